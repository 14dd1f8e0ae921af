"""Cycles of a whole kernel from the simulated timelines of a few of its programs.

    prediction = predict(lambda: host_code(q, k, v), gpu="h200")

Programs of a grid do alike work, or work that varies along an axis of the grid (causal attention). So a
few programs along each axis are simulated, the others interpolated, and all are dealt out to the SMs in
the order of the grid, as the hardware does: one that ends makes room for the next.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilewise.perf import gpus
from tilewise.sim.calibration import parameters as calibrated
from tilewise.sim.launch import intercept
from tilewise.sim.timing import UNITS, Parameters, SmCost, Span

Program = tuple[int, int, int]
EVEN = 1e-3  # programs whose cycles differ by less do the same work
SAMPLES = (3, 9)  # programs along an axis: to see whether it matters, and if it does


@dataclass(frozen=True)
class Prediction:
    """What a kernel would do on a GPU.

    cycles: of the whole kernel. program_cycles: of the longest program simulated. waves: programs for
    each SM on average. balance: share of the SMs' time that has work in it. busy:
    share of the longest program during which a unit works at its full rate. tensor_flops: of that
    program. spans: its timeline; `waits` sums it up.
    """

    kernel: str
    gpu: gpus.GPU
    grid: Program
    cycles: float
    program_cycles: float
    waves: float
    balance: float
    busy: Mapping[str, float]
    tensor_flops: float
    spans: list[Span] = field(repr=False, default_factory=list)

    def utilisation(self, flops: float, dtype: str = "bf16") -> float:
        """Share of the tensor cores' cycles that `flops`, the useful ones of the whole kernel, need."""
        return flops / (self.cycles * self.gpu.sms * self.gpu.tensor_flops_per_cycle[dtype])

    @property
    def seconds(self) -> float:
        """At the boost clock, which a GPU under load does not keep."""
        return self.cycles / self.gpu.boost_hz

    @property
    def binds(self) -> str:
        """The unit with the least room left."""
        return max(self.busy, key=lambda unit: self.busy[unit])

    @property
    def waits(self) -> dict[str, dict[str, float]]:
        """Role -> what it waited for -> share of the longest program, the stages of a ring together."""
        found: dict[str, dict[str, float]] = {s.partition: {} for s in self.spans if s.kind == "role"}
        for s in self.spans:
            if s.kind == "wait":
                role, what = found.setdefault(s.track, {}), re.sub(r"\[\d+\]$", "", s.name)
                role[what] = role.get(what, 0.0) + (s.end - s.start) / self.program_cycles
        return found

    @property
    def works(self) -> dict[str, float]:
        """Role -> share of the longest program in which it does something that takes its own time."""
        found = dict.fromkeys(self.waits, 0.0)
        for s in self.spans:
            if s.kind == "role":
                found[s.track] += (s.end - s.start) / self.program_cycles
        return found


def predict(
    run: Callable[[], Any],
    gpu: str = "h200",
    parameters: Parameters | None = None,
    hoisted: bool = False,
) -> Prediction:
    """Simulate the last Gluon kernel that `run()` launches on a GPU of `tilewise.perf.gpus`.

    Values do not matter for time, so the tensors may be zeros. hoisted: see `SmCost`.
    ValueError if nothing is launched.
    """
    chip = gpus.find(gpu)
    constants = parameters or calibrated(gpu)
    timelines: dict[Program, tuple[float, SmCost]] = {}
    kernel, grid = "", (0, 0, 0)

    def simulate(programs: set[Program]) -> None:
        nonlocal kernel, grid
        options: dict[str, Any] = {
            "arch": chip.family,
            "cost": lambda _: SmCost(chip, constants, hoisted),
            "global_races": False,  # costs time and memory
        }
        with intercept(programs=frozenset(programs), **options) as reports:
            run()
        if not reports:
            raise ValueError("no Gluon kernel was launched")
        report = reports[-1].raise_if_any()
        kernel = report.kernel
        for engine in report.engines:
            grid = engine.ctas[0].grid
            timelines[engine.ctas[0].program_id] = engine.now, engine.cost

    simulate({(0, 0, 0)})
    axes = [_axis(simulate, timelines, n, grid) for n in range(3)]
    base = timelines[0, 0, 0][0]
    x, y, z = axes
    each = (z[:, None, None] + y[None, :, None] + x[None, None, :] - 2 * base).ravel()
    resident, balance = _dealt(each + constants.program, chip.sms)
    longest, cost = max(timelines.values(), key=lambda t: t[0])
    lanes = cost.lanes
    return Prediction(
        kernel,
        chip,
        grid,
        constants.launch + resident,
        longest,
        each.size / chip.sms,
        balance,
        {unit: lanes[unit].busy() / longest for unit in UNITS if unit in lanes},
        lanes[UNITS[0]].total,
        cost.spans,
    )


def _axis(
    simulate: Callable[[set[Program]], None], timelines: Mapping[Program, Any], axis: int, grid: Program
) -> np.ndarray:
    """Cycles of the programs along one axis, the other two indices being 0."""
    n = grid[axis]
    cycles: dict[int, float] = {}
    for samples in SAMPLES:
        indices = sorted({round(i * (n - 1) / (samples - 1)) for i in range(samples)})
        programs = {i: (*(0,) * axis, i, *(0,) * (2 - axis)) for i in indices}
        missing = {p for p in programs.values() if p not in timelines}
        if missing:
            simulate(missing)  # type: ignore[arg-type]
        cycles = {i: timelines[p][0] for i, p in programs.items()}  # type: ignore[index]
        if max(cycles.values()) < (1 + EVEN) * min(cycles.values()):
            break
    return np.interp(np.arange(n), list(cycles), list(cycles.values()))


def _dealt(durations: np.ndarray, sms: int) -> tuple[float, float]:
    """When the last program ends if each takes the first free SM; share of work until then."""
    if len(set(durations.tolist())) == 1:  # nothing to balance but the last wave
        waves = -(-durations.size // sms)
        return waves * float(durations[0]), durations.size / (waves * sms)
    free = [0.0] * sms
    for duration in durations.tolist():
        heapq.heapreplace(free, free[0] + duration)
    return max(free), float(durations.sum()) / (max(free) * sms)
