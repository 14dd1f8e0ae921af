"""What is added to scores and taken from weights: bias, ALiBi, sink, dropout.

In kernels ``terms`` are those of a call: pointers and numbers in the order of ``Terms``, ``None`` for
what there is not, of which nothing is compiled then. With a bias, ALiBi or a sink scores are natural
logits, not in units of log2(e), and the maximum is subtracted before the units change: of a bias of
-1e9, or of the least finite number, nothing else would be left.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise import philox
from tilewise.backends.triton.launch import natural_logits
from tilewise.spec import AttentionSpec, Inputs

INF = tl.constexpr(float("inf"))
LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)


class Terms(NamedTuple):
    """All in one tuple: constants that are alone in an inner one get lost in Triton 3.6."""

    bias: Tensor | None
    bias_batch: int  # strides, 0 where it is broadcast
    bias_head: int
    bias_row: int
    bias_key: int
    slopes: Tensor | None
    slopes_batch: int  # stride of a batch entry
    sink: Tensor | None
    dropout_key: Tensor | None
    threshold: int  # below which 16 bits drop a weight
    keep_scale: float  # what kept weights are multiplied with


BIAS = tl.constexpr(Terms._fields.index("bias"))
SLOPES = tl.constexpr(Terms._fields.index("slopes"))
SINK = tl.constexpr(Terms._fields.index("sink"))
DROPOUT_KEY = tl.constexpr(Terms._fields.index("dropout_key"))
THRESHOLD = tl.constexpr(Terms._fields.index("threshold"))
KEEP_SCALE = tl.constexpr(Terms._fields.index("keep_scale"))


def terms_of(spec: AttentionSpec, x: Inputs) -> tuple[Any, ...]:
    """As a plain tuple, which is what Triton takes."""
    bias, slopes = x.bias, x.alibi_slopes
    terms = Terms(
        bias,
        *((0,) * 4 if bias is None else broadcast_strides(bias)),
        slopes,
        0 if slopes is None else slopes_stride(spec, slopes.dim()),
        x.sink,
        x.dropout_key if spec.dropout_p > 0 else None,
        philox.threshold(spec.dropout_p),
        philox.keep_scale(spec.dropout_p),
    )
    return tuple(terms)


def broadcast_strides(bias: Tensor) -> tuple[int, int, int, int]:
    """Of a bias: 0 where it is broadcast."""
    batch, head, row, key = (
        0 if n == 1 else step for n, step in zip(bias.shape, bias.stride(), strict=True)
    )
    return batch, head, row, key


def slopes_stride(spec: AttentionSpec, dims: int) -> int:
    """From one batch entry to the next, of contiguous slopes with so many dimensions."""
    return spec.heads_q if dims == 2 else 0


def term_arguments(spec: AttentionSpec, x: Inputs) -> dict[str, Any]:
    """What kernels with terms are given beside what all are."""
    return {"terms": terms_of(spec, x), "NATURAL": natural_logits(spec)}


@triton.jit
def added(s, i, j, b, head, seqlen_q, seqlen_k, terms):
    """Logits of a tile with bias and ALiBi. i, j: queries and keys, along the tile's dimensions."""
    if terms[BIAS] is not None:
        bias_ptr, batch, of_head, row, key = terms[:5]
        base = bias_ptr + tl.cast(b, tl.int64) * batch + tl.cast(head, tl.int64) * of_head
        at = i.to(tl.int64) * row + j.to(tl.int64) * key
        inside = (i < seqlen_q) & (j < seqlen_k)
        s += tl.load(base + at, mask=inside, other=0.0).to(tl.float32)
    if terms[SLOPES] is not None:
        slopes_ptr, slopes_batch = terms[5:7]
        slope = tl.load(slopes_ptr + b * slopes_batch + head)
        s -= slope * tl.abs(i + (seqlen_k - seqlen_q) - j).to(tl.float32)
    return s


@triton.jit
def powers(x, origin, NATURAL: tl.constexpr):
    """exp of the difference, in natural logits or in units of log2(e)."""
    if NATURAL:
        return tl.exp2((x - origin) * LOG2E)
    return tl.exp2(x - origin)


@triton.jit
def sink_logit(head, terms):
    """The sink of a head, a natural logit; -inf without one."""
    if terms[SINK] is not None:
        return tl.load(terms[SINK] + head).to(tl.float32)
    return -INF


@triton.jit
def log_sum_exp(top, total, NATURAL: tl.constexpr):
    """Of each row, natural, from its maximum and the sum of its powers; and what rounding took from it,
    which is all that the sum gave where logits are huge. A row that saw nothing has total 0."""
    dead = total == 0
    log_total = tl.log2(tl.where(dead, 1.0, total))
    if NATURAL:
        lse = top + log_total * LN2
        rest = log_total * LN2 - (lse - top)
    else:
        lse = (top + log_total) * LN2
        rest = tl.zeros_like(lse)
    return tl.where(dead, -INF, lse), tl.where(dead, 0.0, rest)


@triton.jit
def weights(s, factor, lse, rest, NATURAL: tl.constexpr):
    """P recomputed, s * factor and lse in the units of scores, the latter inf where nothing is seen."""
    if NATURAL:
        return tl.exp2(((s * factor - lse) - rest) * LOG2E)
    return tl.exp2(s * factor - lse)


@triton.jit
def kept(q_start, k_start, b, head, terms, TILE_Q: tl.constexpr, TILE_K: tl.constexpr):
    """Which weights of a tile dropout keeps, [TILE_Q, TILE_K]: ``philox.keep_mask``, each counter once.

    Tiles begin at multiples of their size, 16 keys or a multiple of 32.
    """
    dropout_key, threshold = terms[DROPOUT_KEY], terms[THRESHOLD]
    BLOCKS: tl.constexpr = (TILE_K + 31) // 32
    block = k_start // 32
    groups = block * 4 + tl.arange(0, 4 * BLOCKS)
    queries = q_start + tl.arange(0, TILE_Q)
    zeros = tl.zeros([TILE_Q, 4 * BLOCKS], tl.int32)
    w0, w1, w2, w3 = tl.philox(
        tl.load(dropout_key),
        zeros + groups[None, :],
        zeros + queries[:, None],
        zeros + head,
        zeros + b,
    )
    if TILE_K == 16:  # half a block, of which two words serve 8 keys each
        late = k_start % 32 != 0
        words = tl.join(tl.where(late, w2, w0), tl.where(late, w3, w1))
        bits = tl.join(words & 0xFFFF, words >> 16).reshape([TILE_Q, 4, 2, 2])
        bits = bits.permute([0, 2, 1, 3])  # query, word, group, half
    else:
        words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
        bits = tl.join(words & 0xFFFF, words >> 16).reshape([TILE_Q, BLOCKS, 4, 2, 2, 2])
        bits = bits.permute([0, 1, 3, 4, 2, 5])  # query, block, word in two, group, half
    return bits.reshape([TILE_Q, TILE_K]).to(tl.int32) >= threshold


def sink_gradient(sink: Tensor, lse: Tensor, delta: Tensor, rest: Tensor | None) -> Tensor:
    """The gradient of a logit per head, (Hq,), which has a share of every row's weights and no value.

    lse, delta: (B, Hq, S) or (Hq, total), both fp32. rest: see ``log_sum_exp``. Rows with no weights at
    all, and those of no sequence, have lse -inf.
    """
    share = sink.float()[:, None] - lse
    share = (share if rest is None else share - rest).exp()
    by_row = torch.where(lse > -torch.inf, share * -delta, 0.0)
    return by_row.sum(dim=[d for d in range(lse.dim()) if d != lse.dim() - 2])
