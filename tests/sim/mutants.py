"""The kernels that the mutation tests break, each with a problem that takes its rings round."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

import torch
from kernels import (
    blackwell_gemm,
    elementwise,
    gemm,
    hopper_backward,
    hopper_forward,
    hopper_persistent,
)
from problems_sim import TRITON, _matrix, error, gradients, inputs
from torch import Tensor

from tilewise import reference, schedule, sim
from tilewise.backends.hopper import backward as product_backward
from tilewise.backends.hopper import backward_parts
from tilewise.backends.hopper import forward as product_forward
from tilewise.backends.hopper import launch as product_launch
from tilewise.backends.hopper import tile as product_tile
from tilewise.gluon import queue, ring
from tilewise.ops import Gradients
from tilewise.sim.kernels import blackwell as blackwell_demo
from tilewise.sim.kernels import hopper as hopper_demo
from tilewise.sim.mutate import Mutation, Source, edit, mutations
from tilewise.spec import AttentionSpec, Inputs, make_spec

Outputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Subject:
    """`run(module, seed)` calls the host code of a possibly broken module; odd seeds are causal.

    functions: those that `run` reaches, if it does not reach all.
    """

    module: types.ModuleType
    run: Callable[[Any, int], Outputs]
    right: Callable[[int], Outputs]
    limit: float
    arch: str = "hopper"
    options: Mapping[str, Any] = field(default_factory=dict)
    functions: tuple[str, ...] = ()

    def mutations(self, by_hand: Sequence[tuple[str, ...]]) -> list[Mutation]:
        found = mutations(self.module)
        if self.functions:
            found = [m for m in found if m.function in self.functions]
        return found + [edit(self.module, *parts) for parts in by_hand]

    def notices(self, module: types.ModuleType, seed: int) -> str:
        """What is wrong with this module: kinds of findings, "wrong result", or nothing ("")."""
        limits = {"watchdog_seconds": 5.0, "stop_at_first": True, "max_findings": 1}
        with sim.intercept(seed=seed, arch=self.arch, **limits, **self.options) as reports:
            try:
                outputs = self.run(module, seed)
            except IndexError:  # of a tuple: the compiler would say so
                return "does not compile"
        found = sorted(set().union(*(r.kinds for r in reports)))
        if found:
            return ", ".join(found)
        right = self.right(seed)
        worst = max(error(x, y) for x, y in zip(outputs, right, strict=True))
        return "" if worst < self.limit else "wrong result"

    def survives(self, mutation: Mutation, seeds: int) -> bool:
        """Does no schedule show that something is wrong?"""
        module = mutation.load()
        return not any(self.notices(module, seed) for seed in range(seeds))


S, D = 256, 64


@cache
def _attention_problem(causal: bool) -> tuple[list[Tensor], Outputs]:
    q, k, v, do = inputs(1, 2, S, D)
    return [q, k, v, do], gradients(q, k, v, do, causal)


def _forward(module: Any, seed: int) -> Outputs:
    """Four key tiles and two stages; tiles narrower than the query tile, so that masks matter inside."""
    causal = bool(seed & 1)
    (q, k, v, _), _right = _attention_problem(causal)
    pinned = seed % 4 > 1
    result: Outputs = module.fwd(q[:, :1], k[:, :1], v[:, :1], causal, BLOCK_N=64, PINNED=pinned)
    return result


def _forward_right(seed: int) -> Outputs:
    o, lse, *_ = _attention_problem(bool(seed & 1))[1]
    return o[:, :1], lse[:, :1]


def _persistent(module: Any, seed: int) -> Outputs:
    """One program with four query tiles, of 2, 2, 1 and 1 key tiles when causal."""
    causal = bool(seed & 1)
    (q, k, v, _), _right = _attention_problem(causal)
    odd = seed % 4 > 1
    block = 64 if odd else 128
    result: Outputs = module.fwd(q, k, v, causal, BLOCK_N=block, PINGPONG=True, PINNED=odd, SMS=1)
    return result


def _persistent_right(seed: int) -> Outputs:
    return _attention_problem(bool(seed & 1))[1][:2]


def _backward(module: Any, seed: int) -> Outputs:
    causal = bool(seed & 1)
    tensors, (o, lse, *_) = _attention_problem(causal)
    q, k, v, do, o = (x[:, :1] for x in (*tensors, o))
    result: Outputs = module.bwd(q, k, v, o, do, lse[:, :1].float(), causal)
    return result


def _backward_right(seed: int) -> Outputs:
    return tuple(x[:, :1] for x in _attention_problem(bool(seed & 1))[1][2:])


def _hopper_demo(module: Any, seed: int) -> Outputs:
    causal = bool(seed & 1)
    (q, k, v, _), _right = _attention_problem(causal)
    result: Outputs = module.forward(q[:, :1], k[:, :1], v[:, :1], causal, BLOCK=64)
    return result


LONG = 768  # six key tiles for each pair of query tiles; when causal, two, four and six


def _blackwell_demo(module: Any, seed: int) -> Outputs:
    """Scores that grow along the keys, so that the output has to be rescaled more than once."""
    causal = bool(seed & 1)
    (q, k, v, _), _right = _growing_problem(causal)
    result: Outputs = module.forward(q, k, v, causal)
    return result


@cache
def _growing_problem(causal: bool) -> tuple[list[Tensor], Outputs]:
    q, k, v, do = (x[:, :1] for x in inputs(1, 2, LONG, D))
    k = (k * torch.linspace(0.2, 8, LONG)[:, None]).bfloat16()
    return [q, k, v, do], gradients(q, k, v, do, causal)[:2]


class Variant(NamedTuple):
    """A tile of the product's forward, the problem it gets, and on how many multiprocessors."""

    tile: schedule.HopperTile
    values: str
    options: Mapping[str, Any] = MappingProxyType({})
    programs: int = 1


