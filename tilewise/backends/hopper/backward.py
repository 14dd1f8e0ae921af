"""FlashAttention-3's backward in Gluon (Shah et al., "FlashAttention-3", 2024, algorithm 3).

A program owns a key tile and walks the queries that see it, over all query heads of its group, so that
dK and dV stay in registers. A producer warp copies Q, dO and their row statistics to shared memory by
TMA, and two consumers, one warpgroup each, own half of the keys. Scores are held transposed (keys,
queries): so P^T and dS^T are left operands, which the tensor cores take from registers.

dQ = dS K sums over the keys of both consumers: they exchange dS through shared memory, and each computes
half of every dQ tile, a tile later than all else. So neither waits for the other's softmax, and the
products of one run beside the softmax of the other. dQ is added to an accumulator in memory straight
from registers, in an order in which that is 16 bytes at a time.

Only queries that see a key and keys that are seen take part: positions count from the first of them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewise.backends.hopper.around import finish_dq, prepare_rows
from tilewise.backends.hopper.launch_backward import CONSUMERS as _CONSUMERS
from tilewise.backends.hopper.launch_backward import launch_backward
from tilewise.backends.hopper.tile import (
    key_tile,
    logits,
    query_range,
    query_tiles_of,
    softcap_slope,
    store_rows,
)
from tilewise.gluon.compat import label, label_stages, tma_load
from tilewise.gluon.ragged import coordinates
from tilewise.gluon.ring import make_ring
from tilewise.ops import Gradients
from tilewise.spec import AttentionSpec, Inputs

CONSUMERS = gl.constexpr(_CONSUMERS)


@gluon.jit
def produce(inputs, ring, beside, once, tile, runs, problem, rows_of_head, RAGGED: gl.constexpr):
    """The producer: K and V once, then Q and dO with their log-sum-exps and negated deltas."""
    k_desc, v_desc, q_desc, dout_desc, lse_desc, minus_delta_desc = inputs
    dout_s, lse_s, minus_delta_s = beside
    k_s, v_s, kv_full = once
    b, kv_head, k_start, start_q, seqlen_q, start_k, seqlen_k, seen_k, seen_q, pad = tile
    group = problem[2][1]
    entry_q, entry_k = problem[1][4], problem[1][5]
    TILE_Q: gl.constexpr = ring.buffer.shape[1]
    ROWS: gl.constexpr = k_s.shape[1]
    count = runs[3] - runs[0]
    if count > 0:
        mbarrier.expect(kv_full, CONSUMERS * (k_desc.block_type.nbytes + v_desc.block_type.nbytes))
        for w in gl.static_range(CONSUMERS):
            row = k_start + w * ROWS
            at = coordinates(b, kv_head, start_k, row, 0, seen_k, entry_k, RAGGED)
            tma_load(k_desc, at, kv_full, k_s.index(w))
            tma_load(v_desc, at, kv_full, v_s.index(w))
    nbytes: gl.constexpr = (
        q_desc.block_type.nbytes
        + dout_desc.block_type.nbytes
        + lse_desc.block_type.nbytes
        + minus_delta_desc.block_type.nbytes
    )
    for step in range(count * group):
        head = kv_head * group + step // count
        row = (runs[0] + step % count) * TILE_Q
        at = coordinates(b, head, start_q, row, 0, seen_q, entry_q, RAGGED)
        statistic = head * rows_of_head + pad + row
        ring.acquire(step, nbytes)
        ring.load(step, q_desc, at)
        load_beside(ring, step, dout_desc, at, dout_s)
        load_beside(ring, step, lse_desc, [statistic], lse_s)
        load_beside(ring, step, minus_delta_desc, [statistic], minus_delta_s)


@gluon.jit
def load_beside(ring, step, desc, at, buffer):
    """Load into the stage of a buffer for which the ring's barriers stand as well."""
    st = step % ring.stages
    tma_load(desc, at, ring.full.index(st), buffer.index(st))


