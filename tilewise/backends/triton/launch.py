"""From a spec and its tensors to a kernel launch: strides, lengths, grid, tile."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
import triton
from torch import Tensor

from tilewise import schedule
from tilewise.backends.keys import settle
from tilewise.spec import AttentionSpec, Inputs

Strides = tuple[int, int, int]
Over = Literal["queries", "keys", "heads"]


class Plan(NamedTuple):
    """What a launch needs besides tensors: the same for every call with one spec."""

    programs: int
    arguments: dict[str, Any]  # by keyword: scalars, constants of the kernel, options of the compiler


def launch(
    kernel: Any,
    name: str,
    spec: AttentionSpec,
    x: Inputs,
    *,
    over: Over,
    operands: tuple[Tensor | None, ...],
    **extra: Any,
) -> None:
    """Launch one program per query tile and query head, key tile and key head, or key head alone.

    name: the kernel's row in ``schedule.py``.
    operands: the tensors of the kernel, in its order; their strides go along.
    """
    launch_planned(kernel, plan_launch(name, spec, over), spec, x, operands, extra)


@lru_cache(maxsize=1024)
def plan_launch(name: str, spec: AttentionSpec, over: Over) -> Plan:
    """Tile, number of programs and scalar arguments of a kernel for a spec."""
    block_d, block_dv = (max(16, triton.next_power_of_2(d)) for d in (spec.head_dim, spec.head_dim_v))
    tile = schedule.triton_tile(name, spec, max(block_d, block_dv))
    programs = {
        "queries": spec.batch * spec.heads_q * triton.cdiv(spec.max_seqlen_q, tile.q),
        "keys": spec.batch * spec.heads_kv * triton.cdiv(spec.max_seqlen_k, tile.k),
        "heads": spec.batch * spec.heads_kv,
    }[over]
    arguments = {
        "heads": spec.heads_q,
        "group": spec.group,
        "left": spec.window_left,
        "right": spec.window_right,
        **score_factors(spec),
        "D": spec.head_dim,
        "DV": spec.head_dim_v,
        "BLOCK_D": block_d,
        "BLOCK_DV": block_dv,
        "TILE_Q": tile.q,
        "TILE_K": tile.k,
        "IEEE": spec.dtype == torch.float32,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    return Plan(programs, arguments)


def launch_rows(
    kernel: Any, spec: AttentionSpec, x: Inputs, *, operands: tuple[Tensor | None, ...]
) -> None:
    """Launch a kernel that makes one pass over the output's rows, a program per tile and query head."""
    launch_planned(kernel, plan_rows(spec), spec, x, operands, {})


@lru_cache(maxsize=1024)
def plan_rows(spec: AttentionSpec) -> Plan:
    """``plan_launch`` for ``launch_rows``."""
    tile = schedule.ROW_TILE
    arguments = {
        "heads": spec.heads_q,
        "DV": spec.head_dim_v,
        "BLOCK_DV": max(16, triton.next_power_of_2(spec.head_dim_v)),
        "TILE_Q": tile,
    }
    return Plan(spec.batch * spec.heads_q * triton.cdiv(spec.max_seqlen_q, tile), arguments)


def launch_planned(
    kernel: Any,
    plan: Plan,
    spec: AttentionSpec,
    x: Inputs,
    operands: tuple[Tensor | None, ...],
    extra: dict[str, Any],
) -> None:
    """Launch a kernel as planned, with arguments that are not planned beside those that are."""
    if plan.programs == 0:
        return
    settle(kernel)
    with on_device(spec.device):
        kernel[(plan.programs,)](
            *operands,
            strides=tuple([strides(spec, t) for t in operands]),
            lengths=lengths(spec, x),
            **plan.arguments,
            **extra,
        )


def lengths(spec: AttentionSpec, x: Inputs) -> tuple[Any, ...]:
    tensors = (x.cu_seqlens_q, x.cu_seqlens_k, x.seqused_q, x.seqused_k)
    return (*tensors, spec.max_seqlen_q, spec.max_seqlen_k)


def strides(spec: AttentionSpec, t: Tensor | None) -> Strides:
    """(batch, row, head) strides in elements. Row statistics are (B, H, S) or (H, total)."""
    return (0, 0, 0) if t is None else steps(spec, t.stride())


def steps(spec: AttentionSpec, strides: tuple[int, ...]) -> Strides:
    """The same from all strides of a tensor."""
    batch = 0 if spec.varlen else strides[0]
    if len(strides) == (2 if spec.varlen else 3):
        return batch, strides[-1], strides[-2]
    return batch, strides[-3], strides[-2]


def natural_logits(spec: AttentionSpec) -> bool:
    """Whether kernels' scores are natural logits, and not in units of log2(e): see ``terms``."""
    return spec.bias or spec.alibi or spec.sink


def score_factors(spec: AttentionSpec) -> dict[str, float | None]:
    """scale and softcap as ``tile.logits`` wants them, in the units of scores."""
    return factors_of_scores(spec, natural_logits(spec))


def factors_of_scores(spec: AttentionSpec, natural: bool) -> dict[str, float | None]:
    """The same where scores are natural logits or not."""
    unit = 1.0 if natural else math.log2(math.e)
    if spec.softcap is None:
        return {"scale": spec.scale * unit, "softcap": None}
    return {"scale": spec.scale / spec.softcap, "softcap": spec.softcap * unit}


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)
