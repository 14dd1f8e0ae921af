"""A plain forward of attention for Hopper: one producer, two consumers of 64 queries each.

The producer keeps rings of K and V full by TMA. A consumer has two products in flight: while the tensor
cores compute the scores of the next key tile, they also add the last tile's weights times V to the
output, and while one consumer does its softmax, the products of the other run.
"""

import math

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilewise.gluon.compat import tma_load
from tilewise.gluon.ring import make_ring

ROWS = 128  # queries of a program


@gluon.jit
def produce(q_desc, k_desc, v_desc, rings, sizes, BLOCK: gl.constexpr):
    q_s, q_full, k_ring, v_ring = rings
    row, base, tiles, _ = sizes
    for w in gl.static_range(2):
        mbarrier.expect(q_full.index(w), q_desc.block_type.nbytes)
        tma_load(q_desc, [base + row + w * 64, 0], q_full.index(w), q_s.index(w))
    for i in range(tiles):
        key = base + (tiles - 1 - i) * BLOCK  # last key tile first: the one that may need a mask
        k_ring.acquire(i, k_desc.block_type.nbytes)
        k_ring.load(i, k_desc, [key, 0])
        v_ring.acquire(i, v_desc.block_type.nbytes)
        v_ring.load(i, v_desc, [key, 0])


@gluon.jit
def masked(s, rows, cols, first, CAUSAL: gl.constexpr):
    """Scores of one tile; keys after a query count as minus infinity."""
    if CAUSAL:
        s = gl.where(rows[:, None] >= (first + cols)[None, :], s, -float("inf"))
    return s


@gluon.jit
def consume(
    W: gl.constexpr,
    rings,
    tensors,
    sizes,
    BLOCK: gl.constexpr,
    D: gl.constexpr,
    DTYPE: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    q_s, q_full, k_ring, v_ring = rings
    o_ptr, lse_ptr = tensors
    row, base, tiles, scale_log2 = sizes
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    weights: gl.constexpr = gl.DotOperandLayout(0, output, 2)
    rows = row + W * 64 + gl.arange(0, 64, gl.SliceLayout(1, scores))
    cols = gl.arange(0, BLOCK, gl.SliceLayout(0, scores))
    zero = gl.zeros([64, BLOCK], gl.float32, scores)
    o = gl.zeros([64, D], gl.float32, output)
    q = q_s.index(W)

    mbarrier.wait(q_full.index(W), 0)
    k = k_ring.wait_full(0)
    token = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, [token])
    k_ring.release(0)
    s = masked(s, rows, cols, (tiles - 1) * BLOCK, CAUSAL)
    m = gl.maximum(gl.max(s, axis=1), -1.0e20)
    p = gl.exp2(s * scale_log2 - (m * scale_log2)[:, None])
    total = gl.sum(p, axis=1)
    p = gl.convert_layout(p.to(DTYPE), weights)

    for i in range(1, tiles):
        k = k_ring.wait_full(i)
        s_token = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        v = v_ring.wait_full(i - 1)
        o_token = warpgroup_mma(p, v, o, is_async=True)
        s = warpgroup_mma_wait(1, [s_token])
        k_ring.release(i)
        if (tiles - i) * BLOCK > row + W * 64:
            s = masked(s, rows, cols, (tiles - 1 - i) * BLOCK, CAUSAL)
        m_new = gl.maximum(m, gl.max(s, axis=1))
        alpha = gl.exp2((m - m_new) * scale_log2)
        p_new = gl.exp2(s * scale_log2 - (m_new * scale_log2)[:, None])
        total = total * alpha + gl.sum(p_new, axis=1)
        m = m_new
        p_new = gl.convert_layout(p_new.to(DTYPE), weights)
        o, p = warpgroup_mma_wait(0, [o_token, p_new])
        v_ring.release(i - 1)
        o = o * gl.convert_layout(alpha, gl.SliceLayout(1, output))[:, None]

    v = v_ring.wait_full(tiles - 1)
    token = warpgroup_mma(p, v, o, is_async=True)
    o = warpgroup_mma_wait(0, [token])
    o = o * gl.convert_layout(1.0 / total, gl.SliceLayout(1, output))[:, None]
    gl.store(lse_ptr + base + rows, m * scale_log2 * 0.6931471805599453 + gl.log(total))
    out_rows = base + row + W * 64 + gl.arange(0, 64, gl.SliceLayout(1, output))
    out_cols = gl.arange(0, D, gl.SliceLayout(0, output))
    gl.store(o_ptr + out_rows[:, None].to(gl.int64) * D + out_cols[None, :], o.to(DTYPE))


@gluon.jit
def forward_kernel(
    q_desc,
    k_desc,
    v_desc,
    o_ptr,
    lse_ptr,
    S,
    scale_log2,
    BLOCK: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    k_layout: gl.constexpr = k_desc.layout
    v_layout: gl.constexpr = v_desc.layout
    row = (gl.num_programs(1) - 1 - gl.program_id(1)) * 128  # longest first
    base = gl.program_id(0) * S
    tiles = gl.cdiv(S, BLOCK)
    if CAUSAL:
        tiles = gl.cdiv(row + 128, BLOCK)
    q_s = gl.allocate_shared_memory(dtype, [2, 64, D], q_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for w in gl.static_range(2):
        mbarrier.init(q_full.index(w), count=1)
    k_ring = make_ring("K", dtype, [BLOCK, D], k_layout, STAGES, 2)
    v_ring = make_ring("V", dtype, [BLOCK, D], v_layout, STAGES, 2)
    rings = (q_s, q_full, k_ring, v_ring)
    tensors = (o_ptr, lse_ptr)
    sizes = (row, base, tiles, scale_log2)
    gl.warp_specialize(
        [
            (consume, (0, rings, tensors, sizes, BLOCK, D, dtype, CAUSAL)),
            (consume, (1, rings, tensors, sizes, BLOCK, D, dtype, CAUSAL)),
            (produce, (q_desc, k_desc, v_desc, rings, sizes, BLOCK)),
        ],
        [4, 1],
        [240, 24],
    )


def forward(q, k, v, causal, BLOCK=128, STAGES=2):
    """O and lse of q, k, v: [B, H, S, D], contiguous, bf16 or fp16; S a multiple of 128, D of 64."""
    B, H, S, D = q.shape
    dtype = gl.bfloat16 if q.dtype == torch.bfloat16 else gl.float16
    o = torch.empty_like(q)
    lse = torch.empty(B, H, S, dtype=torch.float32, device=q.device)

    def descriptor(x, rows):
        layout = gl.NVMMASharedLayout.get_default_for([rows, D], dtype)
        return TensorDescriptor(x, [B * H * S, D], [D, 1], [rows, D], layout)

    descriptors = descriptor(q, 64), descriptor(k, BLOCK), descriptor(v, BLOCK)
    scale = math.log2(math.e) / math.sqrt(D)
    options = {"num_warps": 4, "maxnreg": 168}
    grid = (B * H, S // ROWS)
    forward_kernel[grid](*descriptors, o, lse, S, scale, BLOCK, D, STAGES, causal, **options)
    return o, lse
