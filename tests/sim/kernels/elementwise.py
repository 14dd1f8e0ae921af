"""y = 2 x + 1 as a pipeline: TMA in, arithmetic in registers, TMA out of a double buffer."""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilewise.gluon.compat import thread_barrier, tma_store, tma_store_wait
from tilewise.gluon.ring import make_ring


@gluon.jit
def read(x_desc, ring, tiles, ROWS: gl.constexpr):
    for i in range(tiles):
        ring.acquire(i, x_desc.block_type.nbytes)
        ring.load(i, x_desc, [(i * gl.num_programs(0) + gl.program_id(0)) * ROWS, 0])


@gluon.jit
def compute(y_desc, ring, out, tiles, ROWS: gl.constexpr, layout: gl.constexpr):
    for i in range(tiles):
        x = ring.wait_full(i).load(layout)
        tma_store_wait(1)  # the store before last has read its half of `out`
        thread_barrier()
        half = out.index(i % 2)
        half.store(x * 2.0 + 1.0)
        ring.release(i)  # not before x was needed: until then it may not have been read
        fence_async_shared()
        thread_barrier()
        tma_store(y_desc, [(i * gl.num_programs(0) + gl.program_id(0)) * ROWS, 0], half)
    tma_store_wait(0)


@gluon.jit
def elementwise_kernel(x_desc, y_desc, N, ROWS: gl.constexpr, COLS: gl.constexpr, STAGES: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32 // (COLS // 4), COLS // 4], [4, 1], [1, 0])
    smem: gl.constexpr = x_desc.layout
    ring = make_ring("X", gl.float32, [ROWS, COLS], smem, STAGES, 1)
    out = gl.allocate_shared_memory(gl.float32, [2, ROWS, COLS], y_desc.layout)
    tiles = gl.cdiv(gl.cdiv(N, ROWS) - gl.program_id(0), gl.num_programs(0))
    gl.warp_specialize(
        [
            (compute, (y_desc, ring, out, tiles, ROWS, layout)),
            (read, (x_desc, ring, tiles, ROWS)),
        ],
        [1],
        [24],
    )


def elementwise(x, ROWS=32, STAGES=3, programs=2):
    """x [N, 32] fp32."""
    N, COLS = x.shape
    y = torch.empty_like(x)
    layout = gl.NVMMASharedLayout.get_default_for([ROWS, COLS], gl.float32)
    x_desc = TensorDescriptor(x, [N, COLS], [COLS, 1], [ROWS, COLS], layout)
    y_desc = TensorDescriptor(y, [N, COLS], [COLS, 1], [ROWS, COLS], layout)
    grid = (min(programs, triton.cdiv(N, ROWS)),)
    elementwise_kernel[grid](x_desc, y_desc, N, ROWS, COLS, STAGES, num_warps=4, maxnreg=128)
    return y
