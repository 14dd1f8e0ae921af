"""The kernels that the mutation tests break, each with a problem that takes its rings round."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from kernels import (
    blackwell_gemm,
    elementwise,
    gemm,
    hopper_backward,
    hopper_forward,
    hopper_persistent,
)
from problems_sim import _matrix, error, gradients, inputs
from torch import Tensor

from tilewise import sim
from tilewise.gluon import ring
from tilewise.sim.mutate import Mutation, Source

Outputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Subject:
    """`run(module, seed)` calls the host code of a possibly broken module; odd seeds are causal."""

    module: types.ModuleType
    run: Callable[[Any, int], Outputs]
    right: Callable[[int], Outputs]
    limit: float
    arch: str = "hopper"

    def notices(self, module: types.ModuleType, seed: int) -> str:
        """What is wrong with this module: kinds of findings, "wrong result", or nothing ("")."""
        options = {"arch": self.arch, "watchdog_seconds": 5.0, "stop_at_first": True, "max_findings": 1}
        with sim.intercept(seed=seed, **options) as reports:
            outputs = self.run(module, seed)
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


_A, _B = _matrix(200, 448, 0), _matrix(104, 448, 1)
_X = _matrix(300, 32, 2).float()
_WIDE_A, _WIDE_B = _matrix(128, 256, 6), _matrix(256, 256, 7)


def _gemm_on(broken_ring: Any, seed: int) -> Outputs:
    user = Source.of(gemm).load(instead={ring.__name__: broken_ring})
    return (user.gemm(_A, _B),)


def _product(seed: int) -> Outputs:
    return (_A.double() @ _B.double().T,)


SUBJECTS = {
    "forward": Subject(hopper_forward, _forward, _forward_right, 4e-3),
    "persistent": Subject(hopper_persistent, _persistent, _persistent_right, 4e-3),
    "backward": Subject(hopper_backward, _backward, _backward_right, 4e-3),
    "gemm": Subject(gemm, lambda module, seed: (module.gemm(_A, _B),), _product, 1e-6),
    "ring": Subject(ring, _gemm_on, _product, 1e-6),
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
