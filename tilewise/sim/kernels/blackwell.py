"""A plain forward of attention for Blackwell, after FlashAttention-4: two query tiles by turns.

One warp loads, one issues all products, a warpgroup for each query tile does its softmax, and another
corrects the output. Scores and output live in tensor memory; the weights P take the place of their
scores there. While one tile has its softmax, the products of the other run. The output is rescaled only
when the row maximum has grown by a lot (2**THRESHOLD): until then the old maximum does as well.
"""

import math

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    mbarrier,
    tcgen05_commit,
    tcgen05_mma,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilewise.gluon.compat import label, tma_load, tmem_register_layout, tmem_reinterpret
from tilewise.gluon.ring import make_ring

ROWS = 256  # queries of a program: two tiles of 128
TILE: gl.constexpr = gl.constexpr(128)  # queries of a tile, and keys of a step
CHUNK: gl.constexpr = gl.constexpr(32)  # columns of the output that the correction holds at a time
THRESHOLD: gl.constexpr = gl.constexpr(8.0)


@gluon.jit
def barriers(name: gl.constexpr, count: gl.constexpr):
    """One barrier for each query tile."""
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for w in gl.static_range(2):
        mbarrier.init(bars.index(w), count=count)
    label(bars, name)
    return bars


@gluon.jit
def weights(scores, DTYPE: gl.constexpr):
    """Where P lies: in the left half of the columns of its scores."""
    layout: gl.constexpr = TensorMemoryLayout([TILE, TILE], col_stride=1)
    return tmem_reinterpret(scores, DTYPE, [TILE, 2 * TILE], layout).slice(0, TILE)


@gluon.jit
def load(q_desc, k_desc, v_desc, q_s, q_full, rings, sizes):
    k_ring, v_ring = rings
    row, base, tiles, _ = sizes
    for w in gl.static_range(2):
        mbarrier.expect(q_full.index(w), q_desc.block_type.nbytes)
        tma_load(q_desc, [base + row + w * TILE, 0], q_full.index(w), q_s.index(w))
    for i in range(tiles):
        k_ring.acquire(i, k_desc.block_type.nbytes)
        k_ring.load(i, k_desc, [base + i * TILE, 0])
        v_ring.acquire(i, v_desc.block_type.nbytes)
        v_ring.load(i, v_desc, [base + i * TILE, 0])


@gluon.jit
def free(ring, i):
    """The stage of tile i is free once all products issued so far are complete."""
    tcgen05_commit(ring.empty.index(i % ring.stages))


@gluon.jit
def multiply(q_s, rings, bars, s_t, o_t, sizes, DTYPE: gl.constexpr):
    k_ring, v_ring = rings
    q_full, s_full, p_full, o_full = bars
    _, _, tiles, _ = sizes
    k = k_ring.wait_full(0)
    for w in gl.static_range(2):
        mbarrier.wait(q_full.index(w), 0)
        done = [s_full.index(w)]
        tcgen05_mma(q_s.index(w), k.permute((1, 0)), s_t.index(w), use_acc=False, mbarriers=done)
    free(k_ring, 0)
    for i in range(tiles - 1):
        v = v_ring.wait_full(i)
        k = k_ring.wait_full(i + 1)
        for w in gl.static_range(2):
            mbarrier.wait(p_full.index(w), i & 1)
            p = weights(s_t.index(w), DTYPE)
            tcgen05_mma(p, v, o_t.index(w), use_acc=i > 0, mbarriers=[o_full.index(w)])
            done = [s_full.index(w)]  # products run in order, so P has been read before S is written
            tcgen05_mma(q_s.index(w), k.permute((1, 0)), s_t.index(w), use_acc=False, mbarriers=done)
        free(v_ring, i)
        free(k_ring, i + 1)
    last = tiles - 1
    v = v_ring.wait_full(last)
    for w in gl.static_range(2):
        mbarrier.wait(p_full.index(w), last & 1)
        p = weights(s_t.index(w), DTYPE)
        tcgen05_mma(p, v, o_t.index(w), use_acc=last > 0, mbarriers=[o_full.index(w)])


