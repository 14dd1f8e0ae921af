"""Times of several contenders, taken in turns."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

Call = Callable[[], object]

WARMUP = 2
LEAST_ROUNDS = 3
CELL_SECONDS = 20.0


class Clock(Protocol):
    """Takes the time of one call."""

    def measure(self, call: Call) -> float:
        """Milliseconds of the call, with cold caches."""


class CpuClock:
    """The system's clock. Contenders that take turns evict each other's data, so nothing is flushed."""

    flushed_bytes = 0

    def measure(self, call: Call) -> float:
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3


class GpuClock:
    """CUDA events around the call, behind a clear of memory much larger than the L2 cache.

    The clear does two jobs: it leaves nothing of the operands in L2, and it keeps the GPU busy while
    Python prepares the launch, so that the time is the kernels' and not the host's: for nearly a
    millisecond on an H200, whose memory takes 0.23 ms to fill 1 GiB.
    """

    CLEARS = 4

    def __init__(self, device: torch.device) -> None:
        self.flushed_bytes = min(2**30, torch.cuda.get_device_properties(device).total_memory // 16)
        self._device = device
        self._memory = torch.empty(self.flushed_bytes, dtype=torch.int8, device=device)

    def measure(self, call: Call) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(self.CLEARS):
            self._memory.zero_()
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize(self._device)
        return begin.elapsed_time(end)


def clock_for(device: torch.device) -> CpuClock | GpuClock:
    return GpuClock(device) if device.type == "cuda" else CpuClock()


@dataclass(frozen=True)
class Times:
    """Milliseconds of one contender's rounds."""

    ms: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.ms)

    @property
    def spread(self) -> float:
        """The distance of the quartiles, as a share of the median: what an odd round cannot move."""
        if len(self.ms) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.ms, n=4, method="inclusive")
        return (high - low) / self.median if self.median else 0.0


def alternate(
    calls: Mapping[str, Call],
    clock: Clock,
    rounds: int,
    *,
    warmup: int = WARMUP,
    seconds: float = CELL_SECONDS,
) -> dict[str, Times | Exception]:
    """The times of each contender, in turns.

    Heat and power limits move the clock in the course of a run; in turns they hit all alike. Each round
    has an order of its own, drawn at random but the same in every run, so that nobody always follows
    the same neighbour: what one leaves behind (address translations, clocks) can cost the next a
    quarter. A contender that raises is out, its exception is its result, and the rest go on.

    rounds: that count, after ``warmup`` ones that do not. There are fewer, down to LEAST_ROUNDS, if a
    round is so slow that all of them would take more than ``seconds``.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    failed: dict[str, Exception] = {}
    done, planned = 0, warmup + rounds
    orders = random.Random(0)
    while done < planned and len(failed) < len(calls):
        round_ms = 0.0
        for name in orders.sample(list(calls), len(calls)):
            if name in failed:
                continue
            try:
                ms = clock.measure(calls[name])
            except Exception as error:
                # Its traceback would keep the tensors of the failed call alive.
                failed[name] = error.with_traceback(None)
                continue
            round_ms += ms
            times[name].append(ms)
        if done == max(0, warmup - 1) and round_ms > 0:
            affordable = int(seconds * 1e3 / round_ms)
            planned = warmup + min(rounds, max(LEAST_ROUNDS, affordable))
        done += 1
    return {
        name: failed[name] if name in failed else Times(tuple(times[name][warmup:])) for name in calls
    }
