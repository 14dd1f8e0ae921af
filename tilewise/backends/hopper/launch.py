"""From a spec and its tensors to a launch of the Hopper kernels: descriptors, counts, tile, grid."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilewise import mask, schedule, unused
from tilewise.backends.hopper.agenda import (
    Agenda,
    agenda,
    capture,
    capturing,
    heads_together,
    when_forgotten,
)
from tilewise.backends.hopper.join import join_kernel, plan_join, room_for_parts
from tilewise.backends.hopper.terms import bias_unit, given_terms
from tilewise.backends.relaunch import Relaunch
from tilewise.backends.triton.launch import factors_of_scores, lengths, on_device, strides
from tilewise.gluon.ragged import dense_rows, ragged_rows
from tilewise.spec import AttentionSpec, Inputs

ROWS = 64  # queries of a consumer: the rows of one warpgroup product


def descriptor(spec: AttentionSpec, t: Tensor, length: int, tile: tuple[int, int]) -> TensorDescriptor:
    """A matrix as TMA reads or writes it, in tiles of (rows, columns)."""
    entry, row, head = strides(spec, t)
    entries, rows, heads = 1 if spec.varlen else spec.batch, t.shape[-3], t.shape[-2]
    # The step of a dimension with one entry is never taken, but must look like one.
    head = head if heads > 1 else 8
    if spec.ragged:
        return ragged_rows(t, (0, row if entries * rows > 1 else 8, head), tile)
    return dense_rows(t, (entry if entries > 1 else 8, row if rows > 1 else 8, head), length, tile)


def block_columns(head_dim: int) -> int:
    """Columns of a tile: TMA fills those beyond the head dim with zeros."""
    return max(64, triton.next_power_of_2(head_dim))


class Plan(NamedTuple):
    """What a launch needs besides tensors: the same for every call with one spec."""

    tile: schedule.HopperTile
    blocks: tuple[int, int]  # columns of a tile of Q and K, and of V and the output
    agenda: Agenda | None
    launch: Relaunch
    join: Relaunch | None  # if the agenda breaks query tiles


@lru_cache(maxsize=1024)
def plan_forward(spec: AttentionSpec, bias_unit: int = 0) -> Plan:
    """Tile, number of programs and scalar arguments of the forward for a spec. bias_unit: see
    ``terms``."""
    blocks = block_columns(spec.head_dim), block_columns(spec.head_dim_v)
    parts = 1
    if 128 < spec.head_dim <= 192:  # 256 columns would be a third more products
        blocks, parts = (64, blocks[1]), 3
    tile = schedule.hopper_tile(spec)
    tile_q = tile.consumers * ROWS
    tiles = spec.batch * spec.heads_q * triton.cdiv(spec.max_seqlen_q, tile_q)
    claimed = spec.ragged and spec.window != (None, None)
    arguments = {
        "heads": spec.heads_q,
        "group": spec.group,
        "batch_heads": spec.batch * spec.heads_q,
        "together": heads_together(spec, schedule.KEPT_IN_L2_CLAIMED if claimed else None),
        "left": spec.window_left,
        "right": spec.window_right,
        **factors_of_scores(spec, natural=spec.bias),
        "tiles": tiles,
        "columns": spec.head_dim_v,
        "BLOCK_D": blocks[0],
        "PARTS": parts,
        "BLOCK_DV": blocks[1],
        "O_COLUMNS": min(tile.o_columns, blocks[1]),
        "CONSUMERS": tile.consumers,
        "TILE_K": tile.k,
        "STAGES": tile.stages,
        "Q_STAGES": tile.q_stages,
        "Q_IN_REGISTERS": tile.q_in_registers,
        "PING_PONG": tile.ping_pong,
        "RAGGED": spec.ragged,
        "ANCHORED": spec.dtype == torch.bfloat16 and not spec.bias,  # fp16 has too few exponents
        "BIAS_UNIT": bias_unit,
        "REGISTERS": tile.registers,
    }
    options = {"num_warps": 4, "maxnreg": tile.maxnreg}
    programs = schedule.multiprocessors(spec.device)
    lists = None
    if tiles and not spec.ragged:
        lists = agenda(spec, tile_q, tile.k, programs)
    programs = min(tiles, programs) if lists is None else lists.lists.shape[1]
    join = plan_join(spec, lists, tile_q, blocks[1])
    return Plan(tile, blocks, lists, Relaunch(programs, arguments, options), join)


when_forgotten.append(plan_forward.cache_clear)


def launch_forward(
    kernel: Any, spec: AttentionSpec, x: Inputs, out: Tensor, lse: Tensor, saved: Tensor
) -> None:
    """Fill out and lse, and saved where there is a bias."""
    # What is planned while a graph is recorded may be second best, and is not kept.
    unit = bias_unit(spec, x)
    if capturing(spec.device):
        plan = plan_forward.__wrapped__(spec, unit)
        if plan.agenda is not None:
            capture(plan.agenda)
    else:
        plan = plan_forward(spec, unit)
    if spec.max_seqlen_k == 0:
        out.zero_()
        lse.fill_(-math.inf)
        if x.sink is not None:
            there = lse.new_ones(*lse.mT.shape, 1)  # as queries lie
            unused.clear(spec, x, "q", there)
            lse.copy_(torch.where(there[..., 0].mT > 0, x.sink.float()[:, None], -math.inf))
        if spec.bias:
            saved.zero_()
        return
    if plan.launch.programs == 0:
        return
    q, k, v = (for_tma(spec, t) for t in (x.q, x.k, x.v))
    _, seen_k = mask.key_span(spec.max_seqlen_q, spec.max_seqlen_k, *spec.window)
    by_tma = takes_tma(spec, out)
    o_tile = (ROWS, min(plan.tile.o_columns, plan.blocks[1]))
    lists, join = plan.agenda, plan.join
    o_parts, lse_parts = None, None
    if lists is not None and join is not None:
        o_parts, lse_parts = room_for_parts(lists, join.arguments["TILE_Q"], plan.blocks[1], lse)
    with on_device(spec.device):
        plan.launch(
            kernel,
            descriptor(spec, q, spec.max_seqlen_q, (ROWS, plan.blocks[0])),
            descriptor(spec, k, seen_k, (plan.tile.k, plan.blocks[0])),
            descriptor(spec, v, seen_k, (plan.tile.k, plan.blocks[1])),
            descriptor(spec, out, spec.max_seqlen_q, o_tile) if by_tma else None,
            out,
            *strides(spec, out),
            lse,
            *strides(spec, lse)[::2],
            None if lists is None else lists.lists,
            None if lists is None else lists.parts,
            claims(plan, spec) if spec.ragged else None,
            o_parts,
            lse_parts,
            saved[0] if spec.bias else None,
            *given_terms(spec, x, unit),
            *lengths(spec, x),
        )
        if lists is not None and join is not None:
            join(
                join_kernel,
                o_parts,
                lse_parts,
                lists.broken,
                out,
                *strides(spec, out),
                lse,
                *strides(spec, lse)[::2],
                x.sink,
            )


def claims(plan: Plan, spec: AttentionSpec) -> Tensor:
    """Room for a counter, which is 0, and for the order in which programs claim query tiles."""
    entries = 1 + plan.launch.arguments["tiles"] + plan.launch.programs
    return torch.zeros(entries, dtype=torch.int32, device=spec.device)


def takes_tma(spec: AttentionSpec, t: Tensor) -> bool:
    """Whether the copy engine can address a tensor: everything but columns in steps of 16 bytes; and,
    if sequences end anywhere, one batch entry right after the other."""
    steps = [s for s, n in zip(t.stride()[:-1], t.shape[:-1], strict=True) if n > 1]
    aligned = t.data_ptr() % 16 == 0 and all(s > 0 and s * t.element_size() % 16 == 0 for s in steps)
    return aligned and not (spec.ragged and not spec.varlen and _has_gaps(t))


def _has_gaps(t: Tensor) -> bool:
    return t.shape[0] > 1 and t.stride(0) != t.shape[1] * t.stride(1)


def for_tma(spec: AttentionSpec, t: Tensor) -> Tensor:
    """The tensor itself, or a copy that the copy engine can address."""
    if takes_tma(spec, t):
        return t
    wide = t.new_empty(*t.shape[:-1], -(-t.shape[-1] // 8) * 8)
    return wide[..., : t.shape[-1]].copy_(t)
