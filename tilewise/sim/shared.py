"""Shared memory as a kernel uses it: allocation, loads and stores of tiles, fences between proxies."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tilewise.sim import engine
from tilewise.sim.barriers import Barriers, MBarrier
from tilewise.sim.dtypes import poison, to_numpy
from tilewise.sim.engine import Partition
from tilewise.sim.findings import Site
from tilewise.sim.memory import Allocation, View, assigned_name, row_major
from tilewise.sim.ownership import bases_of, register_box
from tilewise.sim.values import Tensor


class SharedView(View):
    """A view of shared memory; loads and stores go through the generic proxy."""

    def load(self, layout: Any = None) -> Tensor:
        p = engine.current()
        site = p.point()
        p.engine.cost.shared(p, self.nbytes_per_cta, write=False)
        return read_tile(self, layout, p, site)

    def store(self, value: Tensor) -> None:
        p = engine.current()
        site = p.point()
        array = value.np
        if list(array.shape) != self.shape or array.dtype != self.np_dtype:
            what = f"{array.dtype}{list(array.shape)} into {self.label}"
            raise TypeError(f"store of {what}, which is {self.np_dtype}{self.shape}")
        p.engine.cost.shared(p, self.nbytes_per_cta, write=True)
        for where, part in self.pieces(own_part(value.layout, self, p)):
            store_generic(part, array[where].copy(), p, site)

    def gather(self, indices: Tensor, axis: int) -> Tensor:
        whole = self.load(indices.layout)
        picked = np.take_along_axis(whole.held, indices.np.astype(np.int64), axis)
        return whole.renamed(picked, indices.layout)

    def scatter(self, values: Tensor, indices: Tensor, axis: int) -> None:
        p = engine.current()
        site = p.point()
        p.engine.cost.shared(p, values.np.nbytes, write=True)
        new = self.get("generic")
        np.put_along_axis(new, indices.np.astype(np.int64), values.np, axis)
        store_generic(self, new, p, site)

    def reinterpret(self, dtype: Any = None, shape: Any = None, layout: Any = None) -> View:
        """The same bytes as another type or shape. Swizzles are not modelled: bytes keep their order."""
        target = self.np_dtype if dtype is None else to_numpy(dtype)
        extents = self.np_shape if shape is None else tuple(int(n) for n in shape)
        if self.strides != row_major(self.np_shape, self.np_dtype.itemsize):
            raise NotImplementedError("reinterpret of a permuted or sliced view")
        if math.prod(extents) * target.itemsize > self.nbytes:
            raise TypeError(f"reinterpret of {self.label} as a larger tile, {target}{list(extents)}")
        return self.like(
            np_dtype=target,
            np_shape=extents,
            strides=row_major(extents, target.itemsize),
            layout=self.layout if layout is None else layout,
        )

    _reinterpret = reinterpret

    def _keep_alive(self) -> None:
        pass


def own_part(layout: Any, view: View, p: Partition) -> Any:
    """Which part of a tile this CTA has in registers; None if all."""
    if p.cta.cluster.size == 1:
        return None
    return register_box(layout, view.np_shape, p.cta.rank)


def read_tile(view: View, layout: Any, p: Partition, site: Site) -> Tensor:
    """Read what this CTA's registers hold of a tile; the rest of the tile is poison."""
    pieces = view.pieces(own_part(layout, view, p))
    who = p.agent, p.clock[p.agent], p.clock, site
    loads = [part.access(False, "generic", *who) for _, part in pieces]
    if len(pieces) == 1 and pieces[0][0] is ...:
        return Tensor(view.get("generic"), layout, loads=loads)
    tile = np.full(view.np_shape, poison(view.np_dtype))
    for where, part in pieces:
        tile[where] = part.get("generic")
    return Tensor(tile, layout, loads=loads)


def store_generic(
    part: View, array: Any, p: Partition, site: Site, agent: Any = None, tick: int = 0, known: Any = None
) -> None:
    """Write through the generic proxy; the async proxy sees it at the fence or at some moment."""
    if agent is None:
        agent, tick, known = p.agent, p.clock[p.agent], p.clock
    record = part.access(True, "generic", agent, tick, known, site)
    part.put("generic", array)
    if part.buffer.space == "tensor":
        return

    def flush() -> None:
        if record.flush:
            record.flush = None
            part.put("async", array)

    record.flush = flush
    if p.engine.cost.delayed_stores:
        p.engine.at(p.engine.cost.visible(), flush)
    else:
        flush()


def allocate_shared_memory(dtype: Any, shape: Any, layout: Any, value: Any = None) -> Any:
    p = engine.current()
    cta, name = p.cta, assigned_name("shared memory", p.cta.names)
    shape = tuple(int(n) for n in shape)
    if type(layout).__name__ == "MBarrierLayout":
        return _allocate_barriers(cta, shape, layout, name)
    np_dtype = to_numpy(dtype)
    size = math.prod(shape) * np_dtype.itemsize
    allocation = cta.cluster.allocate(
        cta, lambda: Allocation(name, size, np_dtype, "shared", cta.cluster.size)
    )
    strides = row_major(shape, np_dtype.itemsize)
    view = SharedView(allocation, cta.rank, 0, shape, strides, np_dtype, layout, bases_of(layout), name)
    if value is not None:
        view.store(value)
    return view


def _allocate_barriers(cta: Any, shape: tuple[int, ...], layout: Any, name: str) -> Barriers:
    """[n, c] barriers: c per stage, for all CTAs of the cluster; bases say who shares one."""
    size = cta.cluster.size
    bases = bases_of(layout)
    count = math.prod(shape[:-1]) if len(shape) > 1 or size > 1 else shape[0]
    if len(shape) == 1 and size > 1:
        count = 1

    def make() -> Barriers:
        table = []
        for i in range(count):
            label = f"{name}[{i}]" if count > 1 else name
            kept: dict[int, MBarrier] = {}
            row = []
            for rank in range(size):
                key = rank if not bases else sum(b[-1] for bit, b in enumerate(bases) if rank >> bit & 1)
                full = label if size == 1 else f"{label} of CTA {rank}"
                row.append(kept.setdefault(key, MBarrier(full)))
            table.append(row)
        return Barriers(table, 0, name)

    made = cta.cluster.allocate(cta, make)
    return Barriers(made.table, cta.rank, name)


def fence_async_shared(cluster: bool = False) -> None:
    p = engine.current()
    p.point()
    for allocation in p.cta.memories:
        for rank, buffer in enumerate(allocation.buffers):
            if (cluster or rank == p.cta.rank) and buffer.space == "shared":
                buffer.fence(p.agent, p.clock)
    p.release()


def async_store(dst: SharedView, value: Tensor, barrier: Barriers) -> None:
    """st.async: store into the CTAs' shared memory, each piece counted in bytes on its CTA's barrier."""
    from tilewise.sim.asynchronous import agent_for

    p = engine.current()
    site = p.point()
    e = p.engine
    array = value.np
    for where, part in dst.pieces(own_part(value.layout, dst, p)):
        agent = agent_for(e, "async_store", part)
        known, tells, tick = p.fork(agent)
        data = array[where].copy()
        bar = barrier.on(part.cta_rank)
        arrivals = e.cost.copy(p, 1, part.nbytes, "st.async")

        def land(
            part: Any = part, data: Any = data, bar: Any = bar, a: Any = (agent, tick, known, tells)
        ) -> None:
            store_generic(part, data, p, site, a[0], a[1], a[2])
            bar.complete(a[3], part.nbytes, e, site)

        e.at(arrivals[0][2], land)
