"""Feeds and speeds: the cycles each part of a GPU needs for attention, so the best any kernel can do.

The method is that of "FlashAttention-4" (Zadouri et al., 2026), section 3: count what a tile asks of the
tensor cores, of the exponential unit and of shared memory, divide by what each does in a cycle; the
slowest is the bound, reached only if all others hide behind it. `tile_bound` does it for a tile on one
SM, `problem_bound` for a whole problem on the whole GPU, where L2 and HBM join in.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tilewise.perf import memory
from tilewise.perf.gpus import GPU, Family
from tilewise.perf.memory import SelfAttention
from tilewise.perf.tile_work import Direction, Move, Options, Tile, multiplied_flops, shared_moves

ITEMSIZES = {"bf16": 2, "fp16": 2, "fp8": 1}
# FMA-unit instructions for one score. Forward: scale and subtract the maximum in one; add to the sum.
# Backward: scale and subtract the log-sum-exp in one; dP - delta; times P.
_FMAS_PER_SCORE: dict[Direction, int] = {"forward": 2, "backward": 3}
# exp2 on the FMA units, as in FA4: an addition rounds x to an integer, two subtractions leave the
# fraction, a cubic makes its power of two. The exponent is put in by the integer unit.
POLYNOMIAL_FMAS = 6
# FA4 rescales O only when a row maximum jumps; before it, each tile multiplies all of O.
_RESCALES: dict[Family, bool] = {"ampere": True, "hopper": True, "blackwell": False}

# (queries, keys) a kernel would take, by the largest head dim served: those of the published kernels of
# each generation, sides rounded to powers of two where those are not.
_TILES: dict[tuple[Family, Direction], dict[int, tuple[int, int]]] = {
    ("ampere", "forward"): {64: (128, 128), 128: (128, 64), 256: (128, 64)},
    ("ampere", "backward"): {64: (128, 128), 128: (64, 128), 256: (64, 64)},
    ("hopper", "forward"): {64: (192, 128), 128: (128, 128), 256: (128, 64)},
    ("hopper", "backward"): {64: (128, 128), 128: (64, 128), 256: (64, 64)},
    ("blackwell", "forward"): {64: (128, 128), 128: (128, 128), 256: (128, 128)},
    ("blackwell", "backward"): {64: (128, 128), 128: (128, 128), 256: (128, 128)},
}


@dataclass(frozen=True)
class Plan:
    """The kernel whose bound is asked for.

    dtype: of the operands: bf16, fp16 or fp8 (forward only; accumulators and dQ are fp32).
    pair, exchange_ds: backward by pairs of CTAs (Blackwell); these, q_in_registers and loads are told in
        `tile_work.Options`.
    exp_fraction: the part of the exponentials computed on the FMA units, 0 to 1.
    """

    dtype: str = "bf16"
    pair: bool = False
    exchange_ds: bool = False
    q_in_registers: bool = False
    loads: bool = False
    exp_fraction: float = 0.0

    def check(self, gpu: GPU) -> None:
        """ValueError, one line, for what this GPU cannot do."""
        if self.dtype not in gpu.tensor_flops_per_cycle:
            known = ", ".join(gpu.tensor_flops_per_cycle)
            raise ValueError(f"dtype: got {self.dtype!r}; the tensor cores of {gpu.name} take {known}")
        if self.pair and gpu.family != "blackwell":
            raise ValueError(f"pairs of CTAs multiply together on Blackwell only, not on {gpu.name}")
        if self.exchange_ds and not self.pair:
            raise ValueError("only a pair of CTAs can exchange dS")
        if self.q_in_registers and gpu.family == "blackwell":
            raise ValueError(f"{gpu.name} takes no operand from registers")
        if not 0 <= self.exp_fraction <= 1:
            raise ValueError(f"exp fraction: got {self.exp_fraction}; allowed is 0 to 1")

    def directions(self) -> tuple[Direction, ...]:
        """Those with a kernel: there is no backward in fp8."""
        return ("forward",) if self.dtype == "fp8" else ("forward", "backward")

    def options(self, direction: Direction) -> Options:
        backward = direction == "backward"
        return Options(
            itemsize=ITEMSIZES[self.dtype],
            pair=self.pair and backward,
            exchange_ds=self.exchange_ds and backward,
            q_in_registers=self.q_in_registers,
            loads=self.loads,
        )


@dataclass(frozen=True)
class Bound:
    """Cycles by resource, and what follows.

    cycles: of one SM for a tile; of the GPU, evenly shared by its SMs, for a whole problem.
    flops: useful ones, of all SMs that `cycles` is about; flops_per_cycle: the tensor cores' peak there.
    shared: what moves through shared memory for one tile.
    """

    direction: Direction
    tile: Tile
    cycles: dict[str, float]
    flops: float
    flops_per_cycle: float
    shared: tuple[Move, ...]

    @property
    def limit(self) -> float:
        """The cycles no kernel can beat."""
        return max(self.cycles.values())

    @property
    def binds(self) -> list[str]:
        """The resources that need all of them."""
        return [name for name, cycles in self.cycles.items() if cycles >= self.limit * (1 - 1e-9)]

    @property
    def utilisation(self) -> float:
        """The best possible share of the tensor cores' peak."""
        return self.flops / (self.limit * self.flops_per_cycle)

    def as_data(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "direction": self.direction,
            "tile": list(self.tile),
            "cycles": self.cycles,
            "limit": self.limit,
            "binds": self.binds,
            "utilisation": self.utilisation,
            "shared_memory_bytes": {move.what: move.bytes for move in self.shared},
        }


