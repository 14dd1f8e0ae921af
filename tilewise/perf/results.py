"""What a benchmark found, as data, and its file.

The file is JSON, ``{"kind": "tilewise-bench", "schema": 1, ...}`` with the fields of ``Run``. A cell is
one problem in one direction; it holds one measurement per contender, also of those without a number,
with the reason. The schema's number grows when a field changes its meaning; readers refuse others.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypedDict

from tilewise.dispatch import Direction
from tilewise.perf import typed
from tilewise.perf.problem import DIRECTIONS, Problem

KIND = "tilewise-bench"
SCHEMA = 1

Status = Literal["ok", "unsupported", "failed", "wrong"]


class ResultError(ValueError):
    """A file that is no result, or of another version; the message is one line."""


@dataclass(frozen=True)
class Measurement:
    """One contender in one cell.

    ms: median over the rounds. spread: distance of the quartiles over the median. error: the largest
    relative error of what the direction computes, against the exact result. cycles, utilisation: of all
    kernels of one call, from Nsight Compute; main_*: of the longest one alone.
    """

    contender: str
    status: Status
    reason: str | None = None
    ms: float | None = None
    spread: float | None = None
    fastest_ms: float | None = None
    rounds: int | None = None
    tflops: float | None = None
    error: float | None = None
    cycles: float | None = None
    utilisation: float | None = None
    main_cycles: float | None = None
    main_utilisation: float | None = None


@dataclass(frozen=True)
class Cell:
    """One problem in one direction. flops: useful ones, as ``Problem.flops`` counts."""

    problem: Problem
    direction: Direction
    flops: float
    measurements: tuple[Measurement, ...]

    @property
    def key(self) -> tuple[Problem, Direction]:
        return self.problem, self.direction

    @property
    def numbers(self) -> dict[str, Measurement]:
        """The measurements that have a number, by contender."""
        return {m.contender: m for m in self.measurements if m.ms is not None}


class Entry(TypedDict):
    """Who was to be measured. absent: why it took no part, if it did not."""

    name: str
    title: str
    ours: bool
    absent: str | None


@dataclass
class Run:
    """A whole run.

    state and ceilings: {"before": ..., "after": ...} as ``perf.machine`` gives them. notes: what did not
    run and why, one line each. left_out: problems that there was no time for. complete: the run came to
    its end, whatever it left out.
    """

    date: str
    commit: str
    request: dict[str, Any]
    machine: dict[str, Any]
    versions: dict[str, Any]
    method: dict[str, Any]
    contenders: list[Entry]
    state: dict[str, Any] = field(default_factory=dict)
    ceilings: dict[str, dict[str, float | None]] = field(default_factory=dict)
    cells: list[Cell] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    complete: bool = False

    @property
    def status(self) -> int:
        """0 if all that was asked for ran and was right, otherwise 1."""
        bad = any(m.status in ("failed", "wrong") for c in self.cells for m in c.measurements)
        return 1 if bad or self.notes or self.left_out else 0

    @property
    def ceiling_tflops(self) -> float | None:
        """The best that the large matrix product reached, in TFLOP/s."""
        found = [part.get("matmul_flops_per_second") for part in self.ceilings.values()]
        return max((value / 1e12 for value in found if value), default=None)

    @property
    def names(self) -> list[str]:
        """The contenders that have a number somewhere, in their order."""
        measured = {name for direction in self.directions for name in self.measured(direction)}
        return [entry["name"] for entry in self.contenders if entry["name"] in measured]

    def measured(self, direction: Direction) -> list[str]:
        """The contenders that have a number in a direction, in their order."""
        measured = {name for cell in self.of(direction) for name in cell.numbers}
        return [entry["name"] for entry in self.contenders if entry["name"] in measured]

    def own(self, name: str) -> bool:
        return any(entry["name"] == name and entry["ours"] for entry in self.contenders)

    def title(self, name: str) -> str:
        return next((str(e["title"]) for e in self.contenders if e["name"] == name), name)

    def of(self, direction: Direction) -> list[Cell]:
        return [cell for cell in self.cells if cell.direction == direction]

    @property
    def directions(self) -> list[Direction]:
        return [direction for direction in DIRECTIONS if self.of(direction)]


def write(run: Run, path: Path) -> None:
    """Writes the file whole or not at all, so that a run killed while it writes leaves the last one.

    A path that names something else than a file (a device, a pipe) is written to, not replaced."""
    text = json.dumps({"kind": KIND, "schema": SCHEMA, **asdict(run)}, indent=1)
    path = path.resolve()
    if path.exists() and not path.is_file():
        path.write_text(text + "\n", encoding="utf-8")
        return
    draft = path.with_name(path.name + ".part")
    draft.write_text(text + "\n", encoding="utf-8")
    os.replace(draft, path)


def read(path: Path) -> Run:
    """Reads and checks a file. Raises ResultError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ResultError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ResultError(f"{path}: no JSON") from None
    if not isinstance(data, dict) or data.pop("kind", None) != KIND:
        raise ResultError(f"{path}: not a result of tilewise bench")
    schema = data.pop("schema", None)
    if schema != SCHEMA:
        raise ResultError(f"{path}: schema {schema}; this version reads {SCHEMA}")
    try:
        if "cells" not in data:
            raise ValueError("result: cells is missing")
        run: Run = typed.build(Run, data, "result")
        _check(run)
    except ValueError as error:
        raise ResultError(f"{path}: damaged: {error}") from None
    return run


def _check(run: Run) -> None:
    """What annotations do not say. Raises ValueError."""
    for cell in run.cells:
        for m in cell.measurements:
            for name in ("ms", "fastest_ms", "tflops"):
                value = getattr(m, name)
                if value is not None and not 0 < value < 1e15:
                    raise ValueError(f"{name} of {m.contender}: got {value}; allowed is above 0")


def read_all(folder: Path) -> Iterator[tuple[Path, Run]]:
    """The benchmark results in a folder, by name; files of another kind are passed over."""
    for path in sorted(folder.glob("*.json")):
        try:
            kind = json.loads(path.read_text(encoding="utf-8")).get("kind")
        except (ValueError, AttributeError):
            continue
        if kind == KIND:
            yield path, read(path)
