"""A queue of integers in shared memory, from one partition to others.

    queue = make_queue("tiles", STAGES, READERS)

    writer, for every i:     queue.put(i, number, WARPS)      waits until all have read number i - STAGES
    reader, for every i:     number = queue.get(i, WARPS)     waits until it is there

`i` counts numbers from 0 without end. WARPS: of the partition that calls.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewise.gluon.compat import aggregate, label


@aggregate
class Queue:
    numbers: gl.shared_memory_descriptor  # int32 [stages, 1]
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    stages: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, numbers, full, empty, stages):
        self.numbers = numbers
        self.full = full
        self.empty = empty
        self.stages = gl.constexpr(stages)

    @gluon.jit
    def put(self, i, number, WARPS: gl.constexpr):
        st = i % self.stages
        mbarrier.wait(self.empty.index(st), ((i // self.stages) & 1) ^ 1)
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
        self.numbers.index(st).store(gl.zeros([1], gl.int32, layout) + number)
        mbarrier.arrive(self.full.index(st), count=1)

    @gluon.jit
    def get(self, i, WARPS: gl.constexpr):
        st = i % self.stages
        mbarrier.wait(self.full.index(st), (i // self.stages) & 1)
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
        number = gl.sum(self.numbers.index(st).load(layout), 0)
        mbarrier.arrive(self.empty.index(st), count=1)
        return number


@gluon.jit
def make_queue(name: gl.constexpr, stages: gl.constexpr, readers: gl.constexpr):
    """Allocate a queue and initialise its barriers. readers: how many partitions get each number."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    numbers = gl.allocate_shared_memory(gl.int32, [stages, 1], plain)
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(stages):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=readers)
    label(numbers, name)
    label(full, name + ".full")
    label(empty, name + ".empty")
    return Queue(numbers, full, empty, stages)
