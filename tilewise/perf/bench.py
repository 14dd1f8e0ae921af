"""Runs a benchmark: problem by problem, everyone is checked, then everyone who is right is timed.

What the numbers mean and why they are taken this way is told in docs/benchmarks.md.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from tilewise.dispatch import Direction
from tilewise.perf import machine, peers, truth
from tilewise.perf.peers import Attend, Contender
from tilewise.perf.problem import Data, Problem, make
from tilewise.perf.results import Cell, Measurement, Run, Status
from tilewise.perf.timing import CELL_SECONDS, WARMUP, Call, Clock, Times, alternate


class Watcher(Protocol):
    """Told how the run gets on, so that a person can be told too."""

    def begin(self, problems: int) -> None:
        """The run begins."""

    def step(self, what: str) -> None:
        """Something else is being done, within the same problem."""

    def advance(self, cells: list[Cell]) -> None:
        """One problem is done."""


class Silence:
    """A watcher that says nothing."""

    def begin(self, problems: int) -> None: ...

    def step(self, what: str) -> None: ...

    def advance(self, cells: list[Cell]) -> None: ...


@dataclass(frozen=True)
class Plan:
    """Everything that a run needs to know.

    absent: contenders that were looked for and why they take no part. notes: those of them that were
    asked for by name or are broken, one line each. time_limit: seconds; after it no new problem begins.
    counter: of cycles, for ``--cycles``.
    """

    problems: list[Problem]
    directions: tuple[Direction, ...]
    contenders: list[Contender]
    device: torch.device
    rounds: int = 12
    time_limit: float | None = None
    absent: list[tuple[Contender, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    request: dict[str, Any] = field(default_factory=dict)
    out: Path | None = None
    counter: CycleCounter | None = None


class CycleCounter(Protocol):
    """Adds the GPU's cycles to a measurement."""

    def count(
        self, problem: Problem, direction: Direction, flops: float, found: Measurement
    ) -> Measurement: ...


class DeviceLost(Exception):
    """The GPU takes no more work from this process. The message names who was running."""


def execute(
    plan: Plan,
    clock: Clock,
    watcher: Watcher | None = None,
    keep: Callable[[Run], None] = lambda run: None,
    now: Callable[[], float] = time.monotonic,
) -> Run:
    """Runs the plan. keep: called after each problem with all that is known by then.

    Always returns what it has: out of time, interrupted, or with the GPU lost.
    """
    watcher = watcher or Silence()
    start = now()
    run = _empty_run(plan, clock)
    watcher.begin(len(plan.problems))
    done = 0
    try:
        watcher.step("what the machine can do")
        _sample(run, plan, clock, "before")
        keep(run)
        for problem in plan.problems:
            if plan.time_limit is not None and now() - start >= plan.time_limit:
                break
            cells = _measure(plan, problem, clock, watcher)
            run.cells += cells
            done += 1
            keep(run)
            watcher.advance(cells)
        watcher.step("what the machine can do")
        _sample(run, plan, clock, "after")
    except DeviceLost as error:
        run.notes.append(str(error))
    except KeyboardInterrupt:
        run.notes.append("interrupted")
    run.left_out = [str(problem) for problem in plan.problems[done:]]
    run.complete = True
    keep(run)
    return run


def _empty_run(plan: Plan, clock: Clock) -> Run:
    entries = [(contender, None) for contender in plan.contenders] + plan.absent
    return Run(
        date=time.strftime("%Y-%m-%d"),
        commit=machine.commit(),
        request=plan.request,
        machine=machine.describe(plan.device),
        versions=machine.versions(),
        method={
            "rounds": plan.rounds,
            "warmup_rounds": WARMUP,
            "seconds_per_cell": CELL_SECONDS,
            "flushed_bytes": getattr(clock, "flushed_bytes", 0),
            "time": "median over alternating rounds",
            "spread": "interquartile range / median",
            "flops": "2 heads pairs (D + Dv), causal = half of all pairs, backward x 2.5",
            "error_limit": truth.LIMITS,
        },
        contenders=[
            {"name": c.name, "title": c.title, "ours": c.ours, "absent": why} for c, why in entries
        ],
        notes=list(plan.notes),
    )


def _sample(run: Run, plan: Plan, clock: Clock, when: str) -> None:
    run.state[when] = machine.state(plan.device)
    try:
        run.ceilings[when] = machine.ceilings(plan.device, clock, plan.rounds)
    except Exception as error:  # no memory for it: the rest may well fit
        run.ceilings[when] = {}
        run.notes.append(f"ceilings: {peers.one_line(error)}")


