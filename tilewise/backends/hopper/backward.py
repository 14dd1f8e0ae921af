"""FlashAttention-3's backward in Gluon (Shah et al., "FlashAttention-3", 2024, algorithm 3).

A program owns a key tile and walks the queries that see it, over all query heads of its group, so that
dK and dV stay in registers. A producer warp copies Q, dO and their row statistics to shared memory by
TMA, two warpgroups multiply, and a writer warp adds each dQ tile to an accumulator in memory. Scores are
held transposed (keys, queries): so P^T and dS^T are left operands, which the tensor cores take from
registers; dS passes through shared memory once more, for dQ = dS K.

Only queries that see a key and keys that are seen take part: positions count from the first of them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewise.backends.hopper.around import finish_dq, prepare_rows
from tilewise.backends.hopper.launch_backward import launch_backward
from tilewise.backends.hopper.tile import (
    key_range,
    key_tile,
    logits,
    query_tiles_of,
    softcap_slope,
    store_rows,
)
from tilewise.gluon.compat import (
    label,
    label_stages,
    thread_barrier,
    tma_load,
    tma_reduce_add,
    tma_store_wait,
)
from tilewise.gluon.ragged import coordinates
from tilewise.gluon.ring import make_ring
from tilewise.ops import Gradients
from tilewise.spec import AttentionSpec, Inputs


@gluon.jit
def produce(inputs, ring, beside, once, tile, runs, problem, rows_of_head, RAGGED: gl.constexpr):
    """The producer: K and V once, then Q and dO with their log-sum-exps and deltas."""
    k_desc, v_desc, q_desc, dout_desc, lse_desc, delta_desc = inputs
    dout_s, lse_s, delta_s = beside
    k_s, v_s, kv_full = once
    b, kv_head, k_start, start_q, seqlen_q, start_k, seqlen_k, seen_k, seen_q, pad = tile
    group = problem[2][1]
    entry_q, entry_k = problem[1][4], problem[1][5]
    TILE_Q: gl.constexpr = ring.buffer.shape[1]
    count = runs[3] - runs[0]
    if count > 0:
        mbarrier.expect(kv_full, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
        at = coordinates(b, kv_head, start_k, k_start, 0, seen_k, entry_k, RAGGED)
        tma_load(k_desc, at, kv_full, k_s)
        tma_load(v_desc, at, kv_full, v_s)
    nbytes: gl.constexpr = (
        q_desc.block_type.nbytes
        + dout_desc.block_type.nbytes
        + lse_desc.block_type.nbytes
        + delta_desc.block_type.nbytes
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
        load_beside(ring, step, delta_desc, [statistic], delta_s)


@gluon.jit
def load_beside(ring, step, desc, at, buffer):
    """Load into the stage of a buffer for which the ring's barriers stand as well."""
    st = step % ring.stages
    tma_load(desc, at, ring.full.index(st), buffer.index(st))


