"""From a spec and its tensors to a launch of the Hopper kernels: descriptors, counts, tile, grid."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

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
from tilewise.backends.hopper.terms import (
    LaidTerms,
    bias_unit,
    lay_terms,
    term_numbers,
    term_tensors,
)
from tilewise.backends.relaunch import Relaunch
from tilewise.backends.triton.launch import Strides, factors_of_scores, on_device, steps
from tilewise.gluon.ragged import Box, dense_rows, ragged_rows
from tilewise.spec import AttentionSpec, Inputs

ROWS = 64  # queries of a consumer: the rows of one warpgroup product


class Laid(NamedTuple):
    """How the tensors of a call lie in memory, as far as a launch is made for that and not for a spec:
    strides, which values of those that may be None are there, and the types of terms."""

    q: Strides  # of (batch, row, head), for the copy engine
    k: Strides
    v: Strides
    out: tuple[int, ...]  # all strides
    out_by_tma: Strides | None
    lse: tuple[int, ...]
    terms: LaidTerms


def box(
    spec: AttentionSpec, steps: Strides, length: int, shape: tuple[int, int], tile: tuple[int, int]
) -> Box:
    """A matrix as TMA reads or writes it. shape: heads, columns. tile: rows, columns."""
    if spec.ragged:
        return ragged_rows(shape, steps, spec.dtype, tile)
    return dense_rows((spec.batch, length, *shape), steps, spec.dtype, tile)


def block_columns(head_dim: int) -> int:
    """Columns of a tile: TMA fills those beyond the head dim with zeros."""
    return max(64, triton.next_power_of_2(head_dim))


class Plan(NamedTuple):
    """What a launch needs besides tensors: the same for all calls with one spec that lie in one way."""

    agenda: Agenda | None
    launch: Relaunch
    join: Relaunch | None  # if the agenda breaks query tiles


@lru_cache(maxsize=1024)
def plan_forward(spec: AttentionSpec, laid: Laid) -> Plan:
    """Tile, number of programs and all arguments of the forward but tensors."""
    blocks = block_columns(spec.head_dim), block_columns(spec.head_dim_v)
    parts = 1
    if 128 < spec.head_dim <= 192:  # 256 columns would be a third more products
        blocks, parts = (64, blocks[1]), 3
    tile = schedule.hopper_tile(spec)
    tile_q = tile.consumers * ROWS
    tiles = spec.batch * spec.heads_q * triton.cdiv(spec.max_seqlen_q, tile_q)
    claimed = spec.ragged and spec.window != (None, None)
    unit = bias_unit(laid.terms)
    o_columns = min(tile.o_columns, blocks[1])
    arguments = {
        **by_name("o", steps(spec, laid.out)),
        **statistic_strides(spec, "lse", laid.lse),
        **term_numbers(spec, laid.terms, unit),
        "max_q": spec.max_seqlen_q,
        "max_k": spec.max_seqlen_k,
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
        "O_COLUMNS": o_columns,
        "CONSUMERS": tile.consumers,
        "TILE_K": tile.k,
        "STAGES": tile.stages,
        "Q_STAGES": tile.q_stages,
        "Q_IN_REGISTERS": tile.q_in_registers,
        "PING_PONG": tile.ping_pong,
        "RAGGED": spec.ragged,
        "ANCHORED": spec.dtype == torch.bfloat16 and not spec.bias,  # fp16 has too few exponents
        "BIAS_UNIT": unit,
        "REGISTERS": tile.registers,
    }
    options = {"num_warps": 4, "maxnreg": tile.maxnreg}
    programs = schedule.multiprocessors(spec.device)
    lists = None
    if tiles and not spec.ragged:
        lists = agenda(spec, tile_q, tile.k, programs)
    programs = min(tiles, programs) if lists is None else lists.lists.shape[1]
    _, seen_k = mask.key_span(spec.max_seqlen_q, spec.max_seqlen_k, *spec.window)
    queries, keys = (spec.heads_q, spec.head_dim), (spec.heads_kv, spec.head_dim)
    outputs, values = (spec.heads_q, spec.head_dim_v), (spec.heads_kv, spec.head_dim_v)
    boxes = {
        "q_desc": box(spec, laid.q, spec.max_seqlen_q, queries, (ROWS, blocks[0])),
        "k_desc": box(spec, laid.k, seen_k, keys, (tile.k, blocks[0])),
        "v_desc": box(spec, laid.v, seen_k, values, (tile.k, blocks[1])),
    }
    if laid.out_by_tma is not None:
        boxes["o_desc"] = box(spec, laid.out_by_tma, spec.max_seqlen_q, outputs, (ROWS, o_columns))
    launch = Relaunch(programs, arguments, options, boxes)
    return Plan(lists, launch, plan_join(spec, lists, tile_q, blocks[1], arguments))


when_forgotten.append(plan_forward.cache_clear)


def launch_forward(
    kernel: Any, spec: AttentionSpec, x: Inputs, out: Tensor, lse: Tensor, saved: Tensor
) -> None:
    """Fill out and lse, and saved where there is a bias."""
    if spec.max_seqlen_k == 0:
        _fill_without_keys(spec, x, out, lse, saved)
        return
    x, laid = lay(spec, x, out, lse)
    launch_laid(kernel, spec, laid, x, out, lse, saved)


def lay(spec: AttentionSpec, x: Inputs, out: Tensor, lse: Tensor) -> tuple[Inputs, Laid]:
    """Tensors that the copy engine can address, perhaps copies, and how they lie."""
    (q, q_steps), (k, k_steps), (v, v_steps) = (for_tma(spec, t) for t in x[:3])
    if q is not x.q or k is not x.k or v is not x.v:
        x = x._replace(q=q, k=k, v=v)
    steps = q_steps, k_steps, v_steps
    by_tma = tma_strides(spec, out)
    return x, Laid(*steps, out.stride(), by_tma, lse.stride(), lay_terms(spec, x))


def bind_forward(
    kernel: Any, spec: AttentionSpec, x: Inputs, out: Tensor, lse: Tensor
) -> Callable[[Inputs, Tensor, Tensor, Tensor], None] | None:
    """``launch_forward`` for tensors that lie as these do. None: there is no shorter way."""
    if spec.max_seqlen_k == 0:
        return None
    found, laid = lay(spec, x, out, lse)
    return partial(launch_laid, kernel, spec, laid) if found is x else None


def launch_laid(
    kernel: Any,
    spec: AttentionSpec,
    laid: Laid,
    x: Inputs,
    out: Tensor,
    lse: Tensor,
    saved: Tensor,
) -> None:
    """``launch_forward`` for tensors that lie as is said."""
    if capturing(spec.device):
        # What is planned while a graph is recorded may be second best, and is not kept.
        plan = plan_forward.__wrapped__(spec, laid)
        if plan.agenda is not None:
            capture(plan.agenda)
    else:
        plan = plan_forward(spec, laid)
    if plan.launch.programs == 0:
        return
    lists, join = plan.agenda, plan.join
    o_parts, lse_parts = None, None
    if lists is not None and join is not None:
        o_parts, lse_parts = room_for_parts(
            lists, join.arguments["TILE_Q"], join.arguments["BLOCK_DV"], lse
        )
    with on_device(spec.device):
        plan.launch(
            kernel,
            q_desc=x.q,
            k_desc=x.k,
            v_desc=x.v,
            o_desc=None if laid.out_by_tma is None else out,
            o_ptr=out,
            lse_ptr=lse,
            agenda=None if lists is None else lists.lists,
            parts=None if lists is None else lists.parts,
            claims=claims(plan, spec) if spec.ragged else None,
            o_parts=o_parts,
            lse_parts=lse_parts,
            rest_ptr=saved[0] if spec.bias else None,
            **term_tensors(spec, x),
            **length_tensors(x),
        )
        if lists is not None and join is not None:
            join(
                join_kernel,
                o_parts=o_parts,
                lse_parts=lse_parts,
                broken=lists.broken,
                out_ptr=out,
                lse_ptr=lse,
                sink_ptr=x.sink,
            )


def _fill_without_keys(spec: AttentionSpec, x: Inputs, out: Tensor, lse: Tensor, saved: Tensor) -> None:
    out.zero_()
    lse.fill_(-math.inf)
    if x.sink is not None:
        there = lse.new_ones(*lse.mT.shape, 1)  # as queries lie
        unused.clear(spec, x, "q", there)
        lse.copy_(torch.where(there[..., 0].mT > 0, x.sink.float()[:, None], -math.inf))
    if spec.bias:
        saved.zero_()


def by_name(name: str, strides: Iterable[int]) -> dict[str, int]:
    """Strides of a matrix as arguments of a kernel."""
    return dict(zip((f"{name}_batch", f"{name}_row", f"{name}_head"), strides, strict=True))


def statistic_strides(spec: AttentionSpec, name: str, strides: tuple[int, ...]) -> dict[str, int]:
    """The same of a row statistic whose rows are adjacent."""
    batch, _, head = steps(spec, strides)
    return {f"{name}_batch": batch, f"{name}_head": head}


def length_tensors(x: Inputs) -> dict[str, Tensor | None]:
    """Where sequences begin and how long they are, as arguments of a kernel."""
    return {
        "cu_q": x.cu_seqlens_q,
        "cu_k": x.cu_seqlens_k,
        "used_q": x.seqused_q,
        "used_k": x.seqused_k,
    }


def claims(plan: Plan, spec: AttentionSpec) -> Tensor:
    """Room for a counter, which is 0, and for the order in which programs claim query tiles."""
    entries = 1 + plan.launch.arguments["tiles"] + plan.launch.programs
    return torch.zeros(entries, dtype=torch.int32, device=spec.device)


def tma_strides(spec: AttentionSpec, t: Tensor) -> Strides | None:
    """(batch, row, head) strides of a tensor as the copy engine takes them. None: it cannot address the
    tensor, for that takes columns in steps of 16 bytes; and, if sequences end anywhere, one batch entry
    right after the other."""
    if t.data_ptr() % 16:
        return None
    return _tma_strides(t.shape, t.stride(), spec.varlen, spec.ragged)


@lru_cache(maxsize=4096)
def _tma_strides(
    shape: tuple[int, ...], strides: tuple[int, ...], varlen: bool, ragged: bool
) -> Strides | None:
    if varlen:
        shape, strides = (1, *shape), (0, *strides)
    batch, rows, heads = shape[:3]
    if 0 in shape:  # and nothing of it is read
        return 8, 8, 8
    if ragged and batch > 1:
        if strides[0] != rows * strides[1]:
            return None
        rows *= batch
    # The step of a dimension with one entry is never taken, but must look like one.
    sizes = zip((batch, rows, heads), strides[:3], strict=True)
    entry, row, head = (step if n > 1 else 8 for n, step in sizes)
    if any(step <= 0 or step % 8 for step in (entry, row, head)):  # of 2 bytes
        return None
    return entry, row, head


def for_tma(spec: AttentionSpec, t: Tensor) -> tuple[Tensor, Strides]:
    """The tensor itself, or a copy that the copy engine can address; and its strides."""
    found = tma_strides(spec, t)
    if found is not None:
        return t, found
    wide = t.new_empty(*t.shape[:-1], -(-t.shape[-1] // 8) * 8)
    copied = wide[..., : t.shape[-1]].copy_(t)
    found = tma_strides(spec, copied)
    assert found is not None
    return copied, found
