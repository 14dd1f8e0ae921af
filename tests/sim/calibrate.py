"""Predict every measured kernel of tilewise/sim/calibration.py; prints the table of the documentation.

`--fit` searches the constants on the cells marked "fit" first, and uses what it finds.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Sequence

import torch
from kernels import hopper_backward, hopper_forward, hopper_persistent

from tilewise.sim import calibration
from tilewise.sim.calibration import Cell
from tilewise.sim.predict import Prediction, predict
from tilewise.sim.timing import Parameters


def measure(cell: Cell, parameters: Parameters | None = None) -> Prediction:
    """The prediction for one cell; tensors of zeros, since values take no time."""
    shape = (1, cell.heads, cell.seqlen, cell.head_dim)
    x = torch.zeros(shape, dtype=torch.bfloat16)

    def run() -> None:
        if cell.kernel == "hopper_backward":
            lse = torch.zeros(shape[:3])
            hopper_backward.bwd(x, x, x, x, x, lse, cell.causal, **cell.options)
        else:
            module = {"hopper_forward": hopper_forward, "hopper_persistent": hopper_persistent}[
                cell.kernel
            ]
            module.fwd(x, x, x, cell.causal, **cell.options)

    return predict(run, cell.gpu, parameters, cell.hoisted)


def fit(cells: list[Cell], start: Parameters) -> Parameters:
    """The point of a coarse grid with the least sum of squared relative errors."""

    def loss(parameters: Parameters) -> float:
        total = sum(c.error(measure(c, parameters).cycles) ** 2 for c in cells)
        print(f"{total:.4f} {parameters}", file=sys.stderr, flush=True)
        return total

    grid = (
        dict(zip(calibration.FITTED, values, strict=True))
        for values in itertools.product(*calibration.FITTED.values())
    )
    return min((dataclasses.replace(start, **point) for point in grid), key=loss)


HEAD = """\
| kernel | D | mask | options | use | measured | predicted | error | binds |
|---|---|---|---|---|---|---|---|---|"""


def line(cell: Cell, prediction: Prediction) -> str:
    """Its line of the table in docs/simulator-timeline.md."""
    mask = "causal" if cell.causal else "full"
    options = ", ".join(f"{k}={v}" for k, v in cell.options.items()) or "-"
    return (
        f"| {cell.kernel} | {cell.head_dim} | {mask} | {options} | {cell.use} "
        f"| {cell.cycles / 1e6:.3f} M | {prediction.cycles / 1e6:.3f} M "
        f"| {cell.error(prediction.cycles):+.1%} | {prediction.binds} |"
    )


def summary(cells: Sequence[Cell], predictions: Sequence[Prediction]) -> str:
    """What the cells say that were held out."""
    held_out = [(c, p.cycles) for c, p in zip(cells, predictions, strict=True) if c.use == "check"]
    errors = [abs(c.error(p)) for c, p in held_out]
    hits = sum(e <= calibration.WITHIN for e in errors)
    return (
        f"Of the {len(held_out)} cells held out, {hits} are within {calibration.WITHIN:.0%}; "
        f"on average they are {sum(errors) / len(errors):.1%} off, at most {max(errors):.1%}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fit", action="store_true")
    arguments = parser.parse_args()
    cells = list(calibration.CELLS)
    parameters = calibration.parameters("h200")
    if arguments.fit:
        parameters = fit([c for c in cells if c.use == "fit"], parameters)
        print(dataclasses.asdict(parameters))
    predictions = [measure(c, parameters) for c in cells]
    print(HEAD, *map(line, cells, predictions), "", summary(cells, predictions), sep="\n")


if __name__ == "__main__":
    main()
