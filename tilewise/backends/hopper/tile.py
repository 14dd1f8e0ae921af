"""What the Hopper kernels share: which query tile a program works on, where its rows lie, masks.

Masks are not written here: the functions of ``tilewise.mask`` are compiled as they are.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise import mask
from tilewise.backends.triton import tile as portable
from tilewise.gluon.compat import reciprocal

key_tiles = gluon.jit(mask.key_tiles)
key_span = gluon.jit(mask.key_span)
_key_range = gluon.jit(mask.key_range)
finite = gluon.jit(portable.finite.fn)
EVERYTHING = gl.constexpr(2**30)
exact_near_zero = gluon.jit(portable.exact_near_zero.fn)
softcap_slope = gluon.jit(portable.softcap_slope.fn)
sequence_rows = gluon.jit(portable.sequence_rows.fn)


@gluon.jit
def logits(products, scale, softcap):
    """``logits`` of the Triton kernels, with the ``tanh`` of this module."""
    if softcap is not None:
        return softcap * tanh(products * scale), 1.0
    return products, scale


@gluon.jit
def tanh(x):
    """``tanh`` of the Triton kernels, with a reciprocal for a division."""
    return exact_near_zero(x, 1.0 - 2.0 * reciprocal(1.0 + gl.exp2(x * 2.8853900817779268)))


@gluon.jit
def listed_tile(turn, problem):
    """The program's query tile of a turn where the host knows all lengths; from `tiles` on, none. Then
    which part of a query tile it is, and from which to which of the tile's key tiles it goes: of a whole
    one -1 and all."""
    tiles, agenda, parts, claims = problem[0]
    t = turn * gl.num_programs(0) + gl.program_id(0)
    if agenda is not None:
        t = gl.load(agenda + t)
    part, first, stop = t * 0 - 1, t * 0, t * 0 + EVERYTHING
    if parts is not None:
        if t > tiles:
            part = t - tiles - 1
            t = gl.load(parts + part * 3)
            first = gl.load(parts + part * 3 + 1)
            stop = gl.load(parts + part * 3 + 2)
    return t, part, first, stop


@gluon.jit
def claimed_tile(t, problem, AGAIN: gl.constexpr, TILE_Q: gl.constexpr):
    """The query tile after t where lengths are known on the GPU only: the next one that no program has
    claimed and that has a query. Before a program's first one comes `tiles` + its number.

    The claims are how many are claimed beyond the programs' first ones, then for each t what came after
    it: AGAIN, the same follows once more.
    """
    tiles, agenda, parts, claims = problem[0]
    after = claims + 1 + t
    if AGAIN:
        t = gl.load(after)
    else:
        t = t - tiles  # the program's number, of the tile that is its own
        void = t < 0
        if t >= 0:
            void = is_void(t, problem, TILE_Q)
        while void:
            t = gl.num_programs(0) + gl.atomic_add(claims, 1, sem="relaxed")
            void = is_void(t, problem, TILE_Q)
        gl.store(after, t)
    return t


@gluon.jit
def is_void(t, problem, TILE_Q: gl.constexpr):
    """Whether a query tile lies past its sequence's end."""
    tile = query_tile(t, problem, TILE_Q)
    return (t < problem[0][0]) & (tile[2] >= tile[4])


@gluon.jit
def head_and_rank(t, tiles, batch_heads, together):
    """Tile t, where all heads' first tiles come first, then their second ones: but of `together` heads
    at a time, whose keys and values fit the L2 cache."""
    begin = t // (together * tiles) * together
    place = t % (together * tiles)
    abreast = min(together, batch_heads - begin)
    return begin + place % abreast, place // abreast


