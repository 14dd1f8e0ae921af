"""Whose turn it is to add to a query tile of dQ, where sums must be the same every time.

Key tiles add in their order: a count for each query tile tells how many have done so. A warp of its own
watches it, so that consumers never wait for memory: it tells them that their turn has come, and the
next program that they have added.

Nobody waits for a program that cannot run: each takes its key tile when it begins, and by then those
before it have begun. And waiting is rare: all heads' first key tiles are taken first, so that few
programs share a query tile at a time, and all walk from the last queries to the first. Under a causal
mask or a window, programs that begin together then meet a query tile in the order of their key tiles;
without one each follows the one before it at a small distance.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewise.backends.hopper.tile import key_range
from tilewise.gluon.compat import label


@gluon.jit
def next_program(turns):
    """The program's number: in which order it began, or any if no counts are kept.

    turns: how many programs have begun, then for each query tile how many have added to it.
    """
    t = gl.program_id(0)
    if turns is not None:
        t = gl.atomic_add(turns, 1, sem="relaxed")
    return t


@gluon.jit
def make_order(CONSUMERS: gl.constexpr):
    """Barriers between the watching warp and consumers: it is your turn, and we have added."""
    turn = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    added = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(turn, count=1)
    mbarrier.init(added, count=CONSUMERS)
    label(turn, "turn")
    label(added, "added")
    return turn, added


@gluon.jit
def wait_for_turn(step, order):
    """Consumer: wait until it may add to the query tile of a step."""
    if len(order) > 0:
        mbarrier.wait(order[0], step & 1)


@gluon.jit
def end_turn(order):
    """Consumer: all its threads have added."""
    if len(order) > 0:
        mbarrier.arrive(order[1], count=1)


@gluon.jit
def key_tiles_before(n, tile, problem, TILE_Q: gl.constexpr, TILE_K: gl.constexpr):
    """How many key tiles before the program's are seen by query tile n."""
    first, stop = key_range(n * TILE_Q, tile, problem)
    return tile[2] // TILE_K - first // TILE_K


@gluon.jit
def take_turns(turns, order, walk, TILE_Q: gl.constexpr, TILE_K: gl.constexpr):
    """The watching warp. walk: the tile, its query tiles, the problem, and `rows_of_head`."""
    if len(order) > 0:
        turn, added = order
        tile, runs, problem, rows_of_head = walk
        count = runs[3] - runs[0]
        for step in range(count * problem[2][1]):
            n = runs[3] - 1 - step % count
            head = tile[1] * problem[2][1] + step // count
            mine = turns + 1 + (head * rows_of_head + tile[9]) // TILE_Q + n
            before = key_tiles_before(n, tile, problem, TILE_Q, TILE_K)
            have_added = gl.atomic_add(mine, 0, sem="acquire")
            while have_added < before:
                have_added = gl.atomic_add(mine, 0, sem="acquire")
            mbarrier.arrive(turn, count=1)
            mbarrier.wait(added, step & 1)
            gl.atomic_add(mine, 1, sem="release")
