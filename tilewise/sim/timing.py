"""Cycles of one SM: a cost model that turns the engine into a discrete-event simulation.

What a unit can do in a cycle comes from `tilewise.perf.gpus`. What no table says (latencies, how much of
a peak real code reaches) is in `Parameters`, assumed or fitted to measured kernels; see calibration.py.

A unit is a `Lane`: time in small slices, each with a capacity. A request takes what is left of the
slices from its start on, so a matrix product that needs 96 of 128 bytes a cycle leaves room for a small
load beside it, which need not queue behind the whole tile.

Inside one partition the exponential unit runs beside the arithmetic that follows it, as the compiler
interleaves them; the partition waits for it at its next operation that others can see.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tilewise.perf import gpus
from tilewise.sim.cost import MmaShape

if TYPE_CHECKING:
    from tilewise.sim.engine import Engine, Partition

SLICE = 32  # cycles of a lane's time slice
TILE = 1024  # elements from which on something is a tile rather than a row of it
SHARE = 128  # cycles of vector work after which another partition may come in between


@dataclass(frozen=True)
class Parameters:
    """What was fitted or assumed; cycles unless said otherwise.

    launch: from the kernel's start to its first program, and from its last to its end.
    program: to start one program on an SM that the one before has left.
    step: issue of one visible operation. poll: from a barrier's completion until a waiter runs on.
    mma_latency: from a product's last multiplication until its registers can be read.
    tma_latency: from the issue of a copy until its first byte. global_latency: the same of a plain load.
    shared: share of the shared-memory peak that can be had. tensor: the same of the tensor cores.
    vector: the same of the FMA units, for latencies and register banks that the model does not know.
    tensor_memory: bytes a cycle between registers and tensor memory.
    """

    launch: float = 4000.0
    program: float = 500.0
    step: float = 12.0
    poll: float = 20.0
    mma_latency: float = 40.0
    tma_latency: float = 700.0
    global_latency: float = 600.0
    shared: float = 1.0
    tensor: float = 1.0
    vector: float = 1.0
    tensor_memory: float = 2048.0


# Issue slots of one element, in FMAs. A product that ends in a fused multiply-add was charged as "mul".
# Comparisons, maxima and conversions run at half rate [guide]; two conversions go into one instruction.
# Blackwell's maximum takes three operands, so half as many instructions find the maximum of a row.
SLOTS = {
    "add": 1.0,
    "mul": 1.0,
    "fma": 0.0,
    "max": 2.0,
    "compare": 1.0,
    "where": 1.0,
    "exp": 1.0,
    "convert": 1.0,
    "reduce": 1.0,
    "layout": 0.0,
    "other": 1.0,
}
BLACKWELL_SLOTS = {**SLOTS, "max": 1.0}


class Lane:
    """A unit that does `per_cycle` of something, for whoever asks first in each time slice."""

    def __init__(self, per_cycle: float) -> None:
        self.per_cycle = per_cycle
        self.free: dict[int, float] = {}  # what is left of the slices that have been touched
        self.total = 0.0

    def take(self, start: float, amount: float, rate: float = math.inf) -> tuple[float, float]:
        """Do `amount` from `start` on, at most `rate` a cycle. Returns when it begins and ends."""
        self.total += amount
        rate = min(rate, self.per_cycle)
        begin, now, left = math.inf, start, amount
        while left > 1e-9:
            n = int(now // SLICE)
            stop = (n + 1) * SLICE
            free = self.free.get(n, self.per_cycle * SLICE)
            can = min(free, rate * (stop - now))
            if can > 1e-9:
                begin = min(begin, now)
                done = min(left, can)
                self.free[n] = free - done
                left -= done
                if left <= 1e-9:
                    return begin, now + (stop - now) * done / can
            now = stop
        return start, start

    def busy(self) -> float:
        """Cycles at full rate."""
        return self.total / self.per_cycle


@dataclass(frozen=True)
class Span:
    """Something on the timeline, in cycles.

    kind: a hardware unit at work, a role (partition) at work, or a role that waits. track: the unit or
    the role. name: what is done, or what is waited for.
    """

    kind: Literal["unit", "role", "wait"]
    track: str
    name: str
    start: float
    end: float
    partition: str
    tile: str


TENSOR, EXP, FMA, SHARED, TMA = "tensor core", "exponentials", "FMA", "shared memory", "TMA"
TENSOR_MEMORY = "tensor memory"
UNITS = (TENSOR, EXP, FMA, SHARED, TMA, TENSOR_MEMORY)  # the last on Blackwell only


class SmCost:
    """The cost model of one SM of a GPU."""

    delayed_stores = False

    def __init__(self, gpu: gpus.GPU, parameters: Parameters, hoisted: bool = False) -> None:
        """hoisted: ptxas has moved a wait for all products above the exponentials, as it does in a
        forward that puts nothing between them; softmax then follows the products, not beside them."""
        self.gpu, self.parameters, self.hoisted = gpu, parameters, hoisted
        self.flops = {8 * (1 if t == "fp8" else 2): n for t, n in gpu.tensor_flops_per_cycle.items()}
        dense = self.flops[16]
        self.lanes = {
            TENSOR: Lane(dense * parameters.tensor),
            EXP: Lane(gpu.exps_per_cycle),
            FMA: Lane(gpu.fmas_per_cycle * parameters.vector),
            SHARED: Lane(gpu.shared_bytes_per_cycle * parameters.shared),
            TMA: Lane(gpu.l2_bytes_per_cycle / gpu.sms),
        }
        if gpu.tensor_memory_bytes:
            self.lanes[TENSOR_MEMORY] = Lane(parameters.tensor_memory)
        self.slots = BLACKWELL_SLOTS if gpu.family == "blackwell" else SLOTS
        self.spans: list[Span] = []
        self.exps: dict[Partition, float] = {}  # when a partition's exponentials will be done
        self.products: dict[Partition, float] = {}  # when its last product will be done

    def attach(self, engine: Engine) -> None:
        self.engine = engine

    def partition(self, partition: Partition) -> None:
        partition.speed = 1.0

    def unit(self, unit: str, name: str, start: float, end: float, p: Partition) -> None:
        self.spans.append(Span("unit", unit, name, start, end, p.name, p.tile))

    def role(self, p: Partition, name: str, start: float, end: float) -> None:
        self.spans.append(Span("role", p.name, name, start, end, p.name, p.tile))

    def waited(self, partition: Partition, what: str, start: float) -> None:
        p, end = partition, self.engine.now
        if end > start:
            self.spans.append(Span("wait", p.name, what, start, end, p.name, p.tile))

    def step(self, partition: Partition) -> float:
        begin, ready = max(partition.t, self.engine.now), self.exps.pop(partition, 0.0)
        if ready > begin:
            self.role(partition, "exp", begin, ready)
        return max(0.0, ready - begin) + self.parameters.step

    def poll(self) -> float:
        return self.parameters.poll

    def vector(self, partition: Partition, kind: str, elements: int, bits: int) -> None:
        p, slots = partition, elements * self.slots.get(kind, 1.0)
        if kind == "exp":
            if self.hoisted and elements >= TILE:
                start = max(p.t, self.engine.now)
                p.t = max(p.t, self.products.get(p, 0.0))
                p.sync()
                self.waited(p, "the warpgroup MMA", start)
            start, done = self.lanes[EXP].take(max(p.t, self.engine.now), elements)
            self.exps[p] = max(done, self.exps.get(p, 0.0))
            self.unit(EXP, p.name, start, done, p)
        begin = max(p.t, self.engine.now)
        while slots > 0:
            part = min(slots, SHARE * self.lanes[FMA].per_cycle)
            start, p.t = self.lanes[FMA].take(max(p.t, self.engine.now), part)
            slots -= part
            if part > SLICE * self.lanes[FMA].per_cycle / 4:  # the others may have something earlier
                p.sync()
        if p.t - begin > 1:
            self.role(p, kind, begin, p.t)
            self.unit(FMA, p.name, begin, p.t, p)

    def shared(self, partition: Partition, nbytes: int, write: bool) -> None:
        p = partition
        start, p.t = self.lanes[SHARED].take(max(p.t, self.engine.now), nbytes)
        name = "store" if write else "load"
        self.unit(SHARED, f"{p.name} {name}", start, p.t, p)
        self.role(p, name, start, p.t)
        p.sync()

    def tensor(self, partition: Partition, nbytes: int, write: bool) -> None:
        p = partition
        start, moved = self.lanes[TENSOR_MEMORY].take(max(p.t, self.engine.now), nbytes)
        p.t = moved + self.parameters.mma_latency
        name = "store to tensor memory" if write else "load from tensor memory"
        self.unit(TENSOR_MEMORY, f"{p.name} {'store' if write else 'load'}", start, moved, p)
        self.role(p, name, start, p.t)
        p.sync()

    def global_(self, partition: Partition, nbytes: int, kind: str) -> None:
        p = partition
        start, end = self.lanes[TMA].take(max(p.t, self.engine.now), nbytes)
        p.t = end if kind == "store" else end + self.parameters.global_latency
        self.role(p, f"global {kind}", start, p.t)

    def copy(
        self, partition: Partition, rows: int, nbytes: int, kind: str
    ) -> list[tuple[int, int, float]]:
        start, end = self.lanes[TMA].take(self.engine.now, nbytes)
        latency = self.parameters.tma_latency
        rate = nbytes / max(1.0, end - start)
        _, written = self.lanes[SHARED].take(start + latency, nbytes, rate)
        self.unit(TMA, f"{kind} {nbytes} bytes", start, end, partition)
        self.unit(SHARED, f"{partition.name} fill", start + latency, written, partition)
        return [(0, rows, max(written, end + latency))]

    def bulk_store(self, partition: Partition, nbytes: int, reduce: bool) -> tuple[float, float]:
        start, end = self.lanes[TMA].take(self.engine.now, nbytes)
        _, read = self.lanes[SHARED].take(start, nbytes, nbytes / max(1.0, end - start))
        read = max(read, end)
        self.unit(TMA, f"{'reduce' if reduce else 'store'} {nbytes} bytes", start, read, partition)
        return read, read + self.parameters.tma_latency

    def mma(self, partition: Partition, shape: MmaShape, earliest: float) -> float:
        """Operands are read from shared memory while the product runs, so either can be its limit."""
        latency = self.parameters.mma_latency
        start = max(self.engine.now, earliest - latency)
        work = (
            2 * shape.m * shape.n * shape.k * self.flops[16] / self.flops.get(shape.bits, self.flops[16])
        )
        begin, end = self.lanes[TENSOR].take(start, work)
        nbytes = operand_bytes(shape)
        if nbytes:
            _, read = self.lanes[SHARED].take(begin, nbytes, 1.05 * nbytes / (end - begin))
            self.unit(SHARED, f"{partition.name} operands", begin, read, partition)
            end = max(end, read)
        self.unit(TENSOR, f"{partition.name} {shape.m}x{shape.n}x{shape.k}", begin, end, partition)
        self.products[partition] = end + latency
        return end + latency

    def visible(self) -> float:
        return self.engine.now


def operand_bytes(shape: MmaShape) -> float:
    """Bytes of shared memory that a product reads: on Hopper the right operand for every 64 rows."""
    groups, columns = max(1, shape.warps[0] // 4), max(1, shape.warps[1])
    rows = 64 if shape.unit == "wgmma" else 128
    bands = math.ceil(shape.m / groups / rows) * groups
    left = shape.m * columns if shape.a_space == "shared" else 0
    right = shape.n * bands if shape.b_space == "shared" else 0
    return shape.k * shape.bits / 8 * (left + right) / (shape.ctas if shape.unit == "tcgen05" else 1)