def tile_bound(gpu: GPU, direction: Direction, tile: Tile, plan: Plan) -> Bound:
    """The bound of one tile on one SM."""
    options = plan.options(direction)
    peak = gpu.tensor_flops_per_cycle[plan.dtype]
    moves = shared_moves(direction, tile, options, gpu.family)
    scores = tile.q * tile.k
    fmas = scores * (_FMAS_PER_SCORE[direction] + POLYNOMIAL_FMAS * plan.exp_fraction)
    if direction == "forward" and _RESCALES[gpu.family]:
        fmas += tile.q * tile.d
    cycles = {
        "tensor cores": multiplied_flops(direction, tile, options, gpu.family) / peak,
        "exponential unit": scores * (1 - plan.exp_fraction) / gpu.exps_per_cycle,
        "FMA units": fmas / gpu.fmas_per_cycle,
        "shared memory": sum(move.bytes for move in moves) / gpu.shared_bytes_per_cycle,
    }
    flops = (4 if direction == "forward" else 10) * tile.q * tile.k * tile.d
    return Bound(direction, tile, cycles, flops, peak, tuple(moves))


def problem_bound(
    gpu: GPU, direction: Direction, p: SelfAttention, plan: Plan, sides: tuple[int, int] | None = None
) -> Bound:
    """The bound of a whole problem, its tiles spread evenly over all SMs.

    sides: queries and keys per tile instead of the usual ones. Under a causal mask the tiles on the
    diagonal are computed whole, but only the visible half counts as useful. L2 carries what the kernels
    load and store (`memory.fa2`), HBM only what no cache can save.
    """
    p = replace(p, itemsize=ITEMSIZES[plan.dtype])
    tile = Tile(*(sides or usual_tile(gpu, direction, p.head_dim)), p.head_dim)
    one = tile_bound(gpu, direction, tile, plan)
    share = memory.visited_tiles(p, tile.q, tile.k) / gpu.sms
    cycles = {name: each * share for name, each in one.cycles.items()}

    cycles["L2"] = _l2_bytes(gpu, direction, p, plan, tile) / gpu.l2_bytes_per_cycle
    cycles["HBM"] = memory.compulsory(p)[direction] / gpu.hbm_bytes_per_cycle
    peak = one.flops_per_cycle * gpu.sms
    return Bound(direction, tile, cycles, p.flops(direction), peak, one.shared)


def _l2_bytes(gpu: GPU, direction: Direction, p: SelfAttention, plan: Plan, tile: Tile) -> int:
    """What the kernels load, store and add, where one load serves Blackwell's two query tiles of a CTA
    (forward) or its pair of CTAs (backward)."""
    options = plan.options(direction)
    queries = tile.q * (2 if gpu.family == "blackwell" and direction == "forward" else 1)
    keys = tile.k * (2 if options.pair else 1)
    dq_parts = 2 if options.pair and not options.exchange_ds else 1  # each CTA of a pair adds its own
    flows = [flow for flow in memory.fa2(p, queries, keys)[direction].flows if flow.kernel]
    return sum(flow.read + flow.written + flow.added * dq_parts for flow in flows)


def usual_tile(gpu: GPU, direction: Direction, head_dim: int) -> tuple[int, int]:
    """(queries, keys) a kernel of the GPU's own generation takes."""
    return next(sides for d, sides in _TILES[gpu.family, direction].items() if head_dim <= d)
