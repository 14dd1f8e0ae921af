"""Which bytes of a buffer a view covers, exact under slicing, transposing and reinterpretation."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np


class Region:
    """A set of bytes: an offset and, like an array, extents and strides in bytes over items."""

    __slots__ = (
        "_intervals",
        "contiguous",
        "hi",
        "itemsize",
        "lo",
        "offset",
        "shape",
        "size",
        "strides",
    )

    def __init__(
        self, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int
    ) -> None:
        self.offset, self.shape, self.strides, self.itemsize = offset, shape, strides, itemsize
        self.size = int(np.prod(shape, dtype=np.int64)) * itemsize
        self.lo = offset
        self.hi = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + itemsize
        self.contiguous = self.hi - self.lo == self.size
        self._intervals: Any = None

    def view(self, data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The region's bytes within an array of one byte per byte, as an array (*shape, itemsize)."""
        if self.contiguous:
            return data[self.lo : self.hi]
        strides = (*self.strides, 1)
        return np.lib.stride_tricks.as_strided(data[self.lo :], (*self.shape, self.itemsize), strides)

    @property
    def intervals(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Sorted starts and ends of the maximal runs of bytes."""
        if self._intervals is None:
            covered = np.zeros(self.hi - self.lo + 2, np.int8)
            if self.contiguous:
                covered[1:-1] = 1
            else:
                inner = np.lib.stride_tricks.as_strided(
                    covered[1:], (*self.shape, self.itemsize), (*self.strides, 1)
                )
                inner[...] = 1
            edges = np.diff(covered)
            self._intervals = (np.nonzero(edges == 1)[0] + self.lo, np.nonzero(edges == -1)[0] + self.lo)
        return self._intervals


@lru_cache(maxsize=100_000)
def region(offset: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> Region:
    """Regions are interned, so that answers about pairs can be remembered."""
    return Region(offset, shape, strides, itemsize)


@lru_cache(maxsize=200_000)
def shared_bytes(a: Region, b: Region) -> int:
    """How many bytes two regions have in common."""
    lo, hi = max(a.lo, b.lo), min(a.hi, b.hi)
    if lo >= hi:
        return 0
    if a.contiguous and b.contiguous:
        return hi - lo
    (a0, a1), (b0, b1) = a.intervals, b.intervals
    common = np.minimum(a1[:, None], b1[None, :]) - np.maximum(a0[:, None], b0[None, :])
    return int(np.maximum(common, 0).sum())


def overlap(a: Region, b: Region) -> bool:
    return a.lo < b.hi and b.lo < a.hi and (a is b or shared_bytes(a, b) > 0)


def inside(a: Region, b: Region) -> bool:
    """Is every byte of a in b?"""
    return a is b or (b.lo <= a.lo and a.hi <= b.hi and (b.contiguous or shared_bytes(a, b) == a.size))
