"""A simulated timeline as a Chrome trace, for https://ui.perfetto.dev or chrome://tracing.

One track for each hardware unit and one for each warp role; a microsecond of the viewer is a cycle.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tilewise.sim.predict import Prediction
from tilewise.sim.timing import TENSOR, UNITS, Span

UNIT_PROCESS, ROLE_PROCESS = 1, 2


def tracks(spans: list[Span]) -> list[str]:
    """Units first, then warp roles in the order of their partitions."""
    found = {s.track for s in spans}
    return [u for u in UNITS if u in found] + sorted(found - set(UNITS))


def events(prediction: Prediction) -> list[dict[str, Any]]:
    """The trace's events: names of the tracks, then one complete event per span."""
    order = tracks(prediction.spans)
    rows: list[dict[str, Any]] = [
        _metadata("process_name", UNIT_PROCESS, 0, "hardware units"),
        _metadata("process_name", ROLE_PROCESS, 0, "warp roles"),
    ]
    for n, track in enumerate(order):
        rows.append(_metadata("thread_name", _process(track), n, track))
    for s in sorted(prediction.spans, key=lambda s: s.start):
        rows.append(
            {
                "name": s.name,
                "cat": "unit" if s.track in UNITS else "role",
                "ph": "X",
                "ts": round(s.start, 1),
                "dur": round(s.end - s.start, 1),
                "pid": _process(s.track),
                "tid": order.index(s.track),
                "args": {"by": s.partition, "at": s.tile},
            }
        )
    return rows


def write(prediction: Prediction, path: Path) -> None:
    """Write the trace of the longest simulated program; overlapping work of a unit is drawn nested."""
    data = {
        "traceEvents": events(prediction),
        "displayTimeUnit": "ns",
        "otherData": {
            "kernel": prediction.kernel,
            "gpu": prediction.gpu.name,
            "unit": "1 us is 1 cycle",
            "predicted kernel cycles": round(prediction.cycles),
        },
    }
    path.write_text(json.dumps(data), encoding="utf-8")


def _process(track: str) -> int:
    return UNIT_PROCESS if track in UNITS else ROLE_PROCESS


def _metadata(name: str, process: int, thread: int, value: str) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": process, "tid": thread, "args": {"name": value}}


def steady(prediction: Prediction, products: int = 12) -> tuple[float, float]:
    """A window from the middle of the program that holds so many matrix products; in cycles."""
    starts = sorted(s.start for s in prediction.spans if s.track == TENSOR)
    if len(starts) <= products:
        return 0.0, prediction.program_cycles
    first = (len(starts) - products) // 2
    return starts[first], starts[first + products]