@gluon.jit
def write_dq(
    dq_desc, handover, tile, runs, problem, rows_of_head, TILE_Q: gl.constexpr, BLOCK_D: gl.constexpr
):
    """The writer: adds every dQ tile to the accumulator."""
    dq_s, full, empty = handover
    group = problem[2][1]
    kv_head, pad = tile[1], tile[9]
    count = runs[3] - runs[0]
    for step in range(count * group):
        head = kv_head * group + step // count
        row = head * rows_of_head + pad + (runs[0] + step % count) * TILE_Q
        mbarrier.wait(full, step & 1)
        tma_reduce_add(dq_desc, [row // (256 // BLOCK_D), 0], dq_s)
        tma_store_wait(0)
        mbarrier.arrive(empty, count=1)


@gluon.jit
def consume(results, shared, tile, runs, problem, factors, WARPS: gl.constexpr):
    """Both warpgroups: dK and dV of the key tile, and its share of dQ."""
    ring, beside, once, ds_s, handover = shared
    dout_s, lse_s, delta_s = beside
    k_s, v_s, kv_full = once
    dq_s, dq_full, dq_empty = handover
    scale, softcap, gradient_scale = factors
    left, right = problem[3]
    b, kv_head, k_start, start_q, seqlen_q, start_k, seqlen_k, seen_k, seen_q, pad = tile
    DTYPE: gl.constexpr = ring.buffer.dtype
    TILE_K: gl.constexpr = k_s.shape[0]
    TILE_Q: gl.constexpr = ring.buffer.shape[1]
    BLOCK_D: gl.constexpr = k_s.shape[1]
    BLOCK_DV: gl.constexpr = v_s.shape[1]
    GROUPS: gl.constexpr = WARPS // 4
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TILE_Q, 16])
    dk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_D, 16])
    dv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_DV, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, BLOCK_D // GROUPS, 16])
    per_query: gl.constexpr = gl.SliceLayout(0, scores)
    no_scores = gl.zeros([TILE_K, TILE_Q], gl.float32, scores)
    no_dq = gl.zeros([TILE_Q, BLOCK_D], gl.float32, dq_layout)
    dk = gl.zeros([TILE_K, BLOCK_D], gl.float32, dk_layout)
    dv = gl.zeros([TILE_K, BLOCK_DV], gl.float32, dv_layout)
    j = k_start + gl.arange(0, TILE_K, gl.SliceLayout(1, scores))
    queries = gl.arange(0, TILE_Q, per_query)
    group = problem[2][1]
    count = runs[3] - runs[0]
    whole = k_start + TILE_K <= seen_k
    if count > 0:
        mbarrier.wait(kv_full, 0)
    for step in range(count * group):
        n = runs[0] + step % count
        q = ring.wait_full(step)
        st = step % ring.stages
        dout = dout_s.index(st)
        s_token = warpgroup_mma(k_s, q.permute((1, 0)), no_scores, use_acc=False, is_async=True)
        dp_token = warpgroup_mma(v_s, dout.permute((1, 0)), no_scores, use_acc=False, is_async=True)
        lse = lse_s.index(st).load(per_query)
        s = warpgroup_mma_wait(1, [s_token])
        s, factor = logits(s, scale, softcap)
        p = gl.exp2(s * factor - lse[None, :])
        if (n < runs[1]) | (n >= runs[2]) | (not whole):
            i = n * TILE_Q + queries
            first, stop = key_range(i, tile, problem)
            first, stop = i * 0 + first, i * 0 + gl.minimum(stop, seen_k)
            seen = (j[:, None] >= first[None, :]) & (j[:, None] < stop[None, :])
            p = gl.where(seen, p, 0.0)
        p_left = gl.convert_layout(p.to(DTYPE), gl.DotOperandLayout(0, dv_layout, 2))
        dv_token = warpgroup_mma(p_left, dout, dv, is_async=True)
        delta = delta_s.index(st).load(per_query)
        dp = warpgroup_mma_wait(1, [dp_token])
        ds = p * (dp - delta[None, :])
        if softcap is not None:
            ds *= softcap_slope(s, softcap)
        ds = ds.to(DTYPE)
        ds_s.store(ds)
        ds_left = gl.convert_layout(ds, gl.DotOperandLayout(0, dk_layout, 2))
        fence_async_shared()
        thread_barrier()
        dq_token = warpgroup_mma(ds_s.permute((1, 0)), k_s, no_dq, use_acc=False, is_async=True)
        dk_token = warpgroup_mma(ds_left, q, dk, is_async=True)
        dv, dq = warpgroup_mma_wait(1, [dv_token, dq_token])
        mbarrier.wait(dq_empty, (step & 1) ^ 1)
        dq_s.store(in_fragments(dq, GROUPS))
        fence_async_shared()
        mbarrier.arrive(dq_full, count=1)
        dk = warpgroup_mma_wait(0, [dk_token])
        ring.release(step)
    rows = (b, kv_head, start_k, k_start, seen_k)
    store_rows(dk * gradient_scale, results[0], rows)
    store_rows(dv, results[1], rows)


