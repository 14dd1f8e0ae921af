"""How much memory a piece of work takes at its peak, as the machine itself counts it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")


@dataclass
class Peak:
    """Filled when the block ends: bytes at the peak above what was there at its start, or None
    where this system has no way to tell."""

    extra_bytes: int | None = None


@contextmanager
def measured(device: torch.device) -> Iterator[Peak]:
    """Measures the block's peak: of the GPU's allocator, or of this process's resident memory.

    On a CPU everything counts, tensors and scratch space alike, so measure in a process that has
    done little before: memory it freed earlier and kept can hide a part.
    """
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        torch.cuda.synchronize(device)
        peak.extra_bytes = torch.cuda.max_memory_allocated(device) - before
        return
    resident = _resident()
    yield peak
    highest = _highest()
    if resident is not None and highest is not None:
        peak.extra_bytes = highest - resident


def _resident() -> int | None:
    """Resident bytes now. Linux then starts its count of the highest anew; other Unix systems know
    the highest since the process began only, which in a fresh process is nearly the same."""
    try:
        _RESET.write_text("5")
    except OSError:
        return _highest()
    return _status("VmRSS")


def _highest() -> int | None:
    if _STATUS.exists():
        return _status("VmHWM")
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return None
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return highest if sys.platform == "darwin" else highest * 1024


def _status(field: str) -> int | None:
    for line in _STATUS.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    return None