def _measure(plan: Plan, problem: Problem, clock: Clock, watcher: Watcher) -> list[Cell]:
    try:
        data = make(problem, plan.device)
        entries = []
        for contender in plan.contenders:
            watcher.step(f"{problem}: {contender.name}")
            entries.append(_Entry(contender, data, plan.directions))
            _check_device(plan.device, contender.name)
        watcher.step(f"{problem}: is everyone right?")
        errors, faults = truth.judge(data, {e.name: e.results for e in entries if e.results})
    except DeviceLost:
        raise
    except Exception as error:  # the problem itself does not fit
        reason = peers.one_line(error)
        _free(plan.device)
        return [
            Cell(
                problem,
                direction,
                problem.flops(direction),
                tuple(Measurement(c.name, "failed", reason) for c in plan.contenders),
            )
            for direction in plan.directions
        ]
    for entry in entries:
        entry.blame(faults.get(entry.name, {}))
        entry.results.clear()
    cells = []
    for direction in plan.directions:
        watcher.step(f"{problem}: {direction}")
        calls = {e.name: e.calls[direction] for e in entries if direction in e.calls}
        times = alternate(calls, clock, plan.rounds)
        _check_device(plan.device, ", ".join(calls))
        flops = problem.flops(direction)
        measurements = [
            _measurement(e, direction, flops, times.get(e.name), errors.get(e.name, {})) for e in entries
        ]
        if plan.counter is not None:
            for n, m in enumerate(measurements):
                if m.ms is not None:
                    watcher.step(f"{problem}: {direction}, cycles of {m.contender}")
                    measurements[n] = plan.counter.count(problem, direction, flops, m)
        cells.append(Cell(problem, direction, flops, tuple(measurements)))
    entries.clear()
    del data
    _free(plan.device)
    return cells


class _Entry:
    """One contender on one problem: what it computed, and the calls to be timed."""

    def __init__(self, contender: Contender, data: Data, directions: tuple[Direction, ...]) -> None:
        self.name = contender.name
        self.results: dict[str, torch.Tensor] = {}
        self.calls: dict[Direction, Call] = {}
        self.reasons: dict[Direction, tuple[Status, str]] = {}
        attend: Attend | None = None
        graph: peers.Graph | None = None
        # The backward first: compiled code that serves both ways is then compiled once.
        for direction in sorted(directions, key=("backward", "forward").index):
            try:
                refusal = contender.refusal(data, direction)
                if refusal is not None:
                    self.reasons[direction] = ("unsupported", refusal)
                    continue
                with peers.spoken_reasons():
                    attend = attend or contender.prepare(data)
                    if direction == "backward":
                        graph = peers.Graph(attend, data)
                        gradients = graph.backward()
                        self._keep(direction, graph.backward, ("dq", "dk", "dv"), gradients)
                    elif contender.one_graph and graph is not None:
                        self._keep(direction, graph.forward, ("out",), (graph.forward().detach(),))
                    else:
                        call = _Forward(attend, data)
                        self._keep(direction, call, ("out",), (call(),))
                _wait(data.q.device)
            except Exception as error:
                # Without its traceback, which keeps the tensors of the failed call alive.
                self.calls.pop(direction, None)
                for name in truth.OUTPUTS[direction]:
                    self.results.pop(name, None)
                self.reasons[direction] = ("failed", peers.one_line(error.with_traceback(None)))
                _free(data.q.device)

    def _keep(
        self,
        direction: Direction,
        call: Call,
        names: tuple[str, ...],
        tensors: tuple[torch.Tensor, ...],
    ) -> None:
        self.calls[direction] = call
        self.results |= dict(zip(names, tensors, strict=True))

    def blame(self, faults: truth.Faults) -> None:
        """Takes the calls away whose results are wrong; a backward counts on its forward."""
        for direction in list(self.calls):
            needed = dict.fromkeys((*truth.OUTPUTS[direction], "out"))
            found = [faults[tensor] for tensor in needed if tensor in faults]
            if found:
                self.reasons[direction] = ("wrong", "; ".join(found))
                del self.calls[direction]


@dataclass(frozen=True)
class _Forward:
    attend: Attend
    data: Data

    def __call__(self) -> torch.Tensor:
        return peers.forward(self.attend, self.data)


def _measurement(
    entry: _Entry,
    direction: Direction,
    flops: float,
    times: Times | Exception | None,
    errors: truth.Errors,
) -> Measurement:
    shown = [errors[name] for name in truth.OUTPUTS[direction] if name in errors]
    error = max(shown) if shown and math.isfinite(max(shown)) else None  # JSON knows no infinity
    if isinstance(times, Times):
        return Measurement(
            entry.name,
            "ok",
            ms=times.median,
            spread=times.spread,
            fastest_ms=min(times.ms),
            rounds=len(times.ms),
            tflops=flops / times.median / 1e9,
            error=error,
        )
    if isinstance(times, Exception):
        return Measurement(entry.name, "failed", peers.one_line(times), error=error)
    status, reason = entry.reasons[direction]
    return Measurement(entry.name, status, reason, error=error)


def _check_device(device: torch.device, who: str) -> None:
    """After an illegal access every further call fails, whoever makes it: better to say who it was."""
    try:
        _wait(device)
    except Exception as error:
        raise DeviceLost(
            f"the GPU is lost to this process after {who}: {peers.one_line(error)}"
        ) from None


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        try:
            torch.cuda.empty_cache()
        except Exception as error:
            raise DeviceLost(f"the GPU is lost to this process: {peers.one_line(error)}") from None
