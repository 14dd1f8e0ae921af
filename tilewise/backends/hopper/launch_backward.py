"""From a spec and its tensors to a launch of the Hopper backward: descriptors, counts, tile, grid."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilewise import mask, schedule
from tilewise.backends.hopper.agenda import heads_together
from tilewise.backends.hopper.around import Prepared
from tilewise.backends.hopper.launch import ROWS, block_columns, descriptor, for_tma
from tilewise.backends.hopper.terms import given_terms
from tilewise.backends.hopper.units import in_units, unit_of
from tilewise.backends.relaunch import Relaunch
from tilewise.backends.triton.launch import factors_of_scores, lengths, on_device, strides
from tilewise.ops import Gradients
from tilewise.spec import AttentionSpec, Inputs

CONSUMERS = 2  # that share a tile


class Plan(NamedTuple):
    """What a launch needs besides tensors: the same for every call with one spec."""

    tile: schedule.HopperBackwardTile
    blocks: tuple[int, int]  # columns of a tile of Q and K, and of V and dO
    units: tuple[int, int]  # in which strides and columns of dK and dV are given
    tiles: int  # of keys
    launch: Relaunch


def _filled(head_dim: int) -> int:
    """Columns of a tile that take part in the wide products: the last quarter may be all zeros."""
    block = block_columns(head_dim)
    return block * 3 // 4 if 128 < head_dim <= block * 3 // 4 else block


def heads_at_a_time(spec: AttentionSpec) -> int:
    """Of how many key heads key tiles are computed at a time: those that fit the L2 cache, or so many
    that few programs wait for each other."""
    fit = max(1, heads_together(spec) // spec.group)
    if not spec.deterministic:
        return fit
    return max(fit, triton.cdiv(schedule.multiprocessors(spec.device), schedule.following(spec)))


def _may_hide_keys(spec: AttentionSpec) -> bool:
    """Whether there may be keys before the first or after the last that any query of theirs sees."""
    if spec.ragged:  # sequences of any lengths
        left, right = spec.window
        return left is not None or (right is not None and right < 0) or spec.max_seqlen_q == 0
    low, high = mask.key_span(spec.max_seqlen_q, spec.max_seqlen_k, *spec.window)
    return low > 0 or high < spec.max_seqlen_k or spec.max_seqlen_q == 0


@lru_cache(maxsize=1024)
def plan_backward(spec: AttentionSpec, of_head: int, of_entry: int) -> Plan:
    """Tile, number of programs and scalar arguments for a spec. of_head, of_entry: see ``Space``."""
    block_d, block_dv = block_columns(spec.head_dim), block_columns(spec.head_dim_v)
    unit_d, unit_dv = unit_of(spec.head_dim), unit_of(spec.head_dim_v)  # of contiguous gradients
    tile = schedule.hopper_backward_tile(spec)
    heads = spec.batch * spec.heads_kv
    tiles = heads * triton.cdiv(spec.max_seqlen_k, tile.k)
    programs = min(tiles, schedule.multiprocessors(spec.device))
    arguments = {
        "heads": spec.heads_kv,
        "group": spec.group,
        "batch_heads": heads,
        "together": heads_at_a_time(spec),
        "left": spec.window_left,
        "right": spec.window_right,
        **factors_of_scores(spec, natural=spec.bias),
        "gradient_scale": spec.scale,
        "columns_d": spec.head_dim // unit_d,
        "columns_dv": spec.head_dim_v // unit_dv,
        "rows_of_head": of_head,
        "rows_of_entry": of_entry,
        "BLOCK_D": block_d,
        "BLOCK_DV": block_dv,
        "FILLED_D": _filled(spec.head_dim),
        "FILLED_DV": _filled(spec.head_dim_v),
        "UNIT_D": unit_d,
        "UNIT_DV": unit_dv,
        "TILE_Q": tile.q,
        "TILE_K": tile.k,
        "STAGES": tile.stages,
        "KV_STAGES": tile.kv_stages,
        "DS_STAGES": tile.ds_stages,
        "P_STAGES": tile.p_stages,
        "KV_IN_REGISTERS": tile.kv_in_registers,
        "RAGGED": spec.ragged,
        "REGISTERS": tile.registers,
    }
    options = {"num_warps": 4, "maxnreg": tile.maxnreg}
    return Plan(
        tile, (block_d, block_dv), (unit_d, unit_dv), tiles, Relaunch(programs, arguments, options)
    )


def launch_backward(
    kernel: Any,
    spec: AttentionSpec,
    x: Inputs,
    dout: Tensor,
    rows: Prepared,
    grads: Gradients,
) -> None:
    """Fill grads.k and grads.v, and add to rows.dq."""
    plan = plan_backward(spec, rows.space.of_head, rows.space.of_entry)
    _, seen_k = mask.key_span(spec.max_seqlen_q, spec.max_seqlen_k, *spec.window)
    _, seen_q = mask.key_span(spec.max_seqlen_k, spec.max_seqlen_q, *spec.window[::-1])
    if _may_hide_keys(spec):
        grads.k.zero_()  # the kernel writes nothing for keys that nobody sees
        grads.v.zero_()
    if plan.launch.programs == 0 or spec.max_seqlen_q == 0:
        return
    q, k, v, dout = (for_tma(spec, t) for t in (x.q, x.k, x.v, dout))
    progress = None
    if spec.deterministic:
        progress = torch.zeros(plan.tiles, dtype=torch.int32, device=spec.device)
    block_d, block_dv = plan.blocks
    statistics = (rows.lse, rows.minus_delta, rows.rest)
    with on_device(spec.device):
        plan.launch(
            kernel,
            descriptor(spec, k, seen_k, (ROWS, block_d)),
            descriptor(spec, v, seen_k, (ROWS, block_dv)),
            descriptor(spec, q, seen_q, (plan.tile.q, block_d)),
            descriptor(spec, dout, seen_q, (plan.tile.q, block_dv)),
            *(_statistic(t, plan.tile.q) for t in statistics),
            rows.taken,
            progress,
            rows.dq,
            grads.k,
            *in_units(strides(spec, grads.k), plan.units[0]),
            grads.v,
            *in_units(strides(spec, grads.v), plan.units[1]),
            *given_terms(spec, x),
            *lengths(spec, x),
        )


def _statistic(rows: Tensor | None, tile: int) -> TensorDescriptor | None:
    """A row statistic as TMA reads it, that of a query tile at a time."""
    if rows is None:
        return None
    return TensorDescriptor(rows, [rows.numel()], [1], [tile], gl.NVMMASharedLayout(0, 32, rank=1))
