"""A kernel with planted bugs, to test the tests: what the accuracy rule must catch, and must let pass.

Without a bug it does what an honest kernel does: fp32 inside, P and dS rounded to the input dtype for
their products, delta from the rounded output. Materialised, short, and apart from the reference.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tilewise import mask, philox
from tilewise.ops import Gradients
from tilewise.spec import AttentionSpec, Inputs, Sequence, sequences

BUG: list[str] = []  # what is planted now; a list, so that tests can set it in this module


def _has(bug: str) -> bool:
    return bug in BUG


class _Sequence:
    """One sequence's operands in fp32 (fp64 for fp64), (heads, rows, dim), and its weights."""

    def __init__(self, spec: AttentionSpec, x: Inputs, seq: Sequence) -> None:
        sq, sk = seq.length_q, seq.length_k
        self.work = torch.float64 if spec.dtype == torch.float64 else torch.float32
        self.q = seq.queries(x.q).to(self.work).transpose(0, 1)
        keys = torch.arange(spec.heads_q) // spec.group
        if _has("key head of the wrong group"):
            keys = torch.arange(spec.heads_q) % spec.heads_kv
        self.k, self.v = (seq.keys(t).to(self.work).transpose(0, 1)[keys] for t in (x.k, x.v))

        i, j = torch.arange(sq)[:, None], torch.arange(sk)[None, :]
        left, right = spec.window
        if _has("mask a key too wide") and right is not None:
            right += 1
        if _has("mask a key too narrow") and right is not None:
            right -= 1
        if _has("window a key too wide") and left is not None:
            left += 1
        if _has("top-left mask") and right is not None:
            right += sq - sk
        seen = mask.visible(i, j, sq, sk, left, right)
        if _has("last key lost"):
            seen = seen & (j < sk - 1)
        if _has("last key lost in the last row"):
            seen = seen & ~((i == sq - 1) & (j == sk - 1))
        self.seen = seen
        if not _has("unseen keys loaded"):
            self.k, self.v = (t.masked_fill(~seen.any(0)[:, None], 0) for t in (self.k, self.v))

        self.scale = spec.scale * (1.01 if _has("scale 1 % off") else 1)
        q, k = self.q, self.k
        if _has("tf32 products"):
            q, k = (_mantissa(t, 10) for t in (q, k))
        s = q @ k.transpose(1, 2) * self.scale
        self.slope: Tensor | float = 1.0
        if spec.softcap is not None:
            t = torch.tanh(s / spec.softcap)
            s = t * spec.softcap
            self.slope = 1.0 if _has("slope of the softcap lost") else 1 - t * t
        if x.bias is not None:
            bias = x.bias[seq.number if x.bias.shape[0] > 1 else 0].to(self.work)
            s = s + bias[:, : sq if bias.shape[1] > 1 else 1, : sk if bias.shape[2] > 1 else 1]
        if x.alibi_slopes is not None:
            slopes = x.alibi_slopes if x.alibi_slopes.dim() == 1 else x.alibi_slopes[seq.number]
            offset = 0 if _has("top-left ALiBi") else sk - sq
            s = s - slopes.to(self.work)[:, None, None] * (i + offset - j).abs()
        self.s = s.masked_fill(~seen, -math.inf)
        self.keep: Tensor | float = 1.0
        if spec.dropout_p > 0:
            axes = range(spec.heads_q), range(sq), range(sk)
            keep = philox.keep_mask(x.dropout_key, seq.number, *axes, spec.dropout_p)
            scale = 1.0 if _has("dropout not rescaled") else philox.keep_scale(spec.dropout_p)
            self.keep = keep.to(self.work) * scale

    def logsumexp(self, sink: Tensor | None) -> Tensor:
        s = self.s
        if sink is not None and not _has("sink lost"):
            s = torch.cat([s, sink.to(self.work)[:, None, None].expand(-1, s.shape[1], 1)], -1)
        return s.logsumexp(-1) if s.shape[-1] else s.new_full(s.shape[:-1], -math.inf)

    def weights(self, lse: Tensor) -> Tensor:
        dead = lse == -math.inf
        if _has("dead rows are NaN"):
            return torch.exp(self.s - lse[..., None])
        return torch.exp(self.s - lse.masked_fill(dead, 0)[..., None])


