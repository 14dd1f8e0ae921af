"""What surrounds the Hopper backward: row statistics before it, dQ in its dtype and order after it.

Both live in a space of rows of their own, in which every sequence begins with a whole query tile of the
backward's: (head, rows of the head), packed sequences one after another, or (entry, head, rows). Rows
that are nobody's have a log-sum-exp of +inf, with which every weight is 0.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise import philox
from tilewise.backends.hopper.launch import (
    block_columns,
    by_name,
    length_tensors,
    statistic_strides,
)
from tilewise.backends.hopper.units import in_units, unit_of
from tilewise.backends.relaunch import Relaunch
from tilewise.backends.triton.delta import delta_of_rows
from tilewise.backends.triton.launch import on_device, steps
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


class Prepared(NamedTuple):
    """What the backward reads, and adds to."""

    lse: Tensor  # fp32, in the space, in units of log2(e), but natural where there is a bias
    minus_delta: Tensor  # fp32, in the space; as before dropout scales what it keeps
    dq: Tensor  # fp32 (rows of the space, columns): 0 in every query tile that the backward visits
    taken: Tensor  # int32: how many key tiles are taken: 0, if there are queries at all
    rest: Tensor | None  # fp32, in the space: what rounding took from lse, where there is a bias
    space: Space


@lru_cache(maxsize=1024)
def space_of(spec: AttentionSpec, rows: int) -> Space:
    """rows: of packed queries."""
    columns = block_columns(spec.head_dim)
    tile = hopper_backward_tile(spec).q
    if spec.varlen:
        of_head = (rows // tile + spec.batch + 1) * tile
        return Space(spec.heads_q * of_head, of_head, 0, columns, tile)
    of_head = triton.cdiv(spec.max_seqlen_q, tile) * tile
    of_entry = spec.heads_q * of_head
    return Space(spec.batch * of_entry, of_head, of_entry, columns, tile)


@triton.jit
def _query_tile(lengths, heads, left, right, of_head, TILE_Q: tl.constexpr):
    """The program's batch entry and head; of its sequence the first row in memory, the length, and which
    queries see a key; its first row, counted from the first of those, and where that is in the space."""
    cu_q, cu_k, used_q, used_k, max_q, max_k = lengths
    tiles = tl.cdiv(max_q, TILE_Q)
    b = tl.program_id(0) // tiles // heads
    head = tl.program_id(0) // tiles % heads
    row = tl.program_id(0) % tiles * TILE_Q
    start_q, seqlen_q = sequence_rows(b, cu_q, used_q, max_q)
    start_k, seqlen_k = sequence_rows(b, cu_k, used_k, max_k)
    low, high = key_span(seqlen_k, seqlen_q, right, left)
    low = min(low, seqlen_q)  # a window may lie past the last query
    place = b.to(tl.int64) * heads * of_head
    if cu_q is not None:
        place = (start_q // TILE_Q + b).to(tl.int64) * TILE_Q
    place += head.to(tl.int64) * of_head + row
    return b, head, start_q, seqlen_q, low, high, row, place


@triton.jit
def _in_elements(batch, row, head, UNIT: tl.constexpr):
    """Strides given in units of so many elements, which is all that is known of their alignment. They
    have 64 bits: long sequences and wide rows pass 2**31 elements."""
    return (
        tl.cast(batch, tl.int64) * UNIT,
        tl.cast(row, tl.int64) * UNIT,
        tl.cast(head, tl.int64) * UNIT,
    )


@triton.jit(
    do_not_specialize=[
        *("out_batch", "out_row", "out_head", "dout_batch", "dout_row", "dout_head"),
        *("lse_batch", "lse_head", "dlse_batch", "dlse_row", "dlse_head"),
        *("max_q", "max_k", "of_head", "heads", "left", "right"),
    ]
)
def prepare_kernel(
    out_ptr,
    out_batch,  # strides, in units
    out_row,
    out_head,
    dout_ptr,
    dout_batch,
    dout_row,
    dout_head,
    lse_ptr,
    lse_batch,  # strides, in elements
    lse_head,
    dlse_ptr,
    dlse_batch,
    dlse_row,
    dlse_head,
    rest_ptr,  # lies as lse does, or None
    lse_rows_ptr,
    minus_delta_rows_ptr,
    rest_rows_ptr,
    dq_rows_ptr,
    taken_ptr,
    cu_q,
    cu_k,
    used_q,
    used_k,
    max_q,
    max_k,
    of_head,
    heads,
    left,
    right,
    keep_scale,  # of dropout, or None
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE_Q: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Of one query tile: log-sum-exp in the units of scores, -delta = dlse - rowsum(dO * O), and zeros
    to add dQ to, which the backward does by whole tiles. And zero: how many key tiles are taken."""
    if tl.program_id(0) == 0:
        tl.store(taken_ptr, 0)
    lengths = (cu_q, cu_k, used_q, used_k, max_q, max_k)
    tile = _query_tile(lengths, heads, left, right, of_head, TILE_Q)
    b, head, start_q, seqlen_q, low, high, row, place = tile
    if low + row >= high:
        return
    at = tl.arange(0, TILE_Q * BLOCK_D)
    tl.store(dq_rows_ptr + place * BLOCK_D + at, tl.zeros([TILE_Q * BLOCK_D], tl.float32))
    pointers = (out_ptr, dout_ptr, dlse_ptr)
    out_strides = _in_elements(out_batch, out_row, out_head, UNIT)
    dout_strides = _in_elements(dout_batch, dout_row, dout_head, UNIT)
    read = (out_strides, dout_strides, (dlse_batch, dlse_row, dlse_head))
    delta = delta_of_rows(pointers, read, b, start_q, head, low + row, low, high, DV, BLOCK_DV, TILE_Q)
    lse_base = matrix(lse_ptr, (lse_batch, 1, lse_head), b, start_q, head)
    rows = low + row + tl.arange(0, TILE_Q)
    lse = tl.load(lse_base + rows, mask=rows < high, other=INF)
    if rest_ptr is None:
        lse *= LOG2E
    lse = tl.where(lse == -INF, INF, lse)
    if keep_scale is not None:
        delta /= keep_scale
    at = place + tl.arange(0, TILE_Q)
    tl.store(lse_rows_ptr + at, lse)
    tl.store(minus_delta_rows_ptr + at, tl.where(lse == INF, 0.0, -delta))
    if rest_ptr is not None:
        rest_base = matrix(rest_ptr, (lse_batch, 1, lse_head), b, start_q, head)
        tl.store(rest_rows_ptr + at, tl.load(rest_base + rows, mask=rows < high, other=0.0))


