"""A ring buffer: stages of shared memory that one partition fills by TMA and others use.

    ring = make_ring("K", gl.bfloat16, [128, 64], desc.layout, STAGES, CONSUMERS)

    producer, for every i:   ring.acquire(i, nbytes)           wait until stage i is free, announce its
    bytes
                             ring.load(i, desc, [row, 0])      (tma_load into it; several are allowed)
    consumer, for every i:   tile = ring.wait_full(i)
                             ...                               use tile
                             ring.release(i)                   all of it is read: the stage is free

Partitions may also fill stages by ordinary stores, each its part, `producers` of them together:

    producer, for every i:   ring.wait_empty(i)
                             ring.stage(i, part).store(x)
                             ring.hand_over(i)

A stage may have several parts of one shape, such as blocks of columns: `ring.load(i, desc, coord, part)`
and `ring.stage(i, part)`, once `ring.wait_full(i)` has returned, which waits for all of them.

`i` counts tiles from 0 without end; which stage and which phase that is, is hidden here. What was loaded
into registers is read once it has been used, and not before: loads run on past barriers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from tilewise.gluon.compat import aggregate, at_tile, label, label_stages, tma_load


@aggregate
class Ring:
    buffer: gl.shared_memory_descriptor  # [stages * parts, *tile]
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    stages: gl.constexpr
    parts: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, buffer, full, empty, stages, parts):
        self.buffer = buffer
        self.full = full
        self.empty = empty
        self.stages = gl.constexpr(stages)
        self.parts = gl.constexpr(parts)

    @gluon.jit
    def stage(self, i, part: gl.constexpr = 0):
        """The buffer of a part of tile i."""
        return self.buffer.index(i % self.stages * self.parts + part)

    @gluon.jit
    def acquire(self, i, nbytes):
        """Producer: wait until the stage of tile i is free; `nbytes` will be copied into it."""
        at_tile(i)
        self.wait_empty(i)
        mbarrier.expect(self.full.index(i % self.stages), nbytes)

    @gluon.jit
    def load(self, i, desc, coord, part: gl.constexpr = 0):
        """Producer: copy into a part of the stage of tile i."""
        tma_load(desc, coord, self.full.index(i % self.stages), self.stage(i, part))

    @gluon.jit
    def wait_empty(self, i):
        """Producer: wait until the stage of tile i is free."""
        mbarrier.wait(self.empty.index(i % self.stages), ((i // self.stages) & 1) ^ 1)

    @gluon.jit
    def hand_over(self, i):
        """Producer: what it has stored to the stage of tile i is there, for TMA and products as well."""
        fence_async_shared()
        mbarrier.arrive(self.full.index(i % self.stages), count=1)

    @gluon.jit
    def wait_full(self, i):
        """Consumer: wait until tile i has arrived; returns its buffer (of its first part)."""
        at_tile(i)
        mbarrier.wait(self.full.index(i % self.stages), (i // self.stages) & 1)
        return self.stage(i)

    @gluon.jit
    def release(self, i):
        """Consumer: tile i is no longer needed."""
        mbarrier.arrive(self.empty.index(i % self.stages), count=1)


@gluon.jit
def make_ring(
    name: gl.constexpr,
    dtype: gl.constexpr,
    tile: gl.constexpr,
    layout: gl.constexpr,
    stages: gl.constexpr,
    consumers: gl.constexpr,
    parts: gl.constexpr = 1,
    producers: gl.constexpr = 1,
):
    """Allocate a ring and initialise its barriers.

    tile: shape of one part of a stage. consumers: how many partitions release each tile.
    producers: how many hand it over.
    """
    buffer = gl.allocate_shared_memory(dtype, [stages * parts] + tile, layout)
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(stages):
        mbarrier.init(full.index(i), count=producers)
        mbarrier.init(empty.index(i), count=consumers)
    label_stages(buffer, name)
    label(full, name + ".full")
    label(empty, name + ".empty")
    return Ring(buffer, full, empty, stages, parts)
