"""The consumers of the Hopper backward for head dims above 128, where dK and dV are too large for one.

The key tile is one of 64 keys, of which one consumer keeps dV in registers, the other dK:

    the weighing one:         S^T = K Q^T, P^T = softmax(S^T);           dV += P^T dO
    the differentiating one:  dP^T = V dO^T, dS^T = P^T * (dP^T - delta); dK += dS^T Q

Operands and gradients are taken in two halves of their columns, and the second one is a quarter where
the rest would be zeros: 192 columns cost three quarters of 256, in products and in sums to memory.

Each has in registers what its last product takes from the left, and works as much as the other whatever
the head dims. P^T goes from the first to the second through shared memory, in the inputs' dtype, as
plain PyTorch has it; with softcap the slope is in it already, for dV takes the weights from registers.
dS^T goes there for dQ, of whose columns each computes half: the first a query tile late, so that it
never waits for dS of the weights it has just handed over. Both begin dQ before their own gradient, under
which it is then added to memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewise.backends.hopper.backward_parts import (
    add_dq,
    afresh,
    first_query_tile,
    masked,
    next_query_tile,
    spread_over_keys,
    start_dq,
)
from tilewise.backends.hopper.tile import logits, softcap_slope, store_rows


@gluon.jit
def weigh(
    to,
    shared,
    p_ring,
    work,
    factors,
    FILLED_D: gl.constexpr,
    FILLED_DV: gl.constexpr,
):
    """Consumer 0: weights for both, dV, and the first half of every dQ tile's columns."""
    tile, runs, problem = work
    ring, beside, once, ds_ring, dq_rows = shared
    left, right = no_gradient(once[1], FILLED_DV)
    steps = (runs[3] - runs[0]) * problem[2][1]
    DQ_COLUMNS: gl.constexpr = once[0].shape[2] // 2
    if steps > 0:
        mbarrier.wait(once[2], 0)
        n, row = first_query_tile(tile, runs, problem, shared)
        at = (0, n, row)
        dv = (left, right)
        left, right = visit_weights(at, dv, shared, p_ring, work, factors, FILLED_D, FIRST=True)
        for step in range(1, steps):
            before = row
            n, row = next_query_tile(n, row, runs, shared)
            at = (step, n, before)
            dv = (left, right)
            left, right = visit_weights(at, dv, shared, p_ring, work, factors, FILLED_D, FIRST=False)
        ds_ring.wait_full(steps - 1)
        dq = warpgroup_mma_wait(0, [start_dq(0, steps - 1, shared, DQ_COLUMNS)])
        add_dq(0, dq, row, shared)
    store_halves(left, right, to, tile)


@gluon.jit
def differentiate(
    to,
    shared,
    p_ring,
    work,
    factors,
    FILLED_D: gl.constexpr,
    FILLED_DV: gl.constexpr,
):
    """Consumer 1: gradients of the scores, dK, and the second half of every dQ tile's columns."""
    tile, runs, problem = work
    ring, beside, once, ds_ring, dq_rows = shared
    left, right = no_gradient(once[0], FILLED_D)
    steps = (runs[3] - runs[0]) * problem[2][1]
    if steps > 0:
        mbarrier.wait(once[2], 0)
        n, row = first_query_tile(tile, runs, problem, shared)
        for step in range(steps):
            dk = (left, right)
            left, right = visit_gradients(step, row, dk, shared, p_ring, factors, FILLED_DV)
            n, row = next_query_tile(n, row, runs, shared)
    store_halves(left * factors[2], right * factors[2], to, tile)


@gluon.jit
def no_gradient(like, FILLED: gl.constexpr):
    """Zeros for the gradient of a key tile's K or V, in halves of its columns."""
    ROWS: gl.constexpr = like.shape[1]
    HALF: gl.constexpr = like.shape[2] // 2
    REST: gl.constexpr = FILLED - HALF
    left_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    right_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, REST, 16])
    left = gl.zeros([ROWS, HALF], gl.float32, left_layout)
    return left, gl.zeros([ROWS, REST], gl.float32, right_layout)


