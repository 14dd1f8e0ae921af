"""Tile shapes and pipeline depths, as data apart from the kernels."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from tilewise.spec import AttentionSpec


class Tile(NamedTuple):
    """Queries and keys per tile, warps per program, stages of the load pipeline."""

    q: int
    k: int
    warps: int
    stages: int


# Rows per program of the kernels that only stream over rows.
ROW_TILE = 64

# (kernel, largest head dim it serves) -> tile, for 2-byte elements, by family of GPU.
# sm_90, 227 KB of shared memory a program: measured on an H200, benchmarks/results/.
_HOPPER: dict[tuple[str, int], Tile] = {
    ("fa1_forward", 64): Tile(64, 64, 4, 2),
    ("fa1_forward", 128): Tile(64, 64, 8, 2),
    ("fa1_forward", 256): Tile(64, 32, 8, 1),
    ("fa1_backward", 64): Tile(64, 64, 8, 1),
    ("fa1_backward", 128): Tile(64, 64, 8, 1),
    ("fa1_backward", 256): Tile(32, 32, 8, 1),
    ("fa2_forward", 64): Tile(128, 64, 4, 4),
    ("fa2_forward", 128): Tile(128, 128, 8, 3),
    ("fa2_forward", 256): Tile(128, 32, 8, 3),
    ("fa2_backward", 64): Tile(64, 128, 8, 3),
    ("fa2_backward", 128): Tile(64, 128, 8, 3),
    ("fa2_backward", 256): Tile(64, 64, 8, 1),
    ("fa2_dq", 64): Tile(128, 64, 8, 3),
    ("fa2_dq", 128): Tile(128, 64, 8, 3),
    ("fa2_dq", 256): Tile(128, 64, 8, 1),
}
# sm_80, 163 KB: the same with shorter pipelines; compiled, not measured.
_AMPERE = _HOPPER | {
    ("fa2_forward", 64): Tile(128, 64, 4, 3),
    ("fa2_forward", 128): Tile(128, 64, 8, 3),
    ("fa2_forward", 256): Tile(128, 32, 8, 2),
    ("fa2_backward", 64): Tile(64, 128, 8, 2),
    ("fa2_backward", 128): Tile(64, 64, 8, 2),
    ("fa2_dq", 256): Tile(64, 64, 8, 1),
}
# sm_100: accumulators must fit 512 columns of tensor memory; compiled, not measured.
_BLACKWELL = _HOPPER | {
    ("fa2_backward", 128): Tile(64, 64, 8, 2),
    ("fa2_backward", 256): Tile(32, 64, 8, 1),
}
# Any other (99 KB, or AMD's 64 KB): compiled, not measured.
_OTHER: dict[tuple[str, int], Tile] = {
    ("fa1_forward", 64): Tile(64, 32, 4, 1),
    ("fa1_forward", 128): Tile(32, 32, 4, 1),
    ("fa1_forward", 256): Tile(16, 16, 4, 1),
    ("fa1_backward", 64): Tile(32, 32, 4, 1),
    ("fa1_backward", 128): Tile(32, 32, 4, 1),
    ("fa1_backward", 256): Tile(16, 16, 4, 1),
    ("fa2_forward", 64): Tile(128, 64, 4, 2),
    ("fa2_forward", 128): Tile(64, 32, 4, 2),
    ("fa2_forward", 256): Tile(32, 32, 4, 1),
    ("fa2_backward", 64): Tile(32, 64, 4, 1),
    ("fa2_backward", 128): Tile(32, 32, 4, 1),
    ("fa2_backward", 256): Tile(16, 16, 4, 1),
    ("fa2_dq", 64): Tile(64, 32, 4, 1),
    ("fa2_dq", 128): Tile(32, 32, 4, 1),
    ("fa2_dq", 256): Tile(16, 16, 4, 1),
}
_FAMILIES = {"hopper": _HOPPER, "blackwell": _BLACKWELL, "ampere": _AMPERE, "other": _OTHER}
# IEEE fp32 has no tensor cores: small tiles, whose operands the multiply-add units take from registers.
_FP32: dict[tuple[str, int], Tile] = {
    ("fa1_forward", 64): Tile(32, 16, 8, 1),
    ("fa1_forward", 128): Tile(32, 16, 8, 1),
    ("fa1_forward", 256): Tile(16, 16, 4, 1),
    ("fa1_backward", 64): Tile(16, 16, 4, 1),
    ("fa1_backward", 128): Tile(16, 16, 4, 1),
    ("fa1_backward", 256): Tile(16, 16, 8, 1),
    ("fa2_forward", 64): Tile(32, 32, 8, 1),
    ("fa2_forward", 128): Tile(32, 16, 8, 1),
    ("fa2_forward", 256): Tile(16, 16, 4, 1),
    ("fa2_backward", 64): Tile(32, 32, 8, 1),
    ("fa2_backward", 128): Tile(32, 16, 8, 1),
    ("fa2_backward", 256): Tile(16, 16, 4, 1),
    ("fa2_dq", 64): Tile(32, 32, 8, 1),
    ("fa2_dq", 128): Tile(32, 16, 8, 1),
    ("fa2_dq", 256): Tile(16, 16, 4, 1),
}
# With a bias, ALiBi or dropout, for families with the larger tiles: a score has more to it, and a tile
# of a bias is loaded like those of K and V. Compiled, not measured.
_WITH_TERMS: dict[tuple[str, int], Tile] = {
    ("fa2_forward", 64): Tile(128, 64, 8, 2),
    ("fa2_forward", 128): Tile(128, 64, 8, 2),
    ("fa2_forward", 256): Tile(64, 32, 8, 2),
    ("fa2_backward", 64): Tile(64, 64, 8, 2),
    ("fa2_backward", 128): Tile(64, 64, 8, 1),
    ("fa2_backward", 256): Tile(32, 64, 8, 1),
    ("fa2_dq", 64): Tile(64, 64, 8, 2),
    ("fa2_dq", 128): Tile(64, 64, 8, 1),
    ("fa2_dq", 256): Tile(64, 32, 8, 1),
}
# Triton's interpreter: many tiles in a small problem, which is what it is used to test.
_INTERPRETER = Tile(32, 16, 1, 1)


def triton_tile(kernel: str, spec: AttentionSpec, head_dim: int) -> Tile:
    """The tile of a Triton kernel; head_dim is the larger of both, as the kernel pads it."""
    if spec.device.type == "cpu":
        return _INTERPRETER
    family = _family(spec.device)
    table = _FP32 if spec.dtype.itemsize > 2 else _FAMILIES[family]
    if with_terms(spec) and table is not _FP32 and family != "other":
        table = table | _WITH_TERMS
    return next(table[kernel, dim] for dim in (64, 128, 256) if head_dim <= dim)


def with_terms(spec: AttentionSpec) -> bool:
    """Whether there is more to every score than products, a scale and a softcap."""
    return spec.bias or spec.alibi or spec.dropout_p > 0


@cache
def _family(device: torch.device) -> str:
    """The row of _FAMILIES that serves a GPU."""
    if torch.version.hip:
        return "other"
    return family_of(torch.cuda.get_device_capability(device))


def family_of(capability: tuple[int, int]) -> str:
    """The row of _FAMILIES that serves NVIDIA's GPUs of a compute capability."""
    families = {(8, 0): "ampere", (9, 0): "hopper", (10, 0): "blackwell", (10, 3): "blackwell"}
    return families.get(capability, "other")


