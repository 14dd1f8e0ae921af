"""What both shapes of the Hopper backward share: its producer, masks, dQ, and the walk over queries.

In all of it ``shared`` is what lies in shared memory: the ring of Q; what comes with it, dO and the row
statistics; what comes once for a key tile, K in a ring, V beside it, in parts of 64 keys (and, see
``with_key_tile``, which part is this tile's first); the ring through which consumers exchange dS; and
where dQ goes.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from tilewise.backends.hopper.launch_backward import CONSUMERS as _CONSUMERS
from tilewise.backends.hopper.order import count_added, count_last_added
from tilewise.backends.hopper.terms import (
    UNALIGNED,
    added,
    keeps_of_blocks,
    load_bias,
    load_slope,
    marked_by_blocks,
    marked_by_pairs,
    powers_of_near,
)
from tilewise.backends.hopper.tile import columns_of, query_range, store_rows, take_key_tile
from tilewise.backends.triton.terms import BIAS, DROPOUT_KEY, SLOPES
from tilewise.gluon.compat import label_stages, tma_load
from tilewise.gluon.ragged import coordinates
from tilewise.gluon.ring import make_ring

CONSUMERS = gl.constexpr(_CONSUMERS)


@gluon.jit
def make_buffers(
    DTYPE: gl.constexpr,
    statistics: gl.constexpr,
    TILE_Q: gl.constexpr,
    TILE_K: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BLOCK_DV: gl.constexpr,
    STAGES: gl.constexpr,
    KV_STAGES: gl.constexpr,
    DS_STAGES: gl.constexpr,
    ORDERED: gl.constexpr,
    NATURAL: gl.constexpr,
):
    """The first four of ``shared``. statistics: layout of the row statistics."""
    ROWS: gl.constexpr = 64
    PARTS: gl.constexpr = TILE_K // ROWS
    queries_d: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE_Q, BLOCK_D], DTYPE)
    queries_dv: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE_Q, BLOCK_DV], DTYPE)
    keys_d: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_D], DTYPE)
    keys_dv: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_DV], DTYPE)
    keys_queries: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, TILE_Q], DTYPE)
    ring = make_ring("Q", DTYPE, [TILE_Q, BLOCK_D], queries_d, STAGES, CONSUMERS)
    dout_s = gl.allocate_shared_memory(DTYPE, [STAGES, TILE_Q, BLOCK_DV], queries_dv)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, TILE_Q], statistics)
    minus_delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, TILE_Q], statistics)
    kv_ring = make_ring("K", DTYPE, [ROWS, BLOCK_D], keys_d, KV_STAGES, CONSUMERS, PARTS)
    v_s = gl.allocate_shared_memory(DTYPE, [KV_STAGES * PARTS, ROWS, BLOCK_DV], keys_dv)
    WRITERS: gl.constexpr = PARTS + (1 if ORDERED else 0)  # see ``order``
    ds_ring = make_ring("dS", DTYPE, [ROWS, TILE_Q], keys_queries, DS_STAGES, CONSUMERS, PARTS, WRITERS)
    label_stages(dout_s, "dO")
    label_stages(lse_s, "lse")
    label_stages(minus_delta_s, "-delta")
    label_stages(v_s, "V")
    rest_s = ()
    if NATURAL:
        rest_s = gl.allocate_shared_memory(gl.float32, [STAGES, TILE_Q], statistics)
        label_stages(rest_s, "rest of lse")
    return ring, (dout_s, lse_s, minus_delta_s, rest_s), (kv_ring.buffer, v_s, kv_ring), ds_ring


@gluon.jit
def produce(
    inputs, taken, queue, shared, problem, TILE_K: gl.constexpr, rows_of_entry, RAGGED: gl.constexpr
):
    """The producer: takes key tiles, and loads all that the consumers read."""
    TILE_Q: gl.constexpr = shared[0].buffer.shape[1]
    base = gl.program_id(0) * 0  # steps before those of a key tile
    kv, place = base, base  # loads of K and V, and key tiles
    t, tile, runs = take_key_tile(taken, queue, place, problem, TILE_K, TILE_Q, rows_of_entry)
    while t >= 0:
        steps = (runs[3] - runs[0]) * problem[2][1]
        if steps > 0:
            load_key_tile(inputs, t, (tile, runs, problem), base, kv, shared, TILE_K, RAGGED)
            kv += 1
        base += steps
        place += 1
        t, tile, runs = take_key_tile(taken, queue, place, problem, TILE_K, TILE_Q, rows_of_entry)


@gluon.jit
def load_key_tile(inputs, t, work, base, kv, shared, TILE_K: gl.constexpr, RAGGED: gl.constexpr):
    """Its K and V, then of every step Q and dO with their log-sum-exps and negated deltas."""
    ring, beside, once, ds_ring, dq_rows = shared
    tile, runs, problem = work
    rows_of_head = dq_rows[1]
    k_desc, v_desc, q_desc, dout_desc, lse_desc, minus_delta_desc, rest_desc = inputs
    dout_s, lse_s, minus_delta_s, rest_s = beside
    k_s, v_s, kv_ring = once
    b, kv_head, k_start, start_q, seqlen_q, start_k, seqlen_k, seen_k, seen_q, pad = tile[:10]
    group = problem[2][1]
    entry_q, entry_k = problem[1][4], problem[1][5]
    TILE_Q: gl.constexpr = ring.buffer.shape[1]
    PARTS: gl.constexpr = kv_ring.parts
    ROWS: gl.constexpr = k_s.shape[1]
    count = runs[3] - runs[0]
    last = runs[3] - 1
    kv_ring.acquire(kv, PARTS * (k_desc.block_type.nbytes + v_desc.block_type.nbytes))
    for w in gl.static_range(PARTS):
        row = k_start + w * ROWS
        at = coordinates(b, kv_head, start_k, row, 0, seen_k, entry_k, RAGGED)
        kv_ring.load(kv, k_desc, at, w)
        load_beside(kv_ring, kv, v_desc, at, v_s, w)
    STATISTICS: gl.constexpr = 2 if rest_desc is None else 3
    nbytes: gl.constexpr = (
        q_desc.block_type.nbytes + dout_desc.block_type.nbytes + lse_desc.block_type.nbytes * STATISTICS
    )
    for step in range(count * group):
        head = kv_head * group + step // count
        row = (last - step % count) * TILE_Q
        at = coordinates(b, head, start_q, row, 0, seen_q, entry_q, RAGGED)
        statistic = head * rows_of_head + pad + row
        i = base + step
        ring.acquire(i, nbytes)
        ring.load(i, q_desc, at)
        load_beside(ring, i, dout_desc, at, dout_s)
        load_beside(ring, i, lse_desc, [statistic], lse_s)
        load_beside(ring, i, minus_delta_desc, [statistic], minus_delta_s)
        if rest_desc is not None:
            load_beside(ring, i, rest_desc, [statistic], rest_s)
        count_added(t, step, ring, problem, TILE_K)
    count_last_added(t, base, count * group, kv, shared, problem, TILE_K)


@gluon.jit
def load_beside(ring, step, desc, at, buffer, part: gl.constexpr = 0):
    """Load into a part of the stage of a buffer for which the ring's barriers stand as well."""
    st = step % ring.stages
    tma_load(desc, at, ring.full.index(st), buffer.index(st * ring.parts + part))


