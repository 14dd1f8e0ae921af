"""The consumers of the Hopper backward for head dims above 128, where dK and dV are too large for one.

The key tile is one of 64 keys, of which one consumer keeps dV in registers, the other dK:

    the weighing one:         S^T = K Q^T, P^T = softmax(S^T);           dV += P^T dO
    the differentiating one:  dP^T = V dO^T, dS^T = P^T * (dP^T - delta); dK += dS^T Q

Each has in registers what its last product takes from the left, and works as much as the other whatever
the head dims. P^T goes from the first to the second through shared memory, in the inputs' dtype, as
plain PyTorch has it; with softcap the slope is in it already, for dV takes the weights from registers.
dS^T goes there for dQ, of whose columns each computes half: the first a query tile late, so that it
never waits for dS of the weights it has just handed over.
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
def weigh(to, shared, p_ring, tile, runs, problem, factors):
    """Consumer 0: weights for both, dV, and half of every dQ tile."""
    ring, beside, once, ds_ring, dq_rows = shared
    dv = no_gradient(once[1])
    steps = (runs[3] - runs[0]) * problem[2][1]
    if steps > 0:
        mbarrier.wait(once[2], 0)
        n, row = first_query_tile(tile, runs, problem, shared)
        dv = visit_weights(0, n, row, dv, shared, p_ring, tile, runs, problem, factors, True)
        for step in range(1, steps):
            before = row
            n, row = next_query_tile(n, row, runs, shared)
            dv = visit_weights(step, n, before, dv, shared, p_ring, tile, runs, problem, factors, False)
        ds_ring.wait_full(steps - 1)
        dq = warpgroup_mma_wait(0, [start_dq(0, steps - 1, shared)])
        add_dq(0, dq, row, shared)
    store_rows(dv, to, (tile[0], tile[1], tile[5], tile[2], tile[7]))


@gluon.jit
def differentiate(to, shared, p_ring, tile, runs, problem, factors):
    """Consumer 1: gradients of the scores, dK, and the other half of every dQ tile."""
    ring, beside, once, ds_ring, dq_rows = shared
    dk = no_gradient(once[0])
    steps = (runs[3] - runs[0]) * problem[2][1]
    if steps > 0:
        mbarrier.wait(once[2], 0)
        n, row = first_query_tile(tile, runs, problem, shared)
        for step in range(steps):
            dk = visit_gradients(step, row, dk, shared, p_ring, factors)
            n, row = next_query_tile(n, row, runs, shared)
    store_rows(dk * factors[2], to, (tile[0], tile[1], tile[5], tile[2], tile[7]))


@gluon.jit
def no_gradient(like):
    """Zeros for the gradient of a key tile's K or V."""
    ROWS: gl.constexpr = like.shape[1]
    COLUMNS: gl.constexpr = like.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    return gl.zeros([ROWS, COLUMNS], gl.float32, layout)


@gluon.jit
def visit_weights(
    step,
    n,
    before,
    dv,
    shared,
    p_ring,
    tile,
    runs,
    problem,
    factors,
    FIRST: gl.constexpr,
):
    """The weights of query tile n, and what they add to dV; half of dQ of the tile before, unless this
    is the first. before: the first row of that one in the space of ``around``."""
    ring, beside, once, ds_ring, dq_rows = shared
    dout_s, lse_s, minus_delta_s = beside
    scale, softcap, gradient_scale = factors
    DTYPE: gl.constexpr = ring.buffer.dtype
    TILE_Q: gl.constexpr = ring.buffer.shape[1]
    TILE_K: gl.constexpr = once[0].shape[1]
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_Q, 16])
    q = ring.wait_full(step)
    st = step % ring.stages
    k = once[0].index(afresh(step))
    no_scores = gl.zeros([TILE_K, TILE_Q], gl.float32, scores)
    s_token = warpgroup_mma(k, q.permute((1, 0)), no_scores, use_acc=False, is_async=True)
    lse = lse_s.index(st).load(gl.SliceLayout(0, scores))
    s = warpgroup_mma_wait(0, [s_token])
    s, factor = logits(s, scale, softcap)
    p = gl.exp2(s * factor - lse[None, :])
    p = masked(p, n, 0, tile, runs, problem, TILE_K)
    p_left = gl.convert_layout(p.to(DTYPE), gl.DotOperandLayout(0, dv.type.layout, 2))
    if softcap is not None:
        p *= softcap_slope(s, softcap)
    p_ring.wait_empty(step)
    p_ring.stage(step).store(p.to(DTYPE))
    p_ring.hand_over(step)
    dv_token = warpgroup_mma(p_left, dout_s.index(st), dv, is_async=True)
    if FIRST:
        dv = warpgroup_mma_wait(0, [dv_token])
        ring.release(step)
    else:
        ds_ring.wait_full(step - 1)
        dq_token = start_dq(0, step - 1, shared)
        dv = warpgroup_mma_wait(1, [dv_token])
        ring.release(step)
        dq = warpgroup_mma_wait(0, [dq_token])
        ds_ring.release(step - 1)
        add_dq(0, dq, before, shared)
    return dv


@gluon.jit
def visit_gradients(step, row, dk, shared, p_ring, factors):
    """What a query tile adds to dK, and half of its dQ. row: its first in the space of ``around``."""
    ring, beside, once, ds_ring, dq_rows = shared
    dout_s, lse_s, minus_delta_s = beside
    DTYPE: gl.constexpr = ring.buffer.dtype
    TILE_Q: gl.constexpr = ring.buffer.shape[1]
    TILE_K: gl.constexpr = once[0].shape[1]
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_Q, 16])
    q = ring.wait_full(step)
    st = step % ring.stages
    v = once[1].index(afresh(step))
    minus_delta = minus_delta_s.index(st).load(gl.SliceLayout(0, scores))
    dp = spread_over_keys(minus_delta, factors[0], TILE_K, scores)
    dp_token = warpgroup_mma(v, dout_s.index(st).permute((1, 0)), dp, is_async=True)
    p = p_ring.wait_full(step).load(scores)
    dp = warpgroup_mma_wait(0, [dp_token])
    ds = (p.to(gl.float32) * dp).to(DTYPE)
    ds_ring.wait_empty(step)
    ds_ring.stage(step).store(ds)
    ds_ring.hand_over(step)
    p_ring.release(step)
    ds_left = gl.convert_layout(ds, gl.DotOperandLayout(0, dk.type.layout, 2))
    dk_token = warpgroup_mma(ds_left, q, dk, is_async=True)
    ds_ring.wait_full(step)
    dq_token = start_dq(1, step, shared)
    dk = warpgroup_mma_wait(1, [dk_token])
    ring.release(step)
    dq = warpgroup_mma_wait(0, [dq_token])
    ds_ring.release(step)
    add_dq(1, dq, row, shared)
    return dk