@gluon.jit
def in_fragments(dq, GROUPS: gl.constexpr):
    """A dQ tile in the order in which threads hold it, so that storing it has no bank conflicts.

    ``around.finish_kernel`` knows the order.
    """
    ROWS: gl.constexpr = dq.shape[0]
    COLUMNS: gl.constexpr = dq.shape[1]
    parts = dq.reshape([4, 2, 8, GROUPS, COLUMNS // GROUPS // 8, 4, 2])
    return parts.permute([4, 3, 0, 2, 5, 1, 6]).reshape([ROWS * COLUMNS // 256, 256])


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
    delta_desc,
    dq_desc,
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
    WARPS: gl.constexpr,
    RAGGED: gl.constexpr,
):
    DTYPE: gl.constexpr = q_desc.dtype
    queries_d: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE_Q, BLOCK_D], DTYPE)
    queries_dv: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE_Q, BLOCK_DV], DTYPE)
    keys_d: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE_K, BLOCK_D], DTYPE)
    keys_dv: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE_K, BLOCK_DV], DTYPE)
    keys_queries: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE_K, TILE_Q], DTYPE)
    statistics: gl.constexpr = lse_desc.layout
    ring = make_ring("Q", DTYPE, [TILE_Q, BLOCK_D], queries_d, STAGES, 1)
    dout_s = gl.allocate_shared_memory(DTYPE, [STAGES, TILE_Q, BLOCK_DV], queries_dv)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, TILE_Q], statistics)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, TILE_Q], statistics)
    k_s = gl.allocate_shared_memory(DTYPE, [TILE_K, BLOCK_D], keys_d)
    v_s = gl.allocate_shared_memory(DTYPE, [TILE_K, BLOCK_DV], keys_dv)
    ds_s = gl.allocate_shared_memory(DTYPE, [TILE_K, TILE_Q], keys_queries)
    dq_s = gl.allocate_shared_memory(gl.float32, [TILE_Q * BLOCK_D // 256, 256], dq_desc.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    dq_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    dq_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full, count=1)
    mbarrier.init(dq_full, count=1)
    mbarrier.init(dq_empty, count=1)
    label_stages(dout_s, "dO")
    label_stages(lse_s, "lse")
    label_stages(delta_s, "delta")
    label(k_s, "K")
    label(v_s, "V")
    label(ds_s, "dS")
    label(dq_s, "dQ")
    label(kv_full, "K and V there")
    label(dq_full, "dQ.full")
    label(dq_empty, "dQ.empty")

    lengths = (cu_q, cu_k, used_q, used_k, max_q, max_k)
    problem = ((0, None), lengths, (heads, group, batch_heads, together), (left, right))
    tile = key_tile(gl.program_id(0), problem, TILE_K, TILE_Q, rows_of_entry)
    runs = query_tiles_of(tile, problem, TILE_Q, TILE_K)
    inputs = (k_desc, v_desc, q_desc, dout_desc, lse_desc, delta_desc)
    beside = (dout_s, lse_s, delta_s)
    once = (k_s, v_s, kv_full)
    handover = (dq_s, dq_full, dq_empty)
    shared = (ring, beside, once, ds_s, handover)
    dk_to = (dk_ptr, (dk_batch, dk_row, dk_head), columns_d)
    dv_to = (dv_ptr, (dv_batch, dv_row, dv_head), columns_dv)
    factors = (scale, softcap, gradient_scale)
    gl.warp_specialize(
        [
            (
                consume,
                (
                    (dk_to, dv_to),
                    shared,
                    tile,
                    runs,
                    problem,
                    factors,
                    WARPS,
                ),
            ),
            (produce, (inputs, ring, beside, once, tile, runs, problem, rows_of_head, RAGGED)),
            (write_dq, (dq_desc, handover, tile, runs, problem, rows_of_head, TILE_Q, BLOCK_D)),
        ],
        [1, 1],
        [24, 24],
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
    lse_rows, delta_rows, space = prepare_rows(spec, x, out, lse, dout, dlse)
    dq_rows = torch.zeros(space.rows, space.columns, dtype=torch.float32, device=spec.device)
    launch_backward(backward_kernel, spec, x, dout, lse_rows, delta_rows, dq_rows, space, grads)
    finish_dq(spec, x, dq_rows, space, grads.q)
