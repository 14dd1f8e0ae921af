"""delta = rowsum(dO * O) - dlse: all that a backward needs to know of the row besides its lse.

Source: Dao, "FlashAttention-2" (2023), algorithm 2, line 4; a gradient of the log-sum-exp adds P * dlse
to dS, which is the same as taking it from delta.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.backends.triton.launch import launch_rows
from tilewise.backends.triton.tile import load_tile, matrix, sequence_rows
from tilewise.spec import AttentionSpec, Inputs


@triton.jit
def delta_of_rows(
    pointers,  # of out, dout and dlse, which may be None
    strides,
    b,
    start_q,
    head,
    row,
    low,
    high,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    TILE_Q: tl.constexpr,
):
    """delta of the TILE_Q rows from `row` on, of which those in [low, high) exist; 0 of others."""
    out_ptr, dout_ptr, dlse_ptr = pointers
    out_strides, dout_strides, dlse_strides = strides
    out_base = matrix(out_ptr, out_strides, b, start_q, head)
    dout_base = matrix(dout_ptr, dout_strides, b, start_q, head)
    out = load_tile(out_base, out_strides[1], row, low, high, TILE_Q, BLOCK_DV, DV, True)
    dout = load_tile(dout_base, dout_strides[1], row, low, high, TILE_Q, BLOCK_DV, DV, True)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if dlse_ptr is not None:
        rows = row + tl.arange(0, TILE_Q)
        dlse_base = matrix(dlse_ptr, dlse_strides, b, start_q, head)
        delta -= tl.load(dlse_base + rows.to(tl.int64) * dlse_strides[1], mask=rows < high, other=0.0)
    return delta


@triton.jit
def delta_kernel(
    out_ptr,
    dout_ptr,
    dlse_ptr,
    delta_ptr,
    strides,  # of out, dout, dlse, delta
    lengths,
    heads,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    TILE_Q: tl.constexpr,
):
    """delta = rowsum(dO * O) - dlse, one program per query tile."""
    out_strides, dout_strides, dlse_strides, delta_strides = strides
    cu_q, _, used_q, _, max_q, _ = lengths
    tiles = tl.cdiv(max_q, TILE_Q)
    b = tl.program_id(0) // tiles // heads
    head = tl.program_id(0) // tiles % heads
    q_start = tl.program_id(0) % tiles * TILE_Q
    start_q, seqlen_q = sequence_rows(b, cu_q, used_q, max_q)
    if q_start >= seqlen_q:
        return
    pointers = (out_ptr, dout_ptr, dlse_ptr)
    read = (out_strides, dout_strides, dlse_strides)
    delta = delta_of_rows(pointers, read, b, start_q, head, q_start, 0, seqlen_q, DV, BLOCK_DV, TILE_Q)
    delta_base = matrix(delta_ptr, delta_strides, b, start_q, head)
    rows = q_start + tl.arange(0, TILE_Q)
    tl.store(delta_base + rows, delta, mask=rows < seqlen_q)


def row_delta(
    spec: AttentionSpec, x: Inputs, out: Tensor, dout: Tensor, dlse: Tensor | None, lse: Tensor
) -> Tensor:
    """delta, fp32, shaped like lse."""
    delta = torch.empty_like(lse)
    launch_rows(delta_kernel, spec, x, operands=(out, dout, dlse, delta))
    return delta
