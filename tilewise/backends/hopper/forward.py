"""FlashAttention-3's forward in Gluon (Shah et al., "FlashAttention-3", 2024, sections 3.1 and 3.2).

A program has one producer warp, which copies Q, K and V to shared memory by TMA, and consumers of 64
query rows each, one warpgroup for each. Beside a consumer's softmax run the products of the others.
Programs stay for several query tiles, and the step from one to the next is a step like any other: the
first scores of the next tile are computed while the last weights of this one meet their values.

What is not in the paper: the *anchor*. Softmax may subtract any number from a row's scores, as long as
exp neither overflows nor loses all. The online softmax takes the largest score so far, looks for it in
every tile, and shrinks what it has when the number grows. Here, a row takes the largest score of its
first key tile, or 0 if it sees none of that, and keeps it: no maxima, no rescaling, and a softmax so
short that the other consumers' products cover it. bf16 has the exponents of fp32, so weights above 1
are as exact as weights below. Only a score 2**127 times as heavy as the anchor is too much, or scores
that all are far below 0: then the program computes its tiles again with the running maximum.

With ALiBi the anchor is a score without it, as the key that a row looks at most may be far from those
of its first tile. With a bias, which may be anything, there is none.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewise.backends.hopper.launch import ROWS as _ROWS
from tilewise.backends.hopper.launch import bind_forward, launch_forward
from tilewise.backends.hopper.terms import (
    UNSPECIALIZED,
    added,
    dropped,
    load_bias,
    load_dropout_key,
    load_sink,
    load_slope,
    powers_of_near,
    rows_layout,
    scale_of_kept,
    with_sink,
    words_of_rows,
)
from tilewise.backends.hopper.tile import (
    claimed_tile,
    columns_of,
    finite,
    key_range,
    key_tile_runs,
    listed_tile,
    logits,
    part_of_runs,
    query_tile,
    runs_of_rows,
    store_rows,
    tile_has_dead_rows,
)
from tilewise.backends.triton.terms import BIAS, SINK
from tilewise.gluon.compat import (
    label,
    label_stages,
    thread_barrier,
    tma_store,
    tma_store_wait,
    tma_store_wait_written,
)
from tilewise.gluon.queue import make_queue
from tilewise.gluon.ragged import coordinates
from tilewise.gluon.ring import make_ring
from tilewise.gluon.turns import make_turns
from tilewise.spec import AttentionSpec, Inputs

INF = gl.constexpr(float("inf"))
LN2 = gl.constexpr(0.6931471805599453)
LEAST_SUM = gl.constexpr(2.0**-60)
NOWHERE = gl.constexpr(2**29)
ROWS = gl.constexpr(_ROWS)


@gluon.jit
def deal(queue, problem, verdict, how: gl.constexpr, TILE_K: gl.constexpr, ANCHORED: gl.constexpr):
    """The dealer: which query tiles the program computes, once or, if consumers ask for it, twice."""
    ticket = deal_tiles(queue, problem, gl.program_id(0) * 0, how, TILE_K, False)
    if ANCHORED:
        if lost(verdict, 1):
            deal_tiles(queue, problem, ticket, how, TILE_K, True)


@gluon.jit
def deal_tiles(queue, problem, ticket, how: gl.constexpr, TILE_K: gl.constexpr, AGAIN: gl.constexpr):
    """Tell the others of one query tile after the other: where it lies, which key tiles belong to it,
    and which part of a query tile that is, or -1 of a whole one. One without key tiles comes last.

    ticket: how many there were before. Returns how many there are now.
    """
    RAGGED: gl.constexpr = how[3]
    TILE_Q: gl.constexpr = how[0] * ROWS
    tiles = problem[0][0]
    t = tiles + gl.program_id(0)
    turn = ticket * 0
    more = True
    while more:
        queue.acquire(ticket + turn)  # first: another program may be sooner to compute the next one
        part = turn * 0 - 1
        if RAGGED:
            t = claimed_tile(t, problem, AGAIN, TILE_Q)
        else:
            t, part, first, stop = listed_tile(turn, problem)
        tile = query_tile(t, problem, TILE_Q)
        runs = key_tile_runs(tile, problem, TILE_Q, TILE_K)
        if not RAGGED:
            runs = part_of_runs(runs, runs[0] + first, runs[0] + stop)
        more = t < tiles
        stop = gl.where(more, runs[3], 0)
        numbers = tile[:8] + (runs[0], runs[1], runs[2], stop, part) + tile[8:]  # noqa: RUF005
        queue.put(ticket + turn, numbers, 1)
        turn += 1
    return ticket + turn


@gluon.jit
def next_tile(queue, ticket, WARPS: gl.constexpr):
    """What the dealer tells: a query tile, its runs of key tiles, its part. Which sequence it is, and
    how many keys come before it, only where the queue has room for it."""
    n = queue.get(ticket, WARPS)
    tile = n[:8] + (n[0] * 0, n[0] * 0)  # noqa: RUF005
    if queue.width > 13:
        tile = n[:8] + n[13:]
    return tile, (n[8], n[9], n[10], n[11]), n[12]


@gluon.jit
def produce(inputs, rings, queue, problem, verdict, how: gl.constexpr, ANCHORED: gl.constexpr):
    """The producer: all that the consumers read, once or twice."""
    none = gl.program_id(0) * 0
    start = load_tiles(inputs, rings, queue, problem, (none, none, none), how)
    if ANCHORED:
        if lost(verdict, 1):
            load_tiles(inputs, rings, queue, problem, start, how)


@gluon.jit
def load_tiles(inputs, rings, queue, problem, start, how: gl.constexpr):
    """Load K and V tile by tile, and Q with the first of them, for every query tile of the program.

    start: how many query tiles, key tiles and tickets there were before. Returns how many there are now.
    """
    q_desc, k_desc, v_desc = inputs
    q_ring, k_ring, v_ring = rings
    lengths = problem[1]
    q_step, step, ticket = start
    CONSUMERS: gl.constexpr = how[0]
    RAGGED: gl.constexpr = how[3]
    TILE_K: gl.constexpr = k_ring.buffer.shape[1]
    turn = step * 0
    tile, runs, part = next_tile(queue, ticket, 1)
    while runs[3] > 0:
        b, head, q_start, start_q, seqlen_q, start_k, seqlen_k, seen_k = tile[:8]
        kv_head = head // problem[2][1]
        for back in range(runs[3] - runs[0]):
            row = (runs[3] - 1 - back) * TILE_K
            k_at = (b, kv_head, start_k, row), (seen_k, lengths[5])
            load_parts(k_ring, step, k_desc, k_at, RAGGED)
            if back == 0:
                for w in gl.static_range(CONSUMERS):
                    q_at = (b, head, start_q, q_start + w * ROWS), (seqlen_q, lengths[4])
                    load_parts(q_ring, (q_step + turn) * CONSUMERS + w, q_desc, q_at, RAGGED)
            load_parts(v_ring, step, v_desc, k_at, RAGGED)
            step += 1
        turn += 1
        tile, runs, part = next_tile(queue, ticket + turn, 1)
    return q_step + turn, step, ticket + turn + 1


@gluon.jit
def load_parts(ring, step, desc, at, RAGGED: gl.constexpr):
    """Load a tile, as blocks of columns."""
    b, head, start, row = at[0]
    length, entry_rows = at[1]
    COLUMNS: gl.constexpr = ring.buffer.shape[2]
    ring.acquire(step, desc.block_type.nbytes * ring.parts)
    for part in gl.static_range(ring.parts):
        corner = coordinates(b, head, start, row, part * COLUMNS, length, entry_rows, RAGGED)
        ring.load(step, desc, corner, part)


@gluon.jit
def consume(W: gl.constexpr, shared, verdict, how: gl.constexpr, ANCHORED: gl.constexpr):
    """Consumer W: rows W * 64 and on of every query tile of the program."""
    results = shared[0]
    none = gl.program_id(0) * 0
    start, lost_rows = attend(W, shared, (none, none, none), how, ANCHORED)
    if ANCHORED:
        ballot, done = verdict
        ballot.slice(W * ROWS, ROWS).store(lost_rows)
        mbarrier.arrive(done, count=1)
        if lost(verdict, 4):
            if results[0] is not None:
                tma_store_wait_written()  # or the first attempt's output might arrive last
            attend(W, shared, start, how, False)
    tma_store_wait(0)


@gluon.jit
def make_verdict(CONSUMERS: gl.constexpr):
    """Which rows of which consumer an anchor has lost, and a barrier: all consumers have told."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ballot = gl.allocate_shared_memory(gl.int32, [4 * ROWS], plain)
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ballot.store(gl.zeros([4 * ROWS], gl.int32, gl.BlockedLayout([2], [32], [4], [0])))
    mbarrier.init(done, count=CONSUMERS)
    label(ballot, "lost rows")
    label(done, "done")
    return ballot, done


