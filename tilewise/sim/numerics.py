"""Arithmetic as the GPU does it, where that is known to differ from NumPy's."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]


def fma(a: Any, b: Any, c: Any) -> F32:
    """a * b + c in fp32 with one rounding (the product is exact in fp64)."""
    with np.errstate(all="ignore"):
        return (np.asarray(a, np.float64) * b + c).astype(np.float32)


def exp2(x: NDArray[Any], approximate: bool) -> NDArray[Any]:
    """2**x; approximate: as ex2.approx.ftz.f32, whose relative error is at most 2**-22."""
    with np.errstate(all="ignore"):
        if not approximate or x.dtype != np.float32:
            return np.exp2(x.astype(np.float32)).astype(x.dtype) if x.dtype.itemsize < 4 else np.exp2(x)
        y = np.exp2(x.astype(np.float64))
        # A pseudo-random error that depends on x alone: of either sign, at most 1.5 units of 2**-23.
        hashed = x.view(np.uint32) * np.uint32(2654435761)
        error = ((hashed >> np.uint32(16)) * 2.0**-15 - 1) * 2.0**-22.5
        exact = (x == np.rint(x)) | ~np.isfinite(y)
        y = np.where(exact, y, y * (1 + error)).astype(np.float32)
        return np.where(np.abs(y) < np.float32(2**-126), np.float32(0), y)


def exp(x: NDArray[Any], approximate: bool) -> NDArray[Any]:
    """e**x, which Triton compiles in fp32 as ex2.approx(x * log2(e))."""
    if x.dtype != np.float32 or not approximate:
        return np.exp(x.astype(np.float32)).astype(x.dtype) if x.dtype.itemsize < 4 else np.exp(x)
    with np.errstate(all="ignore"):
        return exp2(x * np.float32(1.4426950408889634), True)


def to_tf32(x: NDArray[Any]) -> F32:
    """What the tensor core sees of an fp32 operand: the low 13 bits of the fraction are dropped."""
    return (np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def dot(a: NDArray[Any], b: NDArray[Any]) -> F32:
    """a @ b with fp32 accumulation; operands of fp32 are taken as tf32."""
    if a.dtype.kind in "iu" and b.dtype.kind in "iu":
        return a.astype(np.int32) @ b.astype(np.int32)  # type: ignore[return-value]
    if a.dtype == b.dtype == np.float32:
        a, b = to_tf32(a), to_tf32(b)
    with np.errstate(all="ignore"):
        return a.astype(np.float32) @ b.astype(np.float32)


def dot_fp8_hopper(
    a: NDArray[Any], b: NDArray[Any], acc: F32 | None, bits: int, promote_every: int
) -> F32:
    """a @ b + acc as Hopper's fp8 WGMMA: every step of 32 aligns its terms to the largest of them and
    drops what lies below `bits` fraction bits. After `promote_every` elements of k the partial sum is
    added to acc in full fp32 (0: never, the short accumulator carries everything).
    """
    m, k = a.shape
    n = b.shape[1]
    a32, b32 = a.astype(np.float32), b.astype(np.float32)
    total = np.zeros((m, n), np.float32) if acc is None else acc.astype(np.float32)
    every = promote_every if 0 < promote_every < k else 0
    partial = np.zeros((m, n), np.float32) if every else total
    with np.errstate(all="ignore"):
        for start in range(0, k, 32):
            terms = a32[:, start : start + 32, None] * b32[None, start : start + 32, :]
            largest = np.maximum(np.abs(terms).max(1), np.abs(partial))
            exponent = np.frexp(largest)[1] - 1
            unit = np.ldexp(np.float32(1), exponent - bits)
            terms = np.trunc(terms / unit[:, None, :])
            summed = (terms.sum(1) + np.trunc(partial / unit)) * unit
            partial = np.where(largest == 0, 0, summed).astype(np.float32)
            if every and (start + 32) % every == 0:
                total = total + partial
                partial = np.zeros((m, n), np.float32)
    return total + partial if every else partial