@triton.jit(
    do_not_specialize=[
        *("dq_batch", "dq_row", "dq_head"),
        *("max_q", "max_k", "of_head", "heads", "left", "right"),
    ]
)
def finish_kernel(
    dq_rows_ptr,
    dq_ptr,
    dq_batch,  # strides, in units
    dq_row,
    dq_head,
    cu_q,
    cu_k,
    used_q,
    used_k,
    max_q,
    max_k,
    of_head,
    heads,
    left,
    right,
    scale,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE_Q: tl.constexpr,
    UNIT: tl.constexpr,
):
    """dQ of one query tile of the accumulator. That begins with the first query that sees a key: those
    before it come after the last one, and all that see none are 0."""
    lengths = (cu_q, cu_k, used_q, used_k, max_q, max_k)
    tile = _query_tile(lengths, heads, left, right, of_head, TILE_Q)
    b, head, start_q, seqlen_q, low, high, row, place = tile
    if row >= seqlen_q:
        return
    seen = high - low  # to tiles beyond these nobody has written
    at = tl.arange(0, TILE_Q * BLOCK_D)
    dq = tl.load(dq_rows_ptr + place * BLOCK_D + at, mask=row + 0 * at < seen, other=0.0) * scale
    dq = _from_fragments(dq.to(dq_ptr.dtype.element_ty), TILE_Q, BLOCK_D)
    i = row + tl.arange(0, TILE_Q)
    dq = tl.where((i < seen)[:, None], dq, 0.0)
    rows = tl.where(low + i < seqlen_q, low + i, low + i - seqlen_q)
    c = tl.arange(0, BLOCK_D)
    dq_strides = _in_elements(dq_batch, dq_row, dq_head, UNIT)
    base = matrix(dq_ptr, dq_strides, b, start_q, head)
    at = rows.to(tl.int64)[:, None] * dq_strides[1] + c[None, :]
    tl.store(base + at, dq, mask=(i < seqlen_q)[:, None] & (c < D)[None, :])