@gluon.jit
def lost(verdict, WARPS: gl.constexpr):
    """Whether an anchor has lost any row of any consumer."""
    ballot, done = verdict
    mbarrier.wait(done, 0)
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [WARPS], [0])
    return gl.sum(ballot.load(layout), 0) != 0


@gluon.jit
def attend(W: gl.constexpr, shared, start, how: gl.constexpr, ANCHORED: gl.constexpr):
    """Attention of every query tile of the program.

    start: as for load_tiles. Returns the next start and, for each row, how many outputs were lost to
    the anchor.
    """
    results, rings, problem, factors, turns, queue, terms = shared
    q_ring, k_ring, v_ring = rings
    q_step, step, ticket = start
    left, right = problem[3]
    CONSUMERS: gl.constexpr = how[0]
    Q_IN_REGISTERS: gl.constexpr = how[1]
    DTYPE: gl.constexpr = q_ring.buffer.dtype
    TILE_K: gl.constexpr = k_ring.buffer.shape[1]
    BLOCK_DV: gl.constexpr = v_ring.buffer.shape[2]
    MASKED: gl.constexpr = left is not None or right is not None  # else only the last key tile is
    NATURAL: gl.constexpr = terms[BIAS] is not None
    # The second attempt; or with a bias, of which little might be left.
    EXACT: gl.constexpr = not ANCHORED and (q_ring.buffer.dtype == gl.bfloat16 or NATURAL)
    kind: gl.constexpr = (ANCHORED, EXACT)
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_K, 16])
    output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DV, 16])
    per_row: gl.constexpr = gl.SliceLayout(1, scores)
    rows = W * ROWS + gl.arange(0, ROWS, per_row)
    keys = gl.arange(0, TILE_K, gl.SliceLayout(0, scores))
    lost_rows = gl.zeros([ROWS], gl.int32, per_row)
    turn = step * 0
    tile, runs, part = next_tile(queue, ticket, 4)
    # Before the first query tile comes one that lies past all ends: nothing of it is stored.
    out = gl.zeros([ROWS, BLOCK_DV], DTYPE, output)
    lse = gl.zeros([ROWS], gl.float32, per_row)
    rest = lse
    doubt = lost_rows
    done = tile[:2] + (tile[2] * 0 + NOWHERE,) + tile[3:]  # noqa: RUF005
    dropout_key = load_dropout_key(terms)

    while runs[3] > 0:
        turn += 1
        # The first product of a query tile hides how the output of the tile before leaves.
        mine = runs
        if MASKED:
            mine = runs_of_rows(runs, W * ROWS, tile, problem, ROWS, TILE_K)
        step = pass_by(W, runs[3] - mine[3], rings, turns, step, how)
        number = (q_step + turn - 1) * CONSUMERS + W
        q = load_q(q_ring, number, scores, Q_IN_REGISTERS)
        k_ring.wait_full(step)
        s = start_scores(q, q_ring, k_ring, step, scores, Q_IN_REGISTERS)
        lost_rows += store(W, (out, lse, rest, doubt), rows, done, results, problem, terms, how)
        n = mine[3] - 1
        i = tile[2] + rows
        at = (keys, i, tile, load_slope(tile[1], tile[8], terms), dropout_key)
        bias = load_bias_of(W, n, at, problem, terms, how, False)
        place = corner(W, n, at, problem)
        dropout = words_of_rows(scores, ROWS, TILE_K, dropout_key, place, terms)
        s = warpgroup_mma_wait(0, [s])
        k_ring.release(step)
        release_q(q_ring, number, Q_IN_REGISTERS)
        s, factor = logits(s, *factors)
        hidden = (n < mine[1]) | (n >= mine[2])
        if not ANCHORED:
            s, factor = with_terms(s, factor, bias, n, at, terms)
        if hidden:
            s = masked(s, n, keys, i, tile, problem)
        p, top, total = first_step(s, factor, n, at, terms, kind)
        p = dropped(p, dropout, dropout_key, place, terms)
        p = gl.convert_layout(p.to(DTYPE), gl.DotOperandLayout(0, output, 2))
        o = gl.zeros([ROWS, BLOCK_DV], gl.float32, output)

        # Key tiles come from last to first: masked ones, those that all rows see, masked ones.
        if right is not None:
            for _ in range(n - mine[2]):
                n -= 1
                state = (p, o, top, total)
                p, o, top, total = next_keys(W, q, state, n, at, shared, step, how, kind, True)
                step += 1
        for _ in range(min(n, mine[2]) - mine[1]):
            n -= 1
            state = (p, o, top, total)
            p, o, top, total = next_keys(W, q, state, n, at, shared, step, how, kind, False)
            step += 1
        if left is not None:
            for _ in range(n - mine[0]):
                n -= 1
                state = (p, o, top, total)
                p, o, top, total = next_keys(W, q, state, n, at, shared, step, how, kind, True)
                step += 1

        # The last product of a query tile hides the way to the next one.
        release_q(q_ring, number, not Q_IN_REGISTERS)
        last = start_output(W, p, o, v_ring, turns, step, how)
        passed = mine[0] - runs[0]
        done, done_part, done_keys = tile, part, (runs[0] * TILE_K, runs[3] * TILE_K)
        tile, runs, part = next_tile(queue, ticket + turn, 4)
        top = top * factor if EXACT and not NATURAL else top
        lse, rest, inverse, doubt = statistics(top, total, done[1], done_part, terms, ANCHORED)
        o = warpgroup_mma_wait(0, [last])
        v_ring.release(step)
        o = o * spread(inverse, o)
        if results[7] is not None:
            result, where = (o, lse, doubt), (done, done_part, done_keys)
            done, lost_part = store_part(W, result, rows, where, results, problem, how)
            lost_rows += lost_part
        out = o.to(DTYPE)
        step = pass_by(W, passed, rings, turns, step + 1, how)

    if turn > 0:
        lost_rows += store(W, (out, lse, rest, doubt), rows, done, results, problem, terms, how)
    return (q_step + turn, step, ticket + turn + 1), lost_rows


