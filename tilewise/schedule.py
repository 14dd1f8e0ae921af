"""Tile shapes and pipeline depths, as data apart from the kernels."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch


class Tile(NamedTuple):
    """Queries and keys per tile, warps per program, stages of the load pipeline."""

    q: int
    k: int
    warps: int
    stages: int


# Rows per program of the kernels that only stream over rows.
ROW_TILE = 64

# (kernel, largest head dim it serves) -> tile, for 2-byte elements, by the shared memory of a program.
# 227 KB (Hopper, data-center Blackwell): measured on an H200, benchmarks/results/.
_227_KB: dict[tuple[str, int], Tile] = {
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
# 163 KB (A100): the same with shorter pipelines; not measured.
_163_KB = _227_KB | {
    ("fa2_forward", 64): Tile(128, 64, 4, 3),
    ("fa2_forward", 128): Tile(128, 64, 8, 3),
    ("fa2_forward", 256): Tile(128, 32, 8, 2),
    ("fa2_backward", 64): Tile(64, 128, 8, 2),
    ("fa2_backward", 128): Tile(64, 128, 8, 2),
    ("fa2_dq", 256): Tile(64, 64, 8, 1),
}
# Any other GPU (99 KB, or AMD's 64 KB): not measured.
_64_KB: dict[tuple[str, int], Tile] = {
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
_TABLES = ((227, _227_KB), (163, _163_KB), (0, _64_KB))
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
# Triton's interpreter: many tiles in a small problem, which is what it is used to test.
_INTERPRETER = Tile(32, 16, 1, 1)


def triton_tile(kernel: str, device: torch.device, head_dim: int, itemsize: int) -> Tile:
    """The tile of a Triton kernel; head_dim is the larger of both, itemsize in bytes."""
    if device.type == "cpu":
        return _INTERPRETER
    return tile_for(kernel, _shared_memory(device), head_dim, itemsize)


def tile_for(kernel: str, shared_memory: int, head_dim: int, itemsize: int) -> Tile:
    """``triton_tile`` for a GPU whose programs may use ``shared_memory`` bytes."""
    table = next(table for least, table in _TABLES if shared_memory >= least * 1024)
    if itemsize > 2:
        table = _FP32
    return next(table[kernel, dim] for dim in (64, 128, 256) if head_dim <= dim)


@cache
def _shared_memory(device: torch.device) -> int:
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
