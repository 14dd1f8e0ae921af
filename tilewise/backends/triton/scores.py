"""A tile of scores in the backward: weights recomputed from the log-sum-exp, and their gradient."""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.backends.triton.terms import DROPOUT_KEY, KEEP_SCALE, added, kept, weights
from tilewise.backends.triton.tile import dot, load_rows, logits, matrix, softcap_slope, visible

INF = tl.constexpr(float("inf"))
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_lse(
    lse_base,
    rest_ptr,
    rest_strides,
    b,
    start_q,
    head,
    start,
    low,
    high,
    TILE_Q: tl.constexpr,
    MASKED: tl.constexpr,
    NATURAL: tl.constexpr,
):
    """The log-sum-exp of queries in the units of their scores, inf where nothing is seen, and what
    rounding took from it. Rows that a mask hides from all keys are outside [low, high), those that a
    bias hides have -inf."""
    lse = load_rows(lse_base, start, low, high, INF, TILE_Q, MASKED)
    rest = tl.zeros([TILE_Q], tl.float32)
    if NATURAL:
        lse = tl.where(lse == -INF, INF, lse)
    else:
        lse *= LOG2E
    if rest_ptr is not None:
        rest_base = matrix(rest_ptr, rest_strides, b, start_q, head)
        rest = load_rows(rest_base, start, low, high, 0.0, TILE_Q, MASKED)
    return lse, rest


@triton.jit
def score_gradients(
    operands,  # q, dout, lse, rest, delta of a query tile; k, v of a key tile
    q_start,
    k_start,
    b,
    head,
    seqlens,
    terms,
    left,
    right,
    scale,
    softcap,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    IEEE: tl.constexpr,
    NATURAL: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The gradient of a tile of logits, bias and all, and what the softcap passes on of it."""
    q, dout, lse, rest, delta, k, v = operands
    seqlen_q, seqlen_k = seqlens
    i = q_start + tl.arange(0, TILE_Q)
    j = k_start + tl.arange(0, TILE_K)
    s, factor = logits(dot(q, tl.trans(k), None, IEEE), scale, softcap)
    capped = s
    if NATURAL:
        s = added(s * factor, i[:, None], j[None, :], b, head, seqlen_q, seqlen_k, terms)
        factor = 1.0
    p = weights(s, factor, lse[:, None], rest[:, None], NATURAL)
    if MASKED:
        seen = visible(i[:, None], j[None, :], seqlen_q, seqlen_k, left, right)
        p = tl.where(seen, p, 0.0)
    dp = dot(dout, tl.trans(v), None, IEEE)
    if terms[DROPOUT_KEY] is not None:
        keep = kept(q_start, k_start, b, head, terms, TILE_Q, TILE_K)
        dp = tl.where(keep, dp * terms[KEEP_SCALE], 0.0)
    ds = p * (dp - delta[:, None])
    if softcap is not None:
        return ds, ds * softcap_slope(capped, softcap)
    return ds, ds
