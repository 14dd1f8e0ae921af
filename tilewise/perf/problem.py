"""One attention problem to measure: its sizes, its work in FLOPs, its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from tilewise import mask
from tilewise.dispatch import Direction
from tilewise.mask import Window
from tilewise.spec import DTYPES

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
DTYPE = {name: dtype for dtype, name in DTYPES.items()}

#: The backward multiplies five matrices where the forward multiplies two.
BACKWARD_WORK = 2.5


@dataclass(frozen=True)
class Problem:
    """Self-attention of ``batch`` sequences of ``seqlen`` tokens, or packed ones of ``lengths``.

    ``seqlen`` of packed sequences is the longest. ``name`` sets apart problems that differ in
    something else than sizes and mask; it is empty for the plain ones.
    """

    batch: int
    seqlen: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: str
    causal: bool
    window: Window = (None, None)
    lengths: tuple[int, ...] | None = None
    softcap: float | None = None
    bias: bool = False
    alibi: bool = False
    sink: bool = False
    deterministic: bool = False
    name: str = ""

    @property
    def needs(self) -> frozenset[str]:
        """What an implementation must support, in the words of ``dispatch.FEATURES``."""
        asked = {
            self.dtype: True,
            "gqa": self.heads != self.kv_heads,
            "unequal_dims": self.head_dim != self.head_dim_v,
            "causal": self.causal,
            "window": self.window != (None, None),
            "varlen": self.lengths is not None,
            "softcap": self.softcap is not None,
            "bias": self.bias,
            "alibi": self.alibi,
            "sink": self.sink,
            "deterministic": self.deterministic,
        }
        return frozenset(name for name, used in asked.items() if used)

    @property
    def panel(self) -> str:
        """What this problem shares with those it is drawn beside."""
        parts = [f"D={self.head_dim}" + self._dim_v]
        if self.heads != self.kv_heads:
            parts.append(f"{self.heads}/{self.kv_heads} heads")
        if self.name and self.lengths is None:
            parts.append(f"S={short(self.seqlen)}")
        return ", ".join([*parts, "causal" if self.causal else "full"])

    @property
    def tick(self) -> str:
        """What sets it apart from those."""
        return self.name or short(self.seqlen)

    def __str__(self) -> str:
        return f"{self.panel}, {self.name or 'S=' + self.tick}"

    @property
    def _dim_v(self) -> str:
        return "" if self.head_dim_v == self.head_dim else f"/{self.head_dim_v}"

    def visible(self) -> float:
        """Pairs of a query and a key it sees, of one head, over all sequences.

        A causal mask counts as half of all pairs, as the papers count; a window to the pair.
        """
        lengths = self.lengths or (self.seqlen,) * self.batch
        return sum(self._visible(n) * lengths.count(n) for n in set(lengths))

    def _visible(self, n: int) -> float:
        left, right = mask.normalize_window(self.causal, self.window, n, n)
        if left is None:
            if right is None:
                return float(n * n)
            if right == 0:
                return n * n / 2
        spans = (mask.key_tiles(i, i + 1, n, n, left, right, 1) for i in range(n))
        return float(sum(stop - first for first, _, _, stop in spans))

    def flops(self, direction: Direction) -> float:
        """Useful floating-point operations, a multiply-add being two."""
        forward = 2.0 * self.heads * self.visible() * (self.head_dim + self.head_dim_v)
        return forward * (BACKWARD_WORK if direction == "backward" else 1.0)


def short(n: int) -> str:
    """A length as papers write it: 512, 1k, 16k."""
    return f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else str(n)


@dataclass(frozen=True)
class Data:
    """A problem's tensors. q, k, v and dout: (B, S, H, D), or packed (total, H, D)."""

    problem: Problem
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    cu_seqlens: Tensor | None = None  # (B + 1,) int32
    bias: Tensor | None = None  # (1, 1, S, S) fp32
    alibi_slopes: Tensor | None = None  # (H,) fp32
    sink: Tensor | None = None  # (H,) fp32


def make(problem: Problem, device: torch.device, seed: int = 0) -> Data:
    """Standard normal tensors; the same on one device for the same seed."""
    p, dtype = problem, DTYPE[problem.dtype]
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(of)

    rows = (p.batch, p.seqlen) if p.lengths is None else (sum(p.lengths),)
    starts = None if p.lengths is None else [0, *accumulate(p.lengths)]
    slopes = [2 ** (-8 * (h + 1) / p.heads) for h in range(p.heads)]  # those of the ALiBi paper
    return Data(
        problem,
        q=normal(*rows, p.heads, p.head_dim),
        k=normal(*rows, p.kv_heads, p.head_dim),
        v=normal(*rows, p.kv_heads, p.head_dim_v),
        dout=normal(*rows, p.heads, p.head_dim_v),
        cu_seqlens=None if starts is None else torch.tensor(starts, dtype=torch.int32, device=device),
        bias=normal(1, 1, p.seqlen, p.seqlen, of=torch.float32) if p.bias else None,
        alibi_slopes=torch.tensor(slopes, dtype=torch.float32, device=device) if p.alibi else None,
        sink=normal(p.heads, of=torch.float32) if p.sink else None,
    )