@gluon.jit
def with_key_tile(shared, kv):
    """``shared`` of load kv of K and V: they are the parts from the last number in it on."""
    ring, beside, once, ds_ring, dq_rows = shared
    k_s, v_s, kv_ring = once
    return ring, beside, (k_s, v_s, kv_ring, kv % kv_ring.stages * kv_ring.parts), ds_ring, dq_rows


@gluon.jit
def first_query_tile(tile, runs, problem, shared):
    """The last query tile of the first head, where the walk begins: see ``order``. Its number, its first
    row in the space of ``around``, and the head."""
    rows_of_head = shared[4][1]
    TILE_Q: gl.constexpr = shared[0].buffer.shape[1]
    n = runs[3] - 1
    head = tile[1] * problem[2][1]
    return n, head * rows_of_head + tile[9] + n * TILE_Q, head


@gluon.jit
def next_query_tile(n, row, head, runs, shared):
    """The query tile before n, which begins with a row: of the same head, or the last of the next."""
    rows_of_head = shared[4][1]
    TILE_Q: gl.constexpr = shared[0].buffer.shape[1]
    n -= 1
    row -= TILE_Q
    if n < runs[0]:
        n = runs[3] - 1
        row += rows_of_head + (runs[3] - runs[0]) * TILE_Q
        head += 1
    return n, row, head


