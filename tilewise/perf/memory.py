"""IO accounting: the bytes each algorithm moves between its kernels and memory, and what it keeps there.

Materialised attention and FlashAttention-1 are algorithms 0, 1, 3 and 4 of Dao et al., "FlashAttention"
(NeurIPS 2022); the materialised one moves Θ(Nd + N²) numbers (theorem 2), FlashAttention Θ(N²d²/M) with
M numbers of on-chip memory (same theorem). FlashAttention-2 (Dao, 2023, algorithms 1 and 2) and the
later ones order the loops the other way round and keep the output on chip: one count serves all of them.

The counts are exact for given tiles: what this library's Triton kernels load and store, element by
element, plus the passes over fp32 accumulators around them. A cache may serve a part of it: these are
the bytes that leave the kernel, an upper bound of what reaches HBM.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tilewise import mask

FP32 = 4  # bytes of accumulators and of a row's statistics


@dataclass(frozen=True)
class SelfAttention:
    """The sizes that are counted with: as many keys as queries, as many key heads as query heads,
    values as wide as keys. itemsize in bytes."""

    seqlen: int
    head_dim: int
    heads: int = 1
    batch: int = 1
    causal: bool = False
    itemsize: int = 2

    @property
    def matrices(self) -> int:
        return self.heads * self.batch

    def flops(self, direction: str) -> float:
        """By the usual count: 4 N² d a head, half of it under a causal mask, backward 2.5 times."""
        full = 4.0 * self.matrices * self.seqlen**2 * self.head_dim
        return full * (0.5 if self.causal else 1.0) * (2.5 if direction == "backward" else 1.0)


@dataclass(frozen=True)
class Flow:
    """One tensor's traffic, in bytes. `added` is what atomic additions send; each is read, added to and
    written where it lands, but crosses the wire once. `kernel`: by the attention kernels themselves, not
    by a pass before or after them."""

    what: str
    read: int = 0
    written: int = 0
    added: int = 0
    kernel: bool = True


@dataclass(frozen=True)
class Account:
    """What one direction of one algorithm moves, and the memory it needs beside inputs and results."""

    flows: tuple[Flow, ...]
    extra_bytes: int

    @property
    def moved(self) -> int:
        return sum(f.read + f.written + f.added for f in self.flows)


def materialised(p: SelfAttention) -> dict[str, Account]:
    """Scores and probabilities as whole matrices; no use is made of a causal mask's empty half."""
    square, tall = _sizes(p)
    forward = (
        Flow("Q, K, V", read=3 * tall),
        Flow("S", read=square, written=square),
        Flow("P", read=square, written=square),
        Flow("O", written=tall),
    )
    backward = (
        Flow("Q, K, V", read=3 * tall),
        Flow("dO", read=2 * tall),
        Flow("P", read=2 * square),
        Flow("dP", read=square, written=square),
        Flow("dS", read=2 * square, written=square),
        Flow("dQ, dK, dV", written=3 * tall),
    )
    return {"forward": Account(forward, 2 * square), "backward": Account(backward, 3 * square)}


def fa1(p: SelfAttention, tile_q: int, tile_k: int) -> dict[str, Account]:
    """FlashAttention-1: keys outside, queries inside; O, m and l pass through memory at every step."""
    _, tall = _sizes(p)
    rows = p.matrices * p.seqlen
    steps = p.matrices * sum(_visits(p, tile_k, tile_q, by_keys=True))  # query rows, once per key tile
    vector, vector32 = p.head_dim * p.itemsize, p.head_dim * FP32
    forward = (
        Flow("K, V", read=2 * tall),
        Flow("Q", read=steps * vector),
        Flow("O in fp32", read=steps * vector32, written=steps * vector32),
        Flow("m, l", read=2 * steps * FP32, written=2 * steps * FP32),
        Flow("O in fp32, cleared", written=rows * vector32, kernel=False),
        Flow("O, converted", read=rows * vector32, written=tall, kernel=False),
    )
    backward = (
        Flow("K, V", read=2 * tall),
        Flow("Q, O, dO", read=3 * steps * vector),
        Flow("dQ in fp32", read=steps * vector32, written=steps * vector32),
        Flow("m, l", read=2 * steps * FP32),
        Flow("dK, dV", written=2 * tall),
        *_dq_passes(p),
    )
    statistics = 3 * rows * FP32  # m, l and the log-sum-exp made of them
    extra = rows * vector32 + statistics
    return {"forward": Account(forward, extra), "backward": Account(backward, extra)}