def _mantissa(x: Tensor, bits: int) -> Tensor:
    kept = 2.0 ** (bits + 1)
    significand, exponent = torch.frexp(x)
    return torch.ldexp((significand * kept).round() / kept, exponent)


def forward(spec: AttentionSpec, x: Inputs, out: Tensor, lse: Tensor, saved: Tensor) -> None:
    for seq in sequences(spec, x):
        a = _Sequence(spec, x, seq)
        exact = a.logsumexp(x.sink)
        p = a.weights(exact) * a.keep
        v = a.v
        if _has("bf16 products"):
            p, v = (t.bfloat16().to(a.work) for t in (p, v))
        o = p.to(spec.dtype).to(a.work) @ v
        seq.queries(out).copy_(o.transpose(0, 1))
        if _has("lse in log2"):
            exact = exact / math.log(2)
        if _has("lse of dead rows is finite"):
            exact = exact.clamp_min(-1e30)
        seq.rows(lse).copy_(exact)
    if _has("rows of no sequence written") and spec.varlen:
        out[int(x.cu_seqlens_q[-1]) :] = 1e-6


def backward(
    spec: AttentionSpec,
    x: Inputs,
    out: Tensor,
    lse: Tensor,
    saved: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    grads: Gradients,
) -> None:
    total_bias = total_sink = None
    for seq in sequences(spec, x):
        a = _Sequence(spec, x, seq)
        o, do = (seq.queries(t).to(a.work).transpose(0, 1) for t in (out, dout))
        row_lse = seq.rows(lse)
        p = a.weights(row_lse)
        delta = (o * do).sum(-1)
        if _has("delta lost"):
            delta = torch.zeros_like(delta)
        if dlse is not None and not _has("dlse lost"):
            sign = -1 if _has("dlse with the wrong sign") else 1
            delta = delta - sign * seq.rows(dlse).to(a.work)
        keep = 1.0 if _has("dropout forgotten in dP") else a.keep
        ds_exact = p * (do @ a.v.transpose(1, 2) * keep - delta[..., None]) * (p > 0)
        ds = (ds_exact * a.slope).to(spec.dtype).to(a.work)
        pd = p if _has("dropout forgotten in dV") else p * a.keep
        pd = pd.to(spec.dtype).to(a.work)
        q = a.q.masked_fill(~a.seen.any(1)[:, None], 0)

        gradient_scale = 1.0 if _has("dq not scaled") else spec.scale
        seq.queries(grads.q).copy_((ds @ a.k * gradient_scale).transpose(0, 1))
        for grad, by_head in (
            (grads.k, ds.transpose(1, 2) @ q * spec.scale),
            (grads.v, pd.transpose(1, 2) @ do),
        ):
            grouped = by_head.unflatten(0, (-1, spec.group))
            total = grouped[:, -1] if _has("group not summed") else grouped.sum(1)
            seq.keys(grad).copy_(total.transpose(0, 1))

        if x.bias is not None:
            total_bias = torch.zeros(x.bias.shape, dtype=a.work) if total_bias is None else total_bias
            part = total_bias[seq.number if x.bias.shape[0] > 1 else 0]
            for dim in range(3):
                if part.shape[dim] == 1:
                    ds_exact = ds_exact.sum(dim, keepdim=True)
            inside = part[:, : ds_exact.shape[1], : ds_exact.shape[2]]
            inside.copy_(ds_exact if _has("bias gradient of the last batch") else inside + ds_exact)
        if x.sink is not None:
            total_sink = torch.zeros(spec.heads_q, dtype=a.work) if total_sink is None else total_sink
            p_sink = torch.exp(
                x.sink.to(a.work)[:, None] - row_lse.masked_fill(row_lse == -math.inf, math.inf)
            )
            sign = -1 if _has("sink gradient with the wrong sign") else 1
            total_sink -= sign * (p_sink * delta).sum(-1)
    if total_bias is not None:
        grads.bias.copy_(total_bias)
    if total_sink is not None:
        grads.sink.copy_(total_sink)


def kernel(dispatch: Any) -> Any:
    """Its row for ``dispatch.KERNELS``."""
    everything = frozenset(dispatch.FEATURES) - {"fp8"}
    return dispatch.Kernel("cpu", "fa2", "faulty", everything, everything, lambda device: None)
