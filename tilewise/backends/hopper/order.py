"""The order in which programs add to dQ, where sums must be the same every time.

To a query tile key tiles add in their order: each program follows the one of the key tile before. A
count for each program and consumer tells how many query tiles it has added to; one warp watches the
counts of the program before and tells consumers when their turn has come, and one for each consumer
counts. So consumers never wait for memory.

Nobody waits for a program that cannot run: each takes its key tile when it begins, and by then those
before it have begun. And waiting is rare: so many heads take turns that few programs follow one another
at a time, and all walk from the last queries to the first. Under a causal mask or a window, programs
that begin together then come to a query tile in the order of their key tiles anyway; without one, each
falls a query tile or two behind the one before it, and stays there.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewise.backends.hopper.tile import head_and_rank, query_tiles_of
from tilewise.gluon.compat import label

AHEAD = gl.constexpr(2)  # turns that a consumer may have


@gluon.jit
def next_program(progress):
    """The program's number: in which order it began, or any if no counts are kept.

    progress: how many programs have begun, then for each key tile and consumer how many query tiles it
    has added to.
    """
    t = gl.program_id(0)
    if progress is not None:
        t = gl.atomic_add(progress, 1, sem="relaxed")
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
def count_of(W: gl.constexpr, t, progress, problem, TILE_K: gl.constexpr):
    """Where it is counted what consumer W of program t has added; and the rank of its key tile."""
    tiles = gl.cdiv(problem[1][5], TILE_K)
    number, rank = head_and_rank(t, tiles, problem[2][2], problem[2][3])
    return progress + 1 + (number * tiles + rank) * 2 + W, rank


@gluon.jit
def watch(t, progress, order, work, TILE_Q: gl.constexpr, TILE_K: gl.constexpr):
    """The warp that tells consumers when their turn has come.

    work: the program's key tile, the query tiles that see it, and the problem.
    """
    if len(order) > 0:
        tile, runs, problem = work
        b, head, k_start, start_q, rows_q, start_k, rows_k, seen_k, seen_q, pad = tile
        before = (b, head, k_start - TILE_K, start_q, rows_q, start_k, rows_k, seen_k, seen_q, pad)
        runs_before = query_tiles_of(before, problem, TILE_Q, TILE_K)
        count, count_before = runs[3] - runs[0], runs_before[3] - runs_before[0]
        mine, rank = count_of(0, t, progress, problem, TILE_K)
        have = (t * 0, t * 0)
        for step in range(count * problem[2][1]):
            # The one before begins with its last query tile as well, which may be an earlier one.
            behind = runs_before[3] - (runs[3] - 1 - step % count)
            needed = step // count * count_before + behind
            if (rank == 0) | (behind <= 0):
                needed = needed * 0
            first = tell(0, step, needed, have[0], mine - 2, order)
            second = tell(1, step, needed, have[1], mine - 1, order)
            have = (first, second)


@gluon.jit
def tell(W: gl.constexpr, step, needed, have, count, order):
    """Tell consumer W that its turn has come, once a count is as needed. have: a past state of it."""
    turn, phase = barrier_of(W, step, order[0])
    counted, phase = barrier_of(W, step, order[2])
    mbarrier.wait(counted, phase ^ 1)
    while have < needed:
        have = gl.atomic_add(count, 0, sem="acquire")
    mbarrier.arrive(turn, count=1)
    return have


@gluon.jit
def count_added(W: gl.constexpr, t, progress, order, work, TILE_K: gl.constexpr):
    """The warp that counts what consumer W has added."""
    if len(order) > 0:
        tile, runs, problem = work
        mine, rank = count_of(W, t, progress, problem, TILE_K)
        for step in range((runs[3] - runs[0]) * problem[2][1]):
            added, phase = barrier_of(W, step, order[1])
            counted, phase = barrier_of(W, step, order[2])
            mbarrier.wait(added, phase)
            gl.atomic_add(mine, 1, sem="release")
            mbarrier.arrive(counted, count=1)