def fa2(p: SelfAttention, tile_q: int, tile_k: int) -> dict[str, Account]:
    """FlashAttention-2 and later: each query tile reads the keys it sees; backward, each key tile reads
    the queries that see it and adds to their dQ."""
    _, tall = _sizes(p)
    rows = p.matrices * p.seqlen
    keys = p.matrices * sum(_visits(p, tile_q, tile_k, by_keys=False))  # key rows, once per query tile
    steps = p.matrices * sum(_visits(p, tile_k, tile_q, by_keys=True))
    vector, vector32 = p.head_dim * p.itemsize, p.head_dim * FP32
    forward = (
        Flow("Q", read=tall),
        Flow("K, V", read=2 * keys * vector),
        Flow("O", written=tall),
        Flow("lse", written=rows * FP32),
    )
    backward = (
        Flow("delta from O, dO", read=2 * tall, written=rows * FP32),
        Flow("K, V", read=2 * tall),
        Flow("Q, dO", read=2 * steps * vector),
        Flow("lse, delta", read=2 * steps * FP32),
        Flow("dQ in fp32", added=steps * vector32),
        Flow("dK, dV", written=2 * tall),
        *_dq_passes(p),
    )
    statistics = rows * FP32
    return {
        "forward": Account(forward, statistics),
        "backward": Account(backward, rows * vector32 + 2 * statistics),
    }


def compulsory(p: SelfAttention) -> dict[str, int]:
    """The bytes no algorithm can save: every input read once, every result written once."""
    _, tall = _sizes(p)
    statistics = p.matrices * p.seqlen * FP32
    return {"forward": 4 * tall + statistics, "backward": 8 * tall + statistics}


def fa1_tile(sram_bytes: int, p: SelfAttention) -> tuple[int, int]:
    """(queries, keys) per tile as the first paper's algorithm 1 cuts them from on-chip memory: blocks of
    M/4 numbers for Q, K, V and O, queries at most d."""
    queries, keys = fa2_tile(sram_bytes, p)
    return min(queries, p.head_dim), keys


def fa2_tile(sram_bytes: int, p: SelfAttention) -> tuple[int, int]:
    """The same without the limit on queries, which the second paper leaves to the implementer."""
    rows = max(1, math.ceil(sram_bytes / p.itemsize / (4 * p.head_dim)))
    return min(rows, p.seqlen), min(rows, p.seqlen)


def _sizes(p: SelfAttention) -> tuple[int, int]:
    """Bytes of all N × N and of all N × d matrices."""
    return (
        p.matrices * p.seqlen * p.seqlen * p.itemsize,
        p.matrices * p.seqlen * p.head_dim * p.itemsize,
    )


def _dq_passes(p: SelfAttention) -> tuple[Flow, ...]:
    numbers = p.matrices * p.seqlen * p.head_dim
    return (
        Flow("dQ in fp32, cleared", written=numbers * FP32, kernel=False),
        Flow("dQ, converted", read=numbers * FP32, written=numbers * p.itemsize, kernel=False),
    )


def _visits(p: SelfAttention, outer: int, inner: int, *, by_keys: bool) -> Iterator[int]:
    """For each outer tile, how many inner rows lie in the tiles it visits; outer are keys if by_keys."""
    n = p.seqlen
    left, right = mask.normalize_window(p.causal, (None, None), n, n)
    if by_keys:  # the same band with the roles swapped
        left, right = right, left
    for start in range(0, n, outer):
        first, _, _, stop = mask.key_tiles(start, start + outer, n, n, left, right, inner)
        yield min(stop * inner, n) - first * inner


def visited_tiles(p: SelfAttention, tile_q: int, tile_k: int) -> int:
    """How many (query tile, key tile) pairs a kernel multiplies that skips what the mask hides."""
    return p.matrices * sum(
        math.ceil(keys / tile_k) for keys in _visits(p, tile_q, tile_k, by_keys=False)
    )
