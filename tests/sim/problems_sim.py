"""The kernels under the simulator's tests, each with a small problem and its right answer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from kernels import (
    blackwell_gemm,
    elementwise,
    features,
    gemm,
    hopper_backward,
    hopper_forward,
    hopper_persistent,
    philox,
    tensor_cores,
    turns,
)
from torch import Tensor

from tilewise.philox import philox as reference_philox
from tilewise.sim.kernels import blackwell as blackwell_demo
from tilewise.sim.kernels import hopper as hopper_demo

TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])


@dataclass(frozen=True)
class Case:
    """`run()` launches; `right()` gives the expected tensors in fp64; Frobenius error < limit."""

    name: str
    run: Callable[[], tuple[Tensor, ...]]
    right: Callable[[], tuple[Tensor, ...]]
    limit: float
    arch: str = "hopper"
    options: dict[str, Any] = field(default_factory=dict)
    compiles: bool = True

    def __str__(self) -> str:
        return self.name


def error(x: Tensor, right: Tensor) -> float:
    x, right = x.double(), right.double()
    if not torch.isfinite(x).all():
        return math.inf
    return float((x - right).norm() / right.norm().clamp_min(1e-30))


def inputs(B: int, H: int, S: int, D: int, seed: int = 0, dtype: Any = torch.bfloat16) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(B, H, S, D, generator=g).to(dtype) for _ in range(4)]


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        n = q.shape[-2]
        s = s.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -math.inf)
    return torch.softmax(s, -1) @ v, torch.logsumexp(s, -1)


def gradients(q: Tensor, k: Tensor, v: Tensor, do: Tensor, causal: bool) -> tuple[Tensor, ...]:
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    o, lse = attention(q, k, v, causal)
    return o.detach(), lse.detach(), *torch.autograd.grad(o, (q, k, v), do.double())


def forward_case(
    module: Any, S: int, D: int, causal: bool, H: int = 1, dtype: Any = torch.bfloat16, **kw: Any
) -> Case:
    q, k, v, _ = inputs(1, H, S, D, S + D, dtype)
    extra = "".join(f" {key}={value}" for key, value in kw.items())
    name = f"{module.__name__.split('.')[-1]} S={S} D={D}{' causal' if causal else ''}"
    return Case(
        f"{name}{f' H={H}' if H > 1 else ''}{' fp16' if dtype == torch.float16 else ''}{extra}",
        lambda: module.fwd(q, k, v, causal, **kw),
        lambda: attention(q.double(), k.double(), v.double(), causal),
        4e-3,
    )


def backward_case(S: int, D: int, causal: bool, H: int = 1, **kw: Any) -> Case:
    q, k, v, do = inputs(1, H, S, D, S + D)
    o, lse, *grads = gradients(q, k, v, do, causal)
    extra = "".join(f" {key}={value}" for key, value in kw.items())
    return Case(
        f"hopper_backward S={S} D={D}{' causal' if causal else ''}{f' H={H}' if H > 1 else ''}{extra}",
        lambda: hopper_backward.bwd(q, k, v, o, do, lse.float(), causal, **kw),
        lambda: tuple(grads),
        4e-3,
    )


def demo_case(module: Any, arch: str, S: int, D: int, causal: bool, **kw: Any) -> Case:
    """The kernels that `tilewise trace` knows, on two heads."""
    q, k, v, _ = inputs(1, 2, S, D, S + D)
    return Case(
        f"{arch} demonstration S={S} D={D}{' causal' if causal else ''}",
        lambda: module.forward(q, k, v, causal, **kw),
        lambda: attention(q.double(), k.double(), v.double(), causal),
        4e-3,
        arch,
    )


def _matrix(m: int, n: int, seed: int) -> Tensor:
    return torch.randn(m, n, generator=torch.Generator().manual_seed(seed)).bfloat16()


def _other_cases() -> list[Case]:
    a, b = _matrix(200, 192, 0), _matrix(104, 192, 1)
    x = _matrix(300, 32, 2).float()
    rows = _matrix(6, 128, 3).float()
    flat = _matrix(1, 1000, 4).float()[0]
    long = _matrix(1, 5 * 512, 5).float()[0]
    wide_a, wide_b = _matrix(128, 256, 6), _matrix(256, 256, 7)
    small_a, small_b = _matrix(64, 160, 10), _matrix(64, 160, 11)
    fp8_a, fp8_b = (_matrix(m, 512, m).to(torch.float8_e4m3fn) for m in (128, 64))
    square = _matrix(128, 64, 12).float()

    def ordered_sum() -> tuple[Tensor]:
        total = rows[0].clone()
        for row in rows[1:]:
            total += row
        return (total,)

    def counters() -> tuple[Tensor]:
        i = torch.arange(256)
        words = reference_philox((i, 0 * i + 1, 0 * i + 2, 0 * i + 3), torch.tensor(0x123456789ABCDEF0))
        words = torch.stack([words[0], words[3]])
        return (torch.where(words >= 2**31, words - 2**32, words),)

    return [
        Case("gemm", lambda: (gemm.gemm(a, b),), lambda: (a.double() @ b.double().T,), 1e-6),
        Case("elementwise", lambda: (elementwise.elementwise(x),), lambda: (2 * x.double() + 1,), 1e-7),
        Case(
            "turns",
            lambda: (turns.turns(rows),),
            ordered_sum,
            1e-30,
            options={"together": True},
        ),
        Case(
            "features",
            lambda: (features.features(flat),),
            lambda: (torch.where(flat > 0, 3 * flat, 0 * flat).double() + 513,),
            1e-6,
            options={"together": True},
        ),
        Case(
            "cp.async groups",
            lambda: (features.copy_groups(long),),
            lambda: (2 * long.double(),),
            1e-30,
            arch="ampere",
        ),
        Case(
            "cp.async signals",
            lambda: (features.copy_signals(long[:1536]),),
            lambda: (2 * long[:1536].double(),),
            1e-30,
        ),
        Case("philox", lambda: (philox.philox(256, 0x123456789ABCDEF0),), counters, 1e-30),
        Case(
            "blackwell_gemm",
            lambda: (blackwell_gemm.gemm(wide_a, wide_b),),
            lambda: (wide_a.double() @ wide_b.double().T,),
            1e-6,
            arch="blackwell",
        ),
        Case(
            "mma_v2",
            lambda: (tensor_cores.ampere_gemm(small_a, small_b),),
            lambda: (small_a.double() @ small_b.double().T,),
            1e-6,
            arch="ampere",
        ),
        Case(
            "fp8 hopper",
            lambda: (tensor_cores.fp8_gemm(fp8_a, fp8_b, promote=128),),
            lambda: (fp8_a.double() @ fp8_b.double().T,),
            1e-3,
        ),
        Case(
            "fp8 blackwell",
            lambda: (tensor_cores.fp8_gemm(fp8_a, fp8_b, tcgen05=True),),
            lambda: (fp8_a.double() @ fp8_b.double().T,),
            1e-6,
            arch="blackwell",
        ),
        Case(
            "tcgen05_copy",
            lambda: (tensor_cores.copied(square),),
            lambda: (square.double(),),
            1e-30,
            arch="blackwell",
        ),
    ]


def _pair_cases() -> list[Case]:
    """Kernels for clusters, which Triton can express from 3.9 on."""
    if TRITON < (3, 9):
        return []
    from kernels import blackwell_pair, clusters

    a, b = _matrix(256, 192, 8), _matrix(128, 192, 9)
    x = _matrix(192, 32, 13).float()
    square = _matrix(64, 64, 14).float()
    rows = (torch.arange(6, dtype=torch.int32) + 1)[:, None].expand(6, 256)
    return [
        Case(
            "blackwell_pair",
            lambda: (blackwell_pair.gemm(a, b),),
            lambda: (a.double() @ b.double().T,),
            4e-3,
            arch="blackwell",
        ),
        Case(
            "multicast",
            lambda: (clusters.multicast(x),),
            lambda: (2 * x.double(),),
            1e-30,
            arch="blackwell",
        ),
        Case(
            "remote arrival",
            lambda: (clusters.remote(),),
            lambda: (torch.arange(7, 263),),
            1e-30,
            arch="blackwell",
        ),
        Case(
            "exchange",
            lambda: (clusters.exchange(square),),
            lambda: (square.double(),),
            1e-30,
            arch="blackwell",
        ),
        *(
            Case(
                f"takeover by {n} CTA(s)",
                lambda n=n: (clusters.takeover(n),),
                lambda: (rows,),
                1e-30,
                arch="blackwell",
                options={"resident": 2},
            )
            for n in (1, 2)
        ),
    ]


OTHERS = [*_other_cases(), *_pair_cases()]
SMALL = [
    forward_case(hopper_forward, 256, 64, True),
    forward_case(hopper_forward, 256, 128, False, PINNED=True),
    forward_case(hopper_persistent, 256, 64, True, SMS=2),
    backward_case(256, 64, True),
]
DEMOS = [
    demo_case(module, arch, S, D, causal)
    for module, arch, S in ((hopper_demo, "hopper", 256), (blackwell_demo, "blackwell", 512))
    for D, causal in ((64, True), (128, False))
]
CASES = [*SMALL, *DEMOS, *OTHERS]
