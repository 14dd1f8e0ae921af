"""Matrix products that the larger kernels do not make: mma_v2, fp8, and a copy into tensor memory."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    fence_async_shared,
    mbarrier,
    tcgen05_commit,
    tcgen05_copy,
    tcgen05_mma,
)
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilewise.gluon.compat import tma_load, tmem_register_layout

if "async_load" in async_copy.__all__:
    copy_in = async_copy.async_load
else:
    copy_in = async_copy.async_copy_global_to_shared


@gluon.jit
def ampere_kernel(a_ptr, b_ptr, c_ptr, K: gl.constexpr, BK: gl.constexpr):
    """C = A B^T, 64 x 64, with cp.async one step ahead and products in registers."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    smem: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    a_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, BK], smem)
    b_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, BK], smem)
    rows = gl.arange(0, 64, gl.SliceLayout(1, flat))[:, None]
    cols = gl.arange(0, BK, gl.SliceLayout(0, flat))[None, :]
    acc = gl.zeros([64, 64], gl.float32, layout)
    steps = K // BK
    copy_in(a_s.index(0), a_ptr + rows * K + cols)
    copy_in(b_s.index(0), b_ptr + rows * K + cols)
    async_copy.commit_group()
    for i in range(steps):
        more = i + 1 < steps
        mask = (rows >= 0) & (cols >= 0) & more
        k = (i + 1) * BK
        copy_in(a_s.index((i + 1) % 2), a_ptr + rows * K + cols + k, mask=mask)
        copy_in(b_s.index((i + 1) % 2), b_ptr + rows * K + cols + k, mask=mask)
        async_copy.commit_group()
        async_copy.wait_group(1)
        a = a_s.index(i % 2).load(left)
        b = b_s.index(i % 2).permute((1, 0)).load(right)
        acc = mma_v2(a, b, acc)
    async_copy.wait_group(0)
    m = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    n = gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :]
    gl.store(c_ptr + m * 64 + n, acc)


def ampere_gemm(a, b):
    """a, b [64, K] bf16, K a multiple of 32."""
    c = torch.empty(64, 64)
    ampere_kernel[(1,)](a, b, c, a.shape[1], 32, num_warps=4)
    return c