@gluon.jit
def consume(
    W: gl.constexpr,
    results,
    shared,
    tile,
    runs,
    problem,
    factors,
    KV_IN_REGISTERS: gl.constexpr,
):
    """Consumer W: dK and dV of its keys, and its part of every dQ tile."""
    ring, beside, once, ds_ring, dq_rows = shared
    k_s, v_s, kv_full = once
    rows_of_head = dq_rows[1]
    b, kv_head, k_start, start_q, seqlen_q, start_k, seqlen_k, seen_k, seen_q, pad = tile
    TILE_Q: gl.constexpr = ring.buffer.shape[1]
    ROWS: gl.constexpr = k_s.shape[1]
    BLOCK_D: gl.constexpr = k_s.shape[2]
    BLOCK_DV: gl.constexpr = v_s.shape[2]
    dk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    dv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DV, 16])
    dk = gl.zeros([ROWS, BLOCK_D], gl.float32, dk_layout)
    dv = gl.zeros([ROWS, BLOCK_DV], gl.float32, dv_layout)
    steps = (runs[3] - runs[0]) * problem[2][1]
    if steps > 0:
        mbarrier.wait(kv_full, 0)
        if KV_IN_REGISTERS:
            by_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_Q, 16])
            left_operand: gl.constexpr = gl.DotOperandLayout(0, by_scores, 2)
            keys = (k_s.index(W).load(left_operand), v_s.index(W).load(left_operand))
        else:
            keys = None
        n = runs[0]
        row = kv_head * problem[2][1] * rows_of_head + pad + n * TILE_Q  # in the space of ``around``
        state = (dk, dv)
        dk, dv = visit(W, 0, n, row, keys, state, shared, tile, runs, problem, factors, True)
        for step in range(1, steps):
            before = row
            row += TILE_Q
            n += 1
            if n == runs[3]:  # on to the next head
                n = runs[0]
                row += rows_of_head - (runs[3] - runs[0]) * TILE_Q
            state = (dk, dv)
            dk, dv = visit(W, step, n, before, keys, state, shared, tile, runs, problem, factors, False)
        ds_ring.wait_full(steps - 1)
        dq = warpgroup_mma_wait(0, [start_dq(W, steps - 1, shared)])
        add_dq(W, dq, row, shared)
    rows = (b, kv_head, start_k, k_start + W * ROWS, seen_k)
    store_rows(dk * factors[2], results[0], rows)
    store_rows(dv, results[1], rows)


@gluon.jit
def visit(
    W: gl.constexpr,
    step,
    n,
    before,
    keys,
    state,
    shared,
    tile,
    runs,
    problem,
    factors,
    FIRST: gl.constexpr,
):
    """What query tile n adds to dK and dV; and dQ of the tile before, unless this is the first.

    before: the first row of that one in the space of ``around``. keys: K and V, if in registers.
    """
    ring, beside, once, ds_ring, dq_rows = shared
    dout_s, lse_s, minus_delta_s = beside
    dk, dv = state
    scale, softcap, gradient_scale = factors
    if keys is not None:
        k, v = keys
    else:
        k, v = once[0].index(W + afresh(step)), once[1].index(W + afresh(step))
    DTYPE: gl.constexpr = ring.buffer.dtype
    TILE_Q: gl.constexpr = ring.buffer.shape[1]
    ROWS: gl.constexpr = once[0].shape[1]
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_Q, 16])
    per_query: gl.constexpr = gl.SliceLayout(0, scores)
    no_scores = gl.zeros([ROWS, TILE_Q], gl.float32, scores)
    q = ring.wait_full(step)
    st = step % ring.stages
    dout = dout_s.index(st)
    s_token = warpgroup_mma(k, q.permute((1, 0)), no_scores, use_acc=False, is_async=True)
    minus_delta = minus_delta_s.index(st).load(per_query)
    dp = spread_over_keys(minus_delta, scale, ROWS, scores)  # dP - delta, less work once it is there
    dp_token = warpgroup_mma(v, dout.permute((1, 0)), dp, is_async=True)
    lse = lse_s.index(st).load(per_query)
    s = warpgroup_mma_wait(1, [s_token])
    s, factor = logits(s, scale, softcap)
    p = gl.exp2(s * factor - lse[None, :])
    p = masked(W, p, n, tile, runs, problem)
    p_left = gl.convert_layout(p.to(DTYPE), gl.DotOperandLayout(0, dv.type.layout, 2))
    if softcap is not None:
        p *= softcap_slope(s, softcap)
    dv_token = warpgroup_mma(p_left, dout, dv, is_async=True)
    dp = warpgroup_mma_wait(1, [dp_token])
    ds = (p * dp).to(DTYPE)
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
        dq_token = start_dq(W, step - 1, shared)
        dk_token = warpgroup_mma(ds_left, q, dk, is_async=True)
        dv, dq = warpgroup_mma_wait(1, [dv_token, dq_token])
        ds_ring.release(step - 1)
        add_dq(W, dq, before, shared)
        dk = warpgroup_mma_wait(0, [dk_token])
    ring.release(step)
    return dk, dv


