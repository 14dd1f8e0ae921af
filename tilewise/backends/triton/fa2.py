"""FlashAttention-2 in Triton (Dao, "FlashAttention-2", 2023, sections 3.1 and 3.2; algorithms 1 and 2).

Forward: one program per query tile; the output accumulates unnormalised, is divided once at the end,
and one log-sum-exp per row is kept. Backward: one program per key tile walks the queries that see it,
over all query heads of its group, so dK and dV stay in registers; dQ is added atomically in fp32. The
deterministic backward leaves dQ to a kernel of its own that is parallel over queries. The gradient of a
bias is another kernel's, parallel over the bias: whatever it is broadcast over is summed in one order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.backends.triton.bias_gradient import fill_bias_gradient
from tilewise.backends.triton.delta import row_delta
from tilewise.backends.triton.launch import launch
from tilewise.backends.triton.scores import load_lse, score_gradients
from tilewise.backends.triton.terms import (
    DROPOUT_KEY,
    KEEP_SCALE,
    added,
    kept,
    log_sum_exp,
    powers,
    sink_gradient,
    sink_logit,
    term_arguments,
    weights,
)
from tilewise.backends.triton.tile import (
    dot,
    finite,
    has_tiles,
    key_span,
    key_tile_runs,
    load_rows,
    load_tile,
    logits,
    matrix,
    query_tile_runs,
    sequence_rows,
    softcap_slope,
    store_tile,
    tile_mask,
    tile_pointers,
    visible,
)
from tilewise.ops import Gradients
from tilewise.spec import AttentionSpec, Inputs

INF = tl.constexpr(float("inf"))
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    rest_ptr,  # see ``terms.log_sum_exp``, or None
    strides,  # of q, k, v, out, lse, rest: (batch, row, head) each
    lengths,  # cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, seqlen_q, seqlen_k
    terms,
    heads,
    group,
    left,
    right,
    scale,
    softcap,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    IEEE: tl.constexpr,
    NATURAL: tl.constexpr,  # scores are natural logits: see ``terms``
):
    q_strides, k_strides, v_strides, out_strides, lse_strides, rest_strides = strides
    cu_q, cu_k, used_q, used_k, max_q, max_k = lengths
    tiles = tl.cdiv(max_q, TILE_Q)
    b = tl.program_id(0) // tiles // heads
    head = tl.program_id(0) // tiles % heads
    # Last queries first: under a causal mask they see the most keys, and long work should start early.
    q_start = (tiles - 1 - tl.program_id(0) % tiles) * TILE_Q
    start_q, seqlen_q = sequence_rows(b, cu_q, used_q, max_q)
    start_k, seqlen_k = sequence_rows(b, cu_k, used_k, max_k)
    if q_start >= seqlen_q:
        return

    q_base = matrix(q_ptr, q_strides, b, start_q, head)
    k_base = matrix(k_ptr, k_strides, b, start_k, head // group)
    v_base = matrix(v_ptr, v_strides, b, start_k, head // group)
    q = load_tile(q_base, q_strides[1], q_start, 0, seqlen_q, TILE_Q, BLOCK_D, D, True)
    i = q_start + tl.arange(0, TILE_Q)

    sink = sink_logit(head, terms)
    top = tl.zeros([TILE_Q], tl.float32) + sink
    total = tl.zeros([TILE_Q], tl.float32) + tl.where(sink == -INF, 0.0, 1.0)
    acc = tl.zeros([TILE_Q, BLOCK_DV], tl.float32)
    low, high = key_span(seqlen_q, seqlen_k, left, right)
    bounds = key_tile_runs(q_start, q_start + TILE_Q, seqlen_q, seqlen_k, left, right, TILE_K, IEEE)
    for run in tl.static_range(3):
        if has_tiles(run, left, IEEE):
            for tile in range(bounds[run], bounds[run + 1]):
                k_start = tile * TILE_K
                k = load_tile(k_base, k_strides[1], k_start, low, high, TILE_K, BLOCK_D, D, run != 1)
                v = load_tile(v_base, v_strides[1], k_start, low, high, TILE_K, BLOCK_DV, DV, run != 1)
                s, factor = logits(dot(q, tl.trans(k), None, IEEE), scale, softcap)
                j = k_start + tl.arange(0, TILE_K)
                if NATURAL:
                    s = added(s * factor, i[:, None], j[None, :], b, head, seqlen_q, seqlen_k, terms)
                    factor = 1.0
                if run != 1:
                    seen = visible(i[:, None], j[None, :], seqlen_q, seqlen_k, left, right)
                    s = tl.where(seen, s, -INF)
                new_top = tl.maximum(top, tl.max(s, 1) * factor)
                origin = finite(new_top) if run != 1 or NATURAL else new_top
                p = powers(s * factor, origin[:, None], NATURAL)
                shrink = powers(top, origin, NATURAL)
                top = new_top
                total = total * shrink + tl.sum(p, 1)
                if terms[DROPOUT_KEY] is not None:
                    p = tl.where(kept(q_start, k_start, b, head, terms, TILE_Q, TILE_K), p, 0.0)
                acc = dot(p.to(v.dtype), v, acc * shrink[:, None], IEEE)

    lse, rest = log_sum_exp(top, total, NATURAL)
    total = tl.where(total == 0, 1.0, total)  # rows that saw no key
    if terms[DROPOUT_KEY] is not None:
        acc *= terms[KEEP_SCALE]
    out_base = matrix(out_ptr, out_strides, b, start_q, head)
    lse_base = matrix(lse_ptr, lse_strides, b, start_q, head)
    store_tile(out_base, out_strides[1], q_start, seqlen_q, acc / total[:, None], TILE_Q, BLOCK_DV, DV)
    tl.store(lse_base + i, lse, mask=i < seqlen_q)
    if rest_ptr is not None:
        rest_base = matrix(rest_ptr, rest_strides, b, start_q, head)
        tl.store(rest_base + i, rest, mask=i < seqlen_q)


@triton.jit
def backward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    rest_ptr,
    dq_ptr,  # fp32 accumulator, zeroed; None if dQ is computed elsewhere
    dk_ptr,
    dv_ptr,
    strides,  # of q, k, v, dout, lse, delta, rest, dq, dk, dv
    lengths,
    terms,
    heads,
    group,
    left,
    right,
    scale,
    softcap,
    gradient_scale,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    IEEE: tl.constexpr,
    NATURAL: tl.constexpr,  # scores are natural logits: see ``terms``
):
    """dK and dV of one key tile, and its share of dQ. Scores are held transposed (keys, queries), so
    that P^T and dS^T are left operands, which the tensor cores can take from registers."""
    q_strides, k_strides, v_strides, dout_strides, lse_strides, delta_strides, rest_strides = strides[:7]
    dq_strides, dk_strides, dv_strides = strides[7:]
    cu_q, cu_k, used_q, used_k, max_q, max_k = lengths
    tiles = tl.cdiv(max_k, TILE_K)
    kv_heads = heads // group
    b = tl.program_id(0) // tiles // kv_heads
    kv_head = tl.program_id(0) // tiles % kv_heads
    # First keys first: under a causal mask they are seen by the most queries.
    k_start = tl.program_id(0) % tiles * TILE_K
    start_q, seqlen_q = sequence_rows(b, cu_q, used_q, max_q)
    start_k, seqlen_k = sequence_rows(b, cu_k, used_k, max_k)
    if k_start >= seqlen_k:
        return

    k_low, k_high = key_span(seqlen_q, seqlen_k, left, right)
    k_base = matrix(k_ptr, k_strides, b, start_k, kv_head)
    v_base = matrix(v_ptr, v_strides, b, start_k, kv_head)
    k = load_tile(k_base, k_strides[1], k_start, k_low, k_high, TILE_K, BLOCK_D, D, True)
    v = load_tile(v_base, v_strides[1], k_start, k_low, k_high, TILE_K, BLOCK_DV, DV, True)
    j = k_start + tl.arange(0, TILE_K)

    dk = tl.zeros([TILE_K, BLOCK_D], tl.float32)
    dv = tl.zeros([TILE_K, BLOCK_DV], tl.float32)
    low, high = key_span(seqlen_k, seqlen_q, right, left)
    bounds = query_tile_runs(k_start, k_start + TILE_K, seqlen_q, seqlen_k, left, right, TILE_Q, IEEE)
    for member in range(group):
        head = kv_head * group + member
        q_base = matrix(q_ptr, q_strides, b, start_q, head)
        dout_base = matrix(dout_ptr, dout_strides, b, start_q, head)
        lse_base = matrix(lse_ptr, lse_strides, b, start_q, head)
        delta_base = matrix(delta_ptr, delta_strides, b, start_q, head)
        for run in tl.static_range(3):
            if has_tiles(run, right, IEEE):
                for tile in range(bounds[run], bounds[run + 1]):
                    q_start = tile * TILE_Q
                    q = load_tile(q_base, q_strides[1], q_start, low, high, TILE_Q, BLOCK_D, D, run != 1)
                    i = q_start + tl.arange(0, TILE_Q)
                    lse, rest = load_lse(
                        lse_base, rest_ptr, rest_strides, b, start_q, head, q_start, low, high,
                        TILE_Q, run != 1, NATURAL,
                    )  # fmt: skip
                    s, factor = logits(dot(k, tl.trans(q), None, IEEE), scale, softcap)
                    capped = s
                    if NATURAL:
                        s = added(s * factor, i[None, :], j[:, None], b, head, seqlen_q, seqlen_k, terms)
                        factor = 1.0
                    p = weights(s, factor, lse[None, :], rest[None, :], NATURAL)
                    if run != 1:
                        seen = visible(i[None, :], j[:, None], seqlen_q, seqlen_k, left, right)
                        p = tl.where(seen, p, 0.0)
                    dout = load_tile(
                        dout_base, dout_strides[1], q_start, low, high, TILE_Q, BLOCK_DV, DV, run != 1
                    )
                    dp = dot(v, tl.trans(dout), None, IEEE)
                    kept_p = p
                    if terms[DROPOUT_KEY] is not None:
                        keep = tl.trans(kept(q_start, k_start, b, head, terms, TILE_Q, TILE_K))
                        kept_p = tl.where(keep, p, 0.0)
                        dp = tl.where(keep, dp * terms[KEEP_SCALE], 0.0)
                    dv = dot(kept_p.to(dout.dtype), dout, dv, IEEE)
                    delta = load_rows(delta_base, q_start, low, high, 0.0, TILE_Q, run != 1)
                    ds = p * (dp - delta[None, :])
                    if softcap is not None:
                        ds *= softcap_slope(capped, softcap)
                    ds = ds.to(q.dtype)
                    dk = dot(ds, q, dk, IEEE)
                    if dq_ptr is not None:
                        dq_base = matrix(dq_ptr, dq_strides, b, start_q, head)
                        dq = dot(tl.trans(ds), k, None, IEEE)
                        pointers = tile_pointers(dq_base, dq_strides[1], q_start, TILE_Q, BLOCK_D)
                        inside = tile_mask(q_start, low, high, TILE_Q, BLOCK_D, D)
                        tl.atomic_add(pointers, dq, mask=inside, sem="relaxed")

    dk_base = matrix(dk_ptr, dk_strides, b, start_k, kv_head)
    dv_base = matrix(dv_ptr, dv_strides, b, start_k, kv_head)
    if terms[DROPOUT_KEY] is not None:
        dv *= terms[KEEP_SCALE]
    store_tile(dk_base, dk_strides[1], k_start, seqlen_k, dk * gradient_scale, TILE_K, BLOCK_D, D)
    store_tile(dv_base, dv_strides[1], k_start, seqlen_k, dv, TILE_K, BLOCK_DV, DV)


@triton.jit
def dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    rest_ptr,
    dq_ptr,
    strides,  # of q, k, v, dout, lse, delta, rest, dq
    lengths,
    terms,
    heads,
    group,
    left,
    right,
    scale,
    softcap,
    gradient_scale,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    IEEE: tl.constexpr,
    NATURAL: tl.constexpr,  # scores are natural logits: see ``terms``
):
    """dQ of one query tile, in an order that is always the same."""
    q_strides, k_strides, v_strides, dout_strides, lse_strides, delta_strides = strides[:6]
    rest_strides, dq_strides = strides[6:]
    cu_q, cu_k, used_q, used_k, max_q, max_k = lengths
    tiles = tl.cdiv(max_q, TILE_Q)
    b = tl.program_id(0) // tiles // heads
    head = tl.program_id(0) // tiles % heads
    q_start = (tiles - 1 - tl.program_id(0) % tiles) * TILE_Q
    start_q, seqlen_q = sequence_rows(b, cu_q, used_q, max_q)
    start_k, seqlen_k = sequence_rows(b, cu_k, used_k, max_k)
    if q_start >= seqlen_q:
        return

    q_base = matrix(q_ptr, q_strides, b, start_q, head)
    dout_base = matrix(dout_ptr, dout_strides, b, start_q, head)
    lse_base = matrix(lse_ptr, lse_strides, b, start_q, head)
    delta_base = matrix(delta_ptr, delta_strides, b, start_q, head)
    k_base = matrix(k_ptr, k_strides, b, start_k, head // group)
    v_base = matrix(v_ptr, v_strides, b, start_k, head // group)
    q_low, q_high = key_span(seqlen_k, seqlen_q, right, left)
    q = load_tile(q_base, q_strides[1], q_start, q_low, q_high, TILE_Q, BLOCK_D, D, True)
    dout = load_tile(dout_base, dout_strides[1], q_start, q_low, q_high, TILE_Q, BLOCK_DV, DV, True)
    lse, rest = load_lse(
        lse_base, rest_ptr, rest_strides, b, start_q, head, q_start, q_low, q_high, TILE_Q, True, NATURAL
    )
    delta = load_rows(delta_base, q_start, q_low, q_high, 0.0, TILE_Q, True)

    dq = tl.zeros([TILE_Q, BLOCK_D], tl.float32)
    low, high = key_span(seqlen_q, seqlen_k, left, right)
    bounds = key_tile_runs(q_start, q_start + TILE_Q, seqlen_q, seqlen_k, left, right, TILE_K, IEEE)
    for run in tl.static_range(3):
        if has_tiles(run, left, IEEE):
            for tile in range(bounds[run], bounds[run + 1]):
                k_start = tile * TILE_K
                k = load_tile(k_base, k_strides[1], k_start, low, high, TILE_K, BLOCK_D, D, run != 1)
                v = load_tile(v_base, v_strides[1], k_start, low, high, TILE_K, BLOCK_DV, DV, run != 1)
                operands = (q, dout, lse, rest, delta, k, v)
                _, ds = score_gradients(
                    operands, q_start, k_start, b, head, (seqlen_q, seqlen_k), terms, left, right,
                    scale, softcap, TILE_Q, TILE_K, IEEE, NATURAL, run != 1,
                )  # fmt: skip
                dq = dot(ds.to(k.dtype), k, dq, IEEE)

    dq_base = matrix(dq_ptr, dq_strides, b, start_q, head)
    store_tile(dq_base, dq_strides[1], q_start, seqlen_q, dq * gradient_scale, TILE_Q, BLOCK_D, D)


def forward(spec: AttentionSpec, x: Inputs, out: Tensor, lse: Tensor, saved: Tensor) -> None:
    """Fill out and lse, and saved where there is a bias. See ``tilewise.dispatch.Kernel``."""
    operands = (x.q, x.k, x.v, out, lse, _rest(spec, saved))
    extra = term_arguments(spec, x)
    launch(forward_kernel, "fa2_forward", spec, x, over="queries", operands=operands, **extra)


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
    """Fill grads. See ``tilewise.dispatch.Kernel``."""
    delta = row_delta(spec, x, out, dout, dlse, lse)
    rest = _rest(spec, saved)
    read = (x.q, x.k, x.v, dout, lse, delta, rest)
    dq = None if spec.deterministic else torch.zeros_like(x.q, dtype=torch.float32)
    written = (dq, grads.k, grads.v)
    extra = term_arguments(spec, x) | {"gradient_scale": spec.scale}
    launch(backward_kernel, "fa2_backward", spec, x, over="keys", operands=(*read, *written), **extra)
    if dq is None:
        launch(dq_kernel, "fa2_dq", spec, x, over="queries", operands=(*read, grads.q), **extra)
    else:
        torch.mul(dq, spec.scale, out=grads.q)
    if grads.bias is not None:
        fill_bias_gradient(spec, x, read, grads.bias)
    if grads.sink is not None and x.sink is not None:
        grads.sink.copy_(sink_gradient(x.sink, lse, delta, rest))


def _rest(spec: AttentionSpec, saved: Tensor) -> Tensor | None:
    return saved[0] if spec.bias else None
