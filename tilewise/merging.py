"""Attention over parts of the keys, joined exactly."""

from __future__ import annotations

import math
from functools import reduce

import torch
from torch import Tensor

from tilewise.spec import DTYPES, check_tensor, heads_first, require, require_type

_FORMS = {
    True: "rank 4, (B, heads, S, Dv)",
    False: "rank 4, (B, S, heads, Dv), or 3, (total, heads, Dv)",
}


def merge(
    out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor, *more: Tensor, layout: str = "bshd"
) -> tuple[Tensor, Tensor]:
    """Attention over the union of disjoint sets of keys, from the results over each.

    Args:
        out1, out2: (B, S, H, Dv), (B, H, S, Dv) with ``layout="bhsd"``, or varlen (total, H, Dv); fp16,
            bf16, fp32 or fp64.
        lse1, lse2: their log-sum-exps, (B, H, S) or (H, total), fp32 or, of fp64 outputs, fp64. -inf:
            that part saw no key, and whatever its output holds has no effect.
        more: further parts, out3, lse3 and so on. All at once they are rounded to out1's dtype once.

    Returns:
        The merged output in out1's dtype and its lse. Differentiable in all of them.

    Raises:
        ValueError, TypeError: naming the argument, its value and what is allowed.

    A log-sum-exp of -1e9 or the like (every key under an additive mask of that size) leaves no room in
    fp32 for how many keys it stands for: such parts count alike, whatever their numbers of keys.

    Source: Dao et al., FlashAttention (NeurIPS 2022), section 3.1 (softmax by blocks).
    """
    swap = not heads_first(layout)
    require(len(more) % 2 == 0, "more", len(more), "an even number of tensors")
    outs, lses = [out1, out2, *more[::2]], [lse1, lse2, *more[1::2]]
    _check(outs, lses, swap)
    top = reduce(torch.maximum, lses).detach()
    top = top.masked_fill(top == -math.inf, 0)
    weights = [torch.exp(lse - top) for lse in lses]
    total = reduce(torch.add, weights)
    dead = total == 0
    total = total.masked_fill(dead, 1)
    merged_lse = (top + torch.log(total)).masked_fill(dead, -math.inf)

    def over_columns(rows: Tensor) -> Tensor:
        """A value per row, (B, H, S), as what broadcasts over the columns of an output."""
        return (rows.transpose(-2, -1) if swap else rows).unsqueeze(-1)

    # A weight of 0 does not silence NaN; nor would it silence the gradient of a product with NaN.
    parts = [
        over_columns(weight / total) * out.masked_fill(over_columns(lse == -math.inf), 0).to(lse.dtype)
        for out, lse, weight in zip(outs, lses, weights, strict=True)
    ]
    return reduce(torch.add, parts).to(out1.dtype), merged_lse


def _check(outs: list[Tensor], lses: list[Tensor], swap: bool) -> None:
    for n, (out, lse) in enumerate(zip(outs, lses, strict=True), 1):
        for name, t in ((f"out{n}", out), (f"lse{n}", lse)):
            check_tensor(name, t)
            require(t.device == outs[0].device, f"{name}.device", t.device, f"out1's, {outs[0].device}")
    first = outs[0]
    dtypes = [name for name in DTYPES.values() if name != "fp8"]
    require_type(DTYPES.get(first.dtype) in dtypes, "out1.dtype", first.dtype, ", ".join(dtypes))
    form = _FORMS[not swap]
    require(first.dim() in ((3, 4) if swap else (4,)), "out1.shape", tuple(first.shape), form)
    rows = first.transpose(-3, -2).shape[:-1] if swap else first.shape[:-1]
    lse_dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
    for n, (out, lse) in enumerate(zip(outs, lses, strict=True), 1):
        require_type(out.dtype == first.dtype, f"out{n}.dtype", out.dtype, f"out1's, {first.dtype}")
        require_type(lse.dtype == lse_dtype, f"lse{n}.dtype", lse.dtype, f"{lse_dtype}")
        require(out.shape == first.shape, f"out{n}.shape", tuple(out.shape), f"{tuple(first.shape)}")
        require(lse.shape == rows, f"lse{n}.shape", tuple(lse.shape), f"{tuple(rows)}")