class HopperTile(NamedTuple):
    """A Hopper kernel's tile, and what of it lies where."""

    consumers: int  # warpgroups of 64 queries each
    k: int  # keys
    stages: int  # of the rings of K and V
    q_stages: int
    q_in_registers: bool
    ping_pong: bool
    o_columns: int  # of the buffer through which the output leaves: all, or half of them
    registers: int  # of a consumer's thread while it computes
    maxnreg: int  # of every thread at launch


# (largest head dim it serves, masked) -> tile of the forward, for bf16. 192 is for values of 128.
_HOPPER_FORWARD: dict[tuple[int, bool], HopperTile] = {
    (64, False): HopperTile(3, 128, 3, 2, False, True, 64, 160, 128),
    (64, True): HopperTile(3, 128, 3, 2, False, True, 64, 160, 128),
    (128, False): HopperTile(2, 64, 4, 1, True, False, 128, 240, 168),
    (128, True): HopperTile(2, 64, 3, 1, True, False, 128, 240, 168),
    (192, False): HopperTile(2, 128, 2, 1, False, False, 64, 240, 168),
    (192, True): HopperTile(2, 64, 3, 1, False, False, 64, 240, 168),
    (256, False): HopperTile(2, 64, 2, 1, False, False, 128, 240, 168),
    (256, True): HopperTile(2, 64, 2, 1, False, True, 128, 240, 168),
}
# fp16 takes the online softmax, a longer one, which wants more keys at a time.
_HOPPER_FORWARD_FP16 = _HOPPER_FORWARD | {
    (128, False): HopperTile(2, 128, 2, 1, True, False, 128, 240, 168),
    (128, True): HopperTile(2, 128, 2, 1, True, False, 128, 240, 168),
}
# Up to SHORT keys, tiles of 192 queries would mostly be begun and ended, and not divide the length. So
# would they in a window, whose two edges also take more registers than three consumers have; so do a
# bias, ALiBi and dropout.
_HOPPER_FORWARD_SHORT = {64: HopperTile(2, 64, 6, 1, True, False, 64, 240, 168)}
SHORT = 1024