@gluon.jit
def afresh(step):
    """0, but not for all a compiler knows: addresses made with it are computed in every step, which is
    cheaper than to keep those of all products in registers."""
    return step >> 30


@gluon.jit
def spread_over_keys(x, scale, ROWS: gl.constexpr, layout: gl.constexpr):
    """One number per query, for every key, as the beginning of an accumulator.

    Zeros that a compiler cannot know to be zeros are added. Else two keys' numbers would be one register
    until the product needs two: that is when none may be written, and it would wait for the one before.
    """
    keys = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    zeros = keys.to(gl.float32) * (scale * 0.0)
    return x[None, :] + zeros[:, None]


@gluon.jit
def masked(W: gl.constexpr, p, n, tile, runs, problem):
    """Weights of query tile n with 0 where a query does not see a key."""
    ROWS: gl.constexpr = p.shape[0]
    TILE_Q: gl.constexpr = p.shape[1]
    k_start, seen_k = tile[2], tile[7]
    whole = k_start + CONSUMERS * ROWS <= seen_k
    if (n < runs[1]) | (n >= runs[2]) | (not whole):
        # As bounds of a key: a thread has two keys, but a quarter of the queries.
        layout: gl.constexpr = p.type.layout
        j = k_start + W * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        i = n * TILE_Q + gl.arange(0, TILE_Q, gl.SliceLayout(0, layout))
        first, stop = query_range(j, tile, problem)
        seen = i[None, :] < stop[:, None]
        if problem[3][1] is not None:
            seen &= i[None, :] >= first[:, None]
        p = gl.where(seen, p, 0.0)
    return p


@gluon.jit
def start_dq(W: gl.constexpr, step, shared):
    """Consumer W's part of the dQ tile of a step, under way: half of its columns, or of 128 queries."""
    ring, beside, once, ds_ring, dq_rows = shared
    k_s = once[0]
    TILE_Q: gl.constexpr = ring.buffer.shape[1]
    COLUMNS: gl.constexpr = k_s.shape[2] * TILE_Q // (64 * CONSUMERS)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    dq = gl.zeros([64, COLUMNS], gl.float32, layout)
    for w in gl.static_range(CONSUMERS):
        ds, k = ds_ring.stage(step, w).permute((1, 0)), k_s.index(w + afresh(step))
        if TILE_Q > 64:
            ds = ds.slice(W * 64, 64)
        else:
            k = k.slice(W * COLUMNS, COLUMNS, 1)
        dq = warpgroup_mma(ds, k, dq, use_acc=w > 0, is_async=True)
    return dq