@gluon.jit
def masked(s, rows, cols, first, CAUSAL: gl.constexpr):
    """Scores of one tile; keys after a query count as minus infinity."""
    if CAUSAL:
        s = gl.where(rows[:, None] >= (first + cols)[None, :], s, -float("inf"))
    return s


@gluon.jit
def softmax(
    W: gl.constexpr, s_t, statistics, bars, lse_ptr, sizes, DTYPE: gl.constexpr, CAUSAL: gl.constexpr
):
    alphas, totals = statistics
    s_full, p_full, a_full, l_full = bars
    row, base, tiles, scale_log2 = sizes
    block: gl.constexpr = TensorMemoryLayout([TILE, TILE], col_stride=1)
    layout: gl.constexpr = tmem_register_layout(gl.float32, (TILE, TILE), block, 4)
    p_layout: gl.constexpr = tmem_register_layout(DTYPE, (TILE, TILE), block, 4)
    rows = row + W * TILE + gl.arange(0, TILE, gl.SliceLayout(1, layout))
    cols = gl.arange(0, TILE, gl.SliceLayout(0, layout))
    m = gl.full([TILE], -float("inf"), gl.float32, gl.SliceLayout(1, layout))
    total = gl.full([TILE], 0.0, gl.float32, gl.SliceLayout(1, layout))
    for i in range(tiles):
        mbarrier.wait(s_full.index(W), i & 1)
        s = s_t.index(W).load(layout)
        if (i + 1) * TILE > row + W * TILE:
            s = masked(s, rows, cols, i * TILE, CAUSAL)
        top = gl.maximum(m, gl.max(s, axis=1))
        grown = (top - m) * scale_log2 > THRESHOLD  # at first m is minus infinity, so this is true
        m_new = gl.where(grown, top, m)
        alpha = gl.where(grown, gl.exp2((m - m_new) * scale_log2), 1.0)
        alphas.index(W).store(alpha)  # the last one was read before these scores were computed
        mbarrier.arrive(a_full.index(W), count=1)
        p = gl.exp2(s * scale_log2 - (m_new * scale_log2)[:, None])
        weights(s_t.index(W), DTYPE).store(gl.convert_layout(p.to(DTYPE), p_layout))
        mbarrier.arrive(p_full.index(W), count=1)
        total = total * alpha + gl.sum(p, axis=1)
        m = m_new
    totals.index(W).store(total)
    mbarrier.arrive(l_full.index(W), count=1)
    gl.store(lse_ptr + base + rows, m * scale_log2 * 0.6931471805599453 + gl.log(total))


