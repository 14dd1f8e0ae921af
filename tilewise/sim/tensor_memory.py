"""Tensor memory: views that may overlay each other, loads and stores, allocation.

It is modelled as bytes: a row per lane, four bytes per column. A view that reinterprets another, such as
P over S, overlaps exactly the bytes that it overlaps on the chip. Tiles of 64 rows on a pair of CTAs are
folded into 128 lanes, as the hardware does.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from tilewise.gluon import compat
from tilewise.sim import engine
from tilewise.sim.dtypes import to_numpy
from tilewise.sim.memory import Allocation, View, assigned_name
from tilewise.sim.ownership import bases_of, box_of
from tilewise.sim.regions import Region, region
from tilewise.sim.shared import own_part, read_tile
from tilewise.sim.values import Tensor

COLUMNS, LANES = 512, 128


class TensorView(View):
    """A view of tensor memory: [..., rows, columns]."""

    fold = 0  # columns of one block, if the block's right half lies in the upper 64 lanes; else 0

    def slice(self, start: Any, length: Any, dim: int = -1) -> Any:
        start, length = int(start), int(length)
        dim = dim % self.rank
        if self.fold and dim == self.rank - 1:
            if start % self.fold or length % self.fold:
                raise NotImplementedError("part of a folded block of tensor memory")
            view = View.slice(self, 0, length, dim)
            return view.like(offset=self.offset + start // 2 * self.strides[-1])
        return View.slice(self, start, length, dim)

    # A folded block is [rows, 2 halves, columns / 2] in memory; everything below goes through _physical.

    def _physical(self) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        if not self.fold:
            return self.offset, self.np_shape, self.strides
        *lead, m, n = self.np_shape
        pitch, step = self.strides[-2:]
        half = self.fold // 2
        shape = (*lead, m, n // self.fold, 2, half)
        strides = (*self.strides[:-2], pitch, half * step, 64 * pitch, step)
        return self.offset, shape, strides

    @property
    def region(self) -> Region:
        offset, shape, strides = self._physical()
        return region(offset, shape, strides, self.np_dtype.itemsize)

    def array(self, proxy: str) -> Any:
        offset, shape, strides = self._physical()
        return np.ndarray(shape, self.np_dtype, self.buffer.generic, offset, strides)

    def get(self, proxy: str) -> Any:
        return self.array(proxy).reshape(self.np_shape).copy()

    def put(self, proxy: str, value: Any) -> None:
        target = self.array(proxy)
        target[...] = np.broadcast_to(value, self.np_shape).reshape(target.shape)

    def narrow(self, box: Any) -> View:
        """A CTA's own rows start at its lane 0."""
        if box is None:
            return self
        view = self
        for dim, (lo, hi) in enumerate(box):
            view = view._cut(dim, lo, hi)  # type: ignore[assignment]
            if dim == self.rank - 2:
                view = view.like(offset=view.offset - lo * self.strides[dim])  # type: ignore[assignment]
        return view.like(bases=())

    # ---- what a kernel may ask

    def load(self, layout: Any = None) -> Tensor:
        p = engine.current()
        site = p.point()
        p.engine.cost.tensor(p, self.nbytes_per_cta, write=False)
        if layout is None:
            layout = self.get_reg_layout()
        return read_tile(self, layout, p, site)

    def store(self, value: Tensor, pred: Any = True) -> None:
        p = engine.current()
        site = p.point()
        if not pred:
            return
        array = value.np
        if list(array.shape) != self.shape or array.dtype != self.np_dtype:
            raise TypeError(f"store of {array.dtype}{list(array.shape)} into {self.label}, {self.shape}")
        p.engine.cost.tensor(p, self.nbytes_per_cta, write=True)
        for where, part in self.pieces(self.own_box() or own_part(value.layout, self, p)):
            part.access(True, "generic", p.agent, p.clock[p.agent], p.clock, site)
            part.put("generic", array[where])

    def reinterpret(self, dtype: Any = None, shape: Any = None, layout: Any = None) -> Any:
        """The same lanes and columns as another type; a row stays a row."""
        target = self.np_dtype if dtype is None else to_numpy(dtype)
        extents = self.np_shape if shape is None else tuple(int(n) for n in shape)
        layout = self.layout if layout is None else layout
        step = _column_bytes(target, layout)
        fold = _fold(layout)
        pitch = self.strides[-2]
        have = self.np_shape[-1] * self.strides[-1] // (2 if self.fold else 1)
        if extents[-1] * step // (2 if fold else 1) > have:
            raise TypeError(f"reinterpret of {self.label} needs more columns than it has")
        if len(extents) != 2 or self.rank != 2:
            raise NotImplementedError("reinterpret of more than one tile of tensor memory")
        return self.like(
            np_dtype=target,
            np_shape=extents,
            strides=(pitch, step),
            layout=layout,
            bases=bases_of(layout),
            fold=fold,
        )

    _reinterpret = reinterpret

    def get_reg_layout(self, num_warps: Any = None, instr_variant: str = "32x32b") -> Any:
        """Triton's own answer, since kernels take such layouts apart."""
        warps = engine.current().warps if num_warps is None else int(num_warps)
        return register_layout(self.dtype, self.np_shape, self.layout, warps, instr_variant)


