"""Turns that partitions take, one barrier each: partition w's is complete when it may go on.

turns = make_turns(PARTITIONS)
partition w, for every i:  mbarrier.wait(turns.index(w), i & 1)
                           mbarrier.arrive(turns.index((w + 1) % PARTITIONS), count=1)
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewise.gluon.compat import label


@gluon.jit
def make_turns(partitions: gl.constexpr):
    """Allocate and initialise them: the first turn is partition 0's."""
    turns = gl.allocate_shared_memory(gl.int64, [partitions, 1], mbarrier.MBarrierLayout())
    for w in gl.static_range(partitions):
        mbarrier.init(turns.index(w), count=1)
    mbarrier.arrive(turns.index(0), count=1)
    label(turns, "turns")
    return turns