@gluon.jit
def store_halves(left, right, to, tile):
    """Store both halves of the columns of a key tile's gradient."""
    ptr, strides, columns = to
    HALF: gl.constexpr = left.shape[1]
    rows = (tile[0], tile[1], tile[5], tile[2], tile[7])
    store_rows(left, to, rows)
    store_rows(right, (ptr + HALF, strides, columns - HALF), rows)


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
    """gradient += weights x, of all its columns, under way."""
    left, right = gradient
    HALF: gl.constexpr = left.shape[1]
    REST: gl.constexpr = right.shape[1]
    for_left = gl.convert_layout(weights, gl.DotOperandLayout(0, left.type.layout, 2))
    for_right = gl.convert_layout(weights, gl.DotOperandLayout(0, right.type.layout, 2))
    left = warpgroup_mma(for_left, x.slice(0, HALF, 1), left, is_async=True)
    return left, warpgroup_mma(for_right, x.slice(HALF, REST, 1), right, is_async=True)


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

    at: which step and query tile it is, and the first row of the one before in the space of ``around``.
    """
    step, n, before = at
    tile, runs, problem = work
    ring, beside, once, ds_ring, dq_rows = shared
    dout_s, lse_s, minus_delta_s = beside
    scale, softcap, gradient_scale = factors
    DTYPE: gl.constexpr = ring.buffer.dtype
    TILE_Q: gl.constexpr = ring.buffer.shape[1]
    TILE_K: gl.constexpr = once[0].shape[1]
    DQ_COLUMNS: gl.constexpr = once[0].shape[2] // 2
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_Q, 16])
    q = ring.wait_full(step)
    st = step % ring.stages
    k = once[0].index(afresh(step))
    no_scores = gl.zeros([TILE_K, TILE_Q], gl.float32, scores)
    s_token = start_scores(k, q, no_scores, FILLED_D, ADD=False)
    lse = lse_s.index(st).load(gl.SliceLayout(0, scores))
    s = warpgroup_mma_wait(0, [s_token])
    s, factor = logits(s, scale, softcap)
    p = gl.exp2(s * factor - lse[None, :])
    p = masked(p, n, 0, tile, runs, problem, TILE_K)
    weights = p.to(DTYPE)
    if softcap is not None:
        p *= softcap_slope(s, softcap)
    p_ring.wait_empty(step)
    p_ring.stage(step).store(p.to(DTYPE))
    p_ring.hand_over(step)
    if FIRST:
        left_token, right_token = start_gradient(weights, dout_s.index(st), dv)
        left, right = warpgroup_mma_wait(0, [left_token, right_token])
    else:
        ds_ring.wait_full(step - 1)
        dq_token = start_dq(0, step - 1, shared, DQ_COLUMNS)
        left_token, right_token = start_gradient(weights, dout_s.index(st), dv)
        dq = warpgroup_mma_wait(2, [dq_token])
        ds_ring.release(step - 1)
        add_dq(0, dq, before, shared)
        left, right = warpgroup_mma_wait(0, [left_token, right_token])
    ring.release(step)
    return left, right


@gluon.jit
def visit_gradients(step, row, dk, shared, p_ring, factors, FILLED_DV: gl.constexpr):
    """What a query tile adds to dK, and half of its dQ. row: its first in the space of ``around``."""
    ring, beside, once, ds_ring, dq_rows = shared
    dout_s, lse_s, minus_delta_s = beside
    DTYPE: gl.constexpr = ring.buffer.dtype
    TILE_Q: gl.constexpr = ring.buffer.shape[1]
    TILE_K: gl.constexpr = once[0].shape[1]
    DQ_COLUMNS: gl.constexpr = dk[1].shape[1]
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_Q, 16])
    q = ring.wait_full(step)
    st = step % ring.stages
    v = once[1].index(afresh(step))
    minus_delta = minus_delta_s.index(st).load(gl.SliceLayout(0, scores))
    dp = spread_over_keys(minus_delta, factors[0], TILE_K, scores)
    dp_token = start_scores(v, dout_s.index(st), dp, FILLED_DV, ADD=True)
    p = p_ring.wait_full(step).load(scores)
    dp = warpgroup_mma_wait(0, [dp_token])
    ds = (p.to(gl.float32) * dp).to(DTYPE)
    ds_ring.wait_empty(step)
    ds_ring.stage(step).store(ds)
    ds_ring.hand_over(step)
    p_ring.release(step)
    ds_ring.wait_full(step)
    dq_token = start_dq(1, step, shared, DQ_COLUMNS)
    left_token, right_token = start_gradient(ds, q, dk)
    dq = warpgroup_mma_wait(2, [dq_token])
    ds_ring.release(step)
    add_dq(1, dq, row, shared)
    left, right = warpgroup_mma_wait(0, [left_token, right_token])
    ring.release(step)
    return left, right