# With key tiles so small that rings go round, and so few programs that each has several query tiles.
_THREE = schedule.HopperTile(3, 64, 2, 2, False, True, 64, 160, 128)
_TWO = schedule.HopperTile(2, 64, 2, 1, True, False, 64, 240, 168)
_CAUSAL = {"causal": True}
_PRODUCT = (
    Variant(_THREE, "plain"),
    Variant(_TWO, "growing", _CAUSAL),
    Variant(_THREE._replace(q_stages=1), "growing", {"window_left": 40, "window_right": 30}),
    Variant(_TWO._replace(o_columns=32), "overflow", _CAUSAL),
    Variant(_TWO, "packed overflow", _CAUSAL, programs=3),
    Variant(_THREE, "overflow", _CAUSAL),
    Variant(_THREE._replace(o_columns=32), "packed half", _CAUSAL),
    Variant(_TWO._replace(q_in_registers=False), "wide", _CAUSAL),
    Variant(_THREE._replace(stages=3), "packed short"),
    Variant(_TWO, "huge half"),
    Variant(_TWO, "broken sink", programs=4),
    Variant(_TWO, "broken overflow", _CAUSAL, programs=4),
)
_PACKED = [n for n, variant in enumerate(_PRODUCT) if "packed" in variant.values]


@cache
def _product_problem(variant: int) -> tuple[AttentionSpec, Inputs, Outputs]:
    """Keys are visited from the last to the first, so what grows must grow towards the first."""
    values, options = _PRODUCT[variant].values, _PRODUCT[variant].options
    # No first attempt takes the rings back to their first phase: the second one would not notice.
    length = 384 if values == "growing" else 320
    q, k, v, _ = (t.transpose(1, 2) for t in inputs(1, 1, length, D))
    longest: dict[str, int] = {}
    if values == "growing":  # and diagonals pass between the corners of key tiles
        q = q[:, 20:]
        k = (k * torch.linspace(4, 0.2, length)[None, :, None, None]).bfloat16()
    if "overflow" in values:  # a score beyond the range of the first attempt
        k[:, 5] *= 60
    if values == "wide":  # Q and K in three blocks of columns
        q, k = (torch.cat([t, t.flip(1), t], -1)[:, :200] / 2 for t in (q, k))
        v = v[:, :200]
    if values == "huge half":  # logits so large that a rounded one is off by more than exp2 can bear
        q, k, v = torch.full_like(q, 6e4), torch.full_like(k[:, :1], 6e4), v[:, :1]
    if "half" in values:
        q, k, v = (t.half() for t in (q, k, v))
    x = Inputs(q, k, v)
    if "sink" in values:
        x = x._replace(sink=torch.ones(q.shape[2]))
    if "packed" in values:
        ends = [150, 170, length]  # the second sequence lacks a query tile that the others have
        if "short" in values:  # one key tile for each query tile
            ends = list(range(40, length + 1, 40))
        starts = torch.tensor([0, *ends], dtype=torch.int32)
        x = Inputs(*(t[0] for t in (q, k, v)), cu_seqlens_q=starts, cu_seqlens_k=starts)
        longest = dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), int(starts.diff().max()))
    spec = make_spec(x, **longest, **options)
    return spec, x, reference.attention(spec, x)


def _product(module: Any, seed: int, variants: Sequence[int] = range(len(_PRODUCT))) -> Outputs:
    variant = variants[seed % len(variants)]
    tile, values, _, programs = _PRODUCT[variant]
    spec, x, right = _product_problem(variant)
    out, lse = (
        torch.full(r.shape, torch.nan, dtype=d)
        for r, d in zip(right, (x.q.dtype, torch.float32), strict=True)
    )
    with (
        mock.patch.object(schedule, "hopper_tile", lambda *_: tile),
        mock.patch.object(schedule, "multiprocessors", lambda _: programs),
        mock.patch.object(schedule, "JOINING", -1e6 if "broken" in values else schedule.JOINING),
        mock.patch.object(schedule, "WORTH_BREAKING", -1),
        mock.patch.object(schedule, "BETWEEN_QUERY_TILES", 16),
        mock.patch.object(product_launch, "plan_forward", product_launch.plan_forward.__wrapped__),
    ):
        module.forward(spec, x, out, lse, lse)
    if "huge" in values:  # there, what is not a number, or infinite, is no wrong one
        out, lse = (
            torch.where((r != r) | (r == math.inf), y, r) for r, y in zip((out, lse), right, strict=True)
        )
    return out, lse


