"""The consumers of the Hopper backward for head dims above 128, where dK and dV are too large for one.

The key tile is one of 64 keys, of which one consumer keeps dV in registers, the other dK:

    the weighing one:         S^T = K Q^T, P^T = softmax(S^T);           dV += P^T dO
    the differentiating one:  dP^T = V dO^T, dS^T = P^T * (dP^T - delta); dK += dS^T Q

Where the last quarter of the columns would be zeros it takes no part: a half and a quarter then are
products of their own, and 192 columns cost three quarters of 256, also in sums to memory. Gradients of
all columns are one product each: in halves they take more registers than Triton 3.9's assembler has.

Each has in registers what its last product takes from the left, and works as much as the other whatever
the head dims. P^T goes from the first to the second through shared memory, in the inputs' dtype, as
plain PyTorch has it, negative where dropout takes a weight; with softcap the slope is in it already, for
dV takes the weights from registers, and what rounding takes from the two goes along. dS^T goes there for
dQ, of whose columns each computes half: the first a query tile late, so that it never waits for dS of
the weights it has just handed over.
Both begin dQ before their own gradient, under which it is then added to memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewise.backends.hopper.backward_parts import (
    accumulator,
    add_dq,
    afresh,
    first_query_tile,
    load_added,
    masked,
    next_query_tile,
    spread_over_keys,
    start_dq,
    start_dropout,
    store_gradient,
    weights,
    with_dropout,
    with_key_tile,
)
from tilewise.backends.hopper.terms import (
    kept,
    load_dropout_key,
    scale_of_kept,
    score_gradients,
)
from tilewise.backends.hopper.tile import logits, next_key_tile, softcap_slope


@gluon.jit
def weigh(
    to,
    queue,
    shared,
    p_ring,
    problem,
    factors,
    FILLED_D: gl.constexpr,
    FILLED_DV: gl.constexpr,
):
    """Consumer 0: weights for both, dV, and the first half of every dQ tile's columns."""
    ring, beside, once, ds_ring, dq_rows = shared
    kv_ring = once[2]
    DQ_COLUMNS: gl.constexpr = once[0].shape[2] // 2
    terms = problem[4]
    dropout_key = load_dropout_key(terms)
    base = gl.program_id(0) * 0  # steps before those of a key tile
    kv, place = base, base  # loads of K and V, and key tiles
    t, tile, runs = next_key_tile(queue, place, 4)
    while t >= 0:
        work = (tile, runs, problem, dropout_key)
        dv = no_gradient(once[1], FILLED_DV)
        steps = (runs[3] - runs[0]) * problem[2][1]
        if steps > 0:
            kv_ring.wait_full(kv)
            mine = with_key_tile(shared, kv)
            n, row, head = first_query_tile(tile, runs, problem, shared)
            at = (base, n, head, row)
            dv = visit_weights(at, dv, mine, p_ring, work, factors, FILLED_D, FIRST=True)
            for step in range(base + 1, base + steps):
                before = row
                n, row, head = next_query_tile(n, row, head, runs, shared)
                at = (step, n, head, before)
                dv = visit_weights(at, dv, mine, p_ring, work, factors, FILLED_D, FIRST=False)
            last = base + steps - 1
            ds_ring.wait_full(last)
            dq = warpgroup_mma_wait(0, [start_dq(0, 0, DQ_COLUMNS, last, mine)])
            ds_ring.release(last)
            add_dq(0, 0, dq, row, shared)
            kv_ring.release(kv)
            kv += 1
        base += steps
        store_gradients(dv, scale_of_kept(terms), p_ring, base, to, tile)
        place += 1
        t, tile, runs = next_key_tile(queue, place, 4)


