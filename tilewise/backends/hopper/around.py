"""What surrounds the Hopper backward: row statistics before it, dQ in its dtype and order after it.

Both live in a space of rows of their own, in which every sequence begins with a whole query tile of the
backward's: (head, rows of the head), packed sequences one after another, or (entry, head, rows). Rows
that are nobody's have a log-sum-exp of +inf, with which every weight is 0.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tilewise.backends.hopper.launch import block_columns
from tilewise.backends.triton.delta import delta_of_rows
from tilewise.backends.triton.launch import lengths, on_device, strides
from tilewise.backends.triton.tile import key_span, matrix, sequence_rows
from tilewise.schedule import hopper_backward_tile
from tilewise.spec import AttentionSpec, Inputs

INF = tl.constexpr(float("inf"))
LOG2E = tl.constexpr(1.4426950408889634)


class Space(NamedTuple):
    """Sizes of the space of rows."""

    rows: int
    of_head: int  # from one head to the next
    of_entry: int  # from one batch entry to the next; of packed sequences each begins where it may
    columns: int  # of the accumulator of dQ
    tile: int  # rows of a query tile


def space_of(spec: AttentionSpec, x: Inputs) -> Space:
    columns = block_columns(spec.head_dim)
    tile = hopper_backward_tile(spec).q
    if spec.varlen:
        of_head = (x.q.shape[0] // tile + spec.batch + 1) * tile
        return Space(spec.heads_q * of_head, of_head, 0, columns, tile)
    of_head = triton.cdiv(spec.max_seqlen_q, tile) * tile
    of_entry = spec.heads_q * of_head
    return Space(spec.batch * of_entry, of_head, of_entry, columns, tile)


@triton.jit
def _query_tile(lengths, heads, left, right, of_entry, TILE_Q: tl.constexpr):
    """The program's batch entry, head and first row; of its sequence the first row in memory and the
    length, which queries see a key, and its place in the space."""
    cu_q, cu_k, used_q, used_k, max_q, max_k = lengths
    tiles = tl.cdiv(max_q, TILE_Q)
    b = tl.program_id(0) // tiles // heads
    head = tl.program_id(0) // tiles % heads
    row = tl.program_id(0) % tiles * TILE_Q
    start_q, seqlen_q = sequence_rows(b, cu_q, used_q, max_q)
    start_k, seqlen_k = sequence_rows(b, cu_k, used_k, max_k)
    low, high = key_span(seqlen_k, seqlen_q, right, left)
    place = b * of_entry
    if cu_q is not None:
        place = (start_q // TILE_Q + b) * TILE_Q
    return b, head, row, start_q, seqlen_q, low, high, place


@triton.jit
def prepare_kernel(
    out_ptr,
    lse_ptr,
    dout_ptr,
    dlse_ptr,
    lse_rows_ptr,
    minus_delta_rows_ptr,
    strides,  # of out, lse, dout, dlse
    lengths,
    heads,
    left,
    right,
    of_head,
    of_entry,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    TILE_Q: tl.constexpr,
):
    """Log-sum-exp in units of log2(e), and -delta = dlse - rowsum(dO * O), of one query tile."""
    out_strides, lse_strides, dout_strides, dlse_strides = strides
    tile = _query_tile(lengths, heads, left, right, of_entry, TILE_Q)
    b, head, row, start_q, seqlen_q, low, high, place = tile
    if low + row >= high:
        return
    pointers = (out_ptr, dout_ptr, dlse_ptr)
    read = (out_strides, dout_strides, dlse_strides)
    delta = delta_of_rows(pointers, read, b, start_q, head, low + row, low, high, DV, BLOCK_DV, TILE_Q)
    lse_base = matrix(lse_ptr, lse_strides, b, start_q, head)
    rows = low + row + tl.arange(0, TILE_Q)
    lse = tl.load(lse_base + rows, mask=rows < high, other=INF) * LOG2E
    lse = tl.where(lse == -INF, INF, lse)
    at = head.to(tl.int64) * of_head + place + row + tl.arange(0, TILE_Q)
    tl.store(lse_rows_ptr + at, lse)
    tl.store(minus_delta_rows_ptr + at, tl.where(lse == INF, 0.0, -delta))


@triton.jit
def finish_kernel(
    dq_rows_ptr,
    dq_ptr,
    dq_strides,
    lengths,
    heads,
    left,
    right,
    of_head,
    of_entry,
    scale,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE_Q: tl.constexpr,
):
    """dQ of one tile of rows, from the order of ``backward.in_fragments``, which is that of 64 rows."""
    tile = _query_tile(lengths, heads, left, right, of_entry, TILE_Q)
    b, head, row, start_q, seqlen_q, low, high, place = tile
    if row >= seqlen_q:
        return
    rows = row + tl.arange(0, TILE_Q)
    i = rows - low
    r = i % 64
    first = head.to(tl.int64) * of_head + place + (i - r)  # of 64 rows in the space
    c = tl.arange(0, BLOCK_D)
    # A warp has 16 rows, r // 16; of these a thread r % 8 and 8 more; of 8 columns it has a pair.
    of_row = (r // 16) * 128 + r % 8 * 16 + r % 16 // 8 * 2
    of_column = c // 8 * 512 + c % 8 // 2 * 4 + c % 2
    at = (first * BLOCK_D + of_row)[:, None] + of_column[None, :]
    seen = (i >= 0) & (rows < high)
    dq = tl.load(dq_rows_ptr + at, mask=seen[:, None], other=0.0) * scale
    base = matrix(dq_ptr, dq_strides, b, start_q, head)
    inside = (rows < seqlen_q)[:, None] & (c < D)[None, :]
    at = rows.to(tl.int64)[:, None] * dq_strides[1] + c[None, :]
    tl.store(base + at, dq.to(dq_ptr.dtype.element_ty), mask=inside)


def prepare_rows(
    spec: AttentionSpec, x: Inputs, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Space]:
    """Row statistics in their space, fp32."""
    space = space_of(spec, x)
    lse_rows, minus_delta_rows = (lse.new_empty(max(space.rows, 1)) for _ in range(2))
    programs = spec.batch * spec.heads_q * triton.cdiv(spec.max_seqlen_q, space.tile)
    if programs:
        with on_device(spec.device):
            prepare_kernel[(programs,)](
                out,
                lse,
                dout,
                dlse,
                lse_rows,
                minus_delta_rows,
                tuple([strides(spec, t) for t in (out, lse, dout, dlse)]),
                lengths(spec, x),
                spec.heads_q,
                spec.window_left,
                spec.window_right,
                space.of_head,
                space.of_entry,
                DV=spec.head_dim_v,
                BLOCK_DV=max(16, triton.next_power_of_2(spec.head_dim_v)),
                TILE_Q=space.tile,
            )
    return lse_rows, minus_delta_rows, space


def finish_dq(spec: AttentionSpec, x: Inputs, dq_rows: Tensor, space: Space, dq: Tensor) -> None:
    """Fill dq."""
    programs = spec.batch * spec.heads_q * triton.cdiv(spec.max_seqlen_q, space.tile)
    if programs:
        with on_device(spec.device):
            finish_kernel[(programs,)](
                dq_rows,
                dq,
                strides(spec, dq),
                lengths(spec, x),
                spec.heads_q,
                spec.window_left,
                spec.window_right,
                space.of_head,
                space.of_entry,
                spec.scale,
                D=spec.head_dim,
                BLOCK_D=space.columns,
                TILE_Q=space.tile,
            )
