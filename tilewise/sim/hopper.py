"""Hopper: mbarriers, TMA, asynchronous warpgroup MMA."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from tilewise.sim import engine, numerics
from tilewise.sim.asynchronous import Pending, Queue, agent_for
from tilewise.sim.barriers import Barriers
from tilewise.sim.clocks import Agent, join
from tilewise.sim.cost import MmaShape
from tilewise.sim.dtypes import is_fp8
from tilewise.sim.findings import Site
from tilewise.sim.global_memory import Descriptor, log
from tilewise.sim.ownership import box_of
from tilewise.sim.shared import SharedView, allocate_shared_memory
from tilewise.sim.values import Tensor

# ---- mbarriers


def allocate_mbarrier(batch: int | None = None, two_ctas: bool = False) -> Barriers:
    from tilewise.sim.names import mbarrier_layout

    n = engine.current().cta.cluster.size
    shape = [n] if batch is None else [int(batch), n]
    return allocate_shared_memory(None, shape, mbarrier_layout(n, bool(two_ctas)))


def mbarrier_init(mbarrier: Barriers, count: int) -> None:
    p = engine.current()
    site = p.point()
    if mbarrier.kept_here:
        mbarrier.one.init(int(count) * mbarrier.sharers, p, site)
    p.cta.fresh_barriers = p.cta.cluster.size > 1


def mbarrier_invalidate(mbarrier: Barriers) -> None:
    engine.current().point()
    mbarrier.one.count = None


def mbarrier_wait(mbarrier: Barriers, phase: Any, pred: Any = True, deps: Any = ()) -> None:
    p = engine.current()
    site = p.point()
    if pred and mbarrier.kept_here:  # a barrier of a pair is waited for by the CTA that keeps it
        mbarrier.one.wait(p, int(phase), site)


def mbarrier_arrive(
    mbarrier: Barriers, *, count: int = 1, pred: Any = True, from_cta: Any = None
) -> None:
    p = engine.current()
    site = p.point()
    if not pred:
        return
    for rank in _routed(p.cta, from_cta):
        mbarrier.on(rank).arrive(p.clock, int(count), p.engine, site)
    p.release()


def mbarrier_expect(
    mbarrier: Barriers,
    bytes_per_cta: Any = None,
    pred: Any = True,
    *,
    bytes: Any = None,
    from_cta: Any = None,
) -> None:
    p = engine.current()
    site = p.point()
    if not pred:
        return
    nbytes = int(bytes if bytes_per_cta is None else bytes_per_cta)
    for rank in _routed(p.cta, from_cta):
        bar = mbarrier.on(rank)
        bar.expect(nbytes)
        bar.arrive(p.clock, 1, p.engine, site)
    p.release()


def _routed(cta: Any, from_cta: Any) -> list[int]:
    """To which CTAs an arrival of this one goes: those whose kept rank bits equal this CTA's rank."""
    if from_cta is None:
        return [cta.rank]
    return [r for r in range(cta.cluster.size) if r & int(from_cta) == cta.rank]


# ---- TMA


def tma_load(
    tensor_desc: Descriptor,
    coord: Any,
    barrier: Barriers,
    result: SharedView,
    pred: Any = True,
    multicast: bool = False,
    cache_policy: Any = None,
) -> None:
    p = engine.current()
    site = p.point()
    if not pred:
        return
    desc, where = tensor_desc, [int(c) for c in coord]
    if not desc.fits(result.shape) or result.np_dtype != desc.memory.dtype:
        raise TypeError(f"TMA tile {desc.dtype}{desc.block_shape} into {result.label}, {result.shape}")
    targets = [p.cta.rank]
    if multicast:
        mine = box_of(result.np_shape, result.bases, p.cta.rank)
        alike = [
            r for r in range(p.cta.cluster.size) if box_of(result.np_shape, result.bases, r) == mine
        ]
        targets = alike if alike[0] == p.cta.rank else []  # one CTA loads for all that want the same
    for rank in targets:
        view = result.on(rank)
        box = view.own_box()
        part = view.narrow(box)
        part.spoil()
        _copy_in(p, site, part, barrier.on(rank), desc, where, box)


def _copy_in(
    p: Any, site: Site, part: Any, bar: Any, desc: Descriptor, coord: list[int], box: Any
) -> None:
    e = p.engine
    rows = part.np_shape[0]
    tile = tuple(slice(*b) for b in box) if box is not None else ...
    pieces = e.cost.copy(p, rows, part.nbytes, "tma")
    for lo, hi, when in pieces:
        piece = part if (lo, hi) == (0, rows) else part.slice(lo, hi - lo)
        agent = agent_for(e, f"TMA load of {desc.name}", piece)
        known, tells, tick = p.fork(agent)

        def land(
            piece: Any = piece,
            lo: int = lo,
            hi: int = hi,
            who: Any = (agent, tick, known, site),
            tells: Any = tells,
        ) -> None:
            piece.access(True, "async", *who)
            if lo == 0:
                log().access(e, desc.memory, desc.offsets(coord, box), "read", *who)
            data = desc.read(coord).reshape(desc.block_shape[-len(part.np_shape) :])[tile][lo:hi]
            for proxy in ("generic", "async"):
                piece.put(proxy, data)
            bar.complete(tells, piece.nbytes, e, site)

        e.at(when, land)