@gluon.jit
def differentiate(
    to,
    queue,
    shared,
    p_ring,
    problem,
    factors,
    FILLED_D: gl.constexpr,
    FILLED_DV: gl.constexpr,
):
    """Consumer 1: gradients of the scores, dK, and the second half of every dQ tile's columns."""
    ring, beside, once, ds_ring, dq_rows = shared
    kv_ring = once[2]
    base = gl.program_id(0) * 0
    kv, place = base, base
    t, tile, runs = next_key_tile(queue, place, 4)
    while t >= 0:
        dk = no_gradient(once[0], FILLED_D)
        steps = (runs[3] - runs[0]) * problem[2][1]
        if steps > 0:
            kv_ring.wait_full(kv)
            mine = with_key_tile(shared, kv)
            n, row, head = first_query_tile(tile, runs, problem, shared)
            for step in range(base, base + steps):
                at = (step, row)
                dk = visit_gradients(at, dk, mine, p_ring, problem, factors, FILLED_D, FILLED_DV)
                n, row, head = next_query_tile(n, row, head, runs, shared)
            kv_ring.release(kv)
            kv += 1
        base += steps
        store_gradients(dk, factors[2], ds_ring, base, to, tile)
        place += 1
        t, tile, runs = next_key_tile(queue, place, 4)


@gluon.jit
def no_gradient(like, FILLED: gl.constexpr):
    """Zeros for the gradient of a key tile's K or V: all columns, or those of three quarters in two."""
    ROWS: gl.constexpr = like.shape[1]
    COLUMNS: gl.constexpr = like.shape[2]
    if FILLED == COLUMNS:
        return (accumulator(ROWS, COLUMNS),)
    else:
        return accumulator(ROWS, COLUMNS // 2), accumulator(ROWS, FILLED - COLUMNS // 2)


@gluon.jit
def store_gradients(gradient, factor, ring, i, to, tile):
    """Store a key tile's gradient, or its columns in two parts."""
    store_gradient(gradient[0] * factor, 0, ring, 0, i, to, tile, tile[2])
    if len(gradient) > 1:
        HALF: gl.constexpr = gradient[0].shape[1]
        store_gradient(gradient[1] * factor, HALF, ring, 0, i, to, tile, tile[2])


@gluon.jit
def start_scores(a, b, begin, FILLED: gl.constexpr, ADD: gl.constexpr):
    """a b^T, under way; added to what it begins with if ADD."""
    HALF: gl.constexpr = a.shape[1] // 2
    REST: gl.constexpr = FILLED - HALF
    b_left, b_right = b.slice(0, HALF, 1).permute((1, 0)), b.slice(HALF, REST, 1).permute((1, 0))
    token = warpgroup_mma(a.slice(0, HALF, 1), b_left, begin, use_acc=ADD, is_async=True)
    return warpgroup_mma(a.slice(HALF, REST, 1), b_right, token, is_async=True)


@gluon.jit
def start_gradient(weights, x, gradient):
    """gradient += weights x, under way."""
    HALF: gl.constexpr = gradient[0].shape[1]
    left = start_columns(weights, x, gradient[0], 0)
    if len(gradient) > 1:
        return left, start_columns(weights, x, gradient[1], HALF)
    else:
        return (left,)


@gluon.jit
def start_columns(weights, x, gradient, FIRST: gl.constexpr):
    """The same of columns from FIRST on."""
    COLUMNS: gl.constexpr = gradient.shape[1]
    weights = gl.convert_layout(weights, gl.DotOperandLayout(0, gradient.type.layout, 2))
    return warpgroup_mma(weights, x.slice(FIRST, COLUMNS, 1), gradient, is_async=True)


@gluon.jit
def wait_for_gradient(gradient):
    """The same when all products are done."""
    if len(gradient) > 1:
        left, right = warpgroup_mma_wait(0, [gradient[0], gradient[1]])
        return left, right
    else:
        return (warpgroup_mma_wait(0, [gradient[0]]),)


@gluon.jit
def add_products(
    COLUMN: gl.constexpr,
    COLUMNS: gl.constexpr,
    weights,
    x,
    gradient,
    step,
    row,
    shared,
):
    """gradient += weights x, and COLUMNS of the dQ tile of a step that begins with a row.

    dQ first: it is added to memory while the gradient is computed.
    """
    ring, beside, once, ds_ring, dq_rows = shared
    PRODUCTS: gl.constexpr = len(gradient)
    ds_ring.wait_full(step)
    dq_token = start_dq(0, COLUMN, COLUMNS, step, shared)
    gradient = start_gradient(weights, x, gradient)
    dq = warpgroup_mma_wait(PRODUCTS, [dq_token])
    ds_ring.release(step)
    add_dq(0, COLUMN, dq, row, shared)
    return wait_for_gradient(gradient)


@gluon.jit
def visit_weights(
    at,
    dv,
    shared,
    p_ring,
    work,
    factors,
    FILLED_D: gl.constexpr,
    FIRST: gl.constexpr,
):
    """The weights of a query tile, and what they add to dV; half of dQ of the tile before, unless this
    is the first.

    at: the step, which query tile of which head it is, and the first row of the one before in the space
    of ``around``.
    """
    step, n, head, before = at
    tile, runs, problem, dropout_key = work
    ring, beside, once, ds_ring, dq_rows = shared
    dout_s, lse_s, minus_delta_s, rest_s = beside
    scale, softcap, gradient_scale = factors
    DTYPE: gl.constexpr = ring.buffer.dtype
    TILE_Q: gl.constexpr = ring.buffer.shape[1]
    TILE_K: gl.constexpr = once[0].shape[1]
    DQ_COLUMNS: gl.constexpr = once[0].shape[2] // 2
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_Q, 16])
    q = ring.wait_full(step)
    st = step % ring.stages
    k = once[0].index(once[3] + afresh(step))
    keeps = start_dropout(n, head, 0, work, scores, TILE_K, TILE_Q)
    s_token = start_scores(k, q, accumulator(TILE_K, TILE_Q), FILLED_D, ADD=False)
    lse = lse_s.index(st).load(gl.SliceLayout(0, scores))
    to_add = load_added(n, head, 0, work, scores, TILE_K, TILE_Q)
    s = warpgroup_mma_wait(0, [s_token])
    s, factor = logits(s, scale, softcap)
    p = weights(s, factor, to_add, n, 0, lse, rest_s, st, work)
    p = with_dropout(p, keeps, n, head, 0, work)
    p = masked(p, n, 0, tile, runs, problem, TILE_K)
    kept_p = kept(p, problem[4]).to(DTYPE)
    if softcap is not None:
        p *= softcap_slope(s, softcap)
    p_ring.wait_empty(step)
    p_ring.stage(step).store(p.to(DTYPE))
    if p_ring.parts > 1:
        p_ring.stage(step, 1).store((p - p.to(DTYPE).to(gl.float32)).to(DTYPE))
    p_ring.hand_over(step)
    dout = dout_s.index(st)
    if FIRST:
        dv = wait_for_gradient(start_gradient(kept_p, dout, dv))
    else:
        dv = add_products(0, DQ_COLUMNS, kept_p, dout, dv, step - 1, before, shared)
    ring.release(step)
    return dv


