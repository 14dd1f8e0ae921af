"""The order in which programs add to dQ, where sums must be the same every time.

To a query tile key tiles add in their order: each program follows the one of the key tile before, and a
count for each program tells to how many query tiles it has added. A warp watches the count of the
program before; it is one of those that hand dS over, so that consumers find dS of a query tile when it
is their turn to add to it. The producer counts: a stage of its ring is free when all before is added. So
consumers neither wait for memory nor know of any order.

Nobody waits for a program that cannot run: each takes its key tile when it begins, and by then those
before it have begun. And waiting is rare: so many heads take turns that few programs follow one another
at a time, and all walk from the last queries to the first. Under a causal mask or a window, programs
that begin together then come to a query tile in the order of their key tiles anyway; without one, each
falls a query tile or two behind the one before it, and stays there.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.backends.hopper.tile import head_and_rank, query_tiles_of


@gluon.jit
def next_program(progress):
    """The program's number: in which order it began, or any if no counts are kept.

    progress: how many programs have begun, then for each key tile to how many query tiles it has added.
    """
    t = gl.program_id(0)
    if progress is not None:
        t = gl.atomic_add(progress, 1, sem="relaxed")
    return t


@gluon.jit
def count_of(problem, TILE_K: gl.constexpr):
    """Where it is counted what the program has added; and the rank of its key tile."""
    t, progress = problem[0]
    tiles = gl.cdiv(problem[1][5], TILE_K)
    number, rank = head_and_rank(t, tiles, problem[2][2], problem[2][3])
    return progress + 1 + number * tiles + rank, rank


@gluon.jit
def watch(ds_ring, work, TILE_Q: gl.constexpr, TILE_K: gl.constexpr):
    """The warp that hands dS of a query tile over when the program before has added to it.

    work: the program's key tile, the query tiles that see it, and the problem.
    """
    tile, runs, problem = work
    if problem[0][1] is not None:
        b, head, k_start, start_q, rows_q, start_k, rows_k, seen_k, seen_q, pad = tile
        before = (b, head, k_start - TILE_K, start_q, rows_q, start_k, rows_k, seen_k, seen_q, pad)
        runs_before = query_tiles_of(before, problem, TILE_Q, TILE_K)
        count, count_before = runs[3] - runs[0], runs_before[3] - runs_before[0]
        mine, rank = count_of(problem, TILE_K)
        added = rank * 0  # by the one before, when last looked at
        for step in range(count * problem[2][1]):
            # The one before begins with its last query tile as well, which may be an earlier one.
            behind = runs_before[3] - (runs[3] - 1 - step % count)
            needed = step // count * count_before + behind
            if (rank == 0) | (behind <= 0):
                needed = needed * 0
            ds_ring.wait_empty(step)
            while added < needed:
                added = gl.atomic_add(mine - 1, 0, sem="acquire")
            ds_ring.hand_over(step)


@gluon.jit
def end_of_steps(steps, ring, problem):
    """Consumer: everything is added. The last stage of the ring is an empty one that says so."""
    if problem[0][1] is not None:
        ring.wait_full(steps)
        ring.release(steps)


@gluon.jit
def stages_used(steps, problem):
    """How many stages of the ring are used: one for each step, and the empty one if there are any."""
    if problem[0][1] is not None:
        steps += min(steps, 1)
    return steps


@gluon.jit
def count_added(step, ring, problem, TILE_K: gl.constexpr):
    """Producer, when the stage of a step is free: to all query tiles but the last of those whose stages
    were released by then dQ is added."""
    if problem[0][1] is not None:
        if step > ring.stages:
            mine, rank = count_of(problem, TILE_K)
            gl.atomic_add(mine, 1, sem="release")


@gluon.jit
def count_last_added(steps, ring, problem, TILE_K: gl.constexpr):
    """Producer: the same for those of the last steps, and the empty one."""
    if problem[0][1] is not None:
        ring.wait_empty(steps)
        ring.hand_over(steps)
        count_added(steps, ring, problem, TILE_K)
        for step in range(steps + 1, steps + 1 + ring.stages):
            ring.wait_empty(step)
            count_added(step, ring, problem, TILE_K)