class BulkStore:
    """A TMA store: reads shared memory at one time and writes global memory at a later one."""

    def __init__(self, site: Site, tells_read: Any, tells_write: Any) -> None:
        self.site = site
        self.read = Pending(site, tells_read, "the TMA store (its read of shared memory)")
        self.write = Pending(site, tells_write, "the TMA store (its write to global memory)")


class BulkQueue(Queue):
    what = "TMA store(s)"

    def __init__(self) -> None:
        super().__init__()
        self.unwritten: deque[BulkStore] = deque()
        self.writer: Agent | None = None


REDUCTIONS = {
    "ADD": np.add,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "AND": np.bitwise_and,
    "OR": np.bitwise_or,
    "XOR": np.bitwise_xor,
}


def bulk_store(desc: Descriptor, coord: Any, src: SharedView, reduce: str | None) -> None:
    p = engine.current()
    site = p.point()
    e = p.engine
    if not desc.fits(src.shape) or src.np_dtype != desc.memory.dtype:
        raise TypeError(f"TMA tile {desc.dtype}{desc.block_shape} from {src.label}, {src.shape}")
    where = [int(c) for c in coord]
    box = src.own_box()
    part = src.narrow(box)
    queue = p.queue(BulkQueue)
    reader = queue.agent_of(p, "TMA store")
    if queue.writer is None:
        queue.writer = Agent(f"TMA store of {p.full_name}")
    writer = queue.writer
    known, tells_read, tick = p.fork(reader)
    _, tells_write, write_tick = p.fork(writer)
    join(tells_write, tells_read)
    op = BulkStore(site, tells_read, tells_write)
    queue.pending.append(op)
    queue.unwritten.append(op)
    read_at, write_at = e.cost.bulk_store(p, part.nbytes, reduce is not None)
    tile = np.empty(src.np_shape, src.np_dtype)

    def read() -> None:
        part.access(False, "async", reader, tick, known, site)
        tile[tuple(slice(*b) for b in box) if box is not None else ...] = part.get("async")
        op.read.finish()

    def write() -> None:
        offsets = desc.offsets(where, box)
        kind = "write" if reduce is None else "atomic"
        log().access(e, desc.memory, offsets, kind, writer, write_tick, known, site, always=True)
        desc.write(where, box, tile, None if reduce is None else REDUCTIONS[reduce])
        log().changed(e, desc.memory, offsets if log().watchers else ())
        op.write.finish()

    e.at(read_at, read)
    e.at(write_at, write)


def tma_store(tensor_desc: Descriptor, coord: Any, src: SharedView, cache_policy: Any = None) -> None:
    bulk_store(tensor_desc, coord, src, None)


def tma_reduction(kind: str) -> Any:
    def reduction(tensor_desc: Descriptor, coord: Any, src: SharedView) -> None:
        bulk_store(tensor_desc, coord, src, kind)

    return reduction


def store_wait(pendings: int = 0, read_only: bool = True) -> None:
    """Until all but `pendings` stores have read shared memory or, with read_only=False, are written."""
    p = engine.current()
    site = p.point()
    queue = p.queue(BulkQueue)
    while len(queue.pending) > int(pendings):
        queue.pending[0].read.wait(p, site)
        queue.pending.popleft()
    if not read_only:
        while len(queue.unwritten) > int(pendings):
            queue.unwritten[0].write.wait(p, site)
            queue.unwritten.popleft()


class Builder:
    """For a kernel's own @builtin functions that call Triton's builder directly."""

    @staticmethod
    def create_async_tma_reduce(kind: Any, desc: Descriptor, coord: Any, src: SharedView) -> None:
        bulk_store(desc, coord, src, str(kind).split(".")[-1])

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(f"builder.{name} is not simulated")


# ---- warpgroup MMA


class Wgmma(Pending):
    """One asynchronous warpgroup MMA; it owns its accumulator and A registers until waited for."""

    def __init__(self, site: Site, tells: Any) -> None:
        super().__init__(site, tells, "the warpgroup MMA")
        self.waited = False
        self.value: Any = None
        # Accumulators whose registers this MMA owns: by id, with the MMA whose result they hold, if any.
        self.accumulators: dict[int, tuple[Tensor, Wgmma | None]] = {}

    def owns(self, tensor: Tensor, source: Wgmma | None) -> None:
        self.accumulators[id(tensor)] = tensor, source
        tensor.busy = self

    def source(self, tensor: Tensor) -> Wgmma | None:
        """Whose result the tensor is."""
        return self.accumulators.get(id(tensor), (tensor, None))[1]

    def touch(self, tensor: Tensor) -> None:
        """Somebody reads registers that this MMA owns, or owned."""
        if self.waited:
            source = self.source(tensor)
            tensor.settle(None if source is None else source.value)
            return
        site = engine.current().site()
        text = f"registers of the warpgroup MMA issued at {self.site} are used at {site} before its wait"
        engine.report("register", text, site, self.site)
        tensor.settle(np.full(tensor.shape, np.nan).astype(tensor.np_dtype))