@gluon.jit
def query_tile(t, problem, TILE_Q: gl.constexpr):
    """Query tile t, or the last one if there is none.

    Its batch entry, query head and first query, then for queries and for keys the
    first row in memory and the length of the sequence, and the length up to which keys are seen; which
    sequence it is, if tensors are packed too, and how many keys come before it.

    Those are keys before the first one that any query may see, and do not count: the sequence begins
    after them.
    """
    work, lengths, counts, window = problem[:4]
    cu_q, cu_k, used_q, used_k, max_q, max_k = lengths
    heads, group, batch_heads, together = counts
    left, right = window
    t = min(t, work[0] - 1)
    tiles = gl.cdiv(max_q, TILE_Q)
    if cu_q is not None or used_q is not None or used_k is not None:
        # Last queries first: under a causal mask they see the most keys, and are of long sequences.
        number, rank = head_and_rank(t, tiles, batch_heads, together)
        row = tiles - 1 - rank
    else:
        number = t // tiles
        row = t % tiles
    b = number // heads
    head = number % heads
    start_q, seqlen_q = sequence_rows(b, cu_q, used_q, max_q)
    start_k, seqlen_k = sequence_rows(b, cu_k, used_k, max_k)
    low, high = key_span(seqlen_q, seqlen_k, left, right)
    entry = b
    if cu_q is not None:
        b = b * 0  # packed tensors have no batch dimension
    keys = (start_k + low, seqlen_k - low, high - low)
    return (b, head, row * TILE_Q, start_q, seqlen_q) + keys + (entry, low)  # noqa: RUF005


@gluon.jit
def key_range(i, tile, problem):
    """``mask.key_range`` of queries i, within the sequence: none are seen if it is empty."""
    left, right = problem[3]
    first, stop = _key_range(i, tile[4], tile[6], left, right)
    return gl.maximum(first, 0), gl.minimum(stop, tile[6])


@gluon.jit
def query_range(j, tile, problem):
    """``key_range`` with the roles swapped: the queries that see keys j of a key tile's sequence."""
    left, right = problem[3]
    first, stop = _key_range(j, tile[6], tile[4], right, left)
    return first, gl.where(j < tile[7], stop, 0)


@gluon.jit
def tile_has_dead_rows(tile, problem, TILE_Q: gl.constexpr):
    """Whether some query of the tile sees no key: then its first or its last one does not."""
    q_last = min(tile[2] + TILE_Q, tile[4]) - 1
    first, stop = key_range(tile[2], tile, problem)
    last_first, last_stop = key_range(q_last, tile, problem)
    return (first >= stop) | (last_first >= last_stop)


@gluon.jit
def key_tile_runs(tile, problem, TILE_Q: gl.constexpr, TILE_K: gl.constexpr):
    """``mask.key_tiles``, but never none: queries that see nothing visit one tile, masked throughout."""
    left, right = problem[3]
    first, full_first, full_stop, stop = key_tiles(
        tile[2], tile[2] + TILE_Q, tile[4], tile[6], left, right, TILE_K
    )
    return first, full_first, full_stop, max(stop, first + 1)


@gluon.jit
def runs_of_rows(runs, row, tile, problem, ROWS: gl.constexpr, TILE_K: gl.constexpr):
    """``key_tile_runs`` of those ROWS of a query tile that begin with its row `row`; within the tile's
    own, `runs`, and never none either."""
    left, right = problem[3]
    i = tile[2] + row
    first, full_first, full_stop, stop = key_tiles(i, i + ROWS, tile[4], tile[6], left, right, TILE_K)
    return part_of_runs((first, full_first, full_stop, stop), runs[0], runs[3])


@gluon.jit
def part_of_runs(runs, begin, end):
    """Those of the key tiles that are within begin to end, but never none."""
    first, full_first, full_stop, stop = runs
    stop = min(max(stop, begin + 1), end)
    first = min(max(first, begin), stop - 1)
    full_first = min(max(full_first, first), stop)
    return first, full_first, min(max(full_stop, full_first), stop), stop


