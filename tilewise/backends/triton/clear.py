"""Zeros in the rows of a result that belong to no sequence, without a pass over those that do."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.backends.relaunch import Relaunch
from tilewise.backends.triton.launch import on_device

PROGRAMS = 1024  # among which what sequences do not use is shared out
TAIL = 256  # programs for what follows the last packed sequence
BLOCK = 256  # units of 8 elements at most


@triton.jit(do_not_specialize=["batch", "shares", "rows", "units", "longest"])
def clear_kernel(
    t_ptr,
    cu_seqlens,  # or None: `batch` times so many rows
    seqused,  # or None
    batch,
    shares,  # programs of a sequence
    rows,
    units,  # of UNIT elements in a row
    longest,
    UNIT: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One share of what follows the used rows of sequence b. What follows the last one counts as one
    more, of which no row is used."""
    pid = tl.program_id(0)
    b = tl.minimum(pid // shares, batch)
    share = pid - b * shares
    step = tl.where(b < batch, shares, TAIL)
    used = tl.where(b < batch, longest, 0)
    if seqused is not None:
        used = tl.minimum(used, tl.load(seqused + b, mask=b < batch, other=0))
    if cu_seqlens is not None:
        begin = tl.maximum(tl.load(cu_seqlens + b), 0)
        stop = tl.minimum(tl.load(cu_seqlens + b + 1, mask=b < batch, other=rows), rows)
    else:
        begin = b.to(tl.int64) * rows
        stop = begin + rows
    begin += tl.maximum(used, 0)
    i = tl.arange(0, BLOCK * UNIT)
    at = (begin.to(tl.int64) * units + share * BLOCK) * UNIT + i
    left = (stop - begin).to(tl.int64) * units - share * BLOCK  # units from here on
    while left > 0:
        tl.store(t_ptr + at, 0.0, mask=i // UNIT < left)
        at += step.to(tl.int64) * (BLOCK * UNIT)
        left -= step * BLOCK


@lru_cache(maxsize=1024)
def _plan(
    batch: int,
    packed: bool,
    rows: int,
    row: int,
    longest: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Relaunch:
    """row: elements. dtype, device: of what is cleared."""
    shares = triton.cdiv(PROGRAMS, max(batch, 1))
    unit = math.gcd(8, row)
    arguments = {
        "batch": batch,
        "shares": shares,
        "rows": rows,
        "units": row // unit,
        "longest": longest,
        "UNIT": unit,
        "TAIL": TAIL,
        "BLOCK": BLOCK,
    }
    return Relaunch(batch * shares + (TAIL if packed else 0), arguments, {"num_warps": 4})


def clear(t: Tensor, cu_seqlens: Tensor | None, seqused: Tensor | None, longest: int) -> None:
    """Zero what no sequence uses of t, packed (total, H, D) or (B, S, H, D), contiguous.

    cu_seqlens: (B + 1,), of packed sequences. seqused: (B,), or None where all rows of a sequence are
    used. longest: rows of a sequence that kernels write at most.
    """
    if t.numel() == 0:
        return
    packed = cu_seqlens is not None
    batch = t.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    row = t.shape[-2] * t.shape[-1]
    plan = _plan(batch, packed, t.shape[-3], row, longest, t.dtype, t.device)
    with on_device(t.device):
        plan(clear_kernel, t_ptr=t, cu_seqlens=cu_seqlens, seqused=seqused)
