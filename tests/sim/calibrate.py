"""Predict every measured kernel of tilewise/sim/calibration.py; prints the table of the documentation.

`--fit` searches the constants on the cells marked "fit" first, and prints what it finds.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys

import torch
from kernels import hopper_backward, hopper_forward, hopper_persistent

from tilewise.sim import calibration
from tilewise.sim.calibration import Cell
from tilewise.sim.predict import Prediction, predict
from tilewise.sim.timing import Parameters

SEARCH = {
    "shared": (0.90, 0.94, 1.0),
    "vector": (0.42, 0.45, 0.6, 1.0),
    "program": (500.0, 1500.0, 2000.0),
}


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

    grid = (dict(zip(SEARCH, values, strict=True)) for values in itertools.product(*SEARCH.values()))
    return min((dataclasses.replace(start, **point) for point in grid), key=loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fit", action="store_true")
    arguments = parser.parse_args()
    cells = list(calibration.CELLS)
    parameters = calibration.parameters("h200")
    if arguments.fit:
        parameters = fit([c for c in cells if c.use == "fit"], parameters)
        print(dataclasses.asdict(parameters))
    print("| kernel | D | mask | options | use | measured | predicted | error | binds |")
    print("|---|---|---|---|---|---|---|---|---|")
    predicted = []
    for c in cells:
        p = measure(c, parameters)
        predicted.append(p.cycles)
        mask = "causal" if c.causal else "full"
        options = ", ".join(f"{k}={v}" for k, v in c.options.items()) or "-"
        print(
            f"| {c.kernel} | {c.head_dim} | {mask} | {options} | {c.use} "
            f"| {c.cycles / 1e6:.3f} M | {p.cycles / 1e6:.3f} M "
            f"| {c.error(p.cycles):+.1%} | {p.binds} |",
            flush=True,
        )
    print(f"\n{calibration.right(cells, predicted):.0%} of the cells within {calibration.WITHIN:.0%}")


if __name__ == "__main__":
    main()
