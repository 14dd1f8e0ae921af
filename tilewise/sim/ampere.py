"""Ampere: cp.async copies in groups, and the synchronous matrix product mma_v2."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewise.sim import engine, numerics
from tilewise.sim.asynchronous import Pending, Queue, agent_for
from tilewise.sim.barriers import Barriers
from tilewise.sim.clocks import join
from tilewise.sim.cost import MmaShape
from tilewise.sim.global_memory import log
from tilewise.sim.global_ops import _addresses
from tilewise.sim.shared import SharedView, store_generic
from tilewise.sim.values import Pointer, Tensor


class CopyQueue(Queue):
    what = "cp.async group(s)"

    def __init__(self) -> None:
        super().__init__()
        self.open: list[Pending] = []  # copies since the last commit_group


def async_load(
    smem: SharedView,
    pointer: Pointer,
    mask: Any = None,
    cache_modifier: Any = None,
    eviction_policy: Any = None,
    volatile: bool = False,
    cache_policy: Any = None,
) -> None:
    """Copy elements from global to shared memory, through the generic proxy; masked ones become 0."""
    p = engine.current()
    site = p.point()
    e = p.engine
    if smem.shape != pointer.shape:
        raise TypeError(f"cp.async of {pointer.shape} into {smem.label}, {smem.shape}")
    off, on = _addresses(pointer, mask, p, site)
    agent = agent_for(e, "cp.async", smem)
    known, tells, tick = p.fork(agent)
    op = Pending(site, tells, "the cp.async")
    p.queue(CopyQueue).open.append(op)
    smem.spoil()
    when = e.cost.copy(p, 1, smem.nbytes, "cp.async")[0][2]

    def land() -> None:
        memory = pointer.memory
        log().access(e, memory, off[on], "read", agent, tick, known, site)
        values = np.where(on, memory.array[np.where(on, off, 0)], 0).astype(memory.dtype)
        store_generic(smem, values, p, site, agent, tick, known)
        op.finish()

    e.at(when, land)


def commit_group() -> None:
    p = engine.current()
    p.point()
    queue = p.queue(CopyQueue)
    queue.pending.append(_Group(queue.open, p.site()))
    queue.open = []


class _Group:
    def __init__(self, copies: list[Pending], site: Any) -> None:
        self.copies, self.site = copies, site


def wait_group(num_outstanding: int = 0) -> None:
    p = engine.current()
    site = p.point()
    queue = p.queue(CopyQueue)
    while len(queue.pending) > int(num_outstanding):
        for copy in queue.pending[0].copies:
            copy.wait(p, site)
        queue.pending.popleft()


def mbarrier_arrive(mbarrier: Barriers, increment_count: bool = True) -> None:
    """Every thread arrives once all copies of this partition so far have landed."""
    p = engine.current()
    site = p.point()
    e, bar = p.engine, mbarrier.one
    queue = p.queue(CopyQueue)
    copies = [c for g in queue.pending for c in g.copies] + queue.open
    count = 32 * p.warps
    if increment_count:
        bar.pending += count
    waiting = [c for c in copies if not c.done]
    tells = dict(p.clock)
    p.release()
    for c in copies:
        join(tells, c.tells)
    left = [len(waiting)]

    def one_less(original: Any) -> Any:
        def finish() -> None:
            original()
            left[0] -= 1
            if left[0] == 0:
                bar.arrive(tells, count, e, site)

        return finish

    for c in waiting:
        c.finish = one_less(c.finish)
    if not waiting:
        bar.arrive(tells, count, e, site)


def mma_v2(a: Tensor, b: Tensor, acc: Tensor, input_precision: Any = None) -> Tensor:
    """acc + a @ b, synchronously, in registers."""
    m, k = a.shape[-2:]
    n = b.shape[-1]
    product = numerics.dot(a.np, b.np)
    if engine.running():
        p = engine.current()
        bits = 8 * a.np_dtype.itemsize
        shape = MmaShape(m, n, k, bits, "registers", "registers", (p.warps, 1), "mma_v2")
        p.t = max(p.t, p.engine.cost.mma(p, shape, 0.0))
    with np.errstate(all="ignore"):
        return Tensor((product + acc.np).astype(acc.np_dtype), acc.layout)