@gluon.jit
def load_added(n, head, part, work, layout: gl.constexpr, ROWS: gl.constexpr, TILE_Q: gl.constexpr):
    """What is added to the scores of a part of the key tile, 64 keys, and query tile n: the slope of
    ALiBi and a tile of the bias. To be loaded while the product is under way."""
    tile, terms = work[0], work[2][4]
    slope, bias = 0.0, ()
    if terms[BIAS] is not None or terms[SLOPES] is not None:
        entry, q_low, k_low = tile[10:]
        i = q_low + n * TILE_Q + gl.arange(0, TILE_Q, gl.SliceLayout(0, layout))
        j = (k_low + tile[2] + part * ROWS, gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None])
        lengths = (q_low + tile[4], k_low + tile[6])
        bias = load_bias(i[None, :], j, entry, head, lengths, terms, UNIT=0, INSIDE=False)
        slope = load_slope(head, entry, terms)
    return slope, bias


@gluon.jit
def weights(s, factor, to_add, n, part, lse, rest_s, st, work):
    """P^T of a part of the key tile and query tile n, before masks. rest_s: buffers of what rounding
    took from lse, where there is a bias."""
    tile, terms = work[0], work[2][4]
    slope, bias = to_add
    ROWS: gl.constexpr = s.shape[0]
    TILE_Q: gl.constexpr = s.shape[1]
    layout: gl.constexpr = s.type.layout
    j = tile[2] + part * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    i = n * TILE_Q + gl.arange(0, TILE_Q, gl.SliceLayout(0, layout))
    i, j = (i + (tile[6] - tile[4]))[None, :], j[:, None]  # a query is the key at no distance
    if terms[BIAS] is not None:
        s, factor = added(s, factor, bias, slope, i, j, terms)
        rest = rest_s.index(st).load(gl.SliceLayout(0, layout))
        return gl.exp2(((s - lse[None, :]) - rest[None, :]) * factor)
    else:
        return powers_of_near(s, factor, lse[None, :], slope, i, j, terms)


@gluon.jit
def start_dropout(n, head, part, work, scores: gl.constexpr, KEYS: gl.constexpr, TILE_Q: gl.constexpr):
    """What ``with_dropout`` will need: computed before there are scores, which take its registers."""
    terms = work[2][4]
    keeps = ()
    if terms[DROPOUT_KEY] is not None:
        if terms[UNALIGNED] is None:
            at = _corner(n, head, part, work[0], KEYS, TILE_Q)
            keeps = keeps_of_blocks(scores, KEYS, TILE_Q, work[3], at, terms)
    return keeps


@gluon.jit
def with_dropout(p, keeps, n, head, part, work):
    """Weights, negative where dropout takes them."""
    terms = work[2][4]
    if terms[DROPOUT_KEY] is not None:
        if terms[UNALIGNED] is None:
            p = marked_by_blocks(p, keeps)
        else:
            at = _corner(n, head, part, work[0], p.shape[0], p.shape[1])
            p = marked_by_pairs(p, work[3], at, terms)
    return p


@gluon.jit
def _corner(n, head, part, tile, KEYS: gl.constexpr, TILE_Q: gl.constexpr):
    """The first query and key of a tile of weights in their sequences; which of those; the head."""
    entry, q_low, k_low = tile[10:]
    return q_low + n * TILE_Q, k_low + tile[2] + part * KEYS, entry, head


