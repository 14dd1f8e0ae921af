"""Dropout bits from a counter, the same on every backend, in forward and backward.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) is a keyed
bijection of 128-bit counters: no state, any element on its own. One counter serves eight keys of a
query row with 16 bits each:

    counter = (key group, query, head, batch)     all 32-bit, positions local to the sequence
    key     = fold(seed, offset)                  64-bit
    group of key j = (j // 32) * 4 + (j // 2) % 4
    bits of key j  = half (j % 2) of word (j // 8) % 4

so word ``w`` serves the columns 8w + 2g and 8w + 2g + 1 of a block of 32. That is the order in which
one thread holds the accumulator of a tensor-core product, which lets a GPU kernel use all 128 bits
where they are made. An element is dropped iff its 16 bits are below ``threshold(p)``.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
_OFFSET_STEP = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 / golden ratio, odd: offsets never collide


def threshold(p: float) -> int:
    """Dropout probability in units of 2**-16; at least one value is always kept."""
    return min(round(p * 65536), 65535)


def keep_scale(p: float) -> float:
    """What a kept probability is multiplied with, so that the expectation is exactly unchanged."""
    return 65536 / (65536 - threshold(p))


def fold(seed: Tensor, offset: Tensor | int = 0) -> Tensor:
    """The 64-bit Philox key of a (seed, offset) pair: int64, wrapping."""
    return seed + offset * torch.full_like(seed, _OFFSET_STEP)


def philox(counter: tuple[Tensor, ...], key: Tensor) -> tuple[Tensor, ...]:
    """Ten rounds of Philox4x32. counter: four int64 tensors below 2**32; key: int64. Four words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key & _LOW, (key >> 32) & _LOW
    for _ in range(ROUNDS):
        hi0, lo0 = _multiply(MULTIPLIERS[0], c0)
        hi1, lo1 = _multiply(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + WEYL[0]) & _LOW, (k1 + WEYL[1]) & _LOW
    return c0, c1, c2, c3


def _multiply(a: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """High and low word of a 32 x 32 bit product; in two halves, since int64 cannot hold 64 bits."""
    low, high = a * (x & 0xFFFF), a * (x >> 16)
    return (high + (low >> 16)) >> 16, (low + (high << 16)) & _LOW


def keep_mask(key: Tensor, batch: int, heads: range, queries: range, keys: range, p: float) -> Tensor:
    """Which elements of a tile survive dropout: bool (len(heads), len(queries), len(keys)).

    key: int64 tensor of one element, from ``fold``. The ranges are positions within the sequence.
    """

    def axis(r: range, dim: int) -> Tensor:
        shape = [1] * 4
        shape[dim] = len(r)
        return torch.arange(r.start, r.stop, device=key.device).view(shape)

    blocks = range(keys.start // 32, -(-keys.stop // 32))
    groups = axis(range(4 * blocks.start, 4 * blocks.stop), 2)
    row, head = axis(queries, 1), axis(heads, 0)
    words = philox((groups, row, head, torch.full_like(head, batch)), key.view(1, 1, 1, 1))
    bits = torch.stack([half for w in words for half in (w & 0xFFFF, w >> 16)], dim=-1)
    # (head, query, block, group, word, half) -> columns in the order block, word, group, half
    bits = bits.view(len(heads), len(queries), len(blocks), 4, 4, 2).transpose(3, 4).flatten(2)
    skip = keys.start - 32 * blocks.start
    return bits[..., skip : skip + len(keys)] >= threshold(p)
