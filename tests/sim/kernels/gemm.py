"""C = A B^T on Hopper: a ring of A and B tiles, one producer, two consumers of 64 rows each."""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilewise.gluon.ring import make_ring


@gluon.jit
def produce(a_desc, b_desc, a_ring, b_ring, row, col, steps, BK: gl.constexpr):
    for i in range(steps):
        a_ring.acquire(i, a_desc.block_type.nbytes)
        a_ring.load(i, a_desc, [row, i * BK])
        b_ring.acquire(i, b_desc.block_type.nbytes)
        b_ring.load(i, b_desc, [col, i * BK])


@gluon.jit
def multiply(W: gl.constexpr, a_ring, b_ring, c_ptr, row, col, M, N, steps, BN: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    acc = gl.zeros([64, BN], gl.float32, layout)
    for i in range(steps):
        a = a_ring.wait_full(i)
        b = b_ring.wait_full(i)
        token = warpgroup_mma(a.slice(W * 64, 64), b.permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(0, [token])
        a_ring.release(i)
        b_ring.release(i)
    rows = row + W * 64 + gl.arange(0, 64, gl.SliceLayout(1, layout))
    cols = col + gl.arange(0, BN, gl.SliceLayout(0, layout))
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    gl.store(c_ptr + rows[:, None] * N + cols[None, :], acc, mask=mask)


@gluon.jit
def gemm_kernel(
    a_desc,
    b_desc,
    c_ptr,
    M,
    N,
    K,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
):
    DT: gl.constexpr = a_desc.dtype
    a_layout: gl.constexpr = a_desc.layout
    b_layout: gl.constexpr = b_desc.layout
    a_ring = make_ring("A", DT, [BM, BK], a_layout, STAGES, 2)
    b_ring = make_ring("B", DT, [BN, BK], b_layout, STAGES, 2)
    row = gl.program_id(0) * BM
    col = gl.program_id(1) * BN
    steps = gl.cdiv(K, BK)
    gl.warp_specialize(
        [
            (multiply, (0, a_ring, b_ring, c_ptr, row, col, M, N, steps, BN)),
            (multiply, (1, a_ring, b_ring, c_ptr, row, col, M, N, steps, BN)),
            (produce, (a_desc, b_desc, a_ring, b_ring, row, col, steps, BK)),
        ],
        [4, 1],
        [160, 24],
    )


def gemm(a, b, BM=128, BN=64, BK=64, STAGES=3):
    """a [M, K], b [N, K], bf16 or fp16; any sizes with K a multiple of 8."""
    (M, K), N = a.shape, b.shape[0]
    c = torch.empty(M, N, dtype=torch.float32, device=a.device)
    dtype = gl.bfloat16 if a.dtype == torch.bfloat16 else gl.float16
    a_layout = gl.NVMMASharedLayout.get_default_for([BM, BK], dtype)
    b_layout = gl.NVMMASharedLayout.get_default_for([BN, BK], dtype)
    a_desc = TensorDescriptor(a, [M, K], [K, 1], [BM, BK], a_layout)
    b_desc = TensorDescriptor(b, [N, K], [K, 1], [BN, BK], b_layout)
    grid = (triton.cdiv(M, BM), triton.cdiv(N, BN))
    gemm_kernel[grid](a_desc, b_desc, c, M, N, K, BM, BN, BK, STAGES, num_warps=4, maxnreg=168)
    return c