def hopper_tile(spec: AttentionSpec) -> HopperTile:
    """The tile of the Hopper forward."""
    largest = max(spec.head_dim, spec.head_dim_v)
    dim = next(dim for dim in (64, 128, 256) if largest <= dim)
    if 128 < spec.head_dim <= 192 and spec.head_dim_v <= 128:
        dim = 192
    few = spec.max_seqlen_k <= SHORT or spec.window_left is not None
    if (few or with_terms(spec)) and dim in _HOPPER_FORWARD_SHORT:
        return _HOPPER_FORWARD_SHORT[dim]
    fp16 = spec.dtype == torch.float16 and not with_terms(spec)
    table = _HOPPER_FORWARD_FP16 if fp16 else _HOPPER_FORWARD
    return table[dim, spec.window != (None, None) or with_terms(spec)]


class HopperBackwardTile(NamedTuple):
    """The Hopper backward's tile, and how many of each buffer there are."""

    q: int  # queries
    k: int  # keys: 128, half of them each consumer's, or 64 of both
    stages: int  # of the ring of Q and dO
    ds_stages: int  # of the buffer through which consumers exchange dS, and gradients leave
    p_stages: int = 0  # of that for P, where both have the same keys; dV leaves through it
    kv_stages: int = 1  # of the ring of K and V
    kv_in_registers: bool = False  # as operands of the products with Q and dO
    registers: int = 240  # of a consumer's thread while it computes
    maxnreg: int = 168  # of every thread at launch


