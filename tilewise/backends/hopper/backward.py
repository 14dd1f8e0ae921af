"""FlashAttention-3's backward in Gluon (Shah et al., "FlashAttention-3", 2024, algorithm 3).

A program takes key tiles, one after another, and walks the queries that see each, over all query heads
of its group, so that dK and dV stay in registers. A producer warp copies Q, dO and their row statistics
to shared memory by TMA, and two consumers, one warpgroup each, own half of the keys. Scores are held
transposed (keys, queries): so P^T and dS^T are left operands, which the tensor cores take from
registers.

dQ = dS K sums over the keys of both consumers: they exchange dS through shared memory, and each computes
half of every dQ tile, a tile later than all else. So neither waits for the other's softmax, and the
products of one run beside the softmax of the other. dQ is added to an accumulator in memory straight
from registers, in an order in which that is 16 bytes at a time.

Above head dim 128 the consumers are those of ``backward_wide``, in the same kernel.

Only queries that see a key and keys that are seen take part: positions count from the first of them.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewise.backends.hopper.around import finish_dq, prepare_rows
from tilewise.backends.hopper.backward_parts import (
    CONSUMERS,
    accumulator,
    add_dq,
    afresh,
    first_query_tile,
    load_added,
    make_buffers,
    masked,
    next_query_tile,
    produce,
    spread_over_keys,
    start_dq,
    start_dropout,
    store_gradient,
    weights,
    with_dropout,
    with_key_tile,
)
from tilewise.backends.hopper.backward_wide import differentiate, weigh
from tilewise.backends.hopper.launch_backward import launch_backward
from tilewise.backends.hopper.order import watch
from tilewise.backends.hopper.terms import (
    UNSPECIALIZED,
    kept,
    load_dropout_key,
    scale_of_kept,
    score_gradients,
)
from tilewise.backends.hopper.tile import (
    logits,
    next_key_tile,
    softcap_slope,
)
from tilewise.backends.triton.bias_gradient import fill_bias_gradient
from tilewise.backends.triton.delta import row_delta
from tilewise.backends.triton.terms import sink_gradient
from tilewise.gluon.queue import make_queue
from tilewise.gluon.ring import make_ring
from tilewise.gluon.turns import make_turns
from tilewise.ops import Gradients
from tilewise.spec import AttentionSpec, Inputs


@gluon.jit
def consume(
    W: gl.constexpr,
    results,
    queue,
    shared,
    problem,
    factors,
    turns,
    KV_IN_REGISTERS: gl.constexpr,
):
    """Consumer W: dK and dV of its keys of every key tile, and its part of every dQ tile."""
    ds_ring = shared[3]
    ROWS: gl.constexpr = shared[2][0].shape[1]
    base = gl.program_id(0) * 0  # steps before those of a key tile
    kv, place = base, base  # loads of K and V, and key tiles
    terms = problem[4]
    dropout_key = load_dropout_key(terms)
    t, tile, runs = next_key_tile(queue, place, 4)
    while t >= 0:
        work = (tile, runs, problem, dropout_key)
        dk, dv = visit_queries(
            W, base, kv, with_key_tile(shared, kv), work, factors, turns, KV_IN_REGISTERS
        )
        steps = (runs[3] - runs[0]) * problem[2][1]
        base += steps
        kv += min(steps, 1)
        row = tile[2] + W * ROWS
        store_gradient(dk * factors[2], 0, ds_ring, W, base, results[0], tile, row)
        store_gradient(dv * scale_of_kept(terms), 0, ds_ring, W, base, results[1], tile, row)
        place += 1
        t, tile, runs = next_key_tile(queue, place, 4)


@gluon.jit
def visit_queries(
    W: gl.constexpr, base, kv, shared, work, factors, turns, KV_IN_REGISTERS: gl.constexpr
):
    """What all queries that see a key tile add to dK and dV. base, kv: as in ``consume``."""
    ring, beside, once, ds_ring, dq_rows = shared
    k_s, v_s, kv_ring = once[0], once[1], once[2]
    tile, runs, problem, dropout_key = work
    TILE_Q: gl.constexpr = ring.buffer.shape[1]
    ROWS: gl.constexpr = k_s.shape[1]
    dk, dv = accumulator(ROWS, k_s.shape[2]), accumulator(ROWS, v_s.shape[2])
    steps = (runs[3] - runs[0]) * problem[2][1]
    if steps > 0:
        kv_ring.wait_full(kv)
        if KV_IN_REGISTERS:
            by_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_Q, 16])
            left_operand: gl.constexpr = gl.DotOperandLayout(0, by_scores, 2)
            keys = (k_s.index(once[3] + W).load(left_operand), v_s.index(once[3] + W).load(left_operand))
        else:
            keys = None
        n, row, head = first_query_tile(tile, runs, problem, shared)
        at = (base, n, head, row)
        dk, dv = visit(W, at, keys, (dk, dv), shared, work, factors, turns, FIRST=True)
        for step in range(base + 1, base + steps):
            before = row
            n, row, head = next_query_tile(n, row, head, runs, shared)
            at = (step, n, head, before)
            dk, dv = visit(W, at, keys, (dk, dv), shared, work, factors, turns, FIRST=False)
        last = base + steps - 1
        ds_ring.wait_full(last)
        dq = warpgroup_mma_wait(0, [start_my_dq(W, last, shared)])
        ds_ring.release(last)
        add_my_dq(W, dq, row, shared)
        kv_ring.release(kv)
    return dk, dv


@gluon.jit
def visit(
    W: gl.constexpr,
    at,
    keys,
    state,
    shared,
    work,
    factors,
    turns,
    FIRST: gl.constexpr,
):
    """What a query tile adds to dK and dV; and dQ of the tile before, unless this is the first.

    at: the step, which query tile of which head it is, and the first row of the one before in the space
    of ``around``. keys: K and V, if in registers.
    turns: in which consumers begin a step's products, so that one's softmax always falls into the
    other's products, and it is not left to chance in which phase they run against each other.
    """
    step, n, head, before = at
    ring, beside, once, ds_ring, dq_rows = shared
    dout_s, lse_s, minus_delta_s, rest_s = beside
    dk, dv = state
    tile, runs, problem, dropout_key = work
    terms = problem[4]
    scale, softcap, gradient_scale = factors
    if keys is not None:
        k, v = keys
    else:
        part = once[3] + W + afresh(step)
        k, v = once[0].index(part), once[1].index(part)
    DTYPE: gl.constexpr = ring.buffer.dtype
    TILE_Q: gl.constexpr = ring.buffer.shape[1]
    ROWS: gl.constexpr = once[0].shape[1]
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_Q, 16])
    per_query: gl.constexpr = gl.SliceLayout(0, scores)
    q = ring.wait_full(step)
    st = step % ring.stages
    dout = dout_s.index(st)
    keeps = start_dropout(n, head, W, work, scores, ROWS, TILE_Q)
    mbarrier.wait(turns.index(W), step & 1)
    s_token = warpgroup_mma(
        k, q.permute((1, 0)), accumulator(ROWS, TILE_Q), use_acc=False, is_async=True
    )
    minus_delta = minus_delta_s.index(st).load(per_query)
    dp = spread_over_keys(minus_delta, scale, ROWS, scores)  # dP - delta, less work once it is there
    dp_token = warpgroup_mma(v, dout.permute((1, 0)), dp, is_async=True)
    mbarrier.arrive(turns.index(1 - W), count=1)
    lse = lse_s.index(st).load(per_query)
    to_add = load_added(n, head, W, work, scores, ROWS, TILE_Q)
    s = warpgroup_mma_wait(1, [s_token])
    s, factor = logits(s, scale, softcap)
    p = weights(s, factor, to_add, n, W, lse, rest_s, st, work)
    p = with_dropout(p, keeps, n, head, W, work)
    p = masked(p, n, W, tile, runs, problem, CONSUMERS * ROWS)
    p_left = gl.convert_layout(kept(p, terms).to(DTYPE), gl.DotOperandLayout(0, dv.type.layout, 2))
    if softcap is not None:
        p *= softcap_slope(s, softcap)
    dv_token = warpgroup_mma(p_left, dout, dv, is_async=True)
    dp = warpgroup_mma_wait(1, [dp_token])
    ds = score_gradients(p, dp, minus_delta_s.index(st), terms).to(DTYPE)
    if not FIRST:
        ds_ring.wait_full(step - 1)
    ds_ring.wait_empty(step)
    ds_ring.stage(step, W).store(ds)
    ds_ring.hand_over(step)
    ds_left = gl.convert_layout(ds, gl.DotOperandLayout(0, dk.type.layout, 2))
    if FIRST:
        dk_token = warpgroup_mma(ds_left, q, dk, is_async=True)
        dv, dk = warpgroup_mma_wait(0, [dv_token, dk_token])
    else:
        dq_token = start_my_dq(W, step - 1, shared)
        dk_token = warpgroup_mma(ds_left, q, dk, is_async=True)
        dv, dq = warpgroup_mma_wait(1, [dv_token, dq_token])
        ds_ring.release(step - 1)
        add_my_dq(W, dq, before, shared)
        dk = warpgroup_mma_wait(0, [dk_token])
    ring.release(step)
    return dk, dv


@gluon.jit
def start_my_dq(W: gl.constexpr, step, shared):
    """Consumer W's part of the dQ tile of a step, under way: half of its columns, or of 128 queries."""
    TILE_Q: gl.constexpr = shared[0].buffer.shape[1]
    BLOCK_D: gl.constexpr = shared[2][0].shape[2]
    if TILE_Q > 64:
        return start_dq(W * 64, 0, BLOCK_D, step, shared)
    else:
        return start_dq(0, W * BLOCK_D // CONSUMERS, BLOCK_D // CONSUMERS, step, shared)


@gluon.jit
def add_my_dq(W: gl.constexpr, dq, row, shared):
    """Add that to the accumulator; the tile begins with a row."""
    TILE_Q: gl.constexpr = shared[0].buffer.shape[1]
    BLOCK_D: gl.constexpr = shared[2][0].shape[2]
    if TILE_Q > 64:
        add_dq(W * 64, 0, dq, row, shared)
    else:
        add_dq(0, W * BLOCK_D // CONSUMERS, dq, row, shared)


@gluon.jit(
    do_not_specialize=[
        *("max_q", "max_k", "heads", "group", "batch_heads", "together"),
        *("left", "right", "columns_d", "columns_dv", "rows_of_head", "rows_of_entry"),
        *("dk_batch", "dk_row", "dk_head", "dv_batch", "dv_row", "dv_head"),
        *UNSPECIALIZED,
    ]
)
def backward_kernel(
    k_desc,
    v_desc,
    q_desc,
    dout_desc,
    lse_desc,
    minus_delta_desc,
    rest_desc,  # of what rounding took from lse, or None
    taken,  # how many key tiles are
    progress,  # see ``order``, or None
    dq_ptr,
    dk_ptr,
    dk_batch,  # strides, in units
    dk_row,
    dk_head,
    dv_ptr,
    dv_batch,
    dv_row,
    dv_head,
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
    heads,  # of keys
    group,
    batch_heads,
    together,
    left,
    right,
    scale,
    softcap,
    gradient_scale,
    columns_d,  # in units as well
    columns_dv,
    rows_of_head,  # of the row statistics and the accumulator of dQ
    rows_of_entry,
    BLOCK_D: gl.constexpr,
    BLOCK_DV: gl.constexpr,
    FILLED_D: gl.constexpr,
    FILLED_DV: gl.constexpr,
    UNIT_D: gl.constexpr,
    UNIT_DV: gl.constexpr,
    TILE_Q: gl.constexpr,
    TILE_K: gl.constexpr,
    STAGES: gl.constexpr,
    KV_STAGES: gl.constexpr,
    DS_STAGES: gl.constexpr,
    P_STAGES: gl.constexpr,
    KV_IN_REGISTERS: gl.constexpr,
    RAGGED: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    DTYPE: gl.constexpr = q_desc.dtype
    statistics: gl.constexpr = lse_desc.layout
    ring, beside, once, ds_ring = make_buffers(
        DTYPE,
        statistics,
        TILE_Q,
        TILE_K,
        BLOCK_D,
        BLOCK_DV,
        STAGES,
        KV_STAGES,
        DS_STAGES,
        progress is not None,
        rest_desc is not None,
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
    lengths = (cu_q, cu_k, used_q, used_k, max_q, max_k)
    tiles = batch_heads * gl.cdiv(max_k, TILE_K)
    problem = (
        (tiles, progress),
        lengths,
        (heads, group, batch_heads, together),
        (left, right),
        terms,
    )
    inputs = (k_desc, v_desc, q_desc, dout_desc, lse_desc, minus_delta_desc, rest_desc)
    dk_to = (dk_ptr, (dk_batch, dk_row, dk_head), columns_d, UNIT_D)
    dv_to = (dv_ptr, (dv_batch, dv_row, dv_head), columns_dv, UNIT_DV)
    results = (dk_to, dv_to)
    factors = (scale, softcap, gradient_scale)
    shared = (ring, beside, once, ds_ring, (dq_ptr, rows_of_head))
    PLACED: gl.constexpr = bias_ptr is not None or slopes_ptr is not None or dropout_key is not None
    queue = make_queue("tiles", 18 if PLACED else 15, 1, CONSUMERS + (1 if progress is not None else 0))
    if P_STAGES > 0:
        scores: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE_K, TILE_Q], DTYPE)
        # Times the slope of a softcap it is passed on in two numbers: sums of it may cancel.
        PARTS: gl.constexpr = 1 if softcap is None else 2
        p_ring = make_ring("P", DTYPE, [TILE_K, TILE_Q], scores, P_STAGES, consumers=1, parts=PARTS)
        gl.warp_specialize(
            [
                (weigh, (dv_to, queue, shared, p_ring, problem, factors, FILLED_D, FILLED_DV)),
                (differentiate, (dk_to, queue, shared, p_ring, problem, factors, FILLED_D, FILLED_DV)),
                (produce, (inputs, taken, queue, shared, problem, TILE_K, rows_of_entry, RAGGED)),
                (watch, (queue, ds_ring, problem, TILE_Q, TILE_K)),
            ],
            [4, 1, 1],
            [REGISTERS, 24, 24],
        )
    else:
        turns = make_turns(CONSUMERS)
        gl.warp_specialize(
            [
                (consume, (0, results, queue, shared, problem, factors, turns, KV_IN_REGISTERS)),
                (consume, (1, results, queue, shared, problem, factors, turns, KV_IN_REGISTERS)),
                (produce, (inputs, taken, queue, shared, problem, TILE_K, rows_of_entry, RAGGED)),
                (watch, (queue, ds_ring, problem, TILE_Q, TILE_K)),
            ],
            [4, 1, 1],
            [REGISTERS, 24, 24],
        )


def backward(
    spec: AttentionSpec,
    x: Inputs,
    out: Tensor,
    lse: Tensor,
    saved: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    grads: Gradients,
) -> None:
    """Fill grads. See ``tilewise.dispatch.Kernel``."""
    rest = saved[0] if spec.bias else None
    rows = prepare_rows(spec, x, out, lse, rest, dout, dlse)
    launch_backward(backward_kernel, spec, x, dout, rows, grads)
    finish_dq(spec, x, rows, grads.q)
    if grads.bias is not None or grads.sink is not None:
        delta = row_delta(spec, x, out, dout, dlse, lse)
        if grads.bias is not None:
            fill_bias_gradient(spec, x, (x.q, x.k, x.v, dout, lse, delta, rest), grads.bias)
        if grads.sink is not None and x.sink is not None:
            grads.sink.copy_(sink_gradient(x.sink, lse, delta, rest))
