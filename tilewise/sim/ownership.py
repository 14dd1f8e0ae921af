"""Which part of a tile belongs to which CTA of a cluster.

A multi-CTA kernel is one program on whole tiles, and each CTA holds a part of every tile. Which part, a
layout says with one basis per bit of the CTA's rank: in units of the part (`cga_layout`), or in elements
(`block_bases`). A basis of zeros means a copy in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Bases = tuple[tuple[int, ...], ...]
Box = tuple[tuple[int, int], ...]


def bases_of(layout: Any) -> Bases:
    """The bases of a shared-memory, tensor-memory or plain register layout; () if it is for one CTA."""
    bases = getattr(layout, "cga_layout", None)
    if callable(bases):
        bases = None
    return tuple(tuple(b) for b in bases or ())


def box_of(shape: Sequence[int], bases: Bases, rank: int) -> Box | None:
    """(start, end) per dimension of what CTA `rank` holds; None if it is everything."""
    if not any(any(b) for b in bases):
        return None
    parts, index = [1] * len(shape), [0] * len(shape)
    for bit, basis in enumerate(bases):
        lead = len(shape) - len(basis)  # a leading dimension of stages is never divided
        for d, step in enumerate(basis):
            if step:
                parts[lead + d] *= 2
                if rank >> bit & 1:
                    index[lead + d] += step
    box = []
    for n, p, i in zip(shape, parts, index, strict=True):
        size = n // p
        box.append((i * size, (i + 1) * size))
    return tuple(box)


def register_box(layout: Any, shape: Sequence[int], rank: int) -> Box | None:
    """The same for a tile in registers."""
    dims = list(range(len(shape)))
    sizes = list(shape)
    while getattr(layout, "parent", None) is not None:
        if hasattr(layout, "dim"):  # a slice of a larger tile: put the missing dimension back
            dims = [d + (d >= layout.dim) for d in dims]
            sizes.insert(layout.dim, 1)
        layout = layout.parent
    if hasattr(layout, "block_bases"):
        full = layout.shape
        bases = tuple(
            tuple(b // max(1, _part(layout.block_bases, full, d)) for d, b in enumerate(basis))
            for basis in layout.block_bases
        )
    else:
        bases = bases_of(layout)
        full = sizes
    box = box_of([n if n > 1 else f for n, f in zip(sizes, full, strict=False)], bases, rank)
    if box is None:
        return None
    mine = tuple(box[d] if sizes[d] > 1 else (0, 1) for d in dims)
    return None if mine == tuple((0, n) for n in shape) else mine


def _part(bases: Sequence[Sequence[int]], shape: Sequence[int], dim: int) -> int:
    """Extent of one CTA's part along a dimension."""
    size = shape[dim]
    for b in bases:
        if b[dim]:
            size //= 2
    return size


def intersect(a: Sequence[tuple[int, int]], b: Sequence[tuple[int, int]] | None) -> Box | None:
    if b is None:
        return tuple(a)
    common = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return common if all(lo < hi for lo, hi in common) else None


def permuted(bases: Bases, order: Sequence[int]) -> Bases:
    if not bases:
        return bases
    out = []
    for b in bases:
        full = (0,) * (len(order) - len(b)) + tuple(b)
        out.append(tuple(full[i] for i in order))
    return tuple(out)
