"""A byte-level GPT in a hundred lines, with the attention left open: that is what the demo compares."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tilewise

#: Causal attention: query, key, value of shape (B, S, H, D) in, (B, S, H, D) out.
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def tiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention by Tilewise; no tensor of size S x S exists. Shapes (B, S, H, D)."""
    out = tilewise.attention(q, k, v, causal=True)
    assert isinstance(out, Tensor)  # a pair only if the log-sum-exp was asked for
    return out


def chosen_kernels(q: Tensor, k: Tensor, v: Tensor) -> str:
    """Names of the kernels that `tiled` runs forward and backward for tensors like these."""
    choice = tilewise.explain(q, k, v, causal=True).data
    return " + ".join(dict.fromkeys(choice[way]["kernel"] for way in ("forward", "backward")))


def materialised(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention as a textbook writes it, all S x S scores at once. Shapes (B, S, H, D)."""
    length, dim = q.shape[1], q.shape[3]
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(dim)
    future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    weights = scores.masked_fill(future, -math.inf).softmax(-1)
    return torch.einsum("bhij,bjhd->bihd", weights, v)


@dataclass(frozen=True)
class Shape:
    """The model's size. `context` is in bytes of text, `width` in features."""

    layers: int
    heads: int
    width: int
    context: int


class Rotary(nn.Module):
    """Turns each pair of features by an angle that grows with the position, so that a score knows
    how far apart query and key are (Su et al., 2021). Shape (B, S, H, D), D even."""

    cos: Tensor
    sin: Tensor

    def __init__(self, dim: int, context: int) -> None:
        super().__init__()
        speed = 10_000.0 ** -(torch.arange(0, dim, 2) / dim)
        angle = torch.arange(context)[:, None, None] * speed  # (context, 1, D / 2)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = self.cos[: x.shape[1]], self.sin[: x.shape[1]]
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Block(nn.Module):
    """Attention and a two-layer perceptron, each normalised before and added to its input."""

    def __init__(self, shape: Shape, attention: Attention) -> None:
        super().__init__()
        self.heads = shape.heads
        self.attention = attention
        self.rotary = Rotary(shape.width // shape.heads, shape.context)
        self.before_attention = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.mix_heads = nn.Linear(shape.width, shape.width, bias=False)
        self.before_mlp = nn.LayerNorm(shape.width)
        self.expand = nn.Linear(shape.width, 4 * shape.width)
        self.contract = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.before_attention(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.unbind(dim=2)  # each (B, S, H, D)
        x = x + self.mix_heads(self.attention(self.rotary(q), self.rotary(k), v).flatten(2))
        return x + self.contract(F.gelu(self.expand(self.before_mlp(x))))


class ByteGPT(nn.Module):
    """Predicts each byte of a text from those before it: bytes (B, S) in, logits (B, S, 256) out."""

    def __init__(self, shape: Shape, attention: Attention) -> None:
        super().__init__()
        self.shape = shape
        self.byte = nn.Embedding(256, shape.width)
        self.blocks = nn.Sequential(*(Block(shape, attention) for _ in range(shape.layers)))
        self.last_norm = nn.LayerNorm(shape.width)
        self.predict = nn.Linear(shape.width, 256, bias=False)
        self._initialise()

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, text: Tensor) -> Tensor:
        return self.predict(self.last_norm(self.blocks(self.byte(text))))

    @torch.inference_mode()
    def write(self, prompt: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """Continues `prompt`, int64 of shape (S,) with S >= 1, by `count` bytes drawn one by one.

        `generator` lives on the CPU, so that a seed draws alike on every device. Returns the
        continuation alone, int64 of shape (count,).
        """
        text = prompt[None]
        for _ in range(count):
            logits = self(text[:, -self.shape.context :])[0, -1].cpu()
            # A little colder than the model's own distribution: fewer slips in a short sample.
            drawn = torch.multinomial((logits / 0.8).softmax(-1), 1, generator=generator)
            text = torch.cat([text, drawn[None].to(text.device)], dim=1)
        return text[0, -count:]
