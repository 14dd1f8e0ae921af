"""TMA descriptors for rows of sequences, whose ends the copy engine itself respects.

A dense batch is (batch, head, row, column): rows past the sequence's end are out of bounds, read as zero
and never written. Where sequences end anywhere (packed ones, or used lengths), the same is done with two
dimensions more, (wrap, end, head, row, column), an idea of Triton's own ``tools/ragged_tma.py``. Rows
are counted up to FAR, so that a sequence of n rows is rows FAR - n to FAR of the row dimension. `end` is
where the sequence ends in memory, and `wrap` a coordinate whose step, taken FAR times, goes FAR rows
back, modulo 2**64. All sequences lie one after the other: a dense batch must have no gaps.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

DTYPES: dict[torch.dtype, Any] = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}
FAR = gl.constexpr(2**30)
_MOST = 2**31 - 2**16  # of a coordinate


class Box(NamedTuple):
    """A matrix as the copy engine sees it, wherever that lies: sizes and strides in elements, and the
    tile that it copies at a time."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    tile: tuple[int, ...]
    layout: gl.NVMMASharedLayout

    def of(self, t: torch.Tensor) -> TensorDescriptor:
        """The matrix that begins with t."""
        shape, strides, tile = (list(sizes) for sizes in self[:3])
        return TensorDescriptor(t, shape, strides, tile, self.layout)


def dense_rows(
    sizes: tuple[int, int, int, int],
    strides: tuple[int, int, int],
    dtype: torch.dtype,
    tile: tuple[int, int],
) -> Box:
    """Of (B, S, H, D), S rows that count. strides: of (batch, row, head). tile: rows, columns."""
    entries, rows, heads, columns = sizes
    entry, row, head = strides
    shape = (entries, heads, max(rows, 1), columns)
    return Box(shape, (entry, head, row, 1), (1, 1, *tile), _layout(dtype, tile, 4))


def ragged_rows(
    sizes: tuple[int, int], strides: tuple[int, int, int], dtype: torch.dtype, tile: tuple[int, int]
) -> Box:
    """Of (B, S, H, D) without gaps, or packed (total, H, D). sizes: H, D. Others: as for dense rows."""
    _, row, head = strides
    # FAR steps of 2**34 elements are a multiple of 2**64 bytes, whatever the element.
    steps = (2**34 - row, row, head, row, 1)
    heads, columns = sizes
    shape = (_MOST, _MOST, heads, FAR.value, columns)
    return Box(shape, steps, (1, 1, 1, *tile), _layout(dtype, tile, 5))


@cache  # making one takes longer than all the rest of a descriptor
def _layout(dtype: torch.dtype, tile: tuple[int, int], rank: int) -> gl.NVMMASharedLayout:
    flat = gl.NVMMASharedLayout.get_default_for(list(tile), DTYPES[dtype])
    return gl.NVMMASharedLayout(flat.swizzle_byte_width, flat.element_bitwidth, rank=rank)


@gluon.jit
def coordinates(b, head, start, row, column, length, entry_rows, RAGGED: gl.constexpr):
    """Where a tile begins: column `column` and row `row` of a sequence of `length` rows, whose first is
    row `start` of batch entry b, which has `entry_rows` of them in memory. Packed sequences are all in
    entry 0."""
    if RAGGED:
        return FAR, b * entry_rows + start + length, head, FAR - length + row, column
    else:  # a descriptor has at least one row: a sequence without any begins after it
        return b, head, start + row + max(1 - length, 0), column