def _product_right(seed: int) -> Outputs:
    return _product_problem(seed % len(_PRODUCT))[2]


def _packed_with(name: str) -> Callable[[Any, int], Outputs]:
    """Packed variants of the product, with a module that it imports from broken."""

    def run(broken: Any, seed: int) -> Outputs:
        return _product(Source.of(product_forward).load(instead={name: broken}), seed, _PACKED)

    return run


def _packed_right(seed: int) -> Outputs:
    return _product_problem(_PACKED[seed % len(_PACKED)])[2]


_A, _B = _matrix(200, 448, 0), _matrix(104, 448, 1)
_X = _matrix(300, 32, 2).float()
_WIDE_A, _WIDE_B = _matrix(128, 256, 6), _matrix(256, 256, 7)


@cache
def _gradients_problem() -> tuple[AttentionSpec, Inputs, tuple[Tensor, ...], Outputs]:
    """Inputs; output, log-sum-exp and output gradient; right gradients."""
    q, k, v, dout = inputs(1, 1, 300, D)
    out, lse, *right = gradients(q, k, v, dout, False)
    x = Inputs(*(t.transpose(1, 2) for t in (q, k, v)))
    given = (out.to(q.dtype).transpose(1, 2), lse.float(), dout.transpose(1, 2))
    return make_spec(x), x, given, tuple(t.transpose(1, 2) for t in right)


def _on_ring(broken_ring: Any, seed: int) -> Outputs:
    """By TMA in a matrix product, by stores as well in the package's backward."""
    instead = {ring.__name__: broken_ring}
    if seed % 2:
        return (Source.of(gemm).load(instead=instead).gemm(_A, _B),)
    spec, x, (out, lse, dout), _ = _gradients_problem()
    grads = Gradients(spec, x)
    instead[backward_parts.__name__] = Source.of(backward_parts).load(instead=instead)
    user = Source.of(product_backward).load(instead=instead)
    user.backward(spec, x, out, lse, lse, dout, None, grads)
    return grads.q, grads.k, grads.v


def _on_ring_right(seed: int) -> Outputs:
    return _gemm_right(seed) if seed % 2 else _gradients_problem()[3]


def _gemm_right(seed: int) -> Outputs:
    return (_A.double() @ _B.double().T,)


SUBJECTS = {
    "forward": Subject(hopper_forward, _forward, _forward_right, 4e-3),
    "persistent": Subject(hopper_persistent, _persistent, _persistent_right, 4e-3),
    "backward": Subject(hopper_backward, _backward, _backward_right, 4e-3),
    "product": Subject(product_forward, _product, _product_right, 4e-3, options={"together": True}),
    "product_tile": Subject(
        product_tile,
        _packed_with(product_tile.__name__),
        _packed_right,
        4e-3,
        options={"together": True},
        functions=("claimed_tile",),
    ),
    "queue": Subject(
        queue, _packed_with(queue.__name__), _packed_right, 4e-3, options={"together": True}
    ),
    "hopper_demo": Subject(hopper_demo, _hopper_demo, _forward_right, 4e-3),
    "blackwell_demo": Subject(
        blackwell_demo,
        _blackwell_demo,
        lambda seed: _growing_problem(bool(seed & 1))[1],
        4e-3,
        "blackwell",
    ),
    "gemm": Subject(gemm, lambda module, seed: (module.gemm(_A, _B),), _gemm_right, 1e-6),
    "ring": Subject(ring, _on_ring, _on_ring_right, 4e-3),
    "elementwise": Subject(
        elementwise,
        lambda module, seed: (module.elementwise(_X),),
        lambda seed: (2 * _X.double() + 1,),
        1e-7,
    ),
    "blackwell_gemm": Subject(
        blackwell_gemm,
        lambda module, seed: (module.gemm(_WIDE_A, _WIDE_B),),
        lambda seed: (_WIDE_A.double() @ _WIDE_B.double().T,),
        1e-6,
        "blackwell",
    ),
}


def _clusters(module: Any, seed: int) -> Outputs:
    return (
        module.multicast(_X[:192]),
        module.exchange(_SQUARE),
        module.remote(),
        module.takeover(2),
        module.takeover(1),
    )


def _clusters_right(seed: int) -> Outputs:
    rows = (torch.arange(6) + 1)[:, None].expand(6, 256)
    return 2 * _X[:192], _SQUARE, torch.arange(7, 263), rows, rows


_SQUARE = _matrix(64, 64, 14).float()

if TRITON >= (3, 9):
    from kernels import clusters

    SUBJECTS["clusters"] = Subject(
        clusters,
        _clusters,
        _clusters_right,
        1e-30,
        "blackwell",
        {"together": True, "resident": 2},
    )