@gluon.jit
def fp8_kernel(
    a_desc,
    b_desc,
    c_ptr,
    K,
    BN: gl.constexpr,
    BK: gl.constexpr,
    PROMOTE: gl.constexpr,
    TCGEN05: gl.constexpr,
):
    """C = A B^T in fp8, 128 x BN, step by step; with warpgroup_mma or tcgen05_mma."""
    a_s = gl.allocate_shared_memory(a_desc.dtype, [128, BK], a_desc.layout)
    b_s = gl.allocate_shared_memory(b_desc.dtype, [BN, BK], b_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    if TCGEN05:
        done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(done, count=1)
        block: gl.constexpr = TensorMemoryLayout([128, BN], col_stride=1)
        acc_t = allocate_tensor_memory(gl.float32, [128, BN], block)
        layout: gl.constexpr = tmem_register_layout(gl.float32, (128, BN), block, 4)
    else:
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 32])
        acc = gl.zeros([128, BN], gl.float32, layout)
    for i in range(K // BK):
        mbarrier.expect(full, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
        tma_load(a_desc, [0, i * BK], full, a_s)
        tma_load(b_desc, [0, i * BK], full, b_s)
        mbarrier.wait(full, i & 1)
        if TCGEN05:
            tcgen05_mma(a_s, b_s.permute((1, 0)), acc_t, use_acc=i > 0, mbarriers=[done])
            mbarrier.wait(done, i & 1)
        else:
            token = warpgroup_mma(
                a_s, b_s.permute((1, 0)), acc, max_num_imprecise_acc=PROMOTE, is_async=True
            )
            acc = warpgroup_mma_wait(0, [token])
    if TCGEN05:
        acc = acc_t.load(layout)
    m = gl.arange(0, 128, gl.SliceLayout(1, layout))[:, None]
    n = gl.arange(0, BN, gl.SliceLayout(0, layout))[None, :]
    gl.store(c_ptr + m * BN + n, acc)


def fp8_gemm(a, b, promote=0, tcgen05=False):
    """a [128, K], b [64, K] fp8, K a multiple of 128. promote: add up in fp32 after so many of k."""
    (M, K), N, BK = a.shape, b.shape[0], 128
    c = torch.empty(M, N)

    def descriptor(x, rows):
        layout = gl.NVMMASharedLayout.get_default_for([rows, BK], gl.float8e4nv)
        return TensorDescriptor(x, [rows, K], [K, 1], [rows, BK], layout)

    fp8_kernel[(1,)](descriptor(a, M), descriptor(b, N), c, K, N, BK, promote, tcgen05, num_warps=4)
    return c


@gluon.jit
def copy_kernel(x_ptr, y_ptr, COLS: gl.constexpr):
    """Registers to shared memory to tensor memory and back."""
    block: gl.constexpr = TensorMemoryLayout([128, COLS], col_stride=1)
    layout: gl.constexpr = tmem_register_layout(gl.float32, (128, COLS), block, 4)
    smem: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    x_s = gl.allocate_shared_memory(gl.float32, [128, COLS], smem)
    x_t = allocate_tensor_memory(gl.float32, [128, COLS], block)
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(done, count=1)
    at = gl.arange(0, 128, gl.SliceLayout(1, layout))[:, None] * COLS
    at = at + gl.arange(0, COLS, gl.SliceLayout(0, layout))[None, :]
    x = gl.load(x_ptr + at)
    x_s.store(x)
    fence_async_shared()
    tcgen05_copy(x_s, x_t)
    tcgen05_commit(done)
    mbarrier.wait(done, 0)
    gl.store(y_ptr + at, x_t.load(layout))


@gluon.jit
def copied_product_kernel(a_desc, b_desc, c_ptr, N: gl.constexpr, K: gl.constexpr):
    """C = A B^T, 128 x N, with A copied into tensor memory first; one wait for both."""
    a_s = gl.allocate_shared_memory(a_desc.dtype, [128, K], a_desc.layout)
    b_s = gl.allocate_shared_memory(b_desc.dtype, [N, K], b_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
    block: gl.constexpr = TensorMemoryLayout([128, N], col_stride=1)
    layout: gl.constexpr = tmem_register_layout(gl.float32, (128, N), block, 4)
    a_t = allocate_tensor_memory(a_desc.dtype, [128, K], TensorMemoryLayout([128, K], col_stride=1))
    c_t = allocate_tensor_memory(gl.float32, [128, N], block)
    mbarrier.expect(full.index(0), a_desc.block_type.nbytes + b_desc.block_type.nbytes)
    tma_load(a_desc, [0, 0], full.index(0), a_s)
    tma_load(b_desc, [0, 0], full.index(0), b_s)
    mbarrier.wait(full.index(0), 0)
    tcgen05_copy(a_s, a_t)
    tcgen05_mma(a_t, b_s.permute((1, 0)), c_t, use_acc=False, mbarriers=[full.index(1)])
    mbarrier.wait(full.index(1), 0)
    m = gl.arange(0, 128, gl.SliceLayout(1, layout))[:, None]
    n = gl.arange(0, N, gl.SliceLayout(0, layout))[None, :]
    gl.store(c_ptr + m * N + n, c_t.load(layout))


def copied_product(a, b):
    """a [128, K], b [N, K] bf16."""
    (M, K), N = a.shape, b.shape[0]
    c = torch.empty(M, N)

    def descriptor(x, rows):
        layout = gl.NVMMASharedLayout.get_default_for([rows, K], gl.bfloat16)
        return TensorDescriptor(x, [rows, K], [K, 1], [rows, K], layout)

    copied_product_kernel[(1,)](descriptor(a, M), descriptor(b, N), c, N, K, num_warps=4)
    return c


def copied(x):
    """x [128, a power of two] fp32."""
    y = torch.empty_like(x)
    copy_kernel[(1,)](x, y, x.shape[1], num_warps=4)
    return y
