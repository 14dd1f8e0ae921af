"""What the Triton kernels share: a sequence's rows, tiles of a matrix, scores and their derivative.

Masks are not written here: the functions of ``tilewise.mask`` are compiled as they are.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import triton
import triton.language as tl

from tilewise import mask


def device_function(function: Any) -> Any:
    """A plain function of ``tilewise.mask`` for kernels to call. Triton's interpreter insists on seeing
    ``triton.language`` among a function's globals, which a module for everyone does not import."""
    scope = {**function.__globals__, "tl": tl}
    return triton.jit(FunctionType(function.__code__, scope, function.__name__))


key_tiles = device_function(mask.key_tiles)
key_span = device_function(mask.key_span)
visible = device_function(mask.visible)


@triton.jit
def key_tile_runs(q_start, q_stop, seqlen_q, seqlen_k, left, right, tile, ONE_RUN: tl.constexpr):
    """Bounds of three runs of tiles: crossed by the band's left edge, seen whole, crossed by its right
    edge. ONE_RUN makes them all the last, masked one: a third of the code, for kernels in which a mask
    is cheap beside the products."""
    first, full_first, full_stop, stop = key_tiles(
        q_start, q_stop, seqlen_q, seqlen_k, left, right, tile
    )
    if ONE_RUN:
        return first, first, first, stop
    return first, full_first, full_stop, stop


@triton.jit
def query_tile_runs(k_start, k_stop, seqlen_q, seqlen_k, left, right, tile, ONE_RUN: tl.constexpr):
    """``key_tile_runs`` for the queries that see a key tile: the same band with the roles swapped.

    A key tile that reaches past the last key is masked throughout: dQ sums over its rows, and for keys
    that do not exist exp(0 - lse) may be infinite, which times a key of zeros is NaN."""
    first, full_first, full_stop, stop = key_tile_runs(
        k_start, k_stop, seqlen_k, seqlen_q, right, left, tile, ONE_RUN
    )
    partial = k_stop > seqlen_k
    return first, first if partial else full_first, first if partial else full_stop, stop


@triton.constexpr_function
def has_tiles(run, left, one_run):
    """Whether run 0, 1 or 2 can hold any tile: if not, its code is left out."""
    return run == 2 or (not one_run and (run == 1 or left is not None))


@triton.jit
def sequence_rows(b, cu_seqlens, seqused, seqlen):
    """First row and number of rows of sequence ``b``; dense batches start at row 0. Never more rows than
    seqlen, which all else is made for, whatever lengths say that nobody could check without waiting."""
    start = 0
    length = seqlen
    if cu_seqlens is not None:
        start = tl.load(cu_seqlens + b)
        length = tl.load(cu_seqlens + b + 1) - start
    if seqused is not None:
        length = tl.load(seqused + b)
    if cu_seqlens is not None or seqused is not None:
        length = min(length, seqlen)
    return start, length


@triton.jit
def matrix(pointer, strides, b, start, head):
    """Address of one sequence and head: strides are those of (batch, row, head), batch 0 if packed."""
    sequence = tl.cast(b, tl.int64) * strides[0] + tl.cast(start, tl.int64) * strides[1]
    return pointer + sequence + tl.cast(head, tl.int64) * strides[2]


@triton.jit
def tile_pointers(base, stride, start, ROWS: tl.constexpr, COLS: tl.constexpr):
    # 64 bits wherever a row stride enters: long sequences and wide rows pass 2**31 elements.
    rows = tl.arange(0, ROWS).to(tl.int64) * stride
    return base + tl.cast(start, tl.int64) * stride + rows[:, None] + tl.arange(0, COLS)[None, :]


@triton.jit
def tile_mask(start, low, high, ROWS: tl.constexpr, COLS: tl.constexpr, D: tl.constexpr):
    rows = start + tl.arange(0, ROWS)
    inside = ((rows >= low) & (rows < high))[:, None]
    if D < COLS:
        inside = inside & (tl.arange(0, COLS) < D)[None, :]
    return inside


@triton.jit
def load_tile(
    base,
    stride,
    start,
    low,
    high,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    D: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Rows ``start`` to ``start + ROWS``, zero beyond column D and, if MASKED, outside [low, high)."""
    pointers = tile_pointers(base, stride, start, ROWS, COLS)
    if MASKED:
        return tl.load(pointers, mask=tile_mask(start, low, high, ROWS, COLS, D), other=0.0)
    if D < COLS:
        return tl.load(pointers, mask=(tl.arange(0, COLS) < D)[None, :], other=0.0)
    return tl.load(pointers)


@triton.jit
def store_tile(
    base, stride, start, stop, value, ROWS: tl.constexpr, COLS: tl.constexpr, D: tl.constexpr
):
    """Store rows ``start`` to ``stop`` (at most ROWS of them), columns below D."""
    pointers = tile_pointers(base, stride, start, ROWS, COLS)
    inside = tile_mask(start, start, stop, ROWS, COLS, D)
    tl.store(pointers, value.to(base.dtype.element_ty), mask=inside)


@triton.jit
def load_rows(base, start, low, high, other, ROWS: tl.constexpr, MASKED: tl.constexpr):
    """A row statistic (lse, delta), ``other`` outside [low, high)."""
    rows = start + tl.arange(0, ROWS)
    if MASKED:
        return tl.load(base + rows, mask=(rows >= low) & (rows < high), other=other)
    return tl.load(base + rows)


@triton.jit
def logits(products, scale, softcap):
    """Dot products to (s, factor): s * factor are the logits in units of log2(e), ready for exp2.

    The factor stays outside, where it costs nothing: exp2(s * factor - top) is one multiply-add.
    scale: of the products, times log2(e); with softcap c, divided by c instead.
    softcap: c * log2(e), or None.
    """
    if softcap is not None:
        return softcap * tanh(products * scale), 1.0
    return products, scale


@triton.jit
def softcap_slope(s, softcap):
    """Derivative of the softcap where it gave s: 1 - tanh^2."""
    t = s * (1.0 / softcap)
    return 1.0 - t * t


@triton.jit
def tanh(x):
    """Relative error below 4e-7. Portable, which a library call is not."""
    return exact_near_zero(x, 1.0 - 2.0 / (1.0 + tl.exp2(x * 2.8853900817779268)))


@triton.jit
def exact_near_zero(x, far):
    """tanh of x from what 1 - 2 / (1 + e^2x) came to. That is exact at both ends, where exp2 gives 0 or
    inf, but a difference of near numbers around 0; there a polynomial, fitted to tanh(x) / x on
    |x| < 0.5."""
    t = x * x
    near = -0.333330750 + t * (0.133249074 + t * (-0.0529942289 + t * 0.0171512943))
    return tl.where(tl.abs(x) < 0.5, x + x * t * near, far)


@triton.jit
def finite(top):
    """A row maximum to subtract: a row that has seen nothing has -inf, and -inf - -inf is NaN."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def dot(a, b, acc, IEEE: tl.constexpr):
    """acc + a b in fp32; fp32 operands by plain multiply-adds, never tf32."""
    if IEEE:
        return tl.dot(a, b, acc, input_precision="ieee")
    return tl.dot(a, b, acc)
