"""The order in which programs add to dQ, where sums must be the same every time.

To a query tile key tiles add in their order: each follows the one before, of which a count tells to how
many query tiles it has added. A warp watches the count of the key tile before; it is one of those that
hand dS over, so that consumers find dS of a query tile when it is their turn to add to it. The producer
counts: a stage of its ring is free when all before is added. So consumers neither wait for memory nor
know of any order.

Nobody waits for a program that cannot run: key tiles are taken in their order, by programs that run. And
waiting is rare: so many heads take turns that few programs follow one another at a time, and all walk
from the last queries to the first. Under a causal mask or a window, programs that begin together then
come to a query tile in the order of their key tiles anyway; without one, each falls a query tile or two
behind the one before it, and stays there.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.backends.hopper.tile import head_and_rank, next_key_tile, query_tiles_of


@gluon.jit
def count_of(t, problem, TILE_K: gl.constexpr):
    """Where it is counted to how many query tiles key tile t has added; and its rank.

    progress: those counts, of all key tiles.
    """
    tiles = gl.cdiv(problem[1][5], TILE_K)
    number, rank = head_and_rank(t, tiles, problem[2][2], problem[2][3])
    return problem[0][1] + number * tiles + rank, rank


@gluon.jit
def watch(queue, ds_ring, problem, TILE_Q: gl.constexpr, TILE_K: gl.constexpr):
    """The warp that hands dS of a query tile over when the key tile before has added to it."""
    if problem[0][1] is not None:
        base = gl.program_id(0) * 0  # steps before those of a key tile
        place = base
        t, tile, runs = next_key_tile(queue, place, 1)
        while t >= 0:
            base += watch_one(t, tile, runs, base, ds_ring, problem, TILE_Q, TILE_K)
            place += 1
            t, tile, runs = next_key_tile(queue, place, 1)


@gluon.jit
def watch_one(t, tile, runs, base, ds_ring, problem, TILE_Q: gl.constexpr, TILE_K: gl.constexpr):
    """The same for all steps of key tile t; returns how many those are."""
    b, head, k_start, start_q, rows_q, start_k, rows_k, seen_k, seen_q, pad = tile[:10]
    before = (b, head, k_start - TILE_K, start_q, rows_q, start_k, rows_k, seen_k, seen_q, pad)
    runs_before = query_tiles_of(before, problem, TILE_Q, TILE_K)
    count, count_before = runs[3] - runs[0], runs_before[3] - runs_before[0]
    mine, rank = count_of(t, problem, TILE_K)
    added = rank * 0  # by the one before, when last looked at
    steps = count * problem[2][1]
    for step in range(steps):
        # The one before begins with its last query tile as well, which may be an earlier one.
        behind = runs_before[3] - (runs[3] - 1 - step % count)
        needed = step // count * count_before + behind
        if (rank == 0) | (behind <= 0):
            needed = needed * 0
        ds_ring.wait_empty(base + step)
        while added < needed:
            added = gl.atomic_add(mine - 1, 0, sem="acquire")
        ds_ring.hand_over(base + step)
    return steps


@gluon.jit
def count_added(t, step, ring, problem, TILE_K: gl.constexpr):
    """Producer, when the stage of a key tile's step is free: to all query tiles but the last of those
    whose stages were released by then dQ is added."""
    if problem[0][1] is not None:
        if step > ring.stages:
            mine, rank = count_of(t, problem, TILE_K)
            gl.atomic_add(mine, 1, sem="release")


@gluon.jit
def count_last_added(t, base, steps, kv, shared, problem, TILE_K: gl.constexpr):
    """Producer: the same for those of the last steps; and for the last when K and V of this load, whose
    release is the last thing that a consumer does for a key tile, are free."""
    if problem[0][1] is not None:
        ring, kv_ring = shared[0], shared[2][2]
        for step in range(steps, steps + ring.stages):
            ring.wait_empty(base + step)
            count_added(t, step, ring, problem, TILE_K)
        kv_ring.wait_empty(kv + kv_ring.stages)
        mine, rank = count_of(t, problem, TILE_K)
        gl.atomic_add(mine, 1, sem="release")