@gluon.jit
def masked(p, n, part, tile, runs, problem, TILE_K: gl.constexpr):
    """Weights of query tile n with 0 where a query does not see a key of a part of the key tile."""
    ROWS: gl.constexpr = p.shape[0]
    TILE_Q: gl.constexpr = p.shape[1]
    k_start, seen_k = tile[2], tile[7]
    whole = k_start + TILE_K <= seen_k
    if (n < runs[1]) | (n >= runs[2]) | (not whole):
        # As bounds of a key: a thread has two keys, but a quarter of the queries.
        layout: gl.constexpr = p.type.layout
        j = k_start + part * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        i = n * TILE_Q + gl.arange(0, TILE_Q, gl.SliceLayout(0, layout))
        first, stop = query_range(j, tile, problem)
        seen = i[None, :] < stop[:, None]
        if problem[3][1] is not None:
            seen &= i[None, :] >= first[:, None]
        p = gl.where(seen, p, 0.0)
    return p


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
def afresh(step):
    """0, but not for all a compiler knows: addresses made with it are computed in every step, which is
    cheaper than to keep those of all products in registers."""
    return step >> 30


@gluon.jit
def accumulator(ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Zeros that a warpgroup adds products to."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    return gl.zeros([ROWS, COLUMNS], gl.float32, layout)


@gluon.jit
def start_dq(ROW: gl.constexpr, COLUMN: gl.constexpr, COLUMNS: gl.constexpr, step, shared):
    """A part of the dQ tile of a step, under way: 64 rows from ROW on, COLUMNS from COLUMN on."""
    ring, beside, once, ds_ring, dq_rows = shared
    dq = accumulator(64, COLUMNS)
    for w in gl.static_range(ds_ring.parts):
        ds, k = ds_ring.stage(step, w).permute((1, 0)), once[0].index(once[3] + w + afresh(step))
        ds, k = ds.slice(ROW, 64), k.slice(COLUMN, COLUMNS, 1)
        dq = warpgroup_mma(ds, k, dq, use_acc=w > 0, is_async=True)
    return dq


@gluon.jit
def add_dq(ROW: gl.constexpr, COLUMN: gl.constexpr, dq, row, shared):
    """Add a part of the dQ tile that begins with a row to the accumulator."""
    BLOCK_D: gl.constexpr = shared[2][0].shape[2]
    dq = in_fragments(dq)
    layout: gl.constexpr = dq.type.layout
    base = shared[4][0] + (row.to(gl.int64) * BLOCK_D + (ROW * BLOCK_D + COLUMN * 64))
    r = gl.arange(0, dq.shape[0], gl.SliceLayout(1, layout)) * 256
    c = gl.arange(0, 256, gl.SliceLayout(0, layout))
    gl.atomic_add(base + (r[:, None] + c[None, :]), dq, sem="relaxed")


@gluon.jit
def store_gradient(gradient, FIRST: gl.constexpr, ring, part: gl.constexpr, i, to, tile, row):
    """Store a gradient of 64 keys, or those of its columns that begin with FIRST; row: the first key.

    By way of a stage i of a ring, of which it is the consumer's to fill this part, block by block: then
    a thread has columns that are neighbours in memory.
    """
    COLUMNS: gl.constexpr = gradient.shape[1]
    BLOCK: gl.constexpr = min(COLUMNS, 64)
    ring.wait_empty(i)
    buffer = ring.stage(i, part).slice(0, BLOCK, 1)
    for n in gl.static_range(COLUMNS // BLOCK):
        block = columns_of(gradient, n, COLUMNS // BLOCK)
        store_columns(block, FIRST + n * BLOCK, buffer, to, tile, row)


@gluon.jit
def store_columns(x, FIRST: gl.constexpr, buffer, to, tile, row):
    """A block of columns, by way of a buffer of its size."""
    ptr, strides, columns, UNIT = to
    ACROSS: gl.constexpr = x.shape[1] // 8  # threads
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    buffer.store(x.to(buffer.dtype))
    to = (ptr + FIRST, strides, columns * UNIT - FIRST, UNIT)
    store_rows(buffer.load(layout), to, (tile[0], tile[1], tile[5], row, tile[7]))


@gluon.jit
def in_fragments(dq):
    """64 rows of dQ in the order in which threads hold it: four numbers of a thread are neighbours.

    ``around.finish_kernel`` knows the order.
    """
    COLUMNS: gl.constexpr = dq.shape[1]
    parts = dq.reshape([4, 2, 8, COLUMNS // 8, 4, 2])
    return parts.permute([3, 0, 2, 4, 1, 5]).reshape([COLUMNS // 4, 256])
