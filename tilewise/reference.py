"""The definition of right: attention with every score written out.

Plain PyTorch, one sequence at a time, everything in ``compute_dtype`` (fp64 unless asked otherwise),
gradients by autograd. Every other implementation is tested against this one. Memory grows with
Sq * Sk: it is an oracle, not a backend.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilewise import mask, philox
from tilewise.spec import AttentionSpec, Inputs, Sequence, sequences


def attention(
    spec: AttentionSpec, x: Inputs, compute_dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of a whole batch, differentiable in q, k, v, bias and sink.

    Of fp8 tensors it is exact attention of the numbers that they are with their scales; how others are
    to be quantised (``spec.fp8``) makes no difference to what is right.

    Returns:
        out, shaped like q with Dv for D, and lse, (B, Hq, Sq) or varlen (Hq, total), both in
        ``compute_dtype``. Rows that belong to no sequence: out 0, lse -inf.
    """
    out = x.q.new_zeros(*x.q.shape[:-1], spec.head_dim_v, dtype=compute_dtype)
    rows = (spec.heads_q, x.q.shape[0]) if spec.varlen else (spec.batch, spec.heads_q, x.q.shape[1])
    lse = x.q.new_full(rows, -math.inf, dtype=compute_dtype)
    for seq in sequences(spec, x):
        seq_out, seq_lse = _attend(spec, x, seq, compute_dtype)
        seq.queries(out).copy_(seq_out)
        seq.rows(lse).copy_(seq_lse)
    return out, lse


def _attend(spec: AttentionSpec, x: Inputs, seq: Sequence, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """One sequence: out (Sq, Hq, Dv) and lse (Hq, Sq)."""
    b, sq, sk = seq.number, seq.length_q, seq.length_k
    q, k, v = (t.to(dtype) for t in (seq.queries(x.q), seq.keys(x.k), seq.keys(x.v)))
    scales = ((q, x.q_descale, spec.group), (k, x.k_descale, 1), (v, x.v_descale, 1))
    q, k, v = (
        t if scale is None else t * scale[b].to(dtype).repeat_interleave(heads)[:, None]
        for t, scale, heads in scales
    )
    k, v = (t.repeat_interleave(spec.group, dim=1) for t in (k, v))
    i = torch.arange(sq, device=q.device)[:, None]
    j = torch.arange(sk, device=q.device)[None, :]
    seen = mask.visible(i, j, sq, sk, *spec.window)

    # A key that nobody sees and a query that sees nothing have no effect, whatever they hold.
    k, v = (t.masked_fill(~seen.any(0)[:, None, None], 0) for t in (k, v))
    q = q.masked_fill(~seen.any(1)[:, None, None], 0)

    scores = torch.einsum("ihd,jhd->hij", q, k) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if x.bias is not None:
        bias = x.bias[b if x.bias.shape[0] > 1 else 0].to(dtype)
        bias = bias if bias.shape[1] == 1 else bias[:, :sq]
        scores = scores + (bias if bias.shape[2] == 1 else bias[:, :, :sk])
    if x.alibi_slopes is not None:
        slopes = x.alibi_slopes if x.alibi_slopes.dim() == 1 else x.alibi_slopes[b]
        scores = scores - slopes.to(dtype)[:, None, None] * (i + sk - sq - j).abs()
    scores = scores.masked_fill(~seen, -math.inf)

    # The sink is one more column; without one it is a column of nothing (-inf).
    sink = q.new_full((spec.heads_q,), -math.inf) if x.sink is None else x.sink.to(dtype)
    logits = torch.cat([scores, sink[:, None, None].expand(-1, sq, 1)], dim=-1)
    top = logits.detach().amax(dim=-1, keepdim=True).clamp_min(torch.finfo(dtype).min)
    weights = torch.exp(logits - top)
    total = weights.sum(dim=-1)
    dead = total == 0  # nothing to see and no sink
    total = total.masked_fill(dead, 1)
    lse = (top.squeeze(-1) + torch.log(total)).masked_fill(dead, -math.inf)

    p = weights[..., :sk] / total[..., None]
    if spec.dropout_p > 0:
        assert x.dropout_key is not None
        keep = philox.keep_mask(
            x.dropout_key, b, range(spec.heads_q), range(sq), range(sk), spec.dropout_p
        )
        p = p * keep * philox.keep_scale(spec.dropout_p)
    return torch.einsum("hij,jhd->ihd", p, v), lse
