"""``flash_attn_combine`` of FlashAttention-3 and -4: results over parts of the keys, joined."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilewise.merging import merge
from tilewise.spec import check_tensor, require, require_type


def combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None, out_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """(parts, B, S, H, Dv) or (parts, total, H, Dv), with lse of the same shape but the last dimension:
    the output and its lse without the first. Rounded to out_dtype, or out's, or out_partial's, once."""
    for name, t in (("out_partial", out_partial), ("lse_partial", lse_partial)):
        check_tensor(name, t)
    shape = tuple(out_partial.shape)
    fits = len(shape) in (4, 5) and shape[0] >= 1
    form = "(parts, B, S, H, Dv) or (parts, total, H, Dv), one part at least"
    require(fits, "out_partial.shape", shape, form)
    lse_shape = tuple(lse_partial.shape)
    require(lse_shape == shape[:-1], "lse_partial.shape", lse_shape, f"{shape[:-1]}")
    wide = torch.promote_types(out_partial.dtype, torch.float32)
    require_type(lse_partial.dtype == wide, "lse_partial.dtype", lse_partial.dtype, f"{wide}")
    dtype = out_dtype or (out_partial.dtype if out is None else out.dtype)
    if out is not None:
        require(tuple(out.shape) == shape[1:], "out.shape", tuple(out.shape), f"{shape[1:]}")
        require_type(out.dtype == dtype, "out.dtype", out.dtype, f"out_dtype, {dtype}")

    outs = list(out_partial.to(wide).unbind())
    lses = list(lse_partial.transpose(-1, -2).unbind())
    if len(outs) == 1:  # merge wants two: one that saw no key has no effect
        outs.append(torch.zeros_like(outs[0]))
        lses.append(torch.full_like(lses[0], -math.inf))
    more = [t for part in zip(outs[2:], lses[2:], strict=True) for t in part]
    merged, lse = merge(outs[0], lses[0], outs[1], lses[1], *more)
    merged = merged.to(dtype) if out is None else out.copy_(merged)
    return merged, lse.transpose(-1, -2)
