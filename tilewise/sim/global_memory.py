"""Global memory: PyTorch tensors as NumPy arrays, who touched them last, and TMA descriptors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from tilewise.sim import engine
from tilewise.sim.clocks import Agent, Clock, join
from tilewise.sim.dtypes import GLUON, NUMPY, TORCH
from tilewise.sim.engine import Engine, Partition
from tilewise.sim.findings import Site

_WRAPPING = 2**33  # a stride, in elements, that is meant to run around all of memory
_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class GlobalTensor:
    """A tensor's storage, from its first element on, as a flat array."""

    def __init__(self, tensor: torch.Tensor, name: str) -> None:
        if tensor.device.type != "cpu":
            raise ValueError(f"{name}: the simulator works on CPU tensors, not on {tensor.device}")
        storage = tensor.untyped_storage()
        size = tensor.element_size()
        count = storage.nbytes() // size - tensor.storage_offset()
        flat = torch.as_strided(tensor.detach(), (count,), (1,), tensor.storage_offset())
        self.array: np.ndarray[Any, Any] = flat.view(_RAW[size]).numpy().view(NUMPY[TORCH[tensor.dtype]])
        self.name = name
        self.dtype = self.array.dtype
        self.storage = storage.data_ptr()
        self.first_byte = tensor.storage_offset() * size
        self.storage_bytes = storage.nbytes()


