"""Attention forward on Hopper: TMA producer, two or three consumers by turns, two products in flight."""

import math

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilewise.gluon.compat import thread_barrier, tma_load


@gluon.jit
def producer(
    q_desc,
    k_desc,
    v_desc,
    q_s,
    k_s,
    v_s,
    bars,
    m_off,
    kv_off,
    n_blocks,
    STAGES: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    WGS: gl.constexpr,
):
    q_full, k_full, k_empty, v_full, v_empty, turn = bars
    for w in gl.static_range(WGS):
        mbarrier.expect(q_full.index(w), q_desc.block_type.nbytes)
        tma_load(q_desc, [m_off + w * 64, 0], q_full.index(w), q_s.index(w))
    for i in range(n_blocks):
        n = n_blocks - 1 - i
        st = i % STAGES
        ph = (i // STAGES) & 1
        mbarrier.wait(k_empty.index(st), ph ^ 1)
        mbarrier.expect(k_full.index(st), k_desc.block_type.nbytes)
        tma_load(k_desc, [kv_off + n * BLOCK_N, 0], k_full.index(st), k_s.index(st))
        mbarrier.wait(v_empty.index(st), ph ^ 1)
        mbarrier.expect(v_full.index(st), v_desc.block_type.nbytes)
        tma_load(v_desc, [kv_off + n * BLOCK_N, 0], v_full.index(st), v_s.index(st))


@gluon.jit
def consumer(
    W: gl.constexpr,
    scr,
    q_s,
    k_s,
    v_s,
    bars,
    o_ptr,
    lse_ptr,
    m_off,
    m_blk_row,
    n_blocks,
    scale_log2,
    STAGES: gl.constexpr,
    BLOCK_N: gl.constexpr,
    D: gl.constexpr,
    CAUSAL: gl.constexpr,
    PINGPONG: gl.constexpr,
    WGS: gl.constexpr,
    DT: gl.constexpr,
    PINNED: gl.constexpr,
):
    q_full, k_full, k_empty, v_full, v_empty, turn = bars
    s_l: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_l: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_l: gl.constexpr = gl.DotOperandLayout(0, o_l, 2)
    row_s: gl.constexpr = gl.SliceLayout(1, s_l)
    row_o: gl.constexpr = gl.SliceLayout(1, o_l)
    q = q_s.index(W)
    mbarrier.wait(q_full.index(W), 0)
    o = gl.zeros([64, D], gl.float32, o_l)
    zs = gl.zeros([64, BLOCK_N], gl.float32, s_l)
    rows = m_blk_row + W * 64 + gl.arange(0, 64, row_s)
    cols = gl.arange(0, BLOCK_N, gl.SliceLayout(0, s_l))

    mbarrier.wait(k_full.index(0), 0)
    if PINGPONG:
        mbarrier.wait(turn.index(W), 0)
    s = warpgroup_mma(q, k_s.index(0).permute((1, 0)), zs, use_acc=False, is_async=True)
    if PINGPONG:
        mbarrier.arrive(turn.index((W + 1) % WGS), count=1)
    s = warpgroup_mma_wait(0, [s])
    mbarrier.arrive(k_empty.index(0), count=1)
    if CAUSAL:
        n = n_blocks - 1
        s = gl.where(rows[:, None] >= (n * BLOCK_N + cols)[None, :], s, -float("inf"))
    m = gl.maximum(gl.max(s, axis=1), -1.0e20)
    p = gl.exp2(s * scale_log2 - (m * scale_log2)[:, None])
    l = gl.sum(p, axis=1)
    pb = gl.convert_layout(p.to(DT), p_l)

    for i in range(1, n_blocks):
        st = i % STAGES
        ph = (i // STAGES) & 1
        pst = (i - 1) % STAGES
        pph = ((i - 1) // STAGES) & 1
        mbarrier.wait(k_full.index(st), ph)
        if PINGPONG:
            mbarrier.wait(turn.index(W), i & 1)
        s_t = warpgroup_mma(q, k_s.index(st).permute((1, 0)), zs, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(pst), pph)
        o_t = warpgroup_mma(pb, v_s.index(pst), o, is_async=True)
        if PINGPONG:
            mbarrier.arrive(turn.index((W + 1) % WGS), count=1)
        s = warpgroup_mma_wait(1, [s_t])
        mbarrier.arrive(k_empty.index(st), count=1)
        if CAUSAL:
            n = n_blocks - 1 - i
            if n * BLOCK_N + BLOCK_N - 1 > m_blk_row + W * 64:
                s = gl.where(rows[:, None] >= (n * BLOCK_N + cols)[None, :], s, -float("inf"))
        m_new = gl.maximum(m, gl.max(s, axis=1))
        alpha = gl.exp2((m - m_new) * scale_log2)
        p = gl.exp2(s * scale_log2 - (m_new * scale_log2)[:, None])
        l = l * alpha + gl.sum(p, axis=1)
        m = m_new
        pn = gl.convert_layout(p.to(DT), p_l)
        if PINNED:  # keeps ptxas from waiting for the product before the softmax
            scr.index(W).store(l)
            thread_barrier()
        o, pb = warpgroup_mma_wait(0, [o_t, pn])
        mbarrier.arrive(v_empty.index(pst), count=1)
        o = o * gl.convert_layout(alpha, row_o)[:, None]

    pst = (n_blocks - 1) % STAGES
    pph = ((n_blocks - 1) // STAGES) & 1
    mbarrier.wait(v_full.index(pst), pph)
    o_t = warpgroup_mma(pb, v_s.index(pst), o, is_async=True)
    o = warpgroup_mma_wait(0, [o_t])
    o = o * gl.convert_layout(1.0 / l, row_o)[:, None]
    lse = m * scale_log2 * 0.6931471805599453 + gl.log(l)
    gl.store(lse_ptr + m_off + W * 64 + gl.arange(0, 64, row_s), lse)
    # epilogue: direct store in a coalesced layout
    b_l: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    ob = gl.convert_layout(o.to(DT), b_l)
    r = (m_off + W * 64 + gl.arange(0, 64, gl.SliceLayout(1, b_l)))[:, None]
    c = gl.arange(0, D, gl.SliceLayout(0, b_l))[None, :]
    gl.store(o_ptr + r.to(gl.int64) * D + c, ob)


@gluon.jit
def fwd_kernel(
    q_desc,
    k_desc,
    v_desc,
    o_ptr,
    lse_ptr,
    S,
    scale_log2,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    PINGPONG: gl.constexpr,
    WGS: gl.constexpr,
    CREG: gl.constexpr,
    PINNED: gl.constexpr,
):
    DT: gl.constexpr = q_desc.dtype
    n_m = gl.cdiv(S, BLOCK_M)
    if CAUSAL:
        mb = n_m - 1 - gl.program_id(1)
        bh = gl.program_id(0)
    else:
        mb = gl.program_id(0)
        bh = gl.program_id(1)
    q_s = gl.allocate_shared_memory(DT, [WGS, 64, D], q_desc.layout)
    k_s = gl.allocate_shared_memory(DT, [STAGES, BLOCK_N, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(DT, [STAGES, BLOCK_N, D], v_desc.layout)
    scr = gl.allocate_shared_memory(gl.float32, [WGS, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = gl.allocate_shared_memory(gl.int64, [WGS, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [WGS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(WGS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(turn.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=WGS)
        mbarrier.init(v_empty.index(i), count=WGS)
    if PINGPONG:
        mbarrier.arrive(turn.index(0), count=1)
    bars = (q_full, k_full, k_empty, v_full, v_empty, turn)
    m_off = bh * S + mb * BLOCK_M
    kv_off = bh * S
    if CAUSAL:
        n_blocks = gl.cdiv((mb + 1) * BLOCK_M, BLOCK_N)
    else:
        n_blocks = gl.cdiv(S, BLOCK_N)
    if WGS == 2:
        gl.warp_specialize(
            [
                (
                    consumer,
                    (
                        0,
                        scr,
                        q_s,
                        k_s,
                        v_s,
                        bars,
                        o_ptr,
                        lse_ptr,
                        m_off,
                        mb * BLOCK_M,
                        n_blocks,
                        scale_log2,
                        STAGES,
                        BLOCK_N,
                        D,
                        CAUSAL,
                        PINGPONG,
                        WGS,
                        DT,
                        PINNED,
                    ),
                ),
                (
                    consumer,
                    (
                        1,
                        scr,
                        q_s,
                        k_s,
                        v_s,
                        bars,
                        o_ptr,
                        lse_ptr,
                        m_off,
                        mb * BLOCK_M,
                        n_blocks,
                        scale_log2,
                        STAGES,
                        BLOCK_N,
                        D,
                        CAUSAL,
                        PINGPONG,
                        WGS,
                        DT,
                        PINNED,
                    ),
                ),
                (
                    producer,
                    (
                        q_desc,
                        k_desc,
                        v_desc,
                        q_s,
                        k_s,
                        v_s,
                        bars,
                        m_off,
                        kv_off,
                        n_blocks,
                        STAGES,
                        BLOCK_M,
                        BLOCK_N,
                        WGS,
                    ),
                ),
            ],
            [4, 1],
            [CREG, 24],
        )
    else:
        gl.warp_specialize(
            [
                (
                    consumer,
                    (
                        0,
                        scr,
                        q_s,
                        k_s,
                        v_s,
                        bars,
                        o_ptr,
                        lse_ptr,
                        m_off,
                        mb * BLOCK_M,
                        n_blocks,
                        scale_log2,
                        STAGES,
                        BLOCK_N,
                        D,
                        CAUSAL,
                        PINGPONG,
                        WGS,
                        DT,
                        PINNED,
                    ),
                ),
                (
                    consumer,
                    (
                        1,
                        scr,
                        q_s,
                        k_s,
                        v_s,
                        bars,
                        o_ptr,
                        lse_ptr,
                        m_off,
                        mb * BLOCK_M,
                        n_blocks,
                        scale_log2,
                        STAGES,
                        BLOCK_N,
                        D,
                        CAUSAL,
                        PINGPONG,
                        WGS,
                        DT,
                        PINNED,
                    ),
                ),
                (
                    consumer,
                    (
                        2,
                        scr,
                        q_s,
                        k_s,
                        v_s,
                        bars,
                        o_ptr,
                        lse_ptr,
                        m_off,
                        mb * BLOCK_M,
                        n_blocks,
                        scale_log2,
                        STAGES,
                        BLOCK_N,
                        D,
                        CAUSAL,
                        PINGPONG,
                        WGS,
                        DT,
                        PINNED,
                    ),
                ),
                (
                    producer,
                    (
                        q_desc,
                        k_desc,
                        v_desc,
                        q_s,
                        k_s,
                        v_s,
                        bars,
                        m_off,
                        kv_off,
                        n_blocks,
                        STAGES,
                        BLOCK_M,
                        BLOCK_N,
                        WGS,
                    ),
                ),
            ],
            [4, 4, 1],
            [CREG, CREG, 24],
        )


def fwd(q, k, v, causal, BLOCK_N=128, STAGES=2, PINGPONG=True, WGS=2, CREG=240, PINNED=False):
    B, H, S, D = q.shape
    BLOCK_M = 64 * WGS
    dt = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[q.dtype]
    ql = gl.NVMMASharedLayout.get_default_for([64, D], dt)
    kl = gl.NVMMASharedLayout.get_default_for([BLOCK_N, D], dt)
    qd = TensorDescriptor(q, [B * H * S, D], [D, 1], [64, D], ql)
    kd = TensorDescriptor(k, [B * H * S, D], [D, 1], [BLOCK_N, D], kl)
    vd = TensorDescriptor(v, [B * H * S, D], [D, 1], [BLOCK_N, D], kl)
    o = torch.empty_like(q)
    lse = torch.empty(B * H * S, device=q.device, dtype=torch.float32)
    nm = triton.cdiv(S, BLOCK_M)
    grid = (B * H, nm) if causal else (nm, B * H)
    maxnreg = 168 if WGS == 2 else 128
    fwd_kernel[grid](
        qd,
        kd,
        vd,
        o,
        lse,
        S,
        (1 / math.sqrt(D)) * 1.4426950408889634,
        BLOCK_M,
        BLOCK_N,
        D,
        STAGES,
        causal,
        PINGPONG,
        WGS,
        CREG,
        PINNED,
        num_warps=4,
        maxnreg=maxnreg,
    )
    return o, lse.view(B, H, S)