@gluon.jit
def visit_gradients(
    at,
    dk,
    shared,
    p_ring,
    problem,
    factors,
    FILLED_D: gl.constexpr,
    FILLED_DV: gl.constexpr,
):
    """What a query tile adds to dK, and half of its dQ. at: the step, and the tile's first row in the
    space of ``around``."""
    step, row = at
    terms = problem[4]
    ring, beside, once, ds_ring, dq_rows = shared
    dout_s, lse_s, minus_delta_s, rest_s = beside
    DTYPE: gl.constexpr = ring.buffer.dtype
    TILE_Q: gl.constexpr = ring.buffer.shape[1]
    TILE_K: gl.constexpr = once[0].shape[1]
    HALF: gl.constexpr = once[0].shape[2] // 2
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_Q, 16])
    q = ring.wait_full(step)
    st = step % ring.stages
    v = once[1].index(once[3] + afresh(step))
    minus_delta = minus_delta_s.index(st).load(gl.SliceLayout(0, scores))
    dp = spread_over_keys(minus_delta, factors[0], TILE_K, scores)
    dp_token = start_scores(v, dout_s.index(st), dp, FILLED_DV, ADD=True)
    p = p_ring.wait_full(step).load(scores).to(gl.float32)
    if p_ring.parts > 1:
        p += p_ring.stage(step, 1).load(scores).to(gl.float32)
    dp = warpgroup_mma_wait(0, [dp_token])
    ds = score_gradients(p, dp, minus_delta_s.index(st), terms).to(DTYPE)
    ds_ring.wait_empty(step)
    ds_ring.stage(step).store(ds)
    ds_ring.hand_over(step)
    p_ring.release(step)
    dk = add_products(HALF, FILLED_D - HALF, ds, q, dk, step, row, shared)
    ring.release(step)
    return dk
