"""Cluster launch control of Blackwell: a running program takes over one that has not started.

Which programs have not started, the engine knows (`Engine.pending`). The first CTA of a cluster asks,
and the answer goes to the memory and the barrier of each of its CTAs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewise.sim import engine
from tilewise.sim.asynchronous import agent_for
from tilewise.sim.barriers import Barriers
from tilewise.sim.memory import Access, View
from tilewise.sim.values import BOOL, I32, scalar

ANSWER_BYTES = 16
_TAKEN = 1  # first word of an answer; the second is the program's number in the grid


class ClcResult:
    def __init__(self, program: tuple[int, int, int] | None, load: Access) -> None:
        self.program, self.load = program, load

    def is_canceled(self) -> Any:
        self.load.use()
        return scalar(self.program is not None, BOOL)

    def program_id(self, dim: int) -> Any:
        self.load.use()
        return scalar(self.program[int(dim)] if self.program else 0, I32)


def try_cancel(result: View, barrier: Barriers) -> None:
    p = engine.current()
    site = p.point()
    e, cluster = p.engine, p.cta.cluster
    if p.cta.rank:
        return
    if cluster.refused:
        text = (
            f"{p.full_name} asks for a program to take over, at {site}, after it saw that none is left"
        )
        e.report("launch", text, site)
    x, y, _ = p.cta.grid
    answers: list[np.ndarray[Any, Any]] = []  # one, for all CTAs

    def answer() -> np.ndarray[Any, Any]:
        if not answers:
            taken = e.pending.popleft() if e.pending else None
            number = 0 if taken is None else taken[0] + x * (taken[1] + y * taken[2])
            answers.append(np.array([_TAKEN if taken is not None else 0, number], np.int64))
        return answers[0]

    for rank in range(cluster.size):
        view, bar = result.on(rank), barrier.on(rank)
        agent = agent_for(e, "cluster launch control", view)
        known, tells, tick = p.fork(agent)

        def land(
            view: View = view, bar: Any = bar, who: Any = (agent, tick, known, site), tells: Any = tells
        ) -> None:
            view.access(True, "async", *who)
            for proxy in ("generic", "async"):
                view.put(proxy, answer())
            bar.complete(tells, ANSWER_BYTES, e, site)

        e.at(e.cost.copy(p, 1, ANSWER_BYTES, "clc")[0][2], land)


def load_result(src: View) -> ClcResult:
    p = engine.current()
    site = p.point()
    load = src.access(False, "generic", p.agent, p.clock[p.agent], p.clock, site)
    first, number = (int(word) for word in src.get("generic"))
    if first != _TAKEN:
        p.cta.cluster.refused = True
        return ClcResult(None, load)
    x, y, _ = p.cta.grid
    return ClcResult((number % x, number // x % y, number // (x * y)), load)
