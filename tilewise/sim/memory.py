"""On-chip memory: buffers of bytes, views of them, and the log that finds races.

Shared memory has two images. `generic` is what loads and stores of a partition see; `async_` is what TMA
and MMA see. A store reaches the second at the next fence, or at a moment nobody knows. Tensor memory
has one image. Views are by byte, so a buffer that is reinterpreted or overlaid is checked exactly.

A load into registers is under way until its value is used. Barriers order when it was issued, which is
enough for later loads and stores, as these go down the same pipeline; TMA may overtake it.
"""

from __future__ import annotations

import dis
import linecache
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from tilewise.sim import engine
from tilewise.sim.clocks import Agent, Clock, knows
from tilewise.sim.dtypes import GLUON, poison, to_numpy
from tilewise.sim.findings import Site, kernel_frame
from tilewise.sim.ownership import Bases, box_of, intersect, permuted
from tilewise.sim.regions import Region, inside, overlap, region


class Access:
    """One entry of a buffer's log."""

    __slots__ = (
        "agent",
        "flush",
        "overtaken",
        "proxy",
        "region",
        "settled",
        "site",
        "tick",
        "used",
        "write",
    )

    def __init__(
        self, where: Region, write: bool, proxy: str, agent: Agent, tick: int, site: Site
    ) -> None:
        self.region, self.write, self.proxy = where, write, proxy
        self.agent, self.tick, self.site = agent, tick, site
        # Of the generic proxy: the steps after which the async proxy may touch the bytes. These are
        # fences and, of a load into registers, the first use of its value.
        self.settled: Clock = {}
        self.used: Site | None = None
        self.overtaken: Callable[[], None] | None = None  # says so, if the value is used after all
        self.flush: Callable[[], None] | None = None

    def use(self) -> None:
        """An instruction needs the value that was loaded."""
        if self.used is None:
            p = engine.current()
            self.used = p.site()
            self.settled.setdefault(p.agent, p.clock[p.agent])
            if self.overtaken:
                self.overtaken()

    def __str__(self) -> str:
        """Who did what where; of an asynchronous operation, where and by whom it was issued."""
        own = self.agent.name == self.site.partition
        where = f"at {self.site.place}" if own else f"issued at {self.site}"
        return f"{'write' if self.write else 'read'} by {self.agent.name} {where}"


