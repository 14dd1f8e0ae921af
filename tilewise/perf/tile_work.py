"""What one tile asks of an SM: its matrix products, and the bytes they move through shared memory.

A tile is the work of one step of the inner loop: M queries and N keys of D numbers. How often a product
reads its operands follows from the instruction that multiplies, so there is one row of `_READERS` for
each family of GPUs:

- Ampere, `mma.sync`: each warp brings its operands from shared memory into registers (`ldmatrix`), keeps
  32 rows of the left one and so reads the whole right one.
- Hopper, WGMMA m64nNk16: a warpgroup multiplies 64 rows; the right operand is read from shared memory by
  each warpgroup, the left one from there or from registers.
- Blackwell, tcgen05.mma with M=128: the left operand comes from shared or tensor memory, the right one
  from shared memory. A pair of CTAs with M=256 shares the right operand: each holds and reads half.

Forward S = Q K^T and O += P V; P never passes through shared memory. Backward, keys on the rows so that
P^T and dS^T are left operands out of registers or tensor memory: S^T = K Q^T, dP^T = V dO^T,
dV += P^T dO, dK += dS^T Q, dQ = dS K. For the last one dS is written to shared memory, and dQ goes
through it in fp32 on its way to memory (Ampere adds it to memory straight from registers).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tilewise.perf.gpus import Family

Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
DQ_BYTES = 4  # dQ leaves in fp32


class Tile(NamedTuple):
    """Queries, keys, head dim. With a pair of CTAs, what each of the two owns."""

    q: int
    k: int
    d: int


class Product(NamedTuple):
    """(rows × depth) times (depth × columns)."""

    result: str
    left: str
    right: str
    rows: int
    columns: int
    depth: int
    left_in_shared: bool

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.columns * self.depth


class Move(NamedTuple):
    """Bytes through one SM's shared memory, in either direction, for one tile."""

    what: str
    bytes: int


@dataclass(frozen=True)
class Options:
    """How a kernel is built, as far as it changes the count.

    itemsize: bytes of an operand's element.
    pair: two CTAs multiply together (Blackwell).
    exchange_ds: they also swap halves of dS, so that each makes dQ of half the queries from all keys of
        the pair, and half as much dQ passes through its shared memory.
    q_in_registers: forward's Q is held in registers (Hopper, Ampere) instead of read at every tile.
    loads: count also the writes that bring each step's new tiles into shared memory. The article's
        analysis leaves them out.
    """

    itemsize: int = 2
    pair: bool = False
    exchange_ds: bool = False
    q_in_registers: bool = False
    loads: bool = False


class _Reader(NamedTuple):
    """Who reads operands: a warp, a warpgroup, or the tensor core itself.

    rows: of the left operand at a time; columns: of the right operand, at most.
    granule: rows are multiplied in multiples of this; fewer cost as much.
    several: readers work side by side, one for each `rows` of the tile, and share out the columns of a
        product that has fewer rows.
    """

    rows: int
    columns: int
    granule: int
    several: bool


_READERS: dict[Family, _Reader] = {
    "ampere": _Reader(rows=32, columns=256, granule=16, several=True),
    "hopper": _Reader(rows=64, columns=256, granule=64, several=True),
    "blackwell": _Reader(rows=128, columns=256, granule=128, several=False),
}


def products(direction: Direction, tile: Tile, options: Options) -> list[Product]:
    """The matrix products of one tile, as one CTA computes them."""
    q, k, d = tile
    if direction == "forward":
        return [
            Product("S", "Q", "K", q, k, d, not options.q_in_registers),
            Product("O", "P", "V", q, d, k, False),
        ]
    parts = 2 if options.exchange_ds else 1
    return [
        Product("S", "K", "Q", k, q, d, True),
        Product("dP", "V", "dO", k, q, d, True),
        Product("dV", "P", "dO", k, d, q, False),
        Product("dK", "dS", "Q", k, d, q, False),
        Product("dQ", "dS", "K", math.ceil(q / parts), d, k * parts, True),
    ]


def multiplied_flops(direction: Direction, tile: Tile, options: Options, family: Family) -> int:
    """FLOPs the tensor cores spend on a tile: rows are filled up to what an instruction multiplies."""
    total = 0
    for product in products(direction, tile, options):
        granule = _READERS[family].granule
        if options.exchange_ds and product.result == "dQ":
            granule //= 2  # a pair with M=128: 64 rows each, the columns spread over the other lanes
        total += product._replace(rows=math.ceil(product.rows / granule) * granule).flops
    return total


def shared_moves(direction: Direction, tile: Tile, options: Options, family: Family) -> list[Move]:
    """Everything one tile moves through shared memory, operand by operand."""
    reader = _READERS[family]
    q, k, d = tile
    readers = math.ceil((q if direction == "forward" else k) / reader.rows) if reader.several else 1
    moves = []
    for product in products(direction, tile, options):
        bands = math.ceil(product.rows / reader.rows)
        slices = max(math.ceil(product.columns / reader.columns), readers // bands)
        left = product.rows * product.depth * options.itemsize * slices
        right = product.columns * product.depth * options.itemsize * bands
        if product.left_in_shared:
            moves.append(Move(f"{product.left} read for {product.result}", left))
        moves.append(
            Move(f"{product.right} read for {product.result}", right // 2 if options.pair else right)
        )
    if direction == "backward":
        # With an exchange half goes into the partner's shared memory instead, and as much comes from it.
        moves.append(Move("dS written", q * k * options.itemsize))
        if family != "ampere":
            dq = math.ceil(q / (2 if options.exchange_ds else 1)) * d * DQ_BYTES
            moves += [Move("dQ written", dq), Move("dQ read", dq)]
    if options.loads:
        names, rows = ("K, V", k) if direction == "forward" else ("Q, dO", q)
        moves.append(Move(f"{names} loaded", 2 * rows * d * options.itemsize))
    return moves
