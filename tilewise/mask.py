"""The one place that knows masks.

A mask is a band around the bottom-right diagonal: query ``i`` of a sequence with ``seqlen_q`` queries
and ``seqlen_k`` keys sees key ``j`` iff

    i + offset - left <= j <= i + offset + right,    offset = seqlen_k - seqlen_q,

where ``None`` for ``left`` or ``right`` means no bound on that side. Causal is ``right = 0``.

The functions below are plain integer arithmetic on purpose: Python runs them in the CPU backend and
in the tests, and the GPU backends compile the very same functions (``triton.jit(mask.key_tiles)``), so
the kernels cannot disagree with what is tested here. That is why they use only ``min``, ``max``, ``//``
on non-negative numbers (a GPU truncates where Python floors), no helper of this module and no type
annotations (a kernel's own types would be read from them). Positions, lengths and tile sides are int,
left and right int or None.

By symmetry the queries that see a key are the same band with the roles swapped: call ``key_tiles`` or
``key_span`` with (queries, keys) and (left, right) exchanged.
"""

from __future__ import annotations

Window = tuple[int | None, int | None]


def normalize_window(causal: bool, window: Window, seqlen_q: int, seqlen_k: int) -> Window:
    """``causal`` and ``window`` as one band ``(left, right)`` with every idle bound ``None``.

    seqlen_q, seqlen_k: the longest lengths in the batch. A bound that can bind in no sequence up to
    these lengths becomes ``None``, so that (S - 1, 0) takes the path of ``causal`` bit for bit. A band
    that no key can be in becomes one canonical empty band. Sizes are clamped, so that kernels can add
    them to 32-bit positions.
    """
    left, right = window
    if causal:
        right = 0 if right is None else min(right, 0)
    limit = seqlen_q + seqlen_k + 1
    if left is not None and right is not None and left + right < 0:
        return None, -limit
    if left is not None:
        left = None if left >= seqlen_k - 1 else max(left, -limit)
    if right is not None:
        right = None if right >= seqlen_q - 1 else max(right, -limit)
    return left, right


def visible(i, j, seqlen_q, seqlen_k, left, right):
    """Whether query ``i`` sees key ``j``; broadcasts over arrays of positions."""
    offset = seqlen_k - seqlen_q
    seen = (i < seqlen_q) & (j < seqlen_k)
    if left is not None:
        seen = seen & (j >= i + offset - left)
    if right is not None:
        seen = seen & (j <= i + offset + right)
    return seen


def key_range(i, seqlen_q, seqlen_k, left, right):
    """``(first, stop)``: query ``i`` of the sequence sees the keys in ``[first, stop)`` that exist.

    ``visible`` as bounds, which may lie outside of ``[0, seqlen_k)``; broadcasts over arrays of
    positions.
    """
    first = 0
    stop = seqlen_k
    if left is not None:
        first = i + seqlen_k - seqlen_q - left
    if right is not None:
        stop = i + seqlen_k - seqlen_q + right + 1
    return first, stop


def key_span(seqlen_q, seqlen_k, left, right):
    """``(low, high)``: the keys that at least one query of the sequence may see are in ``[low, high)``.

    Keys outside are never used, so loads skip them: whatever they hold (padding, NaN) has no effect.
    """
    low = 0
    high = seqlen_k
    if left is not None:
        low = max(0, seqlen_k - seqlen_q - left)
    if right is not None:
        high = min(seqlen_k, seqlen_k + right)
    return low, high


def key_tiles(q_start, q_stop, seqlen_q, seqlen_k, left, right, tile):
    """``(first, full_first, full_stop, stop)``: the key tiles that queries ``[q_start, q_stop)`` visit.

    Tiles ``[first, stop)`` hold a key that some row sees. Tiles ``[full_first, full_stop)`` are seen
    whole by every row and need no element mask; the rest, on either side of them, does.
    """
    offset = seqlen_k - seqlen_q
    q_last = min(q_stop, seqlen_q) - 1
    low = 0
    full_low = 0
    high = seqlen_k
    full_high = seqlen_k
    if left is not None:
        low = max(0, q_start + offset - left)
        full_low = max(0, q_last + offset - left)
    if right is not None:
        high = min(seqlen_k, q_last + offset + right + 1)
        full_high = min(seqlen_k, q_start + offset + right + 1)
    empty = (high <= low) | (q_last < q_start)
    first = low // tile
    stop = first if empty else (high + tile - 1) // tile
    full_first = min(max((full_low + tile - 1) // tile, first), stop)
    full_stop = max(min(max(full_high, 0) // tile, stop), full_first)
    return first, full_first, full_stop, stop
