"""Two results set against each other, cell by cell."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from tilewise.dispatch import Direction
from tilewise.perf.problem import DIRECTIONS, Problem
from tilewise.perf.results import Run


@dataclass(frozen=True)
class Ratio:
    """One contender in one cell of both results. speedup: A's time over B's, above 1 if B is faster.

    noise: the two runs' spreads together, as a share; a difference below it means nothing.
    """

    problem: Problem
    direction: Direction
    contender: str
    ms_a: float
    ms_b: float
    noise: float

    @property
    def speedup(self) -> float:
        return self.ms_a / self.ms_b

    @property
    def slower(self) -> bool:
        """Whether B takes longer than A by more than the noise."""
        return self.ms_b / self.ms_a > 1 + self.noise

    @property
    def faster(self) -> bool:
        return self.ms_a / self.ms_b > 1 + self.noise


@dataclass(frozen=True)
class Comparison:
    """ratios: what both measured. lost: what A has a number for and B tried in vain, one line each."""

    ratios: list[Ratio]
    lost: list[str]

    @property
    def status(self) -> int:
        """1 if B is slower somewhere by more than the noise, or lost a number; otherwise 0."""
        return 1 if self.lost or any(ratio.slower for ratio in self.ratios) else 0

    def geomeans(self) -> dict[tuple[str, Direction], float]:
        """The geometric mean of the speedups, by contender and direction."""
        names = dict.fromkeys(ratio.contender for ratio in self.ratios)
        found = {}
        for name in names:
            for direction in DIRECTIONS:
                some = [
                    r.speedup for r in self.ratios if (r.contender, r.direction) == (name, direction)
                ]
                if some:
                    found[name, direction] = statistics.geometric_mean(some)
        return found


def compare(a: Run, b: Run) -> Comparison:
    """What both results have in common. Raises ValueError, one line, if that is nothing."""
    others = {cell.key: cell for cell in b.cells}
    ratios: list[Ratio] = []
    lost: list[str] = []
    for cell in a.cells:
        other = others.get(cell.key)
        if other is None:
            continue
        tried = {m.contender: m for m in other.measurements}
        for name, old in cell.numbers.items():
            new = tried.get(name)
            if new is None:
                continue
            if new.ms is None or old.ms is None:
                lost.append(f"{cell.problem}, {cell.direction}, {name}: {new.status}: {new.reason}")
                continue
            noise = (old.spread or 0.0) + (new.spread or 0.0)
            ratios.append(Ratio(cell.problem, cell.direction, name, old.ms, new.ms, noise))
    if not ratios and not lost:
        raise ValueError("the two results have no measurement in common")
    return Comparison(ratios, lost)
