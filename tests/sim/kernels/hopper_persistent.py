"""A persistent attention forward for Hopper: Q in registers, the output stored during the next loads."""

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

from tilewise.gluon.compat import thread_barrier, tma_load, tma_store, tma_store_wait


@gluon.jit
def tile_of(t, n_m, BH, S, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    # causal: longest first; otherwise consecutive tiles of one head together (K/V stay in L2)
    if CAUSAL:
        mb = n_m - 1 - t // BH
        bh = t % BH
        n = gl.cdiv((mb + 1) * BLOCK_M, BLOCK_N)
    else:
        mb = t % n_m
        bh = t // n_m
        n = gl.cdiv(S, BLOCK_N)
    return mb, bh, n


@gluon.jit
def producer(
    q_desc,
    k_desc,
    v_desc,
    q_s,
    k_s,
    v_s,
    bars,
    n_tiles,
    n_m,
    BH,
    S,
    STAGES: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    WGS: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    q_full, q_empty, k_full, k_empty, v_full, v_empty, turn = bars
    it = 0
    k_tile = 0
    for t in range(gl.program_id(0), n_tiles, gl.num_programs(0)):
        mb, bh, n_blocks = tile_of(t, n_m, BH, S, BLOCK_M, BLOCK_N, CAUSAL)
        for w in gl.static_range(WGS):
            mbarrier.wait(q_empty.index(w), (k_tile & 1) ^ 1)
            mbarrier.expect(q_full.index(w), q_desc.block_type.nbytes)
            tma_load(q_desc, [bh * S + mb * BLOCK_M + w * 64, 0], q_full.index(w), q_s.index(w))
        for i in range(n_blocks):
            n = n_blocks - 1 - i
            st = it % STAGES
            ph = (it // STAGES) & 1
            mbarrier.wait(k_empty.index(st), ph ^ 1)
            mbarrier.expect(k_full.index(st), k_desc.block_type.nbytes)
            tma_load(k_desc, [bh * S + n * BLOCK_N, 0], k_full.index(st), k_s.index(st))
            mbarrier.wait(v_empty.index(st), ph ^ 1)
            mbarrier.expect(v_full.index(st), v_desc.block_type.nbytes)
            tma_load(v_desc, [bh * S + n * BLOCK_N, 0], v_full.index(st), v_s.index(st))
            it += 1
        k_tile += 1


@gluon.jit
def consumer(
    W: gl.constexpr,
    scr,
    o_s,
    o_desc,
    q_s,
    k_s,
    v_s,
    bars,
    lse_ptr,
    n_tiles,
    n_m,
    BH,
    S,
    scale_log2,
    STAGES: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    D: gl.constexpr,
    CAUSAL: gl.constexpr,
    PINGPONG: gl.constexpr,
    WGS: gl.constexpr,
    DT: gl.constexpr,
    PINNED: gl.constexpr,
):
    q_full, q_empty, k_full, k_empty, v_full, v_empty, turn = bars
    s_l: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_l: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_l: gl.constexpr = gl.DotOperandLayout(0, o_l, 2)
    row_s: gl.constexpr = gl.SliceLayout(1, s_l)
    row_o: gl.constexpr = gl.SliceLayout(1, o_l)
    q_l: gl.constexpr = gl.DotOperandLayout(0, s_l, 2)
    zs = gl.zeros([64, BLOCK_N], gl.float32, s_l)
    cols = gl.arange(0, BLOCK_N, gl.SliceLayout(0, s_l))
    it = 0
    k_tile = 0
    for t in range(gl.program_id(0), n_tiles, gl.num_programs(0)):
        mb, bh, n_blocks = tile_of(t, n_m, BH, S, BLOCK_M, BLOCK_N, CAUSAL)
        row0 = mb * BLOCK_M + W * 64
        rows = row0 + gl.arange(0, 64, row_s)
        o = gl.zeros([64, D], gl.float32, o_l)
        mbarrier.wait(q_full.index(W), k_tile & 1)
        q = q_s.index(W).load(q_l)
        fence_async_shared()  # or the next Q, copied by TMA, might overtake the load
        mbarrier.arrive(q_empty.index(W), count=1)
        st = it % STAGES
        ph = (it // STAGES) & 1
        mbarrier.wait(k_full.index(st), ph)
        if PINGPONG:
            mbarrier.wait(turn.index(W), it & 1)
        s = warpgroup_mma(q, k_s.index(st).permute((1, 0)), zs, use_acc=False, is_async=True)
        if PINGPONG:
            mbarrier.arrive(turn.index((W + 1) % WGS), count=1)
        s = warpgroup_mma_wait(0, [s])
        mbarrier.arrive(k_empty.index(st), count=1)
        if CAUSAL:
            s = gl.where(rows[:, None] >= ((n_blocks - 1) * BLOCK_N + cols)[None, :], s, -float("inf"))
        m = gl.maximum(gl.max(s, axis=1), -1.0e20)
        p = gl.exp2(s * scale_log2 - (m * scale_log2)[:, None])
        l = gl.sum(p, axis=1)
        pb = gl.convert_layout(p.to(DT), p_l)
        for i in range(1, n_blocks):
            pst = it % STAGES
            pph = (it // STAGES) & 1
            it += 1
            st = it % STAGES
            ph = (it // STAGES) & 1
            mbarrier.wait(k_full.index(st), ph)
            if PINGPONG:
                mbarrier.wait(turn.index(W), it & 1)
            s_t = warpgroup_mma(q, k_s.index(st).permute((1, 0)), zs, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(pst), pph)
            o_t = warpgroup_mma(pb, v_s.index(pst), o, is_async=True)
            if PINGPONG:
                mbarrier.arrive(turn.index((W + 1) % WGS), count=1)
            s = warpgroup_mma_wait(1, [s_t])
            mbarrier.arrive(k_empty.index(st), count=1)
            if CAUSAL:
                n = n_blocks - 1 - i
                if n * BLOCK_N + BLOCK_N - 1 > row0:
                    s = gl.where(rows[:, None] >= (n * BLOCK_N + cols)[None, :], s, -float("inf"))
            m_new = gl.maximum(m, gl.max(s, axis=1))
            alpha = gl.exp2((m - m_new) * scale_log2)
            p = gl.exp2(s * scale_log2 - (m_new * scale_log2)[:, None])
            l = l * alpha + gl.sum(p, axis=1)
            m = m_new
            pn = gl.convert_layout(p.to(DT), p_l)
            if PINNED:
                scr.index(W).store(l)
                thread_barrier()
            o, pb = warpgroup_mma_wait(0, [o_t, pn])
            mbarrier.arrive(v_empty.index(pst), count=1)
            o = o * gl.convert_layout(alpha, row_o)[:, None]
        pst = it % STAGES
        pph = (it // STAGES) & 1
        mbarrier.wait(v_full.index(pst), pph)
        o_t = warpgroup_mma(pb, v_s.index(pst), o, is_async=True)
        o = warpgroup_mma_wait(0, [o_t])
        mbarrier.arrive(v_empty.index(pst), count=1)
        it += 1
        k_tile += 1
        o = o * gl.convert_layout(1.0 / l, row_o)[:, None]
        gl.store(lse_ptr + bh * S + rows, m * scale_log2 * 0.6931471805599453 + gl.log(l))
        tma_store_wait(0)
        ob = o_s.index(W)
        ob.store(o.to(DT))
        fence_async_shared()
        thread_barrier()
        tma_store(o_desc, [bh * S + row0, 0], ob)
    tma_store_wait(0)


@gluon.jit
def fwd_kernel(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    lse_ptr,
    S,
    BH,
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
    n_tiles = n_m * BH
    q_s = gl.allocate_shared_memory(DT, [WGS, 64, D], q_desc.layout)
    o_s = gl.allocate_shared_memory(DT, [WGS, 64, D], o_desc.layout)
    k_s = gl.allocate_shared_memory(DT, [STAGES, BLOCK_N, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(DT, [STAGES, BLOCK_N, D], v_desc.layout)
    scr = gl.allocate_shared_memory(gl.float32, [WGS, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = gl.allocate_shared_memory(gl.int64, [WGS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [WGS, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [WGS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(WGS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
        mbarrier.init(turn.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=WGS)
        mbarrier.init(v_empty.index(i), count=WGS)
    if PINGPONG:
        mbarrier.arrive(turn.index(0), count=1)
    bars = (q_full, q_empty, k_full, k_empty, v_full, v_empty, turn)
    if WGS == 2:
        gl.warp_specialize(
            [
                (
                    consumer,
                    (
                        0,
                        scr,
                        o_s,
                        o_desc,
                        q_s,
                        k_s,
                        v_s,
                        bars,
                        lse_ptr,
                        n_tiles,
                        n_m,
                        BH,
                        S,
                        scale_log2,
                        STAGES,
                        BLOCK_M,
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
                        o_s,
                        o_desc,
                        q_s,
                        k_s,
                        v_s,
                        bars,
                        lse_ptr,
                        n_tiles,
                        n_m,
                        BH,
                        S,
                        scale_log2,
                        STAGES,
                        BLOCK_M,
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
                        n_tiles,
                        n_m,
                        BH,
                        S,
                        STAGES,
                        BLOCK_M,
                        BLOCK_N,
                        WGS,
                        CAUSAL,
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
                        o_s,
                        o_desc,
                        q_s,
                        k_s,
                        v_s,
                        bars,
                        lse_ptr,
                        n_tiles,
                        n_m,
                        BH,
                        S,
                        scale_log2,
                        STAGES,
                        BLOCK_M,
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
                        o_s,
                        o_desc,
                        q_s,
                        k_s,
                        v_s,
                        bars,
                        lse_ptr,
                        n_tiles,
                        n_m,
                        BH,
                        S,
                        scale_log2,
                        STAGES,
                        BLOCK_M,
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
                        o_s,
                        o_desc,
                        q_s,
                        k_s,
                        v_s,
                        bars,
                        lse_ptr,
                        n_tiles,
                        n_m,
                        BH,
                        S,
                        scale_log2,
                        STAGES,
                        BLOCK_M,
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
                        n_tiles,
                        n_m,
                        BH,
                        S,
                        STAGES,
                        BLOCK_M,
                        BLOCK_N,
                        WGS,
                        CAUSAL,
                    ),
                ),
            ],
            [4, 4, 1],
            [CREG, CREG, 24],
        )


def fwd(q, k, v, causal, BLOCK_N=128, STAGES=2, PINGPONG=False, WGS=2, CREG=240, PINNED=False, SMS=132):
    B, H, S, D = q.shape
    BLOCK_M = 64 * WGS
    dt = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[q.dtype]
    ql = gl.NVMMASharedLayout.get_default_for([64, D], dt)
    kl = gl.NVMMASharedLayout.get_default_for([BLOCK_N, D], dt)
    o = torch.empty_like(q)
    lse = torch.empty(B * H * S, device=q.device, dtype=torch.float32)

    def mk(t, b, l):
        return TensorDescriptor(t, [B * H * S, D], [D, 1], [b, D], l)

    nm = triton.cdiv(S, BLOCK_M)
    grid = (min(SMS, nm * B * H),)
    fwd_kernel[grid](
        mk(q, 64, ql),
        mk(k, BLOCK_N, kl),
        mk(v, BLOCK_N, kl),
        mk(o, 64, ql),
        lse,
        S,
        B * H,
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
        maxnreg=168 if WGS == 2 else 128,
    )
    return o, lse.view(B, H, S)
