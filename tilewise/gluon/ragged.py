"""TMA descriptors for rows of sequences, whose ends the copy engine itself respects.

A dense batch is (batch, head, row, column): rows past the sequence's end are out of bounds, read as zero
and never written. Where sequences end anywhere (packed ones, or used lengths), the rows are given twice,
(batch, head, first, row, column), both with the stride of a row and at most as many of the second as a
tile has. A tile that reaches past the end of its sequence starts that many rows late in the second and
early in the first: it is the same memory, and what the tile has too much is out of bounds. Counting
starts a tile before the tensor, so that `first` cannot be negative.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

DTYPES: dict[torch.dtype, Any] = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


@dataclass(frozen=True)
class Earlier:
    """Memory that begins some elements before a tensor: all that a descriptor wants of its base."""

    tensor: Tensor
    elements: int

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def data_ptr(self) -> int:
        return self.tensor.data_ptr() - self.elements * self.tensor.element_size()


def dense_rows(
    t: Tensor, strides: tuple[int, int, int], length: int, tile: tuple[int, int]
) -> TensorDescriptor:
    """t: (B, S, H, D). strides: of (batch, row, head). length: rows that count. tile: rows, columns."""
    entry, row, head = strides
    shape = [t.shape[0], t.shape[2], max(length, 1), t.shape[3]]
    return TensorDescriptor(t, shape, [entry, head, row, 1], [1, 1, *tile], _layout(t, tile, 4))


def ragged_rows(t: Tensor, strides: tuple[int, int, int], tile: tuple[int, int]) -> TensorDescriptor:
    """t: (B, S, H, D) or packed (total, H, D), whose batch stride is given as 0."""
    entry, row, head = strides
    batch = t.shape[0] if t.dim() == 4 else 1
    rows = tile[0]
    shape = [batch, t.shape[-2], t.shape[-3] + rows, rows, t.shape[-1]]
    steps = [entry, head, row, row, 1]
    base = Earlier(t, rows * row)
    return TensorDescriptor(base, shape, steps, [1, 1, 1, *tile], _layout(t, tile, 5))


def _layout(t: Tensor, tile: tuple[int, int], rank: int) -> gl.NVMMASharedLayout:
    flat = gl.NVMMASharedLayout.get_default_for(list(tile), DTYPES[t.dtype])
    return gl.NVMMASharedLayout(flat.swizzle_byte_width, flat.element_bitwidth, rank=rank)


@gluon.jit
def coordinates(b, head, start, row, length, ROWS: gl.constexpr, RAGGED: gl.constexpr):
    """Where rows [row, row + ROWS) of a sequence lie that has `length` rows from row `start` on.

    A dense descriptor has at least one row: a sequence without any begins after it."""
    if RAGGED:
        late = ROWS - max(min(length - row, ROWS), 0)
        return b, head, start + row - late + ROWS, late, 0
    else:
        return b, head, start + row + max(1 - length, 0), 0
