"""C = A B^T by a pair of CTAs: A and C divided by rows, B by columns. Triton 3.9 and newer."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    fence_async_shared,
    mbarrier,
    tcgen05_mma,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilewise.gluon.compat import tma_load, tma_store, tma_store_wait


@gluon.jit
def pair_kernel(
    a_desc, b_desc, c_desc, K, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, DEFECT: gl.constexpr
):
    a_s = gl.allocate_shared_memory(a_desc.dtype, [BM, BK], a_desc.layout)
    b_s = gl.allocate_shared_memory(b_desc.dtype, [BN, BK], b_desc.layout)
    full = mbarrier.allocate_mbarrier(two_ctas=True)  # one for the pair, kept by the even CTA
    done = mbarrier.allocate_mbarrier()  # one in each CTA; the product signals both
    mbarrier.init(full, count=1)
    mbarrier.init(done, count=1)
    block: gl.constexpr = TensorMemoryLayout(
        [BM // 2, BN], col_stride=1, cga_layout=[[1, 0]], two_ctas=True
    )
    acc = allocate_tensor_memory(gl.float32, [BM, BN], block)
    phase = 0
    for k in range(0, K, BK):
        mbarrier.expect(full, a_desc.nbytes_per_cta + b_desc.nbytes_per_cta)
        tma_load(a_desc, [0, k], full, a_s)
        tma_load(b_desc, [0, k], full, b_s)
        if DEFECT != "full":
            mbarrier.wait(full, phase)
        tcgen05_mma(a_s, b_s.permute((1, 0)), acc, use_acc=(k != 0), mbarriers=[done])
        if DEFECT != "done":
            mbarrier.wait(done, phase)
        phase ^= 1
    c_s = gl.allocate_shared_memory(c_desc.dtype, [BM, BN], c_desc.layout)
    c_s.store(acc.load().to(c_desc.dtype))
    fence_async_shared()
    tma_store(c_desc, [0, 0], c_s)
    tma_store_wait(0)


def gemm(a, b, BK=64, defect=""):
    """a [256, K], b [N, K] bf16, N at most 256."""
    (M, K), N = a.shape, b.shape[0]
    c = torch.empty(M, N, dtype=a.dtype)

    def descriptor(t, rows, cols):
        layout = gl.NVMMASharedLayout.get_default_for([rows, cols], gl.bfloat16, cga_layout=[[1, 0]])
        return TensorDescriptor(t, list(t.shape), [t.shape[1], 1], [rows, cols], layout)

    args = (descriptor(a, M, BK), descriptor(b, N, BK), descriptor(c, M, N), K, M, N, BK, defect)
    pair_kernel[(1,)](*args, num_warps=4, num_ctas=2)
    return c


@gluon.jit
def overlay_kernel(out_ptr, WAIT: gl.constexpr):
    """bf16 over the left half of an fp32 tile, while a product may still be reading it."""
    rows: gl.constexpr = TensorMemoryLayout([128, 64], col_stride=1)
    s = allocate_tensor_memory(gl.float32, [128, 64], rows)
    o = allocate_tensor_memory(gl.float32, [128, 64], rows)
    smem: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    v = gl.allocate_shared_memory(gl.bfloat16, [64, 64], smem)
    done = mbarrier.allocate_mbarrier()
    mbarrier.init(done, count=1)
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    v.store(gl.full([64, 64], 1.0, gl.bfloat16, flat))
    fence_async_shared()
    layout: gl.constexpr = s.get_reg_layout()
    s.store(gl.full([128, 64], 7.0, gl.float32, layout))
    packed: gl.constexpr = TensorMemoryLayout([128, 64], col_stride=1)
    p = s.reinterpret(gl.bfloat16, [128, 128], packed).slice(0, 64)
    p_layout: gl.constexpr = p.get_reg_layout()
    p.store(gl.full([128, 64], 1.0, gl.bfloat16, p_layout))
    tcgen05_mma(p, v, o, use_acc=False, mbarriers=[done])
    right = s.slice(32, 32)  # not covered by p
    right_layout: gl.constexpr = right.get_reg_layout()
    right.store(right.load(right_layout) + 1.0)
    if WAIT:
        mbarrier.wait(done, 0)
    left = s.slice(0, 32)
    left_layout: gl.constexpr = left.get_reg_layout()
    left.store(gl.full([128, 32], 2.0, gl.float32, left_layout))
    if not WAIT:
        mbarrier.wait(done, 0)
    r = gl.arange(0, 128, gl.SliceLayout(1, layout))[:, None]
    c = gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :]
    gl.store(out_ptr + r * 64 + c, s.load(layout))
    gl.store(out_ptr + 128 * 64 + r * 64 + c, o.load(layout))
