"""Nested jit calls, constexpr functions, an aggregate, an atomic counter, masks, tuples, cp.async."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewise.gluon.compat import aggregate

FACTOR: gl.constexpr = gl.constexpr(3)


@gluon.constexpr_function
def twice(n):
    return 2 * n


@gluon.jit
def inner(x, BLOCK: gl.constexpr):
    return x * FACTOR, twice(BLOCK)


@gluon.jit
def clipped(x, BLOCK: gl.constexpr):
    y, b = inner(x, BLOCK)
    return gl.where(y > 0, y, 0.0), b


@aggregate
class Counter:
    pointer: gl.tensor

    @gluon.constexpr_function
    def __init__(self, pointer):
        self.pointer = pointer

    @gluon.jit
    def next(self):
        return gl.atomic_add(self.pointer, 1, sem="relaxed")


@gluon.jit
def features_kernel(x_ptr, y_ptr, counter_ptr, N, BLOCK: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    counter = Counter(counter_ptr)
    tile = counter.next()
    while tile * BLOCK < N:
        offsets = tile * BLOCK + gl.arange(0, BLOCK, layout)
        mask = offsets < N
        y, b = clipped(gl.load(x_ptr + offsets, mask=mask, other=0.0), BLOCK)
        for i in gl.static_range(2):
            y += i + b
        gl.store(y_ptr + offsets, y, mask=mask)
        tile = counter.next()


def features(x, programs=3):
    y, counter = torch.empty_like(x), torch.zeros(1, dtype=torch.int32)
    features_kernel[(programs,)](x, y, counter, x.numel(), 128)
    return y


@gluon.jit
def copy_groups_kernel(x_ptr, y_ptr, tiles, BLOCK: gl.constexpr):
    """cp.async in groups, two tiles ahead."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    smem = gl.allocate_shared_memory(gl.float32, [3, BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    offsets = gl.arange(0, BLOCK, layout)
    for i in gl.static_range(2):
        async_copy_in(smem.index(i), x_ptr + i * BLOCK + offsets, i < tiles)
        async_copy.commit_group()
    for i in range(tiles):
        async_copy.wait_group(1)
        value = smem.index(i % 3).load(layout)
        gl.store(y_ptr + i * BLOCK + offsets, value * 2.0)
        async_copy_in(smem.index((i + 2) % 3), x_ptr + (i + 2) * BLOCK + offsets, i + 2 < tiles)
        async_copy.commit_group()
    async_copy.wait_group(0)


if "async_load" in async_copy.__all__:

    @gluon.jit
    def async_copy_in(smem, pointers, wanted):
        async_copy.async_load(smem, pointers, mask=wanted)

else:

    @gluon.jit
    def async_copy_in(smem, pointers, wanted):
        async_copy.async_copy_global_to_shared(smem, pointers, mask=wanted)


def copy_groups(x, BLOCK=512):
    y = torch.empty_like(x)
    copy_groups_kernel[(1,)](x, y, x.numel() // BLOCK, BLOCK)
    return y


@gluon.jit
def fetch(x_ptr, x_s, full, BLOCK: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    offsets = gl.arange(0, BLOCK, layout)
    for i in gl.static_range(3):
        async_copy_in(x_s.index(i), x_ptr + i * BLOCK + offsets, offsets >= 0)
        async_copy.mbarrier_arrive(full.index(i), increment_count=False)


@gluon.jit
def double(y_ptr, x_s, full, BLOCK: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    offsets = gl.arange(0, BLOCK, layout)
    for i in gl.static_range(3):
        mbarrier.wait(full.index(i), 0)
        gl.store(y_ptr + i * BLOCK + offsets, x_s.index(i).load(layout) * 2.0)


@gluon.jit
def copy_signals_kernel(x_ptr, y_ptr, BLOCK: gl.constexpr):
    """cp.async in one partition, whose 32 threads each arrive when their copies have landed."""
    x_s = gl.allocate_shared_memory(gl.float32, [3, BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(3):
        mbarrier.init(full.index(i), count=32)
    gl.warp_specialize(
        [(double, (y_ptr, x_s, full, BLOCK)), (fetch, (x_ptr, x_s, full, BLOCK))], [1], [24]
    )


def copy_signals(x):
    """x [1536] fp32."""
    y = torch.empty_like(x)
    copy_signals_kernel[(1,)](x, y, 512, num_warps=4)
    return y
