"""The kernels that `tilewise trace` knows by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Traced:
    """A kernel by name. `run(heads, seqlen, head_dim, causal)` launches it on tensors of zeros, batch 1.

    families: GPUs that it is written for. hoisted: see `timing.SmCost`. flops: the useful ones, of the
    arguments of `run`.
    """

    name: str
    what: str
    families: tuple[str, ...]
    run: Callable[[int, int, int, bool], Any]
    flops: Callable[[int, int, int, bool], float]
    hoisted: bool


def _forward(heads: int, seqlen: int, head_dim: int, causal: bool) -> None:
    import torch

    from tilewise.sim.kernels.forward import forward

    x = torch.zeros(1, heads, seqlen, head_dim, dtype=torch.bfloat16)
    forward(x, x, x, causal, BLOCK=128 if head_dim <= 128 else 64)


def _forward_flops(heads: int, seqlen: int, head_dim: int, causal: bool) -> float:
    return 4.0 * heads * seqlen * seqlen * head_dim / (2 if causal else 1)


CATALOGUE = {
    t.name: t
    for t in (
        Traced(
            "hopper-forward",
            "a plain attention forward: TMA producer, two consumers, two products in flight",
            ("hopper",),
            _forward,
            _forward_flops,
            hoisted=True,
        ),
    )
}


def find(name: str) -> Traced:
    """ValueError, with the names there are, if this is none."""
    if name not in CATALOGUE:
        raise ValueError(f"unknown kernel {name!r}; known are {', '.join(sorted(CATALOGUE))}")
    return CATALOGUE[name]