@gluon.jit
def add_dq(W: gl.constexpr, dq, row, shared):
    """Add consumer W's part of the dQ tile that begins with a row to the accumulator."""
    ring, beside, once, ds_ring, dq_rows = shared
    TILE_Q: gl.constexpr = ring.buffer.shape[1]
    BLOCK_D: gl.constexpr = once[0].shape[2]
    dq = in_fragments(dq)
    layout: gl.constexpr = dq.type.layout
    base = dq_rows[0] + (row.to(gl.int64) * BLOCK_D + W * (TILE_Q * BLOCK_D // CONSUMERS))
    r = gl.arange(0, dq.shape[0], gl.SliceLayout(1, layout)) * 256
    c = gl.arange(0, 256, gl.SliceLayout(0, layout))
    gl.atomic_add(base + (r[:, None] + c[None, :]), dq, sem="relaxed")


@gluon.jit
def in_fragments(dq):
    """64 rows of dQ in the order in which threads hold it: four numbers of a thread are neighbours.

    ``around.finish_kernel`` knows the order.
    """
    COLUMNS: gl.constexpr = dq.shape[1]
    parts = dq.reshape([4, 2, 8, COLUMNS // 8, 4, 2])
    return parts.permute([3, 0, 2, 4, 1, 5]).reshape([COLUMNS // 4, 256])


@gluon.jit(
    do_not_specialize=[
        *("max_q", "max_k", "heads", "group", "batch_heads", "together"),
        *("left", "right", "columns_d", "columns_dv", "rows_of_head", "rows_of_entry"),
        *("dk_batch", "dk_row", "dk_head", "dv_batch", "dv_row", "dv_head"),
    ]
)
def backward_kernel(
    k_desc,
    v_desc,
    q_desc,
    dout_desc,
    lse_desc,
    minus_delta_desc,
    dq_ptr,
    dk_ptr,
    dk_batch,  # strides
    dk_row,
    dk_head,
    dv_ptr,
    dv_batch,
    dv_row,
    dv_head,
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
    columns_d,
    columns_dv,
    rows_of_head,  # of the row statistics and the accumulator of dQ
    rows_of_entry,
    BLOCK_D: gl.constexpr,
    BLOCK_DV: gl.constexpr,
    TILE_Q: gl.constexpr,
    TILE_K: gl.constexpr,
    STAGES: gl.constexpr,
    DS_STAGES: gl.constexpr,
    KV_IN_REGISTERS: gl.constexpr,
    RAGGED: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    DTYPE: gl.constexpr = q_desc.dtype
    ROWS: gl.constexpr = TILE_K // CONSUMERS
    queries_d: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE_Q, BLOCK_D], DTYPE)
    queries_dv: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE_Q, BLOCK_DV], DTYPE)
    keys_d: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_D], DTYPE)
    keys_dv: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_DV], DTYPE)
    keys_queries: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, TILE_Q], DTYPE)
    statistics: gl.constexpr = lse_desc.layout
    ring = make_ring("Q", DTYPE, [TILE_Q, BLOCK_D], queries_d, STAGES, CONSUMERS)
    dout_s = gl.allocate_shared_memory(DTYPE, [STAGES, TILE_Q, BLOCK_DV], queries_dv)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, TILE_Q], statistics)
    minus_delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, TILE_Q], statistics)
    k_s = gl.allocate_shared_memory(DTYPE, [CONSUMERS, ROWS, BLOCK_D], keys_d)
    v_s = gl.allocate_shared_memory(DTYPE, [CONSUMERS, ROWS, BLOCK_DV], keys_dv)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full, count=1)
    both: gl.constexpr = CONSUMERS
    ds_ring = make_ring("dS", DTYPE, [ROWS, TILE_Q], keys_queries, DS_STAGES, both, both, both)
    label_stages(dout_s, "dO")
    label_stages(lse_s, "lse")
    label_stages(minus_delta_s, "-delta")
    label_stages(k_s, "K")
    label_stages(v_s, "V")
    label(kv_full, "K and V there")

    lengths = (cu_q, cu_k, used_q, used_k, max_q, max_k)
    problem = ((0, None), lengths, (heads, group, batch_heads, together), (left, right))
    tile = key_tile(gl.program_id(0), problem, TILE_K, TILE_Q, rows_of_entry)
    runs = query_tiles_of(tile, problem, TILE_Q, TILE_K)
    inputs = (k_desc, v_desc, q_desc, dout_desc, lse_desc, minus_delta_desc)
    beside = (dout_s, lse_s, minus_delta_s)
    once = (k_s, v_s, kv_full)
    dk_to = (dk_ptr, (dk_batch, dk_row, dk_head), columns_d)
    dv_to = (dv_ptr, (dv_batch, dv_row, dv_head), columns_dv)
    results = (dk_to, dv_to)
    factors = (scale, softcap, gradient_scale)
    shared = (ring, beside, once, ds_ring, (dq_ptr, rows_of_head))
    gl.warp_specialize(
        [
            (consume, (0, results, shared, tile, runs, problem, factors, KV_IN_REGISTERS)),
            (consume, (1, results, shared, tile, runs, problem, factors, KV_IN_REGISTERS)),
            (produce, (inputs, ring, beside, once, tile, runs, problem, rows_of_head, RAGGED)),
        ],
        [4, 1],
        [REGISTERS, 24],
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
    """Fill grads.q, grads.k and grads.v. See ``tilewise.dispatch.Kernel``."""
    lse_rows, minus_delta_rows, space = prepare_rows(spec, x, out, lse, dout, dlse)
    dq_rows = torch.zeros(space.rows, space.columns, dtype=torch.float32, device=spec.device)
    launch_backward(backward_kernel, spec, x, dout, lse_rows, minus_delta_rows, dq_rows, space, grads)
    finish_dq(spec, x, dq_rows, space, grads.q)
