"""FlashAttention-3's numbers in fp8 as tile loops in PyTorch (Shah et al., 2024, section 3.3).

What tensor cores make of e4m3 operands with a scale for each tile, if they add products up in fp32: two
of them multiply exactly in fp32, so operands are turned back into fp32 here and go through the loop of
FlashAttention-2. Errors of the format can be studied without a GPU, and kernels be held against them.
"""

from __future__ import annotations

from torch import Tensor

from tilewise import fp8
from tilewise.backends.cpu.fa2 import attend
from tilewise.backends.cpu.threads import run
from tilewise.backends.cpu.tile import Part, parts
from tilewise.spec import AttentionSpec, Inputs


def forward(spec: AttentionSpec, x: Inputs, out: Tensor, lse: Tensor, saved: Tensor) -> None:
    """Quantises what is not fp8 yet, as ``spec.fp8`` says, and attends.

    Fills out, shaped like q with Dv for D, in bf16 or q's fp16, and lse, (B, Hq, Sq) or varlen
    (Hq, total) in fp32: the log-sum-exp of the quantised scores. saved is empty: no backward uses it.
    """
    run(lambda part: _forward(part, out, lse, saved), parts(spec, x))


def _forward(part: Part, out: Tensor, lse: Tensor, saved: Tensor) -> None:
    operands = _given(part) if part.spec.dtype == fp8.E4M3 else _quantized(part)
    attend(part, *operands, out, lse, saved, fp8.round_weights_)


def _given(part: Part) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values that came as fp8, in fp32: the part's views of them."""
    x = part.x
    given = (
        (part.queries(x.q), x.q_descale),
        (part.keys(x.k), x.k_descale),
        (part.keys(x.v), x.v_descale),
    )
    q, k, v = (_descaled(part, codes, descale) for codes, descale in given)
    return q, k, v


def _descaled(part: Part, codes: Tensor, descale: Tensor | None) -> Tensor:
    wide = codes.to(part.dtype)
    if descale is None:
        return wide
    scale = descale[part.seq.number, part.heads.start : part.heads.stop]
    return wide.mul_(scale.view(-1, 1, 1, 1))


def _quantized(part: Part) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values in fp32 as they are after fp8: the part's views of them."""
    q, k, v = part.queries(part.x.q), part.keys(part.x.k), part.keys(part.x.v)
    if part.spec.fp8 == "rotated":
        q, k = fp8.rotate(q, part.heads), fp8.rotate(k, part.heads)
    tile_q, tile_k = (None, None) if part.spec.fp8 == "tensor" else (fp8.TILE_Q, fp8.TILE_K)
    return (
        fp8.quantize(q, part.seeing_queries(), tile_q).dequantized(),
        fp8.quantize(k, part.seen_keys(), tile_k).dequantized(),
        fp8.quantize(v, part.seen_keys(), tile_k).dequantized(),
    )
