"""FlashAttention-1 in Triton (Dao et al., "FlashAttention", NeurIPS 2022, algorithms 1 and 4).

One program per batch entry and key head, mask and softmax fused. Key tiles in the outer loop, query
tiles in the inner one: the output O and the row statistics m (maximum) and l (sum) travel through
global memory and O is renormalised at every step. The backward recomputes P from m and l, and reads and
writes dQ once per pair of tiles. A row to learn from and compare with; FlashAttention-2 is faster.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.backends.triton.launch import launch
from tilewise.backends.triton.tile import (
    dot,
    finite,
    key_span,
    key_tiles,
    load_rows,
    load_tile,
    logits,
    matrix,
    sequence_rows,
    softcap_slope,
    store_tile,
    visible,
)
from tilewise.ops import Gradients
from tilewise.spec import AttentionSpec, Inputs

INF = tl.constexpr(float("inf"))


@triton.jit
def forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    acc_ptr,  # O in fp32, zeroed
    m_ptr,  # row maximum in units of log2(e), -inf
    l_ptr,  # row sum, zeroed
    strides,  # of q, k, v, acc, m, l: (batch, row, head) each
    lengths,  # cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, seqlen_q, seqlen_k
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
):
    q_strides, k_strides, v_strides, acc_strides, m_strides, l_strides = strides
    cu_q, cu_k, used_q, used_k, max_q, max_k = lengths
    b = tl.program_id(0) // (heads // group)
    kv_head = tl.program_id(0) % (heads // group)
    start_q, seqlen_q = sequence_rows(b, cu_q, used_q, max_q)
    start_k, seqlen_k = sequence_rows(b, cu_k, used_k, max_k)
    k_base = matrix(k_ptr, k_strides, b, start_k, kv_head)
    v_base = matrix(v_ptr, v_strides, b, start_k, kv_head)
    low, high = key_span(seqlen_q, seqlen_k, left, right)

    for k_tile in range(0, tl.cdiv(seqlen_k, TILE_K)):
        k_start = k_tile * TILE_K
        k = load_tile(k_base, k_strides[1], k_start, low, high, TILE_K, BLOCK_D, D, True)
        v = load_tile(v_base, v_strides[1], k_start, low, high, TILE_K, BLOCK_DV, DV, True)
        # The queries that see a key tile: the same band with the roles swapped.
        first, _, _, stop = key_tiles(k_start, k_start + TILE_K, seqlen_k, seqlen_q, right, left, TILE_Q)
        for member in range(group):
            head = kv_head * group + member
            q_base = matrix(q_ptr, q_strides, b, start_q, head)
            acc_base = matrix(acc_ptr, acc_strides, b, start_q, head)
            m_base = matrix(m_ptr, m_strides, b, start_q, head)
            l_base = matrix(l_ptr, l_strides, b, start_q, head)
            for q_tile in range(first, stop):
                q_start = q_tile * TILE_Q
                q = load_tile(q_base, q_strides[1], q_start, 0, seqlen_q, TILE_Q, BLOCK_D, D, True)
                o = load_tile(acc_base, acc_strides[1], q_start, 0, seqlen_q, TILE_Q, BLOCK_DV, DV, True)
                m = load_rows(m_base, q_start, 0, seqlen_q, -INF, TILE_Q, True)
                l = load_rows(l_base, q_start, 0, seqlen_q, 0.0, TILE_Q, True)  # noqa: E741

                s, factor = logits(dot(q, tl.trans(k), None, IEEE), scale, softcap)
                i = q_start + tl.arange(0, TILE_Q)
                j = k_start + tl.arange(0, TILE_K)
                seen = visible(i[:, None], j[None, :], seqlen_q, seqlen_k, left, right)
                s = tl.where(seen, s, -INF)
                new_m = tl.maximum(m, tl.max(s, 1) * factor)
                p = tl.exp2(s * factor - finite(new_m)[:, None])
                old = l * tl.exp2(m - finite(new_m))
                new_l = old + tl.sum(p, 1)
                divisor = tl.where(new_l == 0, 1.0, new_l)[:, None]
                o = dot(p.to(v.dtype), v, o * old[:, None], IEEE) / divisor

                store_tile(acc_base, acc_strides[1], q_start, seqlen_q, o, TILE_Q, BLOCK_DV, DV)
                tl.store(m_base + i, new_m, mask=i < seqlen_q)
                tl.store(l_base + i, new_l, mask=i < seqlen_q)
        # The next key tile reads what other threads of this program have written.
        tl.debug_barrier()


@triton.jit
def backward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    dout_ptr,
    dlse_ptr,
    m_ptr,
    l_ptr,
    dq_ptr,  # fp32, zeroed; without the factor scale
    dk_ptr,
    dv_ptr,
    strides,  # of all of these
    lengths,
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
):
    q_strides, k_strides, v_strides, out_strides, dout_strides, dlse_strides = strides[:6]
    m_strides, l_strides, dq_strides, dk_strides, dv_strides = strides[6:]
    cu_q, cu_k, used_q, used_k, max_q, max_k = lengths
    b = tl.program_id(0) // (heads // group)
    kv_head = tl.program_id(0) % (heads // group)
    start_q, seqlen_q = sequence_rows(b, cu_q, used_q, max_q)
    start_k, seqlen_k = sequence_rows(b, cu_k, used_k, max_k)
    k_base = matrix(k_ptr, k_strides, b, start_k, kv_head)
    v_base = matrix(v_ptr, v_strides, b, start_k, kv_head)
    dk_base = matrix(dk_ptr, dk_strides, b, start_k, kv_head)
    dv_base = matrix(dv_ptr, dv_strides, b, start_k, kv_head)
    k_low, k_high = key_span(seqlen_q, seqlen_k, left, right)
    # Rows that see no key are outside [low, high): nothing of theirs is read.
    low, high = key_span(seqlen_k, seqlen_q, right, left)

    for k_tile in range(0, tl.cdiv(seqlen_k, TILE_K)):
        k_start = k_tile * TILE_K
        k = load_tile(k_base, k_strides[1], k_start, k_low, k_high, TILE_K, BLOCK_D, D, True)
        v = load_tile(v_base, v_strides[1], k_start, k_low, k_high, TILE_K, BLOCK_DV, DV, True)
        dk = tl.zeros([TILE_K, BLOCK_D], tl.float32)
        dv = tl.zeros([TILE_K, BLOCK_DV], tl.float32)
        first, _, _, stop = key_tiles(k_start, k_start + TILE_K, seqlen_k, seqlen_q, right, left, TILE_Q)
        for member in range(group):
            head = kv_head * group + member
            q_base = matrix(q_ptr, q_strides, b, start_q, head)
            out_base = matrix(out_ptr, out_strides, b, start_q, head)
            dout_base = matrix(dout_ptr, dout_strides, b, start_q, head)
            dq_base = matrix(dq_ptr, dq_strides, b, start_q, head)
            m_base = matrix(m_ptr, m_strides, b, start_q, head)
            l_base = matrix(l_ptr, l_strides, b, start_q, head)
            for q_tile in range(first, stop):
                q_start = q_tile * TILE_Q
                i = q_start + tl.arange(0, TILE_Q)
                j = k_start + tl.arange(0, TILE_K)
                q = load_tile(q_base, q_strides[1], q_start, low, high, TILE_Q, BLOCK_D, D, True)
                o = load_tile(out_base, out_strides[1], q_start, low, high, TILE_Q, BLOCK_DV, DV, True)
                dout = load_tile(
                    dout_base, dout_strides[1], q_start, low, high, TILE_Q, BLOCK_DV, DV, True
                )
                dq = load_tile(dq_base, dq_strides[1], q_start, low, high, TILE_Q, BLOCK_D, D, True)
                m = load_rows(m_base, q_start, low, high, INF, TILE_Q, True)
                l = load_rows(l_base, q_start, low, high, 1.0, TILE_Q, True)  # noqa: E741

                s, factor = logits(dot(q, tl.trans(k), None, IEEE), scale, softcap)
                p = tl.exp2(s * factor - m[:, None]) / l[:, None]
                seen = visible(i[:, None], j[None, :], seqlen_q, seqlen_k, left, right)
                p = tl.where(seen, p, 0.0)
                dv = dot(tl.trans(p.to(dout.dtype)), dout, dv, IEEE)
                dp = dot(dout, tl.trans(v), None, IEEE)
                delta = tl.sum(o.to(tl.float32) * dout.to(tl.float32), 1)
                if dlse_ptr is not None:
                    dlse_base = matrix(dlse_ptr, dlse_strides, b, start_q, head)
                    rows = i.to(tl.int64) * dlse_strides[1]
                    delta -= tl.load(dlse_base + rows, mask=(i >= low) & (i < high), other=0.0)
                ds = p * (dp - delta[:, None])
                if softcap is not None:
                    ds *= softcap_slope(s, softcap)
                ds = ds.to(q.dtype)
                dq = dot(ds, k, dq, IEEE)
                dk = dot(tl.trans(ds), q, dk, IEEE)
                store_tile(dq_base, dq_strides[1], q_start, seqlen_q, dq, TILE_Q, BLOCK_D, D)
        store_tile(dk_base, dk_strides[1], k_start, seqlen_k, dk * gradient_scale, TILE_K, BLOCK_D, D)
        store_tile(dv_base, dv_strides[1], k_start, seqlen_k, dv, TILE_K, BLOCK_DV, DV)
        tl.debug_barrier()


def forward(spec: AttentionSpec, x: Inputs, out: Tensor, lse: Tensor, saved: Tensor) -> None:
    """Fill out, lse and saved = (m, l). See ``tilewise.dispatch.Kernel``."""
    m, l = saved  # noqa: E741
    m.fill_(-math.inf)
    acc = torch.zeros_like(out, dtype=torch.float32)
    launch(forward_kernel, "fa1_forward", spec, x, over="heads", operands=(x.q, x.k, x.v, acc, m, l))
    out.copy_(acc)
    torch.add(m * math.log(2), l.log(), out=lse)


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
    """Fill grads.q, grads.k and grads.v. See ``tilewise.dispatch.Kernel``."""
    m, l = saved  # noqa: E741
    dq = torch.zeros_like(x.q, dtype=torch.float32)
    operands = (x.q, x.k, x.v, out, dout, dlse, m, l, dq, grads.k, grads.v)
    launch(
        backward_kernel,
        "fa1_backward",
        spec,
        x,
        over="heads",
        operands=operands,
        gradient_scale=spec.scale,
    )
    torch.mul(dq, spec.scale, out=grads.q)
