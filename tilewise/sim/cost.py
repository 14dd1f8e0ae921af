"""When things happen. A cost model decides every time in a run; whether accesses are ordered it cannot
change.

`RandomCost` looks for bugs with adversarial times from a seed. A model of a real chip implements the
same methods in cycles; the engine then is a discrete-event simulation of one SM.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tilewise.sim.engine import Engine, Partition


@dataclass(frozen=True)
class MmaShape:
    """What a cost model needs to know about one matrix product.

    m, n, k: the whole tile. bits: width of an operand element. a_space, b_space: "registers", "shared"
    or "tensor" memory. warps: how the warps of the partition divide the tile, (along m, along n). ctas:
    1 or 2.
    unit: "wgmma", "tcgen05" or "mma_v2".
    """

    m: int
    n: int
    k: int
    bits: int
    a_space: str
    b_space: str
    warps: tuple[int, int]
    unit: str
    ctas: int = 1


class CostModel(Protocol):
    """All times are absolute unless they are called a duration."""

    delayed_stores: bool  # may the async proxy see a generic store late, without a fence?

    def attach(self, engine: Engine) -> None:
        """Called once, before anything runs."""

    def partition(self, partition: Partition) -> None:
        """A partition has been created."""

    def step(self, partition: Partition) -> float:
        """Duration: what issuing one visible operation costs its partition."""

    def poll(self) -> float:
        """Duration: from a barrier's completion until a waiter notices."""

    def waited(self, partition: Partition, what: str, start: float) -> None:
        """A partition has slept since `start`; `what` is the barrier or operation that it waited for."""

    def vector(self, partition: Partition, kind: str, elements: int, bits: int) -> None:
        """Register arithmetic over a tile; advances `partition.t`.

        kind: "add", "mul", "fma", "max", "compare", "where", "exp", "convert", "reduce", "layout" or
        "other".
        """

    def shared(self, partition: Partition, nbytes: int, write: bool) -> None:
        """A load or store of shared memory by a partition; advances `partition.t`."""

    def tensor(self, partition: Partition, nbytes: int, write: bool) -> None:
        """The same for tensor memory."""

    def global_(self, partition: Partition, nbytes: int, kind: str) -> None:
        """A "load", "store" or "atomic" of global memory by a partition; advances `partition.t`."""

    def copy(
        self, partition: Partition, rows: int, nbytes: int, kind: str
    ) -> list[tuple[int, int, float]]:
        """An asynchronous copy into shared memory: pieces of rows (first, end, time of arrival).

        kind: "tma", "cp.async", "st.async", "tcgen05.cp" or "clc".
        """

    def bulk_store(self, partition: Partition, nbytes: int, reduce: bool) -> tuple[float, float]:
        """A TMA store or reduction: when shared memory has been read, when global memory is written."""

    def mma(self, partition: Partition, shape: MmaShape, earliest: float) -> float:
        """When a matrix product completes; not before `earliest`, when the one before it does."""

    def visible(self) -> float:
        """When the async proxy sees a generic store that is not fenced."""


class RandomCost:
    """Adversarial times: operations are instant, ordinary, or held back until nothing else can run."""

    delayed_stores = True

    def __init__(self, seed: int | str) -> None:
        self.random = random.Random(seed)
        self.now = 0.0

    def attach(self, engine: Engine) -> None:
        self.engine = engine

    def partition(self, partition: Partition) -> None:
        partition.speed = 10 ** self.random.uniform(-1, 1.5)  # one may be 300 times slower than another

    def step(self, partition: Partition) -> float:
        if self.random.random() < 0.5:
            return 0.0
        return partition.speed * 10 ** self.random.uniform(0, 2.5)

    def poll(self) -> float:
        return 0.0 if self.random.random() < 0.6 else 10 ** self.random.uniform(0, 3)

    def waited(self, partition: Partition, what: str, start: float) -> None:
        pass

    def latency(self) -> float:
        draw = self.random.random()
        if draw < 0.25:
            return 0.0
        if draw < 0.40:
            return self.random.uniform(1e5, 1e6)
        return 10 ** self.random.uniform(0, 4)

    def vector(self, partition: Partition, kind: str, elements: int, bits: int) -> None:
        pass

    def shared(self, partition: Partition, nbytes: int, write: bool) -> None:
        pass

    def tensor(self, partition: Partition, nbytes: int, write: bool) -> None:
        pass

    def global_(self, partition: Partition, nbytes: int, kind: str) -> None:
        pass

    def copy(
        self, partition: Partition, rows: int, nbytes: int, kind: str
    ) -> list[tuple[int, int, float]]:
        pieces = self.random.choice([1, 1, 2, 4])
        if rows % pieces:
            pieces = 1
        cuts = [i * rows // pieces for i in range(pieces + 1)]
        return [(a, b, self.engine.now + self.latency()) for a, b in pairwise(cuts)]

    def bulk_store(self, partition: Partition, nbytes: int, reduce: bool) -> tuple[float, float]:
        read = self.engine.now + self.latency()
        return read, read + self.latency()

    def mma(self, partition: Partition, shape: MmaShape, earliest: float) -> float:
        return max(self.engine.now + self.latency(), earliest)

    def visible(self) -> float:
        return self.engine.now + self.latency()
