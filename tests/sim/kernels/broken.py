"""Small kernels, each with one defect; what must be said of them is in test_findings.py."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilewise.gluon.compat import tma_load, tma_store, tma_store_wait
from tilewise.gluon.ring import make_ring

LAYOUT: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
LINE: gl.constexpr = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def tile_in(x_desc):
    """A tile of x in shared memory, and the barrier that says so."""
    smem = gl.allocate_shared_memory(x_desc.dtype, x_desc.block_shape, x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.expect(full, x_desc.block_type.nbytes)
    tma_load(x_desc, [0, 0], full, smem)
    return smem, full


@gluon.jit
def write_out(y_desc, value):
    smem = gl.allocate_shared_memory(y_desc.dtype, y_desc.block_shape, y_desc.layout)
    smem.store(value)
    fence_async_shared()
    tma_store(y_desc, [0, 0], smem)
    tma_store_wait(0)


@gluon.jit
def no_wait(x_desc, y_desc):
    smem, full = tile_in(x_desc)
    write_out(y_desc, smem.load(LAYOUT))
    mbarrier.wait(full, 0)


@gluon.jit
def no_fence(x_desc, y_desc):
    smem = gl.allocate_shared_memory(y_desc.dtype, y_desc.block_shape, y_desc.layout)
    smem.store(gl.full(y_desc.block_shape, 1.0, gl.float32, LAYOUT))
    tma_store(y_desc, [0, 0], smem)
    tma_store_wait(0)


@gluon.jit
def overwritten_store(x_desc, y_desc):
    smem, full = tile_in(x_desc)
    mbarrier.wait(full, 0)
    tma_store(y_desc, [0, 0], smem)
    smem.store(gl.full(y_desc.block_shape, 1.0, gl.float32, LAYOUT))
    tma_store_wait(0)


@gluon.jit
def store_not_waited_for(x_desc, y_desc):
    smem, full = tile_in(x_desc)
    mbarrier.wait(full, 0)
    tma_store(y_desc, [0, 0], smem)


@gluon.jit
def too_few_bytes(x_desc, y_desc):
    smem = gl.allocate_shared_memory(x_desc.dtype, x_desc.block_shape, x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.expect(full, x_desc.block_type.nbytes * 2)
    tma_load(x_desc, [0, 0], full, smem)
    mbarrier.wait(full, 0)


@gluon.jit
def load_not_waited_for(x_desc, y_desc):
    tile_in(x_desc)


@gluon.jit
def arrives_twice(x_desc, y_desc):
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    mbarrier.arrive(bar, count=2)


@gluon.jit
def never_initialised(x_desc, y_desc):
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.arrive(bar, count=1)


@gluon.jit
def nobody_wrote(x_desc, y_desc):
    smem = gl.allocate_shared_memory(y_desc.dtype, y_desc.block_shape, y_desc.layout)
    write_out(y_desc, smem.load(LAYOUT))


@gluon.jit
def half_written(x_desc, y_desc):
    smem = gl.allocate_shared_memory(y_desc.dtype, y_desc.block_shape, y_desc.layout)
    smem.slice(0, 16).store(gl.full([16, 32], 1.0, gl.float32, LAYOUT))
    write_out(y_desc, smem.load(LAYOUT))


@gluon.jit
def stage_beyond_the_last(x_desc, y_desc):
    smem = gl.allocate_shared_memory(gl.float32, [2, 128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for i in range(2):
        smem.index((i - 1) % 2).store(gl.full([128], 1.0, gl.float32, LINE))  # -1 % 2 is -1, as in C


@gluon.jit
def produce(x_desc, ring, tiles, LATE: gl.constexpr):
    for i in range(tiles):
        if LATE:  # forgets to wait for a free stage
            mbarrier.expect(ring.full.index(i % ring.stages), x_desc.block_type.nbytes)
        else:
            ring.acquire(i, x_desc.block_type.nbytes)
        ring.load(i, x_desc, [0, 0])


@gluon.jit
def use(y_desc, ring, tiles, EARLY: gl.constexpr):
    acc = gl.zeros(y_desc.block_shape, gl.float32, LAYOUT)
    for i in range(tiles):
        tile = ring.wait_full(i)
        if EARLY:
            ring.release(i)
        acc += tile.load(LAYOUT)
        if not EARLY:
            ring.release(i)
    write_out(y_desc, acc)


@gluon.jit
def ring_kernel(x_desc, y_desc, tiles, EARLY: gl.constexpr, LATE: gl.constexpr, CONSUMERS: gl.constexpr):
    layout: gl.constexpr = x_desc.layout
    ring = make_ring("X", gl.float32, [32, 32], layout, 2, CONSUMERS)
    gl.warp_specialize(
        [(use, (y_desc, ring, tiles, EARLY)), (produce, (x_desc, ring, tiles, LATE))], [1], [24]
    )


@gluon.jit
def keep(y_desc, ring, tiles, FREED: gl.constexpr):
    """Loads tiles into registers, where they must have arrived when their stages are FREED."""
    acc = gl.zeros(y_desc.block_shape, gl.float32, LAYOUT)
    for i in range(tiles):
        x = ring.wait_full(i).load(LAYOUT)
        if FREED == "fenced":
            fence_async_shared()
        if FREED == "renamed":
            x = gl.convert_layout(x, LAYOUT).to(gl.float32).reshape([32, 32])  # no instruction
        if FREED != "used":
            ring.release(i)
        if FREED != "ignored":
            acc += x
        if FREED == "used":
            ring.release(i)
    write_out(y_desc, acc)


@gluon.jit
def keep_kernel(x_desc, y_desc, tiles, FREED: gl.constexpr):
    layout: gl.constexpr = x_desc.layout
    ring = make_ring("X", gl.float32, [32, 32], layout, 2, 1)
    gl.warp_specialize(
        [(keep, (y_desc, ring, tiles, FREED)), (produce, (x_desc, ring, tiles, False))], [1], [24]
    )


@gluon.jit
def multiply(y_ptr, ring, tiles, EARLY: gl.constexpr):
    """The left operand of a product comes out of registers, where it must have arrived."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    b = gl.allocate_shared_memory(gl.bfloat16, [64, 64], ring.buffer.layout)
    b.store(gl.full([64, 64], 1.0, gl.bfloat16, layout))
    fence_async_shared()
    acc = gl.zeros([64, 64], gl.float32, layout)
    for i in range(tiles):
        a = ring.wait_full(i).load(gl.DotOperandLayout(0, layout, 2))
        if EARLY:
            ring.release(i)
        token = warpgroup_mma(a, b, acc, is_async=True)
        if not EARLY:
            ring.release(i)
        acc = warpgroup_mma_wait(0, [token])
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    cols = gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :]
    gl.store(y_ptr + rows * 64 + cols, acc)


