"""A simulated timeline as a Chrome trace, for https://ui.perfetto.dev or chrome://tracing.

One track for each hardware unit, one for each warp role, and one for what each role waits for; a
microsecond of the viewer is a cycle.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tilewise.sim.predict import Prediction
from tilewise.sim.timing import TENSOR, UNITS, Span

PROCESSES = {"unit": "hardware units", "role": "warp roles", "wait": "what the roles wait for"}
NUMBERS = {kind: n for n, kind in enumerate(PROCESSES, start=1)}


def tracks(spans: list[Span]) -> list[tuple[str, str]]:
    """(kind, track), units first, then warp roles in the order of their partitions, then their waits."""
    found = {(s.kind, s.track) for s in spans}
    units = {unit: n for n, unit in enumerate(UNITS)}
    return sorted(found, key=lambda t: (NUMBERS[t[0]], units.get(t[1], 0), t[1]))


def events(prediction: Prediction) -> list[dict[str, Any]]:
    """The trace's events: names of the tracks, then one complete event per span."""
    order = tracks(prediction.spans)
    rows = [_metadata("process_name", NUMBERS[kind], 0, name) for kind, name in PROCESSES.items()]
    for n, (kind, track) in enumerate(order):
        name = f"{track} waits" if kind == "wait" else track
        rows.append(_metadata("thread_name", NUMBERS[kind], n, name))
    for s in sorted(prediction.spans, key=lambda s: s.start):
        rows.append(
            {
                "name": s.name,
                "cat": s.kind,
                "ph": "X",
                "ts": round(s.start, 1),
                "dur": round(s.end - s.start, 1),
                "pid": NUMBERS[s.kind],
                "tid": order.index((s.kind, s.track)),
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


def _metadata(name: str, process: int, thread: int, value: str) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": process, "tid": thread, "args": {"name": value}}


def steady(prediction: Prediction, products: int = 12) -> tuple[float, float]:
    """A window from the middle of the program that holds so many matrix products; in cycles."""
    starts = sorted(s.start for s in prediction.spans if s.track == TENSOR)
    if len(starts) <= products:
        return 0.0, prediction.program_cycles
    first = (len(starts) - products) // 2
    return starts[first], starts[first + products]