@triton.jit
def _from_fragments(dq, TILE_Q: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows and columns of what is, 64 rows after another, in the order of ``in_fragments`` in
    ``backward_parts``. Read in that order, which is memory's, a thread gets 16 bytes at a time."""
    parts = dq.reshape([TILE_Q // 64, BLOCK_D // 8, 4, 8, 4, 2, 2])
    return parts.permute([0, 2, 5, 3, 1, 4, 6]).reshape([TILE_Q, BLOCK_D])


class LaidRows(NamedTuple):
    """How the tensors lie that ``prepare_kernel`` reads: all strides."""

    out: tuple[int, ...]
    dout: tuple[int, ...]
    lse: tuple[int, ...]
    dlse: tuple[int, ...] | None
    space: Space


@lru_cache(maxsize=1024)
def plan_prepare(spec: AttentionSpec, laid: LaidRows) -> Relaunch:
    """How to launch ``prepare_kernel``."""
    out, dout = steps(spec, laid.out), steps(spec, laid.dout)
    unit = unit_of(*out, *dout)
    dlse = (0, 0, 0) if laid.dlse is None else steps(spec, laid.dlse)
    return _plan(
        spec,
        laid.space,
        unit,
        {
            **by_name("out", in_units(out, unit)),
            **by_name("dout", in_units(dout, unit)),
            **statistic_strides(spec, "lse", laid.lse),
            **by_name("dlse", dlse),
            "keep_scale": philox.keep_scale(spec.dropout_p) if spec.dropout_p > 0 else None,
            "DV": spec.head_dim_v,
            "BLOCK_DV": max(16, triton.next_power_of_2(spec.head_dim_v)),
        },
    )


@lru_cache(maxsize=1024)
def plan_finish(spec: AttentionSpec, dq: tuple[int, ...], space: Space) -> Relaunch:
    """How to launch ``finish_kernel``. dq: strides."""
    unit = unit_of(*steps(spec, dq))
    strides = by_name("dq", in_units(steps(spec, dq), unit))
    return _plan(spec, space, unit, {**strides, "scale": spec.scale, "D": spec.head_dim})


def _plan(spec: AttentionSpec, space: Space, unit: int, arguments: dict[str, Any]) -> Relaunch:
    """A program for each query tile of each head, with arguments of its own beside the common ones."""
    common = {
        "max_q": spec.max_seqlen_q,
        "max_k": spec.max_seqlen_k,
        "of_head": space.of_head,
        "heads": spec.heads_q,
        "left": spec.window_left,
        "right": spec.window_right,
        "BLOCK_D": space.columns,
        "TILE_Q": space.tile,
        "UNIT": unit,
    }
    programs = spec.batch * spec.heads_q * triton.cdiv(spec.max_seqlen_q, space.tile)
    # Of a larger tile 4 warps would need so many registers that few programs fit a multiprocessor.
    widest = max(space.columns, block_columns(spec.head_dim_v))
    options = {"num_warps": 8 if space.tile * widest > 8192 else 4}
    return Relaunch(programs, common | arguments, options)


def prepare_rows(
    spec: AttentionSpec,
    x: Inputs,
    out: Tensor,
    lse: Tensor,
    rest: Tensor | None,
    dout: Tensor,
    dlse: Tensor | None,
) -> Prepared:
    """Row statistics and an accumulator of dQ, in their space. rest: what rounding took from lse."""
    space = space_of(spec, x.q.shape[0])
    statistics = [lse.new_empty(max(space.rows, 1)) for _ in range(2 if rest is None else 3)]
    lse_rows, minus_delta_rows, *others = statistics
    rest_rows = others[0] if others else None
    dq_rows = lse.new_empty(space.rows, space.columns)
    taken = lse.new_empty(1, dtype=torch.int32)
    laid = LaidRows(
        out.stride(), dout.stride(), lse.stride(), None if dlse is None else dlse.stride(), space
    )
    plan = plan_prepare(spec, laid)
    if plan.programs:
        with on_device(spec.device):
            plan(
                prepare_kernel,
                out_ptr=out,
                dout_ptr=dout,
                lse_ptr=lse,
                dlse_ptr=dlse,
                rest_ptr=rest,
                lse_rows_ptr=lse_rows,
                minus_delta_rows_ptr=minus_delta_rows,
                rest_rows_ptr=rest_rows,
                dq_rows_ptr=dq_rows,
                taken_ptr=taken,
                **length_tensors(x),
            )
    return Prepared(lse_rows, minus_delta_rows, dq_rows, taken, rest_rows, space)


def finish_dq(spec: AttentionSpec, x: Inputs, rows: Prepared, dq: Tensor) -> None:
    """Fill dq."""
    plan = plan_finish(spec, dq.stride(), rows.space)
    if plan.programs:
        with on_device(spec.device):
            plan(finish_kernel, dq_rows_ptr=rows.dq, dq_ptr=dq, **length_tensors(x))
