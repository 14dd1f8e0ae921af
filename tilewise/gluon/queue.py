"""A queue of tuples of integers in shared memory, from one partition to others.

    queue = make_queue("tiles", WIDTH, STAGES, READERS)

    writer, for every i:     queue.acquire(i)                  waits until all have read tuple i - STAGES
                             queue.put(i, numbers, WARPS)
    reader, for every i:     numbers = queue.get(i, WARPS)     waits until they are there

`i` counts tuples from 0 without end. WARPS: of the partition that calls.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewise.gluon.compat import aggregate, label


@aggregate
class Queue:
    numbers: gl.shared_memory_descriptor  # int32 [stages * width, 1]
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    width: gl.constexpr
    stages: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, numbers, full, empty, width, stages):
        self.numbers = numbers
        self.full = full
        self.empty = empty
        self.width = gl.constexpr(width)
        self.stages = gl.constexpr(stages)

    @gluon.jit
    def acquire(self, i):
        mbarrier.wait(self.empty.index(i % self.stages), ((i // self.stages) & 1) ^ 1)

    @gluon.jit
    def put(self, i, numbers, WARPS: gl.constexpr):
        st = i % self.stages
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
        for n in gl.static_range(self.width):
            self.numbers.index(st * self.width + n).store(gl.zeros([1], gl.int32, layout) + numbers[n])
        mbarrier.arrive(self.full.index(st), count=1)

    @gluon.jit
    def get(self, i, WARPS: gl.constexpr):
        st = i % self.stages
        mbarrier.wait(self.full.index(st), (i // self.stages) & 1)
        numbers = (self._read(st, 0, WARPS),)
        for n in gl.static_range(1, self.width):
            numbers += (self._read(st, n, WARPS),)  # type: ignore[assignment]
        mbarrier.arrive(self.empty.index(st), count=1)
        return numbers

    @gluon.jit
    def _read(self, st, n: gl.constexpr, WARPS: gl.constexpr):
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
        return gl.sum(self.numbers.index(st * self.width + n).load(layout), 0)


@gluon.jit
def make_queue(name: gl.constexpr, width: gl.constexpr, stages: gl.constexpr, readers: gl.constexpr):
    """Allocate a queue and initialise its barriers.

    width: integers of a tuple. readers: how many partitions get each tuple.
    """
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    numbers = gl.allocate_shared_memory(gl.int32, [stages * width, 1], plain)
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(stages):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=readers)
    label(numbers, name)
    label(full, name + ".full")
    label(empty, name + ".empty")
    return Queue(numbers, full, empty, width, stages)
