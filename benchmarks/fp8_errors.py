"""How wrong attention in fp8 is, for numbers that are easy, and for those that are not.

    python benchmarks/fp8_errors.py [--out FILE.json]

Relative RMSE and cosine of the output against attention in fp64 of the same bf16 tensors. Inputs:

- normal: N(0, 1);
- outliers: N(0, 1) + N(0, 100) * Bernoulli(0.001), by which FlashAttention-3's article measures;
- one huge channel: N(0, 1), and one channel of all keys 30 times as large.

The outputs of all heads count together: those whose weights lie on few keys are large, and say most.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewise import attention, explain
from tilewise.perf import machine
from tilewise.spec import FP8

QUERIES, HEADS, SEED = 512, 8, 0
LENGTHS = (2048, 8192, 16384)
HEAD_DIMS = (64, 128, 256)


def normal(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape) for shape in shapes]


def outliers(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [
        torch.randn(shape) + 10 * torch.randn(shape) * (torch.rand(shape) < 1e-3) for shape in shapes
    ]


def one_huge_channel(*shapes: tuple[int, ...]) -> list[Tensor]:
    q, k, v = normal(*shapes)
    k[..., 5] *= 30
    return [q, k, v]


INPUTS: dict[str, Callable[..., list[Tensor]]] = {
    "normal": normal,
    "outliers": outliers,
    "one huge channel": one_huge_channel,
}


def measure(inputs: str, head_dim: int, length: int) -> dict[str, Any]:
    """One row: relative RMSE and cosine of each way, and of bf16."""
    torch.manual_seed(SEED)
    shapes = [(1, n, HEADS, head_dim) for n in (QUERIES, length, length)]
    q, k, v = (t.bfloat16() for t in INPUTS[inputs](*shapes))
    want = attention(q.double(), k.double(), v.double())
    row: dict[str, Any] = {"inputs": inputs, "head_dim": head_dim, "length": length}
    for how in (None, *FP8):
        got = attention(q, k, v, fp8=how).double()
        row[how or "bf16"] = {
            "relative_rmse": float((got - want).norm() / want.norm()),
            "cosine": float((got * want).sum() / got.norm() / want.norm()),
        }
    errors = [row[how]["relative_rmse"] for how in ("tensor", "rotated")]
    return row | {"tensor_over_rotated": errors[0] / errors[1]}


def markdown(rows: list[dict[str, Any]]) -> str:
    """The relative errors as a table."""
    head = ["inputs", "D", "keys", "bf16", *FP8, "tensor / rotated"]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "--:|" * (len(head) - 1)]
    for row in rows:
        errors = [f"{row[how]['relative_rmse']:.4f}" for how in ("bf16", *FP8)]
        cells = [row["inputs"], str(row["head_dim"]), str(row["length"]), *errors]
        lines.append("| " + " | ".join([*cells, f"{row['tensor_over_rotated']:.2f}"]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", nargs="*", type=int, default=LENGTHS)
    parser.add_argument("--head-dims", nargs="*", type=int, default=HEAD_DIMS)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = [
        measure(inputs, head_dim, length)
        for inputs in INPUTS
        for head_dim in arguments.head_dims
        for length in arguments.lengths
    ]
    print(markdown(rows))
    if arguments.out is not None:
        one = torch.zeros(1, 1, 1, 16, dtype=torch.bfloat16)
        report = {
            "what": "relative errors of attention in fp8 against fp64 of the same bf16 tensors",
            "date": time.strftime("%Y-%m-%d"),
            "commit": machine.commit(),
            "machine": machine.describe(torch.device("cpu")),
            "versions": machine.versions(),
            "kernel": explain(one, one, one, fp8="block").data["forward"]["kernel"],
            "problem": {"queries": QUERIES, "heads": HEADS, "seed": SEED, "causal": False},
            "rows": rows,
        }
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