@gluon.jit
def pass_by(W: gl.constexpr, count, rings, turns, step, how: gl.constexpr):
    """Leave out key tiles that other consumers' rows see and this one's do not."""
    q_ring, k_ring, v_ring = rings
    for _ in range(count):
        k_ring.wait_full(step)
        k_ring.release(step)
        v_ring.wait_full(step)
        take_turn(W, turns, step, how)
        pass_turn(W, turns, how)
        v_ring.release(step)
        step += 1
    return step


@gluon.jit
def next_keys(
    W: gl.constexpr,
    q,
    state,
    n,
    at,
    shared,
    step,
    how: gl.constexpr,
    kind: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Softmax of key tile n, beside the product of the weights before with their values."""
    p, o, top, total = state
    keys, i, tile = at[:3]
    results, rings, problem, factors, turns, queue, terms = shared
    bias = load_bias_of(W, n, at, problem, terms, how, True)
    scores: gl.constexpr = keys.type.layout.parent
    place = corner(W, n, at, problem)
    s, o, dropout = overlap(W, q, p, o, rings, turns, step, how, scores, at[4], place, terms)
    s, factor = logits(s, *factors)
    if not kind[0]:
        s, factor = with_terms(s, factor, bias, n, at, terms)
    if MASKED:
        s = masked(s, n, keys, i, tile, problem)
    if kind[0]:
        p_next = anchored_powers(s, factor, top, n, at, terms)
        total = total + row_sums(p_next)
        p_next = dropped(p_next, dropout, at[4], place, terms)
        p_next = gl.convert_layout(p_next.to(p.dtype), p.type.layout)
        o, p = warpgroup_mma_wait(0, [o, p_next])
    else:
        p_next, top, shrink = softmax_step(s, factor, top, kind[1])
        total = total * spread(shrink, total) + row_sums(p_next)
        p_next = dropped(p_next, dropout, at[4], place, terms)
        p_next = gl.convert_layout(p_next.to(p.dtype), p.type.layout)
        o, p = warpgroup_mma_wait(0, [o, p_next])
        o = o * spread(shrink, o)
    rings[2].release(step)
    return p, o, top, total


@gluon.jit
def corner(W: gl.constexpr, n, at, problem):
    """Where a consumer's weights of key tile n begin: the first query and key in their sequences; which
    sequence it is, and the head."""
    keys, i, tile = at[:3]
    k_start = n * keys.shape[0]
    if problem[3][0] is not None:  # else no keys come before those that are seen
        k_start += tile[9]
    return tile[2] + W * ROWS, k_start, tile[8], tile[1]


@gluon.jit
def load_bias_of(W: gl.constexpr, n, at, problem, terms, how: gl.constexpr, INSIDE: gl.constexpr):
    """The bias of key tile n, if any. INSIDE: the tile lies within the sequence: all but the last do."""
    bias = ()
    if terms[BIAS] is not None:
        keys, i, tile = at[:3]
        KEYS: gl.constexpr = keys.shape[0]
        BITS: gl.constexpr = terms[BIAS].dtype.element_ty.primitive_bitwidth
        layout: gl.constexpr = rows_layout(keys.type.layout.parent, KEYS, BITS, how[5])
        q_start, k_start, entry, head = corner(W, n, at, problem)
        i = q_start + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        j = (k_start, gl.arange(0, KEYS, gl.SliceLayout(0, layout))[None, :])
        lengths = (tile[4], tile[9] + tile[6])
        bias = load_bias(i[:, None], j, entry, head, lengths, terms, how[4], INSIDE)
    return bias


@gluon.jit
def with_terms(s, factor, bias, n, at, terms):
    """Scores of key tile n with ALiBi and bias."""
    i, j = facing(n, at)
    return added(s, factor, bias, at[3], i, j, terms)


@gluon.jit
def anchored_powers(s, factor, top, n, at, terms):
    """``powers`` of scores without ALiBi and what that takes from them."""
    i, j = facing(n, at)
    return powers_of_near(s, factor, top[:, None], at[3], i, j, terms)


@gluon.jit
def facing(n, at):
    """Queries, as the keys at no distance from them, and keys of tile n."""
    keys, i, tile = at[:3]
    return (i + (tile[6] - tile[4]))[:, None], (n * keys.shape[0] + keys)[None, :]


@gluon.jit
def load_q(q_ring, number, scores: gl.constexpr, IN_REGISTERS: gl.constexpr):
    """Q once it has arrived: as the left operand of products with the layout `scores`, or, where it
    stays in shared memory, its number in the ring."""
    q = q_ring.wait_full(number)
    if IN_REGISTERS:
        gl.static_assert(q_ring.parts == 1)
        q = q.load(gl.DotOperandLayout(0, scores, 2))
    else:
        q = number
    return q


@gluon.jit
def start_scores(q, q_ring, k_ring, step, scores: gl.constexpr, Q_IN_REGISTERS: gl.constexpr):
    """Q K^T of a key tile that has arrived, under way."""
    TILE_K: gl.constexpr = k_ring.buffer.shape[1]
    s = gl.zeros([ROWS, TILE_K], gl.float32, scores)
    for part in gl.static_range(k_ring.parts):
        k = k_ring.stage(step, part).permute((1, 0))
        left = q if Q_IN_REGISTERS else q_ring.stage(q, part)
        s = warpgroup_mma(left, k, s, use_acc=part > 0, is_async=True)
    return s


@gluon.jit
def release_q(q_ring, number, NOW: gl.constexpr):
    """Q of one query tile may be overwritten: in registers, only once a product that uses it is done,
    as no barrier waits for loads under way, and the copy engine is not ordered after them."""
    if NOW:
        q_ring.release(number)


@gluon.jit
def overlap(
    W: gl.constexpr,
    q,
    p,
    o,
    rings,
    turns,
    step,
    how: gl.constexpr,
    scores: gl.constexpr,
    dropout_key,
    place,
    terms,
):
    """Start the scores of key tile step + 1 and o += P V of tile step; return once the scores are there.
    And dropout's words for them, which takes no scores to know.

    With ping-pong, consumers start products by turns: while one computes, the others do their softmax.
    """
    q_ring, k_ring, v_ring = rings
    k_ring.wait_full(step + 1)
    take_turn(W, turns, step, how)
    s = start_scores(q, q_ring, k_ring, step + 1, scores, how[1])
    v = v_ring.wait_full(step)
    o = warpgroup_mma(p, v, o, is_async=True)
    pass_turn(W, turns, how)
    dropout = words_of_rows(scores, ROWS, scores.instr_shape[1], dropout_key, place, terms)
    s = warpgroup_mma_wait(1, [s])
    k_ring.release(step + 1)
    return s, o, dropout


@gluon.jit
def take_turn(W: gl.constexpr, turns, step, how: gl.constexpr):
    """With ping-pong, wait until consumer W may start the products of a step."""
    if how[2]:
        mbarrier.wait(turns.index(W), step & 1)


@gluon.jit
def pass_turn(W: gl.constexpr, turns, how: gl.constexpr):
    if how[2]:
        mbarrier.arrive(turns.index((W + 1) % how[0]), count=1)


@gluon.jit
def start_output(W: gl.constexpr, p, o, v_ring, turns, step, how: gl.constexpr):
    """o + P V of a query tile's last key tile, under way."""
    take_turn(W, turns, step, how)
    o = warpgroup_mma(p, v_ring.wait_full(step), o, is_async=True)
    pass_turn(W, turns, how)
    return o


@gluon.jit
def masked(s, n, keys, i, tile, problem):
    """Scores of key tile n with -inf where a query does not see a key."""
    left, right = problem[3]
    first, stop = key_range(i, tile, problem)
    j = n * keys.shape[0] + keys
    if right is None:
        seen = (j < stop)[None, :]
    else:
        seen = j[None, :] < stop[:, None]
    if left is not None:
        seen = seen & (j[None, :] >= first[:, None])
    return gl.where(seen, s, -INF)


@gluon.jit
def first_step(s, factor, n, at, terms, kind: gl.constexpr):
    """Softmax of a query tile's first key tile: P, what was subtracted from each row, and row sums."""
    top = row_maxima(s, factor, kind[1])
    origin = finite(top)
    if kind[0]:
        top = origin
        p = anchored_powers(s, factor, top, n, at, terms)
    else:
        p = powers(s, factor, origin, kind[1])
    return p, top, row_sums(p)


@gluon.jit
def softmax_step(s, factor, top, EXACT: gl.constexpr):
    """One step of the online softmax: P, the row maxima so far, and by how much older sums shrink."""
    new_top = gl.maximum(top, row_maxima(s, factor, EXACT))
    origin = finite(new_top)  # rows may have seen no key yet, or none but at -inf
    shrink = gl.exp2((top - origin) * factor) if EXACT else gl.exp2(top - origin)
    return powers(s, factor, origin, EXACT), new_top, shrink


@gluon.jit
def row_maxima(s, factor, EXACT: gl.constexpr):
    """In units of log2(e); of the scores as they are, if EXACT."""
    top = gl.max(s, 1)
    return top if EXACT else top * factor


@gluon.jit
def powers(s, factor, origin, EXACT: gl.constexpr):
    """exp2 of the scores less their row's origin, in one multiply-add. That rounds but once, the origin
    was rounded too: of logits beyond 1e9 the difference is wrong by more than exp2 can bear. EXACT
    subtracts first."""
    if EXACT:
        return gl.exp2((s - origin[:, None]) * factor)
    else:
        return gl.exp2(s * factor - origin[:, None])


@gluon.jit
def row_sums(p):
    """Sums over the columns that one thread holds, [ROWS, 4]: the four of a row are added at its end."""
    GROUPS: gl.constexpr = p.shape[1] // 8
    return gl.sum(gl.sum(gl.reshape(p, [ROWS, GROUPS, 4, 2]), 3), 1)


@gluon.jit
def spread(x, like):
    """One number per row, for every column."""
    return gl.convert_layout(x, gl.SliceLayout(1, like.type.layout))[:, None]


@gluon.jit
def statistics(top, total, head, part, terms, ANCHORED: gl.constexpr):
    """From what was subtracted from each row, in units of log2(e) or with a bias natural, and its row
    sums: the log-sum-exp, what rounding took from it (see ``terms`` of Triton's), what to multiply the
    output by, and 1 for rows that an anchor may have lost.

    Those have a sum that is not finite, or of weights so small that they may have lost digits. (An
    anchor is the score of a key, of weight 1; but rows that see none in the first tile have 0.)

    A part of a query tile's keys leaves the sink to ``join``.
    """
    NATURAL: gl.constexpr = terms[BIAS] is not None
    total = gl.convert_layout(gl.sum(total, 1), top.type.layout)
    doubt = (total * 0.0 != 0) | (total < LEAST_SUM)
    dead = (total == 0) & (ANCHORED | (top == -INF))  # saw no key, or none but at -inf
    total = gl.where(dead, 1.0, gl.where(total == 0, total * INF, total))  # else 0: not a number
    shrink = 1.0
    if terms[SINK] is not None:
        sink = gl.where(part >= 0, -INF, load_sink(head, terms))
        top, total, shrink = with_sink(top, total, dead, sink, NATURAL)
        dead = total == 0
        total = gl.where(dead, 1.0, total)
    log_total = gl.log2(total)
    if NATURAL or terms[SINK] is not None:
        lse = top + log_total * LN2
        rest = gl.where(dead, 0.0, log_total * LN2 - (lse - top))
    else:
        lse = (top + log_total) * LN2
        rest = lse
    return gl.where(dead, -INF, lse), rest, shrink * scale_of_kept(terms) / total, doubt.to(gl.int32)


@gluon.jit
def store_part(W: gl.constexpr, result, rows, where, results, problem, how: gl.constexpr):
    """Store what a part of a query tile's keys gives, if this is one, where ``join`` finds it.

    where: the tile, its part, from which to which key that goes. Returns the tile that is left to store,
    past all ends if this is a part; and as ``store`` does.
    """
    o, lse, doubt = result
    tile, part, keys = where
    q_start, seqlen_q = tile[2], tile[4]
    lost = doubt * 0
    left = q_start
    if part >= 0:
        i = q_start + rows
        overflow = gl.convert_layout(gl.sum(o * 0.0, 1), lse.type.layout) != 0
        first, stop = key_range(i, tile, problem)
        seen = gl.maximum(first, keys[0]) < gl.minimum(stop, keys[1])
        lost = ((i < seqlen_q) & seen & (overflow | (doubt != 0))).to(gl.int32)
        o_ptr, lse_ptr = results[7], results[8]
        COLUMNS: gl.constexpr = o.shape[1]
        TILE_Q: gl.constexpr = how[0] * ROWS
        row = part * TILE_Q + W * ROWS
        gl.store(lse_ptr + part * TILE_Q + rows, lse)
        store_rows(o, (o_ptr, (0, COLUMNS, 0), COLUMNS, 1), (part * 0, part * 0, row, part * 0, ROWS))
        left = q_start * 0 + NOWHERE
    return tile[:2] + (left,) + tile[3:], lost  # noqa: RUF005


@gluon.jit
def store(W: gl.constexpr, result, rows, tile, results, problem, terms, how: gl.constexpr):
    """Store a consumer's output and row statistics. Returns 1 for a row that an anchor has lost: it is
    in doubt, or its output is not finite, though it sees keys."""
    o, lse, rest, doubt = result
    o_desc, o_s, o_ptr, o_strides, lse_ptr, lse_strides, columns, o_parts, lse_parts, rest_ptr = results
    b, head, q_start, start_q, seqlen_q, start_k, seqlen_k, seen_k = tile[:8]
    i = q_start + rows
    row_of_head = b.to(gl.int64) * lse_strides[0] + head.to(gl.int64) * lse_strides[1]
    lse_base = lse_ptr + row_of_head
    gl.store(lse_base + start_q + i, lse, mask=i < seqlen_q)
    if rest_ptr is not None:
        rest_base = rest_ptr + row_of_head
        gl.store(rest_base + start_q + i, rest, mask=i < seqlen_q)
    overflow = gl.convert_layout(gl.sum(o.to(gl.float32) * 0.0, 1), lse.type.layout) != 0
    first, stop = key_range(i, tile, problem)
    lost = (i < seqlen_q) & (first < stop) & (overflow | (doubt != 0))

    if tile_has_dead_rows(tile, problem, how[0] * ROWS):  # V may hold what 0 does not cancel
        dead = (i < 0) | (first >= stop) if terms[SINK] is not None else lse == -INF
        o = gl.where(spread(dead, o), 0.0, o)
    row = q_start + W * ROWS
    if o_desc is not None:
        COLUMNS: gl.constexpr = o.shape[1]
        PART: gl.constexpr = o_s.shape[2]  # columns for which there is a buffer
        for part in gl.static_range(COLUMNS // PART):
            tma_store_wait(0)  # what was there before has left the buffer
            o_s.index(W).store(columns_of(o, part, COLUMNS // PART))
            fence_async_shared()
            thread_barrier()
            at = coordinates(b, head, start_q, row, part * PART, seqlen_q, problem[1][4], how[3])
            tma_store(o_desc, at, o_s.index(W))
    else:
        store_rows(o, (o_ptr, o_strides, columns, 1), (b, head, start_q, row, seqlen_q))
    return lost.to(gl.int32)


# Sizes are not compiled in, whatever they are: one kernel serves all.
@gluon.jit(
    do_not_specialize=[
        *("o_batch", "o_row", "o_head", "lse_batch", "lse_head", "max_q", "max_k", "heads", "group"),
        *("batch_heads", "together", "left", "right", "tiles", "columns"),
        *UNSPECIALIZED,
    ]
)
def forward_kernel(
    q_desc,
    k_desc,
    v_desc,
    o_desc,  # None: the output leaves by plain stores
    o_ptr,
    o_batch,  # strides
    o_row,
    o_head,
    lse_ptr,
    lse_batch,
    lse_head,
    agenda,  # None: programs take query tiles in turn, or claim them
    parts,  # None: of no query tile
    claims,  # None: they do not
    o_parts,  # what comes of parts, and its log-sum-exps
    lse_parts,
    rest_ptr,  # see ``statistics``, or None; lies as lse does
    bias_ptr,  # from here on ``Terms``
    bias_batch,
    bias_head,
    bias_row,
    bias_key,
    slopes_ptr,
    slopes_batch,
    sink_ptr,
    dropout_key,
    threshold,
    keep_scale,
    unaligned,  # None: see ``given_terms``
    cu_q,
    cu_k,
    used_q,
    used_k,
    max_q,
    max_k,
    heads,
    group,
    batch_heads,
    together,
    left,
    right,
    scale,
    softcap,
    tiles,
    columns,  # of the output, up to BLOCK_DV
    BLOCK_D: gl.constexpr,
    PARTS: gl.constexpr,  # blocks of BLOCK_D columns of Q and K
    BLOCK_DV: gl.constexpr,
    O_COLUMNS: gl.constexpr,  # that leave through a buffer at once: all, or half of them
    CONSUMERS: gl.constexpr,
    TILE_K: gl.constexpr,
    STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr,
    Q_IN_REGISTERS: gl.constexpr,
    PING_PONG: gl.constexpr,
    RAGGED: gl.constexpr,
    ANCHORED: gl.constexpr,
    BIAS_UNIT: gl.constexpr,  # see ``terms.bias_unit``
    REGISTERS: gl.constexpr,
):
    DTYPE: gl.constexpr = q_desc.dtype
    rows_d: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_D], DTYPE)
    keys_d: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE_K, BLOCK_D], DTYPE)
    keys_dv: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE_K, BLOCK_DV], DTYPE)
    q_ring = make_ring("Q", DTYPE, [ROWS, BLOCK_D], rows_d, Q_STAGES * CONSUMERS, 1, PARTS)
    k_ring = make_ring("K", DTYPE, [TILE_K, BLOCK_D], keys_d, STAGES, CONSUMERS, PARTS)
    v_ring = make_ring("V", DTYPE, [TILE_K, BLOCK_DV], keys_dv, STAGES, CONSUMERS)
    # No barrier without a use: its memory would be given to a buffer, and it written over that later.
    turns = ()
    if PING_PONG:
        turns = make_turns(CONSUMERS)
    verdict = ()
    if ANCHORED:
        verdict = make_verdict(CONSUMERS)
    o_strides = (o_batch, o_row, o_head)
    o_s = ()
    if o_desc is not None:
        rows_o: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, O_COLUMNS], DTYPE)
        o_s = gl.allocate_shared_memory(DTYPE, [CONSUMERS, ROWS, O_COLUMNS], rows_o)
        label_stages(o_s, "O")
    lse_strides = (lse_batch, lse_head)
    results = (
        o_desc,
        o_s,
        o_ptr,
        o_strides,
        lse_ptr,
        lse_strides,
        columns,
        o_parts,
        lse_parts,
        rest_ptr,
    )
    terms = (
        bias_ptr,
        bias_batch,
        bias_head,
        bias_row,
        bias_key,
        slopes_ptr,
        slopes_batch,
        sink_ptr,
        dropout_key,
        threshold,
        keep_scale,
        unaligned,
    )

    inputs = (q_desc, k_desc, v_desc)
    rings = (q_ring, k_ring, v_ring)
    lengths = (cu_q, cu_k, used_q, used_k, max_q, max_k)
    PLACED: gl.constexpr = bias_ptr is not None or slopes_ptr is not None or dropout_key is not None
    queue = make_queue("tiles", 15 if PLACED else 13, 1 if RAGGED else 2, CONSUMERS + 1)
    problem = (
        (tiles, agenda, parts, claims),
        lengths,
        (heads, group, batch_heads, together),
        (left, right),
    )
    factors = (scale, softcap)
    shared = (results, rings, problem, factors, turns, queue, terms)
    COALESCED: gl.constexpr = BLOCK_D * PARTS <= 128 and BLOCK_DV <= 128  # else no room for it
    how: gl.constexpr = (CONSUMERS, Q_IN_REGISTERS, PING_PONG, RAGGED, BIAS_UNIT, COALESCED)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume, (0, shared, verdict, how, ANCHORED)),
                (consume, (1, shared, verdict, how, ANCHORED)),
                (produce, (inputs, rings, queue, problem, verdict, how, ANCHORED)),
                (deal, (queue, problem, verdict, how, TILE_K, ANCHORED)),
            ],
            [4, 1, 1],
            [REGISTERS, 24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (0, shared, verdict, how, ANCHORED)),
                (consume, (1, shared, verdict, how, ANCHORED)),
                (consume, (2, shared, verdict, how, ANCHORED)),
                (produce, (inputs, rings, queue, problem, verdict, how, ANCHORED)),
                (deal, (queue, problem, verdict, how, TILE_K, ANCHORED)),
            ],
            [4, 4, 1, 1],
            [REGISTERS, REGISTERS, 24, 24],
        )


def forward(spec: AttentionSpec, x: Inputs, out: Tensor, lse: Tensor, saved: Tensor) -> None:
    """Fill out and lse, and saved where there is a bias. See ``tilewise.dispatch.Kernel``."""
    launch_forward(forward_kernel, spec, x, out, lse, saved)


def bind(spec: AttentionSpec, x: Inputs, out: Tensor, lse: Tensor) -> Any:
    """See ``tilewise.dispatch.Kernel.bind``."""
    return bind_forward(forward_kernel, spec, x, out, lse)
