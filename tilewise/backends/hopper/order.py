"""Whose turn it is to add to a query tile of dQ, where sums must be the same every time.

Key tiles add in their order: two counts for each query tile tell how many have added their first and
their second consumer's part. Consumers never wait for memory: one warp watches the counts and tells them
when their turn has come, and one for each counts what they have added, two steps ahead and behind.

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

AHEAD = gl.constexpr(2)  # turns that one consumer may have


@gluon.jit
def next_program(turns):
    """The program's number: in which order it began, or any if no counts are kept.

    turns: how many programs have begun, then for each query tile and consumer how many have added.
    """
    t = gl.program_id(0)
    if turns is not None:
        t = gl.atomic_add(turns, 1, sem="relaxed")
    return t


@gluon.jit
def make_order(CONSUMERS: gl.constexpr):
    """Barriers: it is your turn, I have added, and it is counted; for each consumer and step ahead."""
    turn = gl.allocate_shared_memory(gl.int64, [CONSUMERS * AHEAD, 1], mbarrier.MBarrierLayout())
    added = gl.allocate_shared_memory(gl.int64, [CONSUMERS * AHEAD, 1], mbarrier.MBarrierLayout())
    counted = gl.allocate_shared_memory(gl.int64, [CONSUMERS * AHEAD, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(CONSUMERS * AHEAD):
        mbarrier.init(turn.index(i), count=1)
        mbarrier.init(added.index(i), count=1)
        mbarrier.init(counted.index(i), count=1)
    label(turn, "turn")
    label(added, "added")
    label(counted, "counted")
    return turn, added, counted


@gluon.jit
def barrier_of(W: gl.constexpr, step, barriers):
    """That of a consumer's step, and the parity of its phase."""
    return barriers.index(W * AHEAD + step % AHEAD), (step // AHEAD) & 1


@gluon.jit
def wait_for_turn(W: gl.constexpr, step, order):
    """Consumer: wait until it may add to the query tile of a step."""
    if len(order) > 0:
        turn, phase = barrier_of(W, step, order[0])
        mbarrier.wait(turn, phase)


@gluon.jit
def end_turn(W: gl.constexpr, step, order):
    """Consumer: all its threads have added."""
    if len(order) > 0:
        added, phase = barrier_of(W, step, order[1])
        mbarrier.arrive(added, count=1)


@gluon.jit
def count_of(W: gl.constexpr, turns, n, head, walk, TILE_Q: gl.constexpr, CONSUMERS: gl.constexpr):
    """Where it is counted who has added to query tile n of a head."""
    tile, runs, problem, rows_of_head = walk
    tiles = (head * rows_of_head + tile[9]) // TILE_Q + n
    return turns + 1 + tiles * CONSUMERS + W


@gluon.jit
def key_tiles_before(n, tile, problem, TILE_Q: gl.constexpr, TILE_K: gl.constexpr):
    """How many key tiles before the program's are seen by query tile n."""
    first, stop = key_range(n * TILE_Q, tile, problem)
    return tile[2] // TILE_K - first // TILE_K


@gluon.jit
def query_tile_of_step(step, walk):
    """Which query tile a step visits, of which head."""
    tile, runs, problem, rows_of_head = walk
    count = runs[3] - runs[0]
    return runs[3] - 1 - step % count, tile[1] * problem[2][1] + step // count


@gluon.jit
def watch(turns, order, walk, TILE_Q: gl.constexpr, TILE_K: gl.constexpr, CONSUMERS: gl.constexpr):
    """The warp that tells consumers when their turn has come.

    walk: the program's key tile, the query tiles that see it, the problem, and `rows_of_head`.
    """
    if len(order) > 0:
        tile, runs, problem, rows_of_head = walk
        for step in range((runs[3] - runs[0]) * problem[2][1]):
            n, head = query_tile_of_step(step, walk)
            before = key_tiles_before(n, tile, problem, TILE_Q, TILE_K)
            for w in gl.static_range(CONSUMERS):
                turn, phase = barrier_of(w, step, order[0])
                counted, phase = barrier_of(w, step, order[2])
                mbarrier.wait(counted, phase ^ 1)
                count = count_of(w, turns, n, head, walk, TILE_Q, CONSUMERS)
                have_added = gl.atomic_add(count, 0, sem="acquire")
                while have_added < before:
                    have_added = gl.atomic_add(count, 0, sem="acquire")
                mbarrier.arrive(turn, count=1)


@gluon.jit
def count_added(W: gl.constexpr, turns, order, walk, TILE_Q: gl.constexpr, CONSUMERS: gl.constexpr):
    """The warp that counts what consumer W has added."""
    if len(order) > 0:
        tile, runs, problem, rows_of_head = walk
        for step in range((runs[3] - runs[0]) * problem[2][1]):
            n, head = query_tile_of_step(step, walk)
            added, phase = barrier_of(W, step, order[1])
            counted, phase = barrier_of(W, step, order[2])
            mbarrier.wait(added, phase)
            gl.atomic_add(count_of(W, turns, n, head, walk, TILE_Q, CONSUMERS), 1, sem="release")
            mbarrier.arrive(counted, count=1)