_layouts: dict[Any, Any] = {}


def register_layout(dtype: Any, shape: tuple[int, ...], layout: Any, warps: int, variant: str) -> Any:
    key = (str(dtype), shape, repr(layout), warps, variant)
    if key not in _layouts:
        block = getattr(layout, "block", None)
        if block is not None:  # of a slice, the block is no wider than the slice
            layout = replace(layout, block=(block[0], min(block[1], shape[-1])))
        _layouts[key] = compat.tmem_layout(dtype, shape, shape, layout, warps, variant)
    return _layouts[key]


def _column_bytes(dtype: np.dtype[Any], layout: Any) -> int:
    """Distance between neighbours in a row: packed, or one per col_stride columns of four bytes."""
    stride = int(getattr(layout, "col_stride", 1) or 1)
    return dtype.itemsize if stride == 1 else 4 * stride * dtype.itemsize // 4


def _fold(layout: Any) -> int:
    block = getattr(layout, "block", None)
    if block is None or not getattr(layout, "two_ctas", False):
        return 0
    return int(block[1]) if int(block[0]) == 64 else 0


def allocate_tensor_memory(dtype: Any, shape: Any, layout: Any, value: Any = None) -> TensorView:
    p = engine.current()
    cta, name = p.cta, assigned_name("tensor memory", p.cta.names)
    shape = tuple(int(n) for n in shape)
    np_dtype = to_numpy(dtype)
    step = _column_bytes(np_dtype, layout)
    fold = _fold(layout)
    pitch = shape[-1] * step // (2 if fold else 1)
    rows = max(LANES, shape[-2])
    tile = rows * pitch
    size = math.prod(shape[:-2]) * tile
    allocation = cta.cluster.allocate(
        cta, lambda: Allocation(name, size, np_dtype, "tensor", cta.cluster.size)
    )
    own = box_of(shape[-2:], bases_of(layout), cta.rank)
    blocks = -(-(own[0][1] - own[0][0] if own else shape[-2]) // LANES)
    allocation.columns = math.prod(shape[:-2]) * blocks * max(1, pitch // 4)
    allocation.two_ctas = bool(getattr(layout, "two_ctas", False))
    _check_columns(cta)
    lead: list[int] = []
    at = tile
    for n in reversed(shape[:-2]):
        lead.insert(0, at)
        at *= n
    strides = (*lead, pitch, step)
    view = TensorView(allocation, cta.rank, 0, shape, strides, np_dtype, layout, bases_of(layout), name)
    view.fold = fold
    if value is not None:
        view.store(value)
    return view


def _check_columns(cta: Any) -> None:
    tensors = [a for a in cta.memories if a.buffers[0].space == "tensor"]
    total = sum(a.columns for a in tensors)
    if total > COLUMNS:
        raise MemoryError(f"{total} columns of tensor memory allocated, a CTA has {COLUMNS}")