class Buffer:
    """One allocation in the shared or tensor memory of one CTA."""

    def __init__(self, name: str, nbytes: int, dtype: np.dtype[Any], space: str) -> None:
        self.name, self.space = name, space
        whole = np.zeros(-(-nbytes // dtype.itemsize), dtype)
        whole[...] = poison(dtype)
        self.generic = whole.view(np.uint8)
        self.async_ = self.generic if space == "tensor" else self.generic.copy()
        self.written = np.zeros(len(self.generic), np.bool_)
        self.log: list[Access] = []

    def access(
        self,
        where: Region,
        write: bool,
        proxy: str,
        agent: Agent,
        tick: int,
        known: Clock,
        site: Site,
        label: str,
    ) -> Access:
        """Check an access against those before it, and note it. `proxy` is "generic" or "async"."""
        record = Access(where, write, proxy, agent, tick, site)
        keep = []
        for other in self.log:
            if not overlap(other.region, where):
                keep.append(other)
                continue
            ordered = knows(known, other.agent, other.tick)
            if (write or other.write) and not ordered:
                text = f"{label}\n    {record}\n    is not ordered after the {other}"
                key = (self.name, site[:3], other.site[:3])
                engine.report("race", text, site, other.site, key=key)
            elif self._unsettled(other, record, known) and not other.write:
                self._overtakes(record, known, other, label)
            elif self._unsettled(other, record, known):
                text = f"{label}\n    {record}\n    follows the {other} without fence_async_shared"
                key = (self.name, site[:3], other.site[:3])
                engine.report("fence", text, site, other.site, key=key)
            over = other.used is not None or other.proxy == "async" or self.space == "tensor"
            replaced = ordered and (write or (not other.write and over and other.agent is agent))
            if not (replaced and inside(other.region, where)):
                keep.append(other)
            elif write:
                other.flush = None  # what is overwritten is not seen any more, by nobody
        written = where.view(self.written)
        if write:
            written[...] = True
            engine.engine().change()
        elif not written.all():
            text = f"{label}: {record}, but nothing was ever written to part of it"
            engine.report("uninit", text, site, key=(self.name, site[:3]))
            written[...] = True  # say it once
        keep.append(record)
        self.log = keep
        return record

    def _unsettled(self, other: Access, record: Access, known: Clock) -> bool:
        """Does the async proxy touch what the generic proxy may still be busy with?"""
        proxies = other.proxy, record.proxy
        if proxies != ("generic", "async") or self.space != "shared":
            return False
        conflict = other.write or record.write
        return conflict and not any(knows(known, a, t) for a, t in other.settled.items())

    def _overtakes(self, write: Access, known: Clock, load: Access, label: str) -> None:
        """A write of the async proxy waits until the load is issued, but not until it is done."""
        if load.used is None:  # perhaps it never is: then it does not matter what was loaded
            load.overtaken = partial(self._overtakes, write, known, load, label)
            return
        freed = load.agent.ends.get(known[load.agent]) or load.site
        text = (
            f"{label}\n    {write}\n    is not ordered after the end of the {load}\n"
            f"    given back at {freed.place}\n    but first used at {load.used.place}\n"
            "    A load has read its bytes only when its value is used: give them back after that, "
            "or after fence_async_shared"
        )
        key = (self.name, write.site[:3], load.site[:3])
        engine.report("race", text, write.site, load.site, freed, load.used, key=key)

    def fence(self, agent: Agent, clock: Clock) -> None:
        for record in self.log:
            if record.proxy == "generic" and knows(clock, record.agent, record.tick):
                record.settled.setdefault(agent, clock[agent])
                if record.flush:
                    record.flush()


class Allocation:
    """What one `allocate_...` statement makes: a buffer on each CTA of the cluster."""

    def __init__(self, name: str, nbytes: int, dtype: np.dtype[Any], space: str, ctas: int) -> None:
        self.name = name
        self.stages = ""  # of a ring buffer: its name
        self.columns = 0  # of tensor memory, per CTA
        self.two_ctas = False  # is it for products on pairs of CTAs?
        self.buffers = [
            Buffer(name if ctas == 1 else f"{name} of CTA {i}", nbytes, dtype, space)
            for i in range(ctas)
        ]


class View:
    """A typed, strided view of an allocation, for one CTA. Shape in elements, strides in bytes."""

    def __init__(
        self,
        allocation: Allocation,
        cta_rank: int,
        offset: int,
        shape: Sequence[int],
        strides: Sequence[int],
        dtype: np.dtype[Any],
        layout: Any,
        bases: Bases,
        label: str,
    ) -> None:
        self.allocation, self.cta_rank, self.offset = allocation, cta_rank, offset
        self.np_shape, self.strides = tuple(shape), tuple(strides)
        self.np_dtype, self.layout, self.bases, self.label = dtype, layout, bases, label

    def like(self, **changes: Any) -> View:
        new = type(self).__new__(type(self))
        new.__dict__.update(self.__dict__)
        new.__dict__.update(changes)
        return new

    # ---- what a kernel may ask

    @property
    def shape(self) -> list[int]:
        return list(self.np_shape)

    @property
    def dtype(self) -> Any:
        return GLUON[self.np_dtype]

    element_ty = dtype

    @property
    def rank(self) -> int:
        return len(self.np_shape)

    @property
    def numel(self) -> int:
        return int(np.prod(self.np_shape))

    @property
    def type(self) -> View:
        return self

    @property
    def nbytes(self) -> int:
        return self.numel * self.np_dtype.itemsize

    @property
    def nbytes_per_cta(self) -> int:
        return self.nbytes >> sum(any(b) for b in self.bases)

    # ---- narrowing

    def _cut(self, dim: int, lo: int, hi: int) -> View:
        if not 0 <= lo <= hi <= self.np_shape[dim]:
            p = engine.current()
            site = p.site()
            text = f"{self.label} sliced {lo}:{hi} in dimension {dim} of {self.np_shape} at {site}"
            engine.report("bounds", text, site)
            raise engine.SimStop
        shape = (*self.np_shape[:dim], hi - lo, *self.np_shape[dim + 1 :])
        return self.like(offset=self.offset + lo * self.strides[dim], np_shape=shape)

    def index(self, i: Any) -> View:
        i = int(i)
        one = self._cut(0, i, i + 1)
        stages = self.allocation.stages
        label = f"stage {i} of {stages}" if stages and self.label == stages else f"{self.label}[{i}]"
        if self.np_shape[0] == 1 and not stages:
            label = self.label
        return one.like(np_shape=one.np_shape[1:], strides=self.strides[1:], label=label)

    def slice(self, start: Any, length: Any, dim: int = 0) -> View:
        start, length = int(start), int(length)
        across = any(b[dim - self.rank] for b in self.bases if len(b) >= self.rank - dim)
        if across and length != self.np_shape[dim]:
            raise NotImplementedError("slice along a dimension that is divided between CTAs")
        if length == self.np_shape[dim] and start == 0:
            return self
        label = f"{self.label}[{', '.join([':'] * dim + [f'{start}:{start + length}'])}]"
        return self._cut(dim, start, start + length).like(label=label)

    def narrow(self, box: Sequence[tuple[int, int]] | None) -> View:
        """The part of the view within a box of (start, end) per dimension."""
        if box is None:
            return self
        view = self
        for dim, (lo, hi) in enumerate(box):
            view = view._cut(dim, lo, hi)
        return view.like(bases=())

    def permute(self, order: Any) -> View:
        order = tuple(order)
        shape = tuple(self.np_shape[i] for i in order)
        strides = tuple(self.strides[i] for i in order)
        return self.like(np_shape=shape, strides=strides, bases=permuted(self.bases, order))

    def reshape(self, shape: Any) -> View:
        shape = tuple(int(n) for n in shape)
        array = self.array("generic").view()
        array.shape = shape  # fails if the bytes would have to move
        return self.like(np_shape=shape, strides=array.strides)

    # ---- contents

    def on(self, rank: int) -> View:
        """The same view of another CTA's memory."""
        return self if rank == self.cta_rank else self.like(cta_rank=rank)

    @property
    def buffer(self) -> Buffer:
        return self.allocation.buffers[self.cta_rank]

    @property
    def region(self) -> Region:
        return region(self.offset, self.np_shape, self.strides, self.np_dtype.itemsize)

    def array(self, proxy: str) -> np.ndarray[Any, Any]:
        data = self.buffer.async_ if proxy == "async" else self.buffer.generic
        return np.ndarray(self.np_shape, self.np_dtype, data, self.offset, self.strides)

    def get(self, proxy: str) -> np.ndarray[Any, Any]:
        """A copy of the contents."""
        return self.array(proxy).copy()

    def put(self, proxy: str, value: Any) -> None:
        self.array(proxy)[...] = value

    def own_box(self) -> tuple[tuple[int, int], ...] | None:
        """Which part of the view lies in this CTA; None if all of it."""
        return box_of(self.np_shape, self.bases, self.cta_rank)

    def pieces(self, box: Sequence[tuple[int, int]] | None) -> list[tuple[Any, View]]:
        """Where the elements of a box lie: (slices within the view, view of one CTA's part).

        What several CTAs hold alike is answered by this CTA if it is among them.
        """
        if box is None and not self.divided:
            return [(..., self)]
        whole = tuple((0, n) for n in self.np_shape) if box is None else tuple(box)
        if not self.divided:
            return [(tuple(slice(*x) for x in whole), self.narrow(whole))]
        ranks = [self.cta_rank, *(r for r in range(len(self.allocation.buffers)) if r != self.cta_rank)]
        found = {}
        for rank in ranks:
            common = intersect(whole, box_of(self.np_shape, self.bases, rank))
            if common is not None and common not in found:
                found[common] = self.on(rank).narrow(common)
        return [(tuple(slice(*x) for x in common), part) for common, part in found.items()]

    @property
    def divided(self) -> bool:
        """Does each CTA of the cluster hold a different part?"""
        return any(any(b) for b in self.bases)

    def spoil(self) -> None:
        """The contents are undefined from here on."""
        for proxy in ("generic", "async"):
            self.put(proxy, poison(self.np_dtype))

    def access(
        self,
        write: bool,
        proxy: str,
        agent: Agent,
        tick: int,
        known: Clock,
        site: Site,
    ) -> Access:
        return self.buffer.access(self.region, write, proxy, agent, tick, known, site, self.label)


def assigned_name(otherwise: str, taken: dict[str, int]) -> str:
    """The name on the left of `x = gl.allocate_shared_memory(...)` in the kernel, for messages.

    taken: how many allocations have had a name; the second is called "x (no. 2)".
    """
    frame, _ = kernel_frame()
    name = otherwise if frame is None else _stored_in(frame) or _left_of(frame) or otherwise
    taken[name] = taken.get(name, 0) + 1
    return name if taken[name] == 1 else f"{name} (no. {taken[name]})"


def _stored_in(frame: Any) -> str | None:
    """The variable in which the next instruction stores the result; a line may have several of them."""
    for i in dis.get_instructions(frame.f_code):
        if i.offset > frame.f_lasti and i.opname != "CACHE":
            name = i.argval[0] if isinstance(i.argval, tuple) else i.argval
            return str(name) if i.opname.startswith("STORE_") and name is not None else None
    return None


def _left_of(frame: Any) -> str | None:
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    match = re.match(r"\s*(\w+)\s*(?::[^=]*)?=[^=]", line)
    return match.group(1) if match else None


def row_major(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    strides, step = [], itemsize
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


__all__ = ["Access", "Allocation", "Buffer", "View", "assigned_name", "row_major", "to_numpy"]
