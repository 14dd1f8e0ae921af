"""Results as tables of text, for whoever prints them: a terminal, a file, the README."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from tilewise.dispatch import Direction
from tilewise.perf.results import Cell, Measurement, Run

_SIGNS = {"unsupported": "-", "failed": "failed", "wrong": "WRONG"}


@dataclass(frozen=True)
class Table:
    """A head and rows of as many cells; ``best`` is, for each row, the column of its best number."""

    title: str
    head: list[str]
    rows: list[list[str]]
    best: list[int | None]


def tables(run: Run) -> list[Table]:
    """One table a direction: problems down, contenders across, useful FLOP/s in the cells."""
    return [_table(run, direction) for direction in run.directions]


def _table(run: Run, direction: Direction) -> Table:
    cells = run.of(direction)
    tried = {m.contender for c in cells for m in c.measurements if m.status != "unsupported"}
    names = [entry["name"] for entry in run.contenders if entry["name"] in tried]
    unit, factor = unit_of(cells)
    rows, best = [], []
    for cell in cells:
        by_name = {m.contender: m for m in cell.measurements}
        rows.append([str(cell.problem), *(shown(by_name.get(name), factor) for name in names)])
        numbers = {name: m.ms for name, m in cell.numbers.items() if m.ms and name in names}
        winner = min(numbers, key=lambda name: numbers[name]) if numbers else None
        best.append(None if winner is None else 1 + names.index(winner))
    return Table(f"{direction}, {unit}", ["", *names], rows, best)


def unit_of(cells: list[Cell]) -> tuple[str, float]:
    """TFLOP/s, or GFLOP/s where nobody reaches one of those; and how many of them a TFLOP/s is."""
    top = max((m.tflops or 0.0 for cell in cells for m in cell.measurements), default=0.0)
    return ("TFLOP/s", 1.0) if top >= 1 else ("GFLOP/s", 1e3)


def shown(m: Measurement | None, factor: float) -> str:
    if m is None:
        return "-"
    if m.tflops is None or m.spread is None:
        return _SIGNS[m.status]
    text = f"{m.tflops * factor:.{0 if m.tflops * factor >= 100 else 1}f} ±{m.spread * 50:.0f}%"
    return text if m.utilisation is None else f"{text} ({m.utilisation:.1%})"


def ratios(run: Run, direction: Direction, ours: str, other: str) -> list[float]:
    """How many times as fast ``ours`` is, in each cell that has both."""
    found = []
    for cell in run.of(direction):
        mine, theirs = cell.numbers.get(ours), cell.numbers.get(other)
        if mine and theirs and mine.ms and theirs.ms:
            found.append(theirs.ms / mine.ms)
    return found


def against_peers(run: Run, direction: Direction) -> list[list[str]]:
    """Rows [kernel, peer, geometric mean, least, cells] of how many times as fast each kernel of this
    library is as each peer."""
    rows = []
    for ours in filter(run.own, run.names):
        for peer in run.names:
            found = [] if run.own(peer) else ratios(run, direction, ours, peer)
            if found:
                mean = statistics.geometric_mean(found)
                rows.append([ours, peer, f"{mean:.2f}", f"{min(found):.2f}", str(len(found))])
    return rows


def complaints(run: Run) -> list[str]:
    """What did not run or was wrong, one line each; the same reason in many cells is one line."""
    seen: dict[tuple[str, str, str], list[str]] = {}
    for cell in run.cells:
        for m in cell.measurements:
            if m.status in ("failed", "wrong") or (m.reason and m.status == "ok"):
                key = (m.contender, m.status, m.reason or "")
                seen.setdefault(key, []).append(f"{cell.problem}, {cell.direction}")
    lines = list(run.notes)
    for (name, status, reason), places in seen.items():
        more = f" and {len(places) - 1} more" if len(places) > 1 else ""
        verdict = {"failed": "did not run", "wrong": "is wrong"}.get(status, "lacks something")
        lines.append(f"{name} {verdict} at {places[0]}{more}: {reason}")
    if run.left_out:
        lines.append(f"left out, no time: {len(run.left_out)} problems, from {run.left_out[0]} on")
    return lines
