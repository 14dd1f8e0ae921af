"""Attention backward for Hopper: dK and dV in registers, dQ by TMA reductions from a writer warp."""

import math

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilewise.gluon.compat import thread_barrier, tma_load, tma_reduce_add, tma_store_wait


@gluon.jit
def b_producer(
    q_desc,
    do_desc,
    k_desc,
    v_desc,
    l_desc,
    d_desc,
    q_s,
    do_s,
    k_s,
    v_s,
    l_s,
    d_s,
    bars,
    kv_off,
    q_off,
    m_lo,
    m_hi,
    QS: gl.constexpr,
    BM: gl.constexpr,
):
    kv_full, q_full, q_empty, do_full, do_empty, dq_full, dq_empty = bars
    mbarrier.expect(kv_full, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
    tma_load(k_desc, [kv_off, 0], kv_full, k_s)
    tma_load(v_desc, [kv_off, 0], kv_full, v_s)
    for m in range(m_lo, m_hi):
        i = m - m_lo
        st = i % QS
        ph = (i // QS) & 1
        mbarrier.wait(q_empty.index(st), ph ^ 1)
        mbarrier.expect(q_full.index(st), q_desc.block_type.nbytes + BM * 4)
        tma_load(q_desc, [q_off + m * BM, 0], q_full.index(st), q_s.index(st))
        tma_load(l_desc, [q_off + m * BM], q_full.index(st), l_s.index(st))
        mbarrier.wait(do_empty.index(st), ph ^ 1)
        mbarrier.expect(do_full.index(st), do_desc.block_type.nbytes + BM * 4)
        tma_load(do_desc, [q_off + m * BM, 0], do_full.index(st), do_s.index(st))
        tma_load(d_desc, [q_off + m * BM], do_full.index(st), d_s.index(st))


@gluon.jit
def b_writer(dq_desc, dq_s, bars, q_off, m_lo, m_hi, BM: gl.constexpr, D: gl.constexpr):
    kv_full, q_full, q_empty, do_full, do_empty, dq_full, dq_empty = bars
    for m in range(m_lo, m_hi):
        i = m - m_lo
        mbarrier.wait(dq_full, i & 1)
        tma_reduce_add(dq_desc, [(q_off + m * BM) // 2 if D == 128 else (q_off + m * BM) // 4, 0], dq_s)
        tma_store_wait(0)
        mbarrier.arrive(dq_empty, count=1)


@gluon.jit
def b_consumer(
    q_s,
    do_s,
    k_s,
    v_s,
    l_s,
    d_s,
    ds_s,
    dq_s,
    bars,
    dk_ptr,
    dv_ptr,
    kv_off,
    q_off,
    n_row,
    m_lo,
    m_hi,
    scale,
    scale_log2,
    QS: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    D: gl.constexpr,
    CAUSAL: gl.constexpr,
    DT: gl.constexpr,
    NW: gl.constexpr,
):
    kv_full, q_full, q_empty, do_full, do_empty, dq_full, dq_empty = bars
    st_l: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NW, 1], [16, BM, 16])
    kv_l: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NW, 1], [16, D, 16])
    dq_l: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, NW // 4], [16, D // (NW // 4), 16])
    a_l: gl.constexpr = gl.DotOperandLayout(0, kv_l, 2)
    col_l: gl.constexpr = gl.SliceLayout(0, st_l)
    z = gl.zeros([BN, BM], gl.float32, st_l)
    zq = gl.zeros([BM, D], gl.float32, dq_l)
    dk = gl.zeros([BN, D], gl.float32, kv_l)
    dv = gl.zeros([BN, D], gl.float32, kv_l)
    rows_n = n_row + gl.arange(0, BN, gl.SliceLayout(1, st_l))
    cols_m = gl.arange(0, BM, col_l)
    mbarrier.wait(kv_full, 0)
    for m in range(m_lo, m_hi):
        i = m - m_lo
        st = i % QS
        ph = (i // QS) & 1
        mbarrier.wait(q_full.index(st), ph)
        s_t = warpgroup_mma(k_s, q_s.index(st).permute((1, 0)), z, use_acc=False, is_async=True)
        mbarrier.wait(do_full.index(st), ph)
        dp_t = warpgroup_mma(v_s, do_s.index(st).permute((1, 0)), z, use_acc=False, is_async=True)
        lse = l_s.index(st).load(col_l)
        s = warpgroup_mma_wait(1, [s_t])
        if CAUSAL:
            if m * BM < n_row + BN - 1:
                s = gl.where((m * BM + cols_m)[None, :] >= rows_n[:, None], s, -float("inf"))
        p = gl.exp2(s * scale_log2 - lse[None, :])
        pb = gl.convert_layout(p.to(DT), a_l)
        dv_t = warpgroup_mma(pb, do_s.index(st), dv, is_async=True)
        delta = d_s.index(st).load(col_l)
        dp = warpgroup_mma_wait(1, [dp_t])
        ds = (p * (dp - delta[None, :])).to(DT)
        ds_s.store(ds)
        dsb = gl.convert_layout(ds, a_l)
        fence_async_shared()
        thread_barrier()
        dq_t = warpgroup_mma(ds_s.permute((1, 0)), k_s, zq, use_acc=False, is_async=True)
        dk_t = warpgroup_mma(dsb, q_s.index(st), dk, is_async=True)
        dv, dq = warpgroup_mma_wait(1, [dv_t, dq_t])
        mbarrier.wait(dq_empty, (i & 1) ^ 1)
        t = (
            dq.reshape([4, 2, 8, NW // 4, D // (NW // 4) // 8, 4, 2])
            .permute([4, 3, 0, 2, 5, 1, 6])
            .reshape([BM * D // 256, 256])
        )
        dq_s.store(t)
        fence_async_shared()
        mbarrier.arrive(dq_full, count=1)
        dk = warpgroup_mma_wait(0, [dk_t])
        mbarrier.arrive(q_empty.index(st), count=1)
        mbarrier.arrive(do_empty.index(st), count=1)
    b_l: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [NW, 1], [1, 0])
    r = (kv_off + gl.arange(0, BN, gl.SliceLayout(1, b_l)))[:, None]
    c = gl.arange(0, D, gl.SliceLayout(0, b_l))[None, :]
    gl.store(dv_ptr + r.to(gl.int64) * D + c, gl.convert_layout(dv.to(DT), b_l))
    gl.store(dk_ptr + r.to(gl.int64) * D + c, gl.convert_layout((dk * scale).to(DT), b_l))


@gluon.jit
def bwd_kernel(
    q_desc,
    do_desc,
    k_desc,
    v_desc,
    dq_desc,
    l_desc,
    d_desc,
    dk_ptr,
    dv_ptr,
    S,
    scale,
    scale_log2,
    BM: gl.constexpr,
    BN: gl.constexpr,
    D: gl.constexpr,
    QS: gl.constexpr,
    CAUSAL: gl.constexpr,
    NW: gl.constexpr,
):
    DT: gl.constexpr = q_desc.dtype
    nb = gl.program_id(0)
    bh = gl.program_id(1)
    k_s = gl.allocate_shared_memory(DT, [BN, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(DT, [BN, D], v_desc.layout)
    q_s = gl.allocate_shared_memory(DT, [QS, BM, D], q_desc.layout)
    do_s = gl.allocate_shared_memory(DT, [QS, BM, D], do_desc.layout)
    l_s = gl.allocate_shared_memory(gl.float32, [QS, BM], l_desc.layout)
    d_s = gl.allocate_shared_memory(gl.float32, [QS, BM], d_desc.layout)
    ds_l: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, BM], DT)
    ds_s = gl.allocate_shared_memory(DT, [BN, BM], ds_l)
    dq_s = gl.allocate_shared_memory(gl.float32, [BM * D // 256, 256], dq_desc.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    dq_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    dq_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [QS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [QS, 1], mbarrier.MBarrierLayout())
    do_full = gl.allocate_shared_memory(gl.int64, [QS, 1], mbarrier.MBarrierLayout())
    do_empty = gl.allocate_shared_memory(gl.int64, [QS, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full, count=1)
    mbarrier.init(dq_full, count=1)
    mbarrier.init(dq_empty, count=1)
    for i in gl.static_range(QS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
        mbarrier.init(do_full.index(i), count=1)
        mbarrier.init(do_empty.index(i), count=1)
    bars = (kv_full, q_full, q_empty, do_full, do_empty, dq_full, dq_empty)
    q_off = bh * S
    kv_off = bh * S + nb * BN
    m_hi = gl.cdiv(S, BM)
    m_lo = 0
    if CAUSAL:
        m_lo = (nb * BN) // BM
    gl.warp_specialize(
        [
            (
                b_consumer,
                (
                    q_s,
                    do_s,
                    k_s,
                    v_s,
                    l_s,
                    d_s,
                    ds_s,
                    dq_s,
                    bars,
                    dk_ptr,
                    dv_ptr,
                    kv_off,
                    q_off,
                    nb * BN,
                    m_lo,
                    m_hi,
                    scale,
                    scale_log2,
                    QS,
                    BM,
                    BN,
                    D,
                    CAUSAL,
                    DT,
                    NW,
                ),
            ),
            (
                b_producer,
                (
                    q_desc,
                    do_desc,
                    k_desc,
                    v_desc,
                    l_desc,
                    d_desc,
                    q_s,
                    do_s,
                    k_s,
                    v_s,
                    l_s,
                    d_s,
                    bars,
                    kv_off,
                    q_off,
                    m_lo,
                    m_hi,
                    QS,
                    BM,
                ),
            ),
            (b_writer, (dq_desc, dq_s, bars, q_off, m_lo, m_hi, BM, D)),
        ],
        [1, 1],
        [24, 24],
    )


def bwd(q, k, v, o, do, lse, causal, BM=64, BN=128, QS=2, NW=8):
    """lse in natural log, shape [B,H,S]"""
    B, H, S, D = q.shape
    delta = (o.float() * do.float()).sum(-1).contiguous()
    lse2 = (lse * 1.4426950408889634).contiguous()
    dq = torch.zeros(B, H, S, D, device=q.device, dtype=torch.float32)
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    run(q, k, v, do, lse2, delta, dq, dk, dv, causal, BM, BN, QS, NW)
    W = NW // 4
    dq = (
        dq.view(B, H, S // BM, D // W // 8, W, 4, 8, 4, 2, 2)
        .permute(0, 1, 2, 5, 8, 6, 4, 3, 7, 9)
        .reshape(B, H, S, D)
    )
    return dq / math.sqrt(D), dk, dv


def run(q, k, v, do, lse2, delta, dq, dk, dv, causal, BM=64, BN=128, QS=2, NW=8):
    B, H, S, D = q.shape
    dt = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[q.dtype]
    ql = gl.NVMMASharedLayout.get_default_for([BM, D], dt)
    kl = gl.NVMMASharedLayout.get_default_for([BN, D], dt)
    dql = gl.NVMMASharedLayout(0, 32, rank=2)

    def mk(t, b, l):
        return TensorDescriptor(t, [B * H * S, D], [D, 1], [b, D], l)

    scale = 1 / math.sqrt(D)
    bwd_kernel[(triton.cdiv(S, BN), B * H)](
        mk(q, BM, ql),
        mk(do, BM, ql),
        mk(k, BN, kl),
        mk(v, BN, kl),
        TensorDescriptor(
            dq.view(-1, 256), [B * H * S * D // 256, 256], [256, 1], [BM * D // 256, 256], dql
        ),
        TensorDescriptor(lse2.view(-1), [B * H * S], [1], [BM], gl.NVMMASharedLayout(0, 32, rank=1)),
        TensorDescriptor(delta.view(-1), [B * H * S], [1], [BM], gl.NVMMASharedLayout(0, 32, rank=1)),
        dk,
        dv,
        S,
        scale,
        scale * 1.4426950408889634,
        BM,
        BN,
        D,
        QS,
        causal,
        NW,
        num_warps=NW,
        maxnreg=168,
    )
