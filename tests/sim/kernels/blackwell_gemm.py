"""C = A B^T on Blackwell: TMA ring, tcgen05 into two buffers of tensor memory, epilogue beside it."""

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

from tilewise.gluon.compat import tma_load, tmem_register_layout


@gluon.jit
def load(
    a_desc,
    b_desc,
    a_s,
    b_s,
    full,
    empty,
    tiles,
    steps,
    STAGES: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
):
    for i in range(tiles * steps):
        st = i % STAGES
        mbarrier.wait(empty.index(st), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(st), a_desc.block_type.nbytes + b_desc.block_type.nbytes)
        tma_load(a_desc, [0, (i % steps) * BK], full.index(st), a_s.index(st))
        tma_load(b_desc, [(i // steps) * BN, (i % steps) * BK], full.index(st), b_s.index(st))


@gluon.jit
def multiply(a_s, b_s, acc_t, full, empty, acc_full, acc_empty, tiles, steps, STAGES: gl.constexpr):
    for t in range(tiles):
        acc = acc_t.index(t % 2)
        mbarrier.wait(acc_empty.index(t % 2), ((t // 2) & 1) ^ 1)
        for j in range(steps):
            i = t * steps + j
            st = i % STAGES
            mbarrier.wait(full.index(st), (i // STAGES) & 1)
            tcgen05_mma(
                a_s.index(st),
                b_s.index(st).permute((1, 0)),
                acc,
                use_acc=j > 0,
                mbarriers=[empty.index(st)],
            )
        tcgen05_commit(acc_full.index(t % 2))


@gluon.jit
def epilogue(acc_t, c_ptr, acc_full, acc_empty, tiles, N, BM: gl.constexpr, BN: gl.constexpr):
    block: gl.constexpr = TensorMemoryLayout([BM, BN], col_stride=1)
    layout: gl.constexpr = tmem_register_layout(gl.float32, (BM, BN), block, 4)
    rows = gl.arange(0, BM, gl.SliceLayout(1, layout))[:, None]
    cols = gl.arange(0, BN, gl.SliceLayout(0, layout))[None, :]
    for t in range(tiles):
        mbarrier.wait(acc_full.index(t % 2), (t // 2) & 1)
        x = acc_t.index(t % 2).load(layout)
        mbarrier.arrive(acc_empty.index(t % 2), count=1)
        gl.store(c_ptr + rows * N + t * BN + cols, x)


@gluon.jit
def gemm_kernel(
    a_desc,
    b_desc,
    c_ptr,
    N,
    K,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
):
    a_s = gl.allocate_shared_memory(a_desc.dtype, [STAGES, BM, BK], a_desc.layout)
    b_s = gl.allocate_shared_memory(b_desc.dtype, [STAGES, BN, BK], b_desc.layout)
    block: gl.constexpr = TensorMemoryLayout([BM, BN], col_stride=1)
    acc_t = allocate_tensor_memory(gl.float32, [2, BM, BN], block)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    acc_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    acc_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(acc_full.index(i), count=1)
        mbarrier.init(acc_empty.index(i), count=1)
    tiles = N // BN
    steps = K // BK
    gl.warp_specialize(
        [
            (epilogue, (acc_t, c_ptr, acc_full, acc_empty, tiles, N, BM, BN)),
            (load, (a_desc, b_desc, a_s, b_s, full, empty, tiles, steps, STAGES, BN, BK)),
            (multiply, (a_s, b_s, acc_t, full, empty, acc_full, acc_empty, tiles, steps, STAGES)),
        ],
        [1, 1],
        [24, 24],
    )


def gemm(a, b, BN=64, BK=64, STAGES=3):
    """a [128, K], b [N, K] bf16."""
    (M, K), N = a.shape, b.shape[0]
    c = torch.empty(M, N, dtype=torch.float32)
    a_layout = gl.NVMMASharedLayout.get_default_for([M, BK], gl.bfloat16)
    b_layout = gl.NVMMASharedLayout.get_default_for([BN, BK], gl.bfloat16)
    a_desc = TensorDescriptor(a, [M, K], [K, 1], [M, BK], a_layout)
    b_desc = TensorDescriptor(b, [N, K], [K, 1], [BN, BK], b_layout)
    gemm_kernel[(1,)](a_desc, b_desc, c, N, K, M, BN, BK, STAGES, num_warps=4)
    return c