class Shadow:
    """For every granule of one storage: who wrote it last, who read it last, and how."""

    NOBODY, PLAIN, ATOMIC = 0, 1, 2

    def __init__(self, nbytes: int, granule: int) -> None:
        n = -(-nbytes // granule)
        self.granule = granule
        self.writer, self.write_tick = np.zeros(n, np.int32), np.zeros(n, np.int32)
        self.how = np.zeros(n, np.int8)
        self.reader, self.read_tick = np.zeros(n, np.int32), np.zeros(n, np.int32)


class GlobalLog:
    """The engine's record of global memory: the shadows, and the clocks that atomics carry."""

    def __init__(self) -> None:
        self.shadows: dict[int, Shadow] = {}
        self.agents: dict[Agent, int] = {}
        self.sites: dict[tuple[int, int], Site] = {}
        self.locks: dict[Any, Clock] = {}
        self.watchers: dict[tuple[int, int], list[Callable[[], None]]] = {}

    def access(
        self,
        e: Engine,
        memory: GlobalTensor,
        offsets: Any,
        kind: str,
        agent: Agent,
        tick: int,
        known: Clock,
        site: Site,
        always: bool = False,
    ) -> None:
        """kind: "read", "write", or "atomic" for what commutes with itself. offsets: in elements.

        always: even where global memory is not watched unless asked for.
        """
        wanted = e.options.global_races
        if wanted is None:
            wanted = e.options.together or always
        if not wanted or np.size(offsets) == 0:
            return
        shadow = self.shadows.get(memory.storage)
        if shadow is None:
            shadow = self.shadows[memory.storage] = Shadow(
                memory.storage_bytes, min(memory.dtype.itemsize, 4)
            )
        at = self._granules(shadow, memory, offsets)
        index = self.agents.setdefault(agent, len(self.agents))
        self.sites[index, tick] = site
        seen = np.array([known.get(a, 0) for a in self.agents], np.int32)
        late = shadow.write_tick[at] > seen[shadow.writer[at]]
        if kind == "atomic":
            late &= shadow.how[at] != Shadow.ATOMIC
        late_reader = None
        if kind == "write" or kind == "atomic":
            late_reader = shadow.read_tick[at] > seen[shadow.reader[at]]
        for bad, who, ticks, verb in (
            (late, shadow.writer, shadow.write_tick, "write"),
            (late_reader, shadow.reader, shadow.read_tick, "read"),
        ):
            if bad is not None and bad.any():
                first = at[bad].flat[0]
                other = self.sites[int(who[first]), int(ticks[first])]
                name = list(self.agents)[int(who[first])].name
                text = (
                    f"{memory.name}: {kind} by {agent.name} at {site} is not ordered after the {verb} "
                    f"by {name} at {other}, in {int(bad.sum())} places"
                )
                e.report("global", text, site, other, key=(memory.name, site[:3], kind))
        if kind == "read":
            shadow.reader[at], shadow.read_tick[at] = index, tick
        else:
            shadow.writer[at], shadow.write_tick[at] = index, tick
            shadow.how[at] = Shadow.ATOMIC if kind == "atomic" else Shadow.PLAIN

    @staticmethod
    def _granules(shadow: Shadow, memory: GlobalTensor, offsets: Any) -> Any:
        size = memory.dtype.itemsize
        first = (memory.first_byte + np.asarray(offsets, np.int64) * size) // shadow.granule
        per = max(1, size // shadow.granule)
        if per == 1:
            return first.reshape(-1)
        return (first.reshape(-1, 1) + np.arange(per)).reshape(-1)

    # ---- atomics as locks

    def synchronise(self, p: Partition, key: Any, acquire: bool, release: bool) -> None:
        """A scalar atomic on one address: what it acquires from, and releases to, the others on it."""
        lock = self.locks.setdefault(key, {})
        if acquire:
            join(p.clock, lock)
        if release:
            join(lock, p.clock)
            p.release()

    def watch(self, address: tuple[int, int], wake: Callable[[], None]) -> None:
        self.watchers.setdefault(address, []).append(wake)

    def changed(self, e: Engine, memory: GlobalTensor, offsets: Any) -> None:
        """Wake whoever polls one of these addresses."""
        e.change()
        if self.watchers:
            for off in np.atleast_1d(offsets).reshape(-1):
                for wake in self.watchers.pop(
                    (memory.storage, memory.first_byte + int(off) * memory.dtype.itemsize), []
                ):
                    e.at(e.now + e.cost.poll(), wake)


class Descriptor:
    """A TMA descriptor: a tensor, its shape and strides, and the tile that one copy moves."""

    def __init__(
        self,
        memory: GlobalTensor,
        shape: Sequence[int],
        strides: Sequence[int],
        block_shape: Sequence[int],
        layout: Any,
        padding: str = "zero",
    ) -> None:
        from triton.experimental.gluon import language as gl

        self.memory, self.name, self.layout = memory, memory.name, layout
        self.extent, self.element_strides = [int(n) for n in shape], [int(s) for s in strides]
        self.block_shape = [int(b) for b in block_shape]
        self.dtype = GLUON[memory.dtype]
        self.block_type = gl.block_type(self.dtype, self.block_shape)
        need = 1 + sum((n - 1) * s for n, s in zip(self.extent, self.element_strides, strict=True))
        wraps = max(self.element_strides) >= _WRAPPING  # then only what is touched can tell
        if need > memory.array.size and not wraps:
            raise ValueError(f"descriptor {self.name} reaches past the end of its tensor")
        self.fill = 0 if padding == "zero" else np.nan

    @property
    def shape(self) -> list[Any]:
        from tilewise.sim.values import I32, scalar

        return [scalar(n, I32) for n in self.extent]

    @property
    def strides(self) -> list[Any]:
        from tilewise.sim.values import I64, scalar

        return [scalar(n, I64) for n in self.element_strides]

    @property
    def type(self) -> Descriptor:
        return self

    @property
    def nbytes_per_cta(self) -> int:
        divided = sum(any(b) for b in getattr(self.layout, "cga_layout", None) or ())
        return int(self.block_type.nbytes) >> divided

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether this is the shape of a tile; sides of 1 that lead may be left out."""
        missing = len(self.block_shape) - len(shape)
        return missing >= 0 and self.block_shape == [1] * missing + list(shape)

    def _whole(self, box: Any) -> Any:
        """A box of a tile whose leading sides were left out, with them."""
        return None if box is None else [(0, 1)] * (len(self.block_shape) - len(box)) + list(box)

    def clip(self, coord: Sequence[int]) -> tuple[Any, Any, bool]:
        """Slices of the tensor, of the tile, and whether they have an element in common."""
        lo = [max(0, c) for c in coord]
        hi = [min(n, c + b) for n, c, b in zip(self.extent, coord, self.block_shape, strict=True)]
        outer = tuple(slice(a, b) for a, b in zip(lo, hi, strict=True))
        inner = tuple(slice(a - c, b - c) for a, b, c in zip(lo, hi, coord, strict=True))
        return outer, inner, all(a < b for a, b in zip(lo, hi, strict=True))

    def offsets(self, coord: Sequence[int], box: Any = None) -> Any:
        """Element offsets of the part of the tile that lies inside the tensor (and inside the box)."""
        outer, _, some = self.clip(coord)
        if not some:
            return np.zeros(0, np.int64)
        box = self._whole(box)
        total = np.zeros((), np.int64)  # addresses wrap around, as on the GPU
        for d, (part, stride) in enumerate(zip(outer, self.element_strides, strict=True)):
            lo, hi = part.start, part.stop
            if box is not None:
                lo, hi = max(lo, coord[d] + box[d][0]), min(hi, coord[d] + box[d][1])
            total = np.add.outer(total, np.arange(lo, max(lo, hi)) * stride)
        if total.size and not 0 <= total.min() <= total.max() < self.memory.array.size:
            raise IndexError(f"descriptor {self.name} at {list(coord)} leaves its tensor")
        return total

    def read(self, coord: Sequence[int]) -> Any:
        tile = np.full(self.block_shape, self.fill, self.memory.dtype)
        _, inner, some = self.clip(coord)
        if some:
            tile[inner] = self.memory.array[self.offsets(coord)]
        return tile

    def write(
        self, coord: Sequence[int], box: Any, tile: Any, reduce: Callable[..., Any] | None
    ) -> None:
        """Write a tile; `box` is the part of it that this CTA holds (None: all)."""
        _, inner, some = self.clip(coord)
        if not some:
            return
        tile, box = tile.reshape(self.block_shape), self._whole(box)
        if box is not None:
            cut = [(max(i.start, b[0]), min(i.stop, b[1])) for i, b in zip(inner, box, strict=True)]
            if any(a >= b for a, b in cut):
                return
            inner = tuple(slice(a, b) for a, b in cut)
        at = self.offsets(coord, box)
        with np.errstate(all="ignore"):
            new = tile[inner]
            self.memory.array[at] = new if reduce is None else reduce(self.memory.array[at], new)


def log() -> GlobalLog:
    return engine.engine().service(GlobalLog)