class WgmmaQueue(Queue):
    what = "warpgroup MMA(s)"


class Accumulator:
    """What an asynchronous warpgroup_mma returns; only another MMA or warpgroup_mma_wait may take it."""

    def __init__(self, op: Wgmma, shape: list[int], layout: Any) -> None:
        self.op, self.shape, self.layout = op, shape, layout

    @property
    def type(self) -> Accumulator:
        return self


def warpgroup_mma(
    a: Any,
    b: SharedView,
    acc: Any,
    *,
    use_acc: Any = True,
    precision: Any = None,
    max_num_imprecise_acc: int | None = None,
    is_async: bool = False,
) -> Any:
    p = engine.current()
    site = p.point()
    e = p.engine
    (m, k), n = a.shape, b.shape[1]
    if b.shape[0] != k or list(acc.shape) != [m, n]:
        raise TypeError(f"warpgroup_mma of {a.shape} and {b.shape} into {acc.shape}")
    queue = p.queue(WgmmaQueue)
    agent = queue.agent_of(p, "warpgroup MMA")
    known, tells, tick = p.fork(agent, in_order=True)
    op = Wgmma(site, tells)
    registers = None
    if isinstance(a, Tensor):
        # Two MMAs may read the same A registers; the result of an unfinished one may not be read.
        shared = isinstance(a.busy, Wgmma) and id(a) not in a.busy.accumulators
        registers = a.untouched if shared else a.np
        a.busy = op
    base: Any = None
    if bool(use_acc):
        base = _accumulated(acc, queue)
        if isinstance(acc, Tensor):
            op.owns(acc, base if isinstance(base, Wgmma) else None)
    warps = tuple(getattr(acc.layout, "warps_per_cta", (p.warps, 1)))
    bits = 8 * b.np_dtype.itemsize
    a_space = "shared" if registers is None else "registers"
    shape = MmaShape(m, n, k, bits, a_space, "shared", (warps[0], warps[-1]), "wgmma")
    when = e.cost.mma(p, shape, queue.last)
    queue.last = when
    queue.pending.append(op)

    def complete() -> None:  # shared memory is read as late as it may be
        left = registers
        if left is None:
            a.access(False, "async", agent, tick, known, site)
            left = a.get("async")
        b.access(False, "async", agent, tick, known, site)
        before = base.value if isinstance(base, Wgmma) else base
        op.value = _product(left, b.get("async"), before, max_num_imprecise_acc)
        e.change()
        op.finish()

    e.at(when, complete)
    out = Accumulator(op, [m, n], acc.layout)
    return out if is_async else warpgroup_mma_wait(0, [out])


def _accumulated(acc: Any, queue: WgmmaQueue) -> Any:
    """What an MMA adds to: values, or an MMA whose result it is. MMAs of one warpgroup into the same
    accumulator complete in order, so warpgroup_mma_wait need not have waited for that one.
    """
    if isinstance(acc, Accumulator):
        return acc.op
    op = acc.busy
    return op if op in queue.pending and op.source(acc) is op else acc.np


def _product(a: Any, b: Any, acc: Any, promote_every: int | None) -> Any:
    options = engine.engine().options
    bits = options.fp8_accumulator_bits
    if is_fp8(a.dtype) and is_fp8(b.dtype) and bits is not None and options.arch == "hopper":
        return numerics.dot_fp8_hopper(a, b, acc, bits, int(promote_every or 0))
    product = numerics.dot(a, b)
    with np.errstate(all="ignore"):
        return product if acc is None else product + acc


def warpgroup_mma_wait(num_outstanding: int = 0, deps: Any = None) -> Any:
    p = engine.current()
    site = p.point()
    if deps is None:
        raise ValueError("warpgroup_mma_wait deps must be given")
    queue = p.queue(WgmmaQueue)
    while len(queue.pending) > int(num_outstanding):
        op = queue.pending[0]
        op.wait(p, site)
        op.waited = True
        queue.pending.popleft()
    out = []
    for dep in deps:
        if isinstance(dep, Accumulator):
            tensor = Tensor(np.broadcast_to(np.float32(np.nan), dep.shape), dep.layout)
            dep.op.owns(tensor, dep.op)
            out.append(tensor)
        else:
            out.append(dep)
    return out[0] if len(out) == 1 else tuple(out)


def warpgroup_mma_init(value: Tensor) -> Tensor:
    return value


def cluster_barrier(relaxed: bool = False) -> None:
    p = engine.current()
    p.point()
    p.cta.cluster.meet(p)
