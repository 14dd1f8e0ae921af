"""How a launch is simulated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import Any

ARCHITECTURES = ("ampere", "hopper", "blackwell")


@dataclass(frozen=True)
class Options:
    """Everything about a run that is not the kernel.

    seed: chooses the schedule; the same seed replays a run exactly.
    arch: "ampere", "hopper" or "blackwell"; an operation of another architecture is an error.
    cost: function (program id) -> cost model, instead of random times.
    together: run all programs in one engine, so that they interleave, instead of one after another.
    global_races: track order in global memory too; None means when `together`, and otherwise only that
        of a program's TMA stores among each other.
    resident: with `together`, run so many programs at a time; the others start as one ends, unless a
        running one takes them over (cluster launch control). None runs all at once.
    limit: run only so many programs of the grid.
    programs: run only these program ids.
    stop_at_first: skip the remaining programs once one has findings.
    max_findings: stop a run after so many.
    watchdog_seconds: a partition that computes for so long without any visible operation is a livelock.
    fuse_multiply_add: a * b + c in fp32 is rounded once, as ptxas compiles it.
    approximate_exp2: the error of ex2.approx, and flushing of denormal results, instead of exact 2**x.
    fp8_accumulator_bits: fraction bits of Hopper's fp8 accumulator; None accumulates in fp32.
    """

    seed: int | None = 0
    arch: str = "hopper"
    cost: Callable[[tuple[int, int, int]], Any] | None = None
    together: bool = False
    global_races: bool | None = None
    resident: int | None = None
    limit: int | None = None
    programs: frozenset[tuple[int, int, int]] | None = None
    stop_at_first: bool = False
    max_findings: int = 50
    watchdog_seconds: float = 20.0
    fuse_multiply_add: bool = True
    approximate_exp2: bool = True
    fp8_accumulator_bits: int | None = 13

    def __post_init__(self) -> None:
        if self.arch not in ARCHITECTURES:
            raise ValueError(f"arch must be one of {ARCHITECTURES}, not {self.arch!r}")
        seed: Any = self.seed
        if seed is not None and not isinstance(seed, Integral):
            raise TypeError(f"seed must be an int or None, not {seed!r}")
        for name in ("resident", "limit", "max_findings"):
            n = getattr(self, name)
            if n is not None and n < 1:
                raise ValueError(f"{name} must be at least 1, not {n!r}")