# (largest head dim it serves, masked) -> tile of the backward. At head dim 64, 64 queries at a time
# leave fewer pairs to a mask than 128, and room for K and V of the next key tile beside those of this
# one. 192 is for one head dim above 128, which leaves room for a third stage.
_HOPPER_BACKWARD: dict[tuple[int, bool], HopperBackwardTile] = {
    (64, False): HopperBackwardTile(128, 128, 2, 2),
    (64, True): HopperBackwardTile(64, 128, 3, 3, kv_stages=2, kv_in_registers=True),
    (128, False): HopperBackwardTile(64, 128, 3, 2),
    (128, True): HopperBackwardTile(64, 128, 3, 3),
    (192, False): HopperBackwardTile(64, 64, 3, 2, p_stages=2),
    (192, True): HopperBackwardTile(64, 64, 3, 2, p_stages=2),
    (256, False): HopperBackwardTile(64, 64, 2, 2, p_stages=2),
    (256, True): HopperBackwardTile(64, 64, 2, 2, p_stages=2),
}
# Programs that follow one another take the next key tile when all of one is added, so K and V of one are
# enough; they wait more often, and then two stages of dS pass faster than three. 128 queries at a time
# would leave Triton 3.9 too few registers.
_HOPPER_BACKWARD_DETERMINISTIC = _HOPPER_BACKWARD | {
    (64, False): HopperBackwardTile(64, 128, 3, 3, kv_in_registers=True),
    (64, True): HopperBackwardTile(64, 128, 3, 3, kv_in_registers=True),
    (128, True): HopperBackwardTile(64, 128, 3, 2),
}
# Up to SHORT keys a key tile has so few steps that it counts that K and V of the next one are there.
_HOPPER_BACKWARD_SHORT = {
    64: HopperBackwardTile(64, 128, 3, 3, kv_stages=2, kv_in_registers=True),
    128: HopperBackwardTile(64, 128, 2, 2, kv_stages=2),
}
# Softcap takes more registers than 128 queries at a time leave, and P is passed on in two parts. A bias,
# ALiBi and dropout take more as well.
_HOPPER_BACKWARD_SOFTCAP = {
    64: HopperBackwardTile(64, 128, 4, 4, kv_in_registers=True),
    128: HopperBackwardTile(64, 128, 3, 2),
    192: HopperBackwardTile(64, 64, 3, 2, p_stages=1),
    256: HopperBackwardTile(64, 64, 2, 2, p_stages=1),
}
# The latter do not leave room for three stages everywhere.
_HOPPER_BACKWARD_TERMS = _HOPPER_BACKWARD_SOFTCAP | {
    192: HopperBackwardTile(64, 64, 2, 2, p_stages=1),
}


def hopper_backward_tile(spec: AttentionSpec) -> HopperBackwardTile:
    """The tile of the Hopper backward."""
    smaller, larger = sorted((spec.head_dim, spec.head_dim_v))
    dim = next(dim for dim in (64, 128, 256) if larger <= dim)
    if smaller <= 128 < larger:
        dim = 192
    if with_terms(spec):
        return _HOPPER_BACKWARD_TERMS[dim]
    if spec.softcap is not None:
        return _HOPPER_BACKWARD_SOFTCAP[dim]
    masked = spec.window != (None, None)
    if spec.deterministic:
        return _HOPPER_BACKWARD_DETERMINISTIC[dim, masked]
    if spec.max_seqlen_k <= SHORT and dim in _HOPPER_BACKWARD_SHORT:
        return _HOPPER_BACKWARD_SHORT[dim]
    return _HOPPER_BACKWARD[dim, masked]


# How many programs at a time add to the same dQ where they do so in order, by whether the consumers are
# those of large head dims and whether there is a mask. The more, the longer the last waits at first; the
# fewer, the more heads are at work at once, and what they read and add to must fit the L2 cache.
_FOLLOWING = {(False, False): 4, (False, True): 4, (True, False): 66, (True, True): 8}


def following(spec: AttentionSpec) -> int:
    """How many programs of the deterministic Hopper backward follow one another at a time."""
    return _FOLLOWING[hopper_backward_tile(spec).p_stages > 0, spec.window != (None, None)]


# Bytes of keys and values that stay in the L2 cache while a kernel runs. An H200 has 50 MB, in two
# halves that keep copies; 8 to 32 MB measure alike, and less is safer.
KEPT_IN_L2 = 8 * 2**20
# The same where the forward claims unequal tiles one by one: then the last heads need enough short ones
# for programs to end at the same time. The backward has Q, dO and sums of dQ to keep as well.
KEPT_IN_L2_CLAIMED = 32 * 2**20
# What a Hopper kernel loses from one query tile to the next, in keys.
BETWEEN_QUERY_TILES = 192
# How much idle time at the end of a kernel is worth breaking query tiles for, in cycles and as a part of
# what the mean program takes. Of 3 % idle only 1 was won, as those that work while others idle have the
# clock and L2 for themselves; and joining the parts is a kernel of its own.
JOINING = 30000
WORTH_BREAKING = 0.05
DEALT_AT_ONCE = 4096  # query tiles; of more, lists repeat themselves
LISTS_KEPT = 1024
FLOPS_A_CYCLE = 4096  # of a multiprocessor's tensor cores, in bf16 or fp16
# The longest list of query tiles over the mean one, from which on lists count as equally long.
EVEN_ENOUGH = 1.04


@cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 132  # an H200's, where a kernel is compiled or simulated without one
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