@gluon.jit
def correct(o_t, statistics, bars, o_ptr, sizes, D: gl.constexpr, DTYPE: gl.constexpr):
    alphas, totals = statistics
    p_full, o_full, a_full, l_full = bars
    row, base, tiles, _ = sizes
    block: gl.constexpr = TensorMemoryLayout([TILE, CHUNK], col_stride=1)
    layout: gl.constexpr = tmem_register_layout(gl.float32, (TILE, CHUNK), block, 4)
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    for w in gl.static_range(2):  # before the first product there is nothing to rescale
        mbarrier.wait(a_full.index(w), 0)
        mbarrier.arrive(p_full.index(w), count=1)
    for i in range(1, tiles):
        for w in gl.static_range(2):
            mbarrier.wait(a_full.index(w), i & 1)
            alpha = alphas.index(w).load(by_row)
            mbarrier.wait(o_full.index(w), (i - 1) & 1)
            if gl.min(alpha, axis=0) < 1.0:
                for c in gl.static_range(D // CHUNK):
                    part = o_t.index(w).slice(c * CHUNK, CHUNK)
                    part.store(part.load(layout) * alpha[:, None])
            mbarrier.arrive(p_full.index(w), count=1)
    for w in gl.static_range(2):
        mbarrier.wait(l_full.index(w), 0)
        share = 1.0 / totals.index(w).load(by_row)
        mbarrier.wait(o_full.index(w), (tiles - 1) & 1)
        rows = (base + row + w * TILE + gl.arange(0, TILE, by_row))[:, None]
        for c in gl.static_range(D // CHUNK):
            o = o_t.index(w).slice(c * CHUNK, CHUNK).load(layout) * share[:, None]
            cols = c * CHUNK + gl.arange(0, CHUNK, gl.SliceLayout(0, layout))[None, :]
            gl.store(o_ptr + rows.to(gl.int64) * D + cols, o.to(DTYPE))


@gluon.jit
def forward_kernel(
    q_desc,
    k_desc,
    v_desc,
    o_ptr,
    lse_ptr,
    S,
    scale_log2,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    layout: gl.constexpr = k_desc.layout
    row = (gl.num_programs(1) - 1 - gl.program_id(1)) * 2 * TILE  # longest first
    base = gl.program_id(0) * S
    tiles = gl.cdiv(S, TILE)
    if CAUSAL:
        tiles = gl.cdiv(row + 2 * TILE, TILE)
    q_s = gl.allocate_shared_memory(dtype, [2, TILE, D], layout)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    alphas = gl.allocate_shared_memory(gl.float32, [2, TILE], line)
    totals = gl.allocate_shared_memory(gl.float32, [2, TILE], line)
    statistics = (alphas, totals)
    s_t = allocate_tensor_memory(
        gl.float32, [2, TILE, TILE], TensorMemoryLayout([TILE, TILE], col_stride=1)
    )
    o_t = allocate_tensor_memory(gl.float32, [2, TILE, D], TensorMemoryLayout([TILE, D], col_stride=1))
    rings = (
        make_ring("K", dtype, [TILE, D], layout, STAGES, 1),
        make_ring("V", dtype, [TILE, D], layout, STAGES, 1),
    )
    q_full = barriers("Q.full", 1)
    s_full = barriers("S.full", 1)
    p_full = barriers("P.full", 2)  # P is there, and the output has been rescaled
    o_full = barriers("O.full", 1)
    a_full = barriers("alpha.full", 1)
    l_full = barriers("sum.full", 1)
    sizes = (row, base, tiles, scale_log2)
    softmax_bars = (s_full, p_full, a_full, l_full)
    gl.warp_specialize(
        [
            (
                correct,
                (o_t, statistics, (p_full, o_full, a_full, l_full), o_ptr, sizes, D, dtype),
            ),
            (softmax, (0, s_t, statistics, softmax_bars, lse_ptr, sizes, dtype, CAUSAL)),
            (softmax, (1, s_t, statistics, softmax_bars, lse_ptr, sizes, dtype, CAUSAL)),
            (multiply, (q_s, rings, (q_full, s_full, p_full, o_full), s_t, o_t, sizes, dtype)),
            (load, (q_desc, k_desc, v_desc, q_s, q_full, rings, sizes)),
        ],
        [4, 4, 1, 1],
        [192, 192, 32, 32],
    )


def forward(q, k, v, causal, STAGES=2):
    """O and lse of q, k, v: [B, H, S, D], contiguous, bf16 or fp16; S a multiple of 256, D 64 or 128."""
    B, H, S, D = q.shape
    dtype = gl.bfloat16 if q.dtype == torch.bfloat16 else gl.float16
    o = torch.empty_like(q)
    lse = torch.empty(B, H, S, dtype=torch.float32, device=q.device)
    layout = gl.NVMMASharedLayout.get_default_for([128, D], dtype)
    q_desc, k_desc, v_desc = (
        TensorDescriptor(x, [B * H * S, D], [D, 1], [128, D], layout) for x in (q, k, v)
    )
    scale = math.log2(math.e) / math.sqrt(D)
    grid = (B * H, S // ROWS)
    options = {"num_warps": 4, "maxnreg": 128}
    forward_kernel[grid](q_desc, k_desc, v_desc, o, lse, S, scale, D, STAGES, causal, **options)
    return o, lse
