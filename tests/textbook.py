"""Attention as a textbook writes it, for the adapters' tests: plain PyTorch, autograd through it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

Window = tuple[int | None, int | None]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: Window = (None, None),
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    keep: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(B, S, H, D) tensors; window bottom-right aligned; keep (B, H, Sq, Sk): what dropout keeps.
    The output and its log-sum-exp (B, H, Sq)."""
    (sq, heads), sk = q.shape[1:3], k.shape[1]
    k, v = (t.repeat_interleave(heads // t.shape[2], 2) for t in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    i, j = torch.arange(sq)[:, None] + sk - sq, torch.arange(sk)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.to(scores).view(-1, heads, 1, 1) * (i - j).abs()
    left, right = window
    hidden = torch.zeros(sq, sk, dtype=torch.bool)
    if left is not None:
        hidden |= j < i - left
    if right is not None:
        hidden |= j > i + right
    scores = scores.masked_fill(hidden, -math.inf)
    extra = torch.full((heads,), -math.inf) if sink is None else sink
    extra = extra.to(scores).view(1, heads, 1, 1).expand(*scores.shape[:3], 1)
    lse = torch.cat([scores, extra], -1).logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0)[..., None])
    if keep is not None:
        weights = weights * keep / (1 - dropout_p)
    return torch.einsum("bhij,bjhd->bihd", weights, v), lse


def attend_packed(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, **options
) -> tuple[Tensor, Tensor]:
    """``attend`` for each sequence: (total, H, Dv) and (H, total); alibi_slopes may be (B, H)."""
    slopes = options.pop("alibi_slopes", None)
    outs, lses = [], []
    for b, (q0, q1, k0, k1) in enumerate(zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True)):
        if slopes is not None:
            options["alibi_slopes"] = slopes[b] if slopes.dim() == 2 else slopes
        out, lse = attend(q[None, q0:q1], k[None, k0:k1], v[None, k0:k1], **options)
        outs.append(out[0])
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().clone().requires_grad_() for t in tensors]


def same(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], mine, theirs, atol=1e-10) -> None:
    """Outputs, log-sum-exps and, through both of them, the gradients of two lists of leaves agree."""
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=atol, rtol=atol, check_stride=False)
    losses = [
        (out.sin().sum() + lse.masked_fill(lse == -math.inf, 0).cos().sum()) for out, lse in (got, want)
    ]
    for a, b in zip(
        torch.autograd.grad(losses[0], mine), torch.autograd.grad(losses[1], theirs), strict=True
    ):
        torch.testing.assert_close(a, b, atol=atol, rtol=atol)