@gluon.jit
def key_tile(t, problem, TILE_K: gl.constexpr, TILE_Q: gl.constexpr, rows_of_entry):
    """Key tile t: its batch entry, key head and first key, then for queries and for keys the first row
    in memory and the length of the sequence, and how many keys are seen and queries see; and where the
    rows of the sequence are in the space of ``around``. Then, as in ``query_tile``, which sequence it
    is, and how many queries and keys come before those.

    Both sequences begin with the first that is seen or sees.
    """
    work, lengths, counts, window = problem[:4]
    cu_q, cu_k, used_q, used_k, max_q, max_k = lengths
    heads, group, batch_heads, together = counts
    left, right = window
    tiles = gl.cdiv(max_k, TILE_K)
    # First keys first: under a causal mask they are seen by the most queries.
    number, rank = head_and_rank(t, tiles, batch_heads, together)
    k_start = rank * TILE_K
    b = number // heads
    head = number % heads
    start_q, seqlen_q = sequence_rows(b, cu_q, used_q, max_q)
    start_k, seqlen_k = sequence_rows(b, cu_k, used_k, max_k)
    k_low, k_high = key_span(seqlen_q, seqlen_k, left, right)
    q_low, q_high = key_span(seqlen_k, seqlen_q, right, left)
    pad = b * rows_of_entry
    entry = b
    if cu_q is not None:
        pad = (start_q // TILE_Q + b) * TILE_Q
        b = b * 0  # packed tensors have no batch dimension
    rows_q, rows_k = seqlen_q - q_low, seqlen_k - k_low
    seen_k, seen_q = k_high - k_low, q_high - q_low
    sides = (start_q + q_low, rows_q, start_k + k_low, rows_k, seen_k, seen_q)
    return (b, head, k_start) + sides + (pad, entry, q_low, k_low)  # noqa: RUF005


@gluon.jit
def take_key_tile(taken, queue, place, problem, TILE_K: gl.constexpr, TILE_Q: gl.constexpr, of_entry):
    """Take the next key tile that no program has taken, or -1, and tell the other partitions of it,
    which call ``next_key_tile``: ten numbers of ``key_tile``, four of ``query_tiles_of``, t, and where
    the queue has room for it the rest of ``key_tile``.

    taken: how many are. place: in the queue. of_entry: the rows of an entry, for ``key_tile``.
    """
    tiles = problem[0][0]
    t = gl.atomic_add(taken, 1, sem="relaxed")
    tile = key_tile(min(t, tiles - 1), problem, TILE_K, TILE_Q, of_entry)
    runs = query_tiles_of(tile, problem, TILE_Q, TILE_K)
    t = gl.where(t < tiles, t, -1)
    queue.acquire(place)
    queue.put(place, tile[:10] + (runs[0], runs[1], runs[2], runs[3], t) + tile[10:], 1)  # noqa: RUF005
    return t, tile, runs


@gluon.jit
def next_key_tile(queue, place, WARPS: gl.constexpr):
    """Which key tile the program computes now, or -1; where it lies; and the query tiles that see it."""
    n = queue.get(place, WARPS)
    tile = n[:10]
    if queue.width > 15:
        tile = n[:10] + n[15:]
    return n[14], tile, (n[10], n[11], n[12], n[13])


@gluon.jit
def query_tiles_of(tile, problem, TILE_Q: gl.constexpr, TILE_K: gl.constexpr):
    """``mask.key_tiles`` with the roles swapped: the query tiles that see a key tile."""
    left, right = problem[3]
    first, full_first, full_stop, stop = key_tiles(
        tile[2], tile[2] + TILE_K, tile[6], tile[4], right, left, TILE_Q
    )
    stop = min(stop, gl.cdiv(tile[8], TILE_Q))
    return first, full_first, full_stop, gl.where(tile[2] < tile[7], max(stop, first), first)


@gluon.jit
def columns_of(x, part: gl.constexpr, PARTS: gl.constexpr):
    """One of 1, 2 or 4 blocks of columns."""
    gl.static_assert(PARTS <= 4)
    if PARTS > 1:
        x = half_of(x, part * 2 // PARTS)
    if PARTS > 2:
        x = half_of(x, part % 2)
    return x


@gluon.jit
def half_of(x, right: gl.constexpr):
    """The left or the right columns."""
    halves = gl.split(x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute([0, 2, 1]))
    return halves[right]


@gluon.jit
def store_rows(x, to, rows):
    """Store a tile to memory: those of its rows and columns that exist, as they lie in registers.

    to: pointer, strides of (batch, row, head) in units of UNIT elements, number of columns, UNIT. rows:
    batch entry, head, the sequence's first row in memory, the tile's first of the sequence, and how many
    the sequence has.
    """
    ptr, strides, columns, UNIT = to
    b, head, start, row, length = rows
    layout: gl.constexpr = x.type.layout
    r = row + gl.arange(0, x.shape[0], gl.SliceLayout(1, layout))
    c = gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))
    base = ptr + (b.to(gl.int64) * strides[0] + head.to(gl.int64) * strides[2]) * UNIT
    inside = (r < length)[:, None] & (c < columns)[None, :]
    at = (start + r).to(gl.int64)[:, None] * strides[1] * UNIT + c[None, :]
    gl.store(base + at, x.to(ptr.dtype.element_ty), mask=inside)