@gluon.jit
def multiply_kernel(a_desc, y_ptr, tiles, EARLY: gl.constexpr):
    layout: gl.constexpr = a_desc.layout
    ring = make_ring("A", gl.bfloat16, [64, 64], layout, 1, 1)
    gl.warp_specialize(
        [(multiply, (y_ptr, ring, tiles, EARLY)), (produce, (a_desc, ring, tiles, False))], [1], [24]
    )


@gluon.jit
def tell(smem, full, empty, rounds):
    for i in range(rounds):
        mbarrier.wait(empty, (i & 1) ^ 1)
        smem.store(gl.full([128], 1.0, gl.float32, LINE))
        mbarrier.arrive(full, count=1)


@gluon.jit
def hear(smem, full, empty, rounds, y_ptr):
    acc = gl.zeros([128], gl.float32, LINE)
    for i in range(rounds):
        mbarrier.wait(full, i & 1)
        x = smem.load(LINE)
        mbarrier.arrive(empty, count=1)  # at once: stores cannot overtake the load
        acc += x
    gl.store(y_ptr + gl.arange(0, 128, LINE), acc)


@gluon.jit
def told(y_ptr, rounds):
    """One partition hands numbers to another by ordinary stores."""
    smem = gl.allocate_shared_memory(gl.float32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.init(empty, count=1)
    gl.warp_specialize(
        [(hear, (smem, full, empty, rounds, y_ptr)), (tell, (smem, full, empty, rounds))], [4], [24]
    )


@gluon.jit
def leader(turn, rounds):
    for i in range(rounds):
        mbarrier.wait(turn, i & 1)


@gluon.jit
def runner(turn, rounds):
    for _ in range(rounds):
        mbarrier.arrive(turn, count=1)


@gluon.jit
def lapped(x_desc, y_desc):
    """Nothing stops the second partition from completing phase 1 before the first has seen phase 0."""
    turn = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(turn, count=1)
    gl.warp_specialize([(leader, (turn, 6)), (runner, (turn, 6))], [1], [24])


@gluon.jit
def product(a_desc, y_ptr, WHAT: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    smem, full = tile_in(a_desc)
    mbarrier.wait(full, 0)
    acc = gl.zeros([64, 64], gl.float32, layout)
    token = warpgroup_mma(smem, smem.permute((1, 0)), acc, is_async=True)
    if WHAT == 0:
        acc = acc + 1.0  # the MMA owns these registers
    if WHAT == 2:
        value = warpgroup_mma_wait(1, [token])  # one may still be in flight
    else:
        value = warpgroup_mma_wait(0, [token])
    if WHAT == 1:
        warpgroup_mma(smem, smem.permute((1, 0)), value, is_async=True)
        value = gl.zeros([64, 64], gl.float32, layout)
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    cols = gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :]
    gl.store(y_ptr + rows * 64 + cols, value)


@gluon.jit
def out_of_bounds(y_ptr, N):
    gl.store(y_ptr + N + gl.arange(0, 128, LINE), gl.full([128], 1.0, gl.float32, LINE))


@gluon.jit
def too_large(y_ptr, N):
    big = N * 1000000
    gl.store(y_ptr + big * gl.arange(0, 128, LINE) * 0, gl.full([128], 1.0, gl.float32, LINE))


@gluon.jit
def waits_for_ever(y_ptr, N):
    while gl.atomic_add(y_ptr, 0) != N:
        pass


@gluon.jit
def waits_for_a_while(y_ptr, N):
    tries = 0
    while (gl.atomic_add(y_ptr, 0) != N) & (tries < 50):
        tries += 1
    gl.store(y_ptr, tries)


@gluon.jit
def polls_for_ever(y_ptr, N):
    gl.atomic_poll(y_ptr, N)


@gluon.jit
def never_comes_back(y_ptr, N):
    while N > 0:
        N = N * 1


@gluon.jit
def asserts(y_ptr, N):
    gl.device_assert(N < 0, "N is negative")


@gluon.jit
def add_without_turns(y_ptr, N):
    """Every program adds to the same row, unordered."""
    offsets = gl.arange(0, 128, LINE)
    gl.store(y_ptr + offsets, gl.load(y_ptr + offsets) + 1.0)


@gluon.jit
def flag_without_release(y_ptr, flag_ptr):
    """The second program waits for the first, but the flag orders nothing."""
    offsets = gl.arange(0, 128, LINE)
    if gl.program_id(0) == 0:
        gl.store(y_ptr + offsets, gl.full([128], 1.0, gl.float32, LINE))
        gl.atomic_add(flag_ptr, 1, sem="relaxed")
    else:
        while gl.atomic_add(flag_ptr, 0, sem="acquire") != 1:
            pass
        gl.store(y_ptr + offsets, gl.load(y_ptr + offsets) + 1.0)


@gluon.jit
def hand_over(smem):
    smem.store(gl.full([128], 3.0, gl.float32, LINE))
    gl.inline_asm_elementwise("bar.sync 9, 256;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def take_over(smem, y_ptr, WAIT: gl.constexpr):
    if WAIT:
        gl.inline_asm_elementwise("bar.sync 9, 256;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    gl.store(y_ptr + gl.arange(0, 128, LINE), smem.load(LINE))


@gluon.jit
def named_barrier(y_ptr, WAIT: gl.constexpr):
    """One partition hands a buffer to another at hardware barrier 9."""
    smem = gl.allocate_shared_memory(gl.float32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    gl.warp_specialize([(hand_over, (smem,)), (take_over, (smem, y_ptr, WAIT))], [4], [64])


def descriptors(rows=32, cols=32, dtype=torch.float32):
    kind = gl.float32 if dtype == torch.float32 else gl.bfloat16
    layout = gl.NVMMASharedLayout.get_default_for([rows, cols], kind)
    x, y = torch.ones(rows, cols, dtype=dtype), torch.zeros(rows, cols, dtype=dtype)
    return [TensorDescriptor(t, [rows, cols], [cols, 1], [rows, cols], layout) for t in (x, y)]
