"""Benchmark results that nobody measured."""

from __future__ import annotations

from tilewise.perf import grid
from tilewise.perf.problem import DIRECTIONS
from tilewise.perf.results import Cell, Measurement, Run

NAMES = ("triton/fa2", "triton/fa1", "fa2", "cudnn", "flex", "fa3", "fa4", "naive")


def measurement(name: str, flops: float, ms: float, **more) -> Measurement:
    more = {"spread": 0.02, "fastest_ms": 0.98 * ms, "rounds": 12, "error": 3e-3, **more}
    return Measurement(name, "ok", ms=ms, tflops=flops / ms / 1e9, **more)


def run(preset: str = "paper", names: tuple[str, ...] = NAMES, slowdown: float = 1.0) -> Run:
    """The first reaches 600 TFLOP/s, each next one takes 1.1 times as long; fa3 has no backward."""
    cells = []
    for problem in grid.problems(grid.preset(preset, "cuda")):
        for direction in DIRECTIONS:
            flops = problem.flops(direction)
            found = [
                Measurement(name, "unsupported", "no backward")
                if (name, direction) == ("fa3", "backward")
                else measurement(name, flops, flops / 600e9 * 1.1**n * slowdown)
                for n, name in enumerate(names)
            ]
            cells.append(Cell(problem, direction, flops, tuple(found)))
    return Run(
        date="2030-01-01",
        commit="0123456789ab",
        request={"preset": preset},
        machine={"device": "cuda", "name": "NVIDIA Imaginary", "driver": "1.0"},
        versions={"torch": "2.99", "triton": "3.99", "tilewise": "0.1.0"},
        method={"rounds": 12},
        contenders=[{"name": n, "title": n.upper(), "ours": "/" in n, "absent": None} for n in names],
        ceilings={"before": {"matmul_flops_per_second": 700e12}, "after": {}},
        cells=cells,
        complete=True,
    )
