"""From a spec and its tensors to a launch of the Hopper backward: descriptors, counts, tile, grid."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl

from tilewise import mask, schedule
from tilewise.backends.hopper.agenda import heads_together
from tilewise.backends.hopper.around import Prepared, Space
from tilewise.backends.hopper.launch import (
    ROWS,
    block_columns,
    box,
    by_name,
    for_tma,
    length_tensors,
)
from tilewise.backends.hopper.terms import LaidTerms, lay_terms, term_numbers, term_tensors
from tilewise.backends.hopper.units import in_units, unit_of
from tilewise.backends.relaunch import Relaunch
from tilewise.backends.triton.launch import Strides, factors_of_scores, on_device, steps
from tilewise.gluon.ragged import Box
from tilewise.ops import Gradients
from tilewise.spec import AttentionSpec, Inputs

CONSUMERS = 2  # that share a tile


class Plan(NamedTuple):
    """What a launch needs besides tensors: the same for all calls with one spec that lie in one way."""

    tiles: int  # of keys
    launch: Relaunch


class LaidBackward(NamedTuple):
    """How the tensors of a call lie in memory: see ``launch.Laid``."""

    q: Strides
    k: Strides
    v: Strides
    dout: Strides
    dk: tuple[int, ...]
    dv: tuple[int, ...]
    terms: LaidTerms
    space: Space


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
def plan_backward(spec: AttentionSpec, laid: LaidBackward) -> Plan:
    """Tile, number of programs and all arguments of the main kernel but tensors."""
    block_d, block_dv = block_columns(spec.head_dim), block_columns(spec.head_dim_v)
    unit_d, unit_dv = unit_of(spec.head_dim), unit_of(spec.head_dim_v)  # of contiguous gradients
    tile = schedule.hopper_backward_tile(spec)
    heads = spec.batch * spec.heads_kv
    tiles = heads * triton.cdiv(spec.max_seqlen_k, tile.k)
    programs = min(tiles, schedule.multiprocessors(spec.device))
    arguments = {
        **by_name("dk", in_units(steps(spec, laid.dk), unit_d)),
        **by_name("dv", in_units(steps(spec, laid.dv), unit_dv)),
        **term_numbers(spec, laid.terms),
        "max_q": spec.max_seqlen_q,
        "max_k": spec.max_seqlen_k,
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
        "rows_of_head": laid.space.of_head,
        "rows_of_entry": laid.space.of_entry,
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
    _, seen_k = mask.key_span(spec.max_seqlen_q, spec.max_seqlen_k, *spec.window)
    _, seen_q = mask.key_span(spec.max_seqlen_k, spec.max_seqlen_q, *spec.window[::-1])
    queries, keys = (spec.heads_q, spec.head_dim), (spec.heads_kv, spec.head_dim)
    douts, values = (spec.heads_q, spec.head_dim_v), (spec.heads_kv, spec.head_dim_v)
    statistic = _statistic(laid.space, tile.q)
    boxes = {
        "k_desc": box(spec, laid.k, seen_k, keys, (ROWS, block_d)),
        "v_desc": box(spec, laid.v, seen_k, values, (ROWS, block_dv)),
        "q_desc": box(spec, laid.q, seen_q, queries, (tile.q, block_d)),
        "dout_desc": box(spec, laid.dout, seen_q, douts, (tile.q, block_dv)),
        **dict.fromkeys(("lse_desc", "minus_delta_desc", "rest_desc"), statistic),
    }
    return Plan(tiles, Relaunch(programs, arguments, options, boxes))


def _statistic(space: Space, tile: int) -> Box:
    """A row statistic as TMA reads it, that of a query tile at a time."""
    return Box((max(space.rows, 1),), (1,), (tile,), gl.NVMMASharedLayout(0, 32, rank=1))


def launch_backward(
    kernel: Any,
    spec: AttentionSpec,
    x: Inputs,
    dout: Tensor,
    rows: Prepared,
    grads: Gradients,
) -> None:
    """Fill grads.k and grads.v, and add to rows.dq."""
    if _may_hide_keys(spec):
        grads.k.zero_()  # the kernel writes nothing for keys that nobody sees
        grads.v.zero_()
    (q, q_steps), (k, k_steps), (v, v_steps) = (for_tma(spec, t) for t in x[:3])
    dout, dout_steps = for_tma(spec, dout)
    laid = LaidBackward(
        q=q_steps,
        k=k_steps,
        v=v_steps,
        dout=dout_steps,
        dk=grads.k.stride(),
        dv=grads.v.stride(),
        terms=lay_terms(spec, x),
        space=rows.space,
    )
    plan = plan_backward(spec, laid)
    if plan.launch.programs == 0 or spec.max_seqlen_q == 0:
        return
    progress = None
    if spec.deterministic:
        progress = torch.zeros(plan.tiles, dtype=torch.int32, device=spec.device)
    with on_device(spec.device):
        plan.launch(
            kernel,
            k_desc=k,
            v_desc=v,
            q_desc=q,
            dout_desc=dout,
            lse_desc=rows.lse,
            minus_delta_desc=rows.minus_delta,
            rest_desc=rows.rest,
            taken=rows.taken,
            progress=progress,
            dq_ptr=rows.dq,
            dk_ptr=grads.k,
            dv_ptr=grads.v,
            **term_tensors(spec, x),
            **length_tensors(x),
        )
