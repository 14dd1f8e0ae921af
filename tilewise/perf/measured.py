"""Measurements set against the bound: a benchmark's result file in, one row per measured cell out."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tilewise.perf import gpus
from tilewise.perf.gpus import GPU
from tilewise.perf.memory import SelfAttention
from tilewise.perf.roofline import Plan, problem_bound
from tilewise.perf.tile_work import Direction

_NEEDED = ("direction", "head_dim", "seqlen", "causal", "tflops")


@dataclass(frozen=True)
class Cell:
    """One measurement, and the best its GPU could do at the boost clock. TFLOP/s by the usual count."""

    contender: str
    direction: Direction
    head_dim: int
    seqlen: int
    causal: bool
    tflops: float
    bound_tflops: float
    binds: list[str]

    @property
    def share(self) -> float:
        return self.tflops / self.bound_tflops


def compare(path: Path, gpu: GPU | None, plan: Plan) -> tuple[GPU, list[Cell]]:
    """The cells of a result file, each beside its bound.

    The file is that of `tilewise bench`, or a plain {"gpu": name, "cells": [...]} whose cells have
    direction ("forward" or "backward"), head_dim, seqlen, causal and tflops, and may have contender,
    dtype, heads and batch. gpu: instead of the file's own. Cells of anything else (both
    directions at once, windows, packed lengths, no number) are left out. ValueError, one line, if
    nothing can be read.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # of JSON or of text in general
        raise ValueError(f"{path} is not JSON") from error
    cells = content.get("cells") if isinstance(content, dict) else None
    if not isinstance(cells, list):
        raise ValueError(f'{path} is not a benchmark result: it has no list "cells"')
    if gpu is None:
        gpu = gpus.find(_gpu_name(content, path))
    elif (name := _named(content)) is not None and _known(name) not in (None, gpu):
        raise ValueError(f"{path} was measured on {name}, which is not {gpu.name}")
    plan.check(gpu)
    flat = [each for cell in cells for each in _measurements(cell)]
    rows = [_cell(cell, gpu, plan) for cell in flat if _is_usable(cell, gpu)]
    if not rows:
        raise ValueError(f"{path} has no cell of {gpu.name} with {', '.join(_NEEDED)}")
    return gpu, rows


def _known(name: str) -> GPU | None:
    try:
        return gpus.find(name)
    except ValueError:
        return None


def _gpu_name(content: dict[str, Any], path: Path) -> str:
    name = _named(content)
    if name is None:
        raise ValueError(f"{path} names no GPU; say which with --gpu")
    return name


def _named(content: dict[str, Any]) -> str | None:
    machine = content.get("machine")
    name = content.get("gpu") or (machine.get("name") if isinstance(machine, dict) else None)
    return name if isinstance(name, str) else None


def _measurements(cell: Any) -> list[dict[str, Any]]:
    """A cell of `tilewise bench`, a problem with many measurements, as plain cells; or a plain one."""
    if not isinstance(cell, dict):
        return []
    problem, measurements = cell.get("problem"), cell.get("measurements")
    if not isinstance(problem, dict) or not isinstance(measurements, list):
        return [cell]
    shared = {**problem, "direction": cell.get("direction")}
    return [{**shared, **each} for each in measurements if isinstance(each, dict)]


def _is_plain(cell: dict[str, Any]) -> bool:
    """Whether the bound is of this cell's problem: no window, no packed lengths, one head for each."""
    return (
        cell.get("lengths") is None
        and cell.get("window") in (None, [None, None])
        and cell.get("kv_heads", cell.get("heads")) == cell.get("heads")
        and cell.get("head_dim_v", cell["head_dim"]) == cell["head_dim"]
    )


def _is_usable(cell: dict[str, Any], gpu: GPU) -> bool:
    if any(cell.get(key) is None for key in _NEEDED):
        return False
    sizes = [cell["head_dim"], cell["seqlen"], cell.get("heads", 1), cell.get("batch", 1)]
    return (
        all(type(size) is int and 0 < size < 2**40 for size in sizes)
        and cell["head_dim"] <= 256
        and cell["direction"] in ("forward", "backward")
        and type(cell["tflops"]) in (int, float)
        and 0 < cell["tflops"] < 1e15
        and _is_plain(cell)
        and cell.get("dtype", "bf16") in list(gpu.tensor_flops_per_cycle)  # of what has no hash, too
        and (cell["direction"], cell.get("dtype")) != ("backward", "fp8")
    )


def _cell(cell: dict[str, Any], gpu: GPU, plan: Plan) -> Cell:
    p = SelfAttention(
        seqlen=cell["seqlen"],
        head_dim=cell["head_dim"],
        # Enough heads for every SM to have work, if the file does not tell.
        heads=cell.get("heads", 16),
        batch=cell.get("batch", 1),
        causal=bool(cell["causal"]),
    )
    plan = replace(plan, dtype=cell.get("dtype", "bf16"))
    bound = problem_bound(gpu, cell["direction"], p, plan)
    return Cell(
        contender=str(cell.get("contender", "")),
        direction=cell["direction"],
        head_dim=p.head_dim,
        seqlen=p.seqlen,
        causal=p.causal,
        tflops=float(cell["tflops"]),
        bound_tflops=bound.utilisation * gpu.peak_flops(plan.dtype) / 1e12,
        binds=bound.binds,
    )
