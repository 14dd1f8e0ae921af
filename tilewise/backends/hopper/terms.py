"""What is added to scores and taken from weights: bias, ALiBi, sink, dropout, for the Hopper kernels.

``terms`` are those of a call, as in ``tilewise.backends.triton.terms``, ``None`` for what there is not.
Only a bias makes scores natural logits here: what ALiBi takes from them is small, or a weight is 0, and
a sink meets no more than a row's log-sum-exp.

In the forward a tile of scores is (queries, keys), in the backward (keys, queries). Functions are given
the positions of both within their sequences, along the tile's dimensions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise import mask, philox
from tilewise.backends.hopper.tile import finite
from tilewise.backends.hopper.units import unit_of
from tilewise.backends.triton.terms import (
    BIAS,
    DROPOUT_KEY,
    KEEP_SCALE,
    SINK,
    SLOPES,
    THRESHOLD,
    Terms,
    broadcast_strides,
    slopes_stride,
)
from tilewise.gluon.compat import by_now
from tilewise.gluon.philox import bits_of, load_key, words
from tilewise.spec import AttentionSpec, Inputs

INF = gl.constexpr(float("inf"))
LN2 = gl.constexpr(0.6931471805599453)
LOG2E = gl.constexpr(1.4426950408889634)
UNALIGNED = gl.constexpr(len(Terms._fields))
# Parameters of kernels.
UNSPECIALIZED = [*Terms._fields[1:5], "slopes_batch", "threshold", "keep_scale", "unaligned"]


class LaidTerms(NamedTuple):
    """What of the tensors of terms a launch is made for."""

    bias: tuple[int, int, int, int] | None  # strides, 0 where it is broadcast
    dtypes: tuple[torch.dtype | None, torch.dtype | None]  # of the bias and the sink
    slopes: int  # dimensions


NOTHING = LaidTerms(None, (None, None), 0)


def lay_terms(spec: AttentionSpec, x: Inputs) -> LaidTerms:
    """How the terms of a call lie in memory."""
    if not (spec.bias or spec.alibi or spec.sink):
        return NOTHING
    bias, slopes, sink = x.bias, x.alibi_slopes, x.sink
    return LaidTerms(
        None if bias is None else broadcast_strides(bias),
        (None if bias is None else bias.dtype, None if sink is None else sink.dtype),
        0 if slopes is None else slopes.dim(),
    )


def term_numbers(spec: AttentionSpec, laid: LaidTerms, unit: int = 0) -> dict[str, Any]:
    """``Terms`` that are no tensors, by the kernels' names for them, None of what is not there; and one
    more, None if the first key that is seen begins a block of dropout's counters in every sequence.
    unit: of the strides of a bias, or 0 for elements."""
    steps: tuple[int | None, ...] = (None,) * 4
    if laid.bias is not None:
        steps = (*(step // max(unit, 1) for step in laid.bias[:3]), laid.bias[3])
    dropout = spec.dropout_p > 0
    return {
        **dict(zip(("bias_batch", "bias_head", "bias_row", "bias_key"), steps, strict=True)),
        "slopes_batch": slopes_stride(spec, laid.slopes) if spec.alibi else None,
        "threshold": philox.threshold(spec.dropout_p) if dropout else None,
        "keep_scale": philox.keep_scale(spec.dropout_p) if dropout else None,
        "unaligned": 0 if dropout and not _blocks_aligned(spec) else None,
    }


def term_tensors(spec: AttentionSpec, x: Inputs) -> dict[str, Tensor | None]:
    """``Terms`` that are tensors, by the kernels' names for them."""
    return {
        "bias_ptr": x.bias,
        "slopes_ptr": x.alibi_slopes,
        "sink_ptr": x.sink,
        "dropout_key": x.dropout_key if spec.dropout_p > 0 else None,
    }


def bias_unit(laid: LaidTerms) -> int:
    """In how many elements strides of a bias are given to kernels that read it along its keys, which
    are adjacent then. 0: in elements, and keys may be anywhere; or there is no bias."""
    if laid.bias is None or laid.bias[3] != 1:
        return 0
    return unit_of(*laid.bias[:3])


def _blocks_aligned(spec: AttentionSpec) -> bool:
    """Whether keys that nobody sees are whole blocks of 32, as far as is known on the host."""
    if spec.window_left is None:
        return True
    low, _ = mask.key_span(spec.max_seqlen_q, spec.max_seqlen_k, *spec.window)
    return not spec.ragged and low % 32 == 0


@gluon.jit
def load_slope(head, entry, terms):
    """What a key's distance takes from its score, in the units of scores; 0 without ALiBi."""
    slope = 0.0
    if terms[SLOPES] is not None:
        slopes_ptr, slopes_batch = terms[5:7]
        slope = gl.load(slopes_ptr + entry * slopes_batch + head)
        if terms[BIAS] is None:
            slope *= LOG2E
    return slope


@gluon.jit
def load_sink(head, terms):
    """The sink of a head, a natural logit."""
    return gl.load(terms[SINK] + head).to(gl.float32)


@gluon.jit
def load_bias(i, j, entry, head, lengths, terms, UNIT: gl.constexpr, INSIDE: gl.constexpr):
    """A tile of the bias, if there is one. i: queries; j: the first key, and keys from there on. UNIT:
    see ``bias_unit``. lengths: beyond which no query and no key has a bias; INSIDE: no key is beyond."""
    bias = ()
    if terms[BIAS] is not None:
        pointer, batch, of_head, row, key = terms[:5]
        STEP: gl.constexpr = max(UNIT, 1)
        seqlen_q, seqlen_k = lengths
        k_start, keys = j
        i = gl.maximum(gl.minimum(i, seqlen_q - 1), 0)
        if not INSIDE:
            keys = gl.maximum(gl.minimum(keys, seqlen_k - 1 - k_start), -k_start)
        if UNIT == 0:
            pointer += k_start.to(gl.int64) * key
            keys = keys.to(gl.int64) * key
        else:
            pointer += k_start
        pointer += (entry.to(gl.int64) * batch + head.to(gl.int64) * of_head) * STEP
        bias = gl.load(pointer + (i.to(gl.int64) * row * STEP + keys))
    return bias


@gluon.constexpr_function
def rows_layout(scores, KEYS, BITS, COALESCED):
    """In which layout a tile of the bias is loaded for scores in another: by rows, 16 bytes at a time.
    As scores lie, 32 keys of a row would take as many loads as one of 8 rows, and memory as long."""
    if not COALESCED:
        return scores
    width = 128 // BITS
    return gl.BlockedLayout([1, width], [32 * width // KEYS, KEYS // width], [4, 1], [1, 0])


@gluon.jit
def distance(i, j):
    """Between queries and keys, along a tile's dimensions. i: counted so that equal numbers are none."""
    return gl.abs(i.to(gl.float32) - j.to(gl.float32))


@gluon.jit
def added(s, factor, bias, slope, i, j, terms):
    """Scores with ALiBi and bias, times a factor in units of log2(e). i, j: see ``distance``."""
    if terms[SLOPES] is not None or terms[BIAS] is not None:
        s = s * factor
        factor = 1.0
        if terms[SLOPES] is not None:
            s -= slope * distance(i, j)
        if terms[BIAS] is not None:
            s += gl.convert_layout(bias, s.type.layout).to(gl.float32)
            factor = LOG2E
    return s, factor


@gluon.jit
def powers_of_near(s, factor, origin, slope, i, j, terms):
    """exp2 of scores less their origin and, with ALiBi, what it takes from them: no more than one
    addition and two multiply-adds. origin: along the tile's dimensions."""
    if terms[SLOPES] is not None:
        origin = origin + slope * distance(i, j)
    return gl.exp2(s * factor - origin)


@gluon.jit
def with_sink(top, total, dead, sink, NATURAL: gl.constexpr):
    """Rows' maxima, now natural logits, and sums of powers with a sink's own; and by how much outputs
    shrink."""
    if not NATURAL:
        top = top * LN2
    top = gl.where(dead, -INF, top)
    origin = finite(gl.maximum(top, sink))
    shrink = gl.exp2((top - origin) * LOG2E)
    total = gl.where(dead, 0.0, total * shrink) + gl.exp2((sink - origin) * LOG2E)
    return origin, total, shrink


@gluon.jit
def load_dropout_key(terms):
    """The key of dropout's counters, or what stands for it."""
    if terms[DROPOUT_KEY] is not None:
        return load_key(terms[DROPOUT_KEY])
    else:
        return ()


@gluon.jit
def scale_of_kept(terms):
    """What weights that dropout keeps are multiplied with."""
    return terms[KEEP_SCALE] if terms[DROPOUT_KEY] is not None else 1.0


@gluon.jit
def words_of_rows(scores: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, key, at, terms):
    """Dropout's words for a tile of weights (queries, keys): of a counter and its eight keys four, in
    the thread that has those keys. at: as in ``keeps_of_blocks``. Nothing if keys begin anywhere."""
    found = ()
    if terms[DROPOUT_KEY] is not None:
        if terms[UNALIGNED] is None:
            q_start, k_start, entry, head = at
            BLOCKS: gl.constexpr = KEYS // 32
            five = gl.zeros([ROWS, KEYS], gl.int32, scores).reshape([ROWS, BLOCKS, 4, 4, 2])
            all_five: gl.constexpr = five.type.layout  # row, block, word, group, half
            counters: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(4, all_five))
            rows = gl.arange(0, ROWS, gl.SliceLayout(1, gl.SliceLayout(2, counters)))
            blocks = gl.arange(0, BLOCKS, gl.SliceLayout(0, gl.SliceLayout(2, counters)))
            groups = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, counters)))
            group = k_start // 8 + blocks[None, :, None] * 4 + groups[None, None, :]
            w = words(key, group, (q_start + rows)[:, None, None], head, entry)
            found = (by_now(w[0]), by_now(w[1]), by_now(w[2]), by_now(w[3]))  # type: ignore[assignment]
    return found


@gluon.jit
def dropped(p, words, key, at, terms):
    """Weights (queries, keys), 0 where dropout takes them."""
    if terms[DROPOUT_KEY] is not None:
        if terms[UNALIGNED] is None:
            p = _dropped_by_rows(p, words, terms[THRESHOLD])
        else:
            q_start, k_start, entry, head = at
            layout: gl.constexpr = p.type.layout
            i = q_start + gl.arange(0, p.shape[0], gl.SliceLayout(1, layout))
            j = k_start + gl.arange(0, p.shape[1], gl.SliceLayout(0, layout))
            bits = bits_of_pairs(key, i[:, None], j[None, :], entry, head)
            p = gl.where(bits >= terms[THRESHOLD], p, 0.0)
    return p


@gluon.jit
def _dropped_by_rows(p, words, threshold):
    ROWS: gl.constexpr = p.shape[0]
    KEYS: gl.constexpr = p.shape[1]
    scores: gl.constexpr = p.type.layout
    p = p.reshape([ROWS, KEYS // 32, 4, 4, 2])
    all_five: gl.constexpr = p.type.layout
    number = gl.arange(0, 4, _only(2, all_five))[None, None, :, None, None]
    half = gl.arange(0, 2, _only(4, all_five))[None, None, None, None, :]
    word = _word(number, _spread(words[0]), _spread(words[1]), _spread(words[2]), _spread(words[3]))
    bits = gl.where(half == 0, word << 16, word)  # on top, the others below do not matter
    keep = bits >= threshold.to(gl.uint32) << 16
    return gl.convert_layout(gl.where(keep, p, 0.0).reshape([ROWS, KEYS]), scores)


@gluon.jit
def _spread(word):
    """Words of counters (row, block, group) for every key: (row, block, word, group, half)."""
    return gl.expand_dims(gl.expand_dims(word, 2), 4)


@gluon.jit
def bits_kept(w, keeps, threshold):
    """Of the eight keys of counters, whose words are given, a bit each: 2 * word + half. keeps: 0."""
    for n in gl.static_range(4):
        early, late = (w[n] & 0xFFFF).to(gl.int32), (w[n] >> 16).to(gl.int32)
        keeps |= gl.where(early >= threshold, 1 << (2 * n), 0)
        keeps |= gl.where(late >= threshold, 2 << (2 * n), 0)
    return keeps


@gluon.constexpr_function
def _only(dim, layout):
    """The layout of one of five dimensions."""
    for other in (4, 3, 2, 1, 0):
        if other != dim:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def bits_of_pairs(key, i, j, entry, head):
    """Dropout's 16 bits of every query i and key j, each from a counter of its own."""
    w0, w1, w2, w3 = words(key, j // 32 * 4 + j // 2 % 4, i, head, entry)
    return bits_of(_word(j // 8 % 4, w0, w1, w2, w3), j % 2)


@gluon.jit
def _word(number, w0, w1, w2, w3):
    """The one of four words with a number."""
    low, high = gl.where(number == 0, w0, w1), gl.where(number == 2, w2, w3)
    return gl.where(number < 2, low, high)


@gluon.jit
def keeps_of_blocks(scores: gl.constexpr, KEYS: gl.constexpr, QUERIES: gl.constexpr, key, at, terms):
    """What dropout keeps of a tile of weights (keys, queries): each byte of a counter's eight keys.

    at: the tile's first query and key, which sequence and head it is of. Those eight are several
    threads' here: each computes a share of all counters, and gets the bytes of those that it needs.
    """
    q_start, k_start, entry, head = at
    shares: gl.constexpr = gl.BlockedLayout([1, QUERIES // 16], [2, 16], [4, 1], [1, 0])
    group = k_start // 8 + gl.arange(0, KEYS // 8, gl.SliceLayout(1, shares))
    query = q_start + gl.arange(0, QUERIES, gl.SliceLayout(0, shares))
    w = words(key, group[:, None], query[None, :], head, entry)
    keeps = bits_kept(w, gl.zeros([KEYS // 8, QUERIES], gl.int32, shares), terms[THRESHOLD])
    keeps = keeps.to(gl.uint8).reshape([KEYS // 32, 4, QUERIES])
    five = gl.zeros([KEYS, QUERIES], gl.int32, scores).reshape([KEYS // 32, 4, 4, 2, QUERIES])
    all_five: gl.constexpr = five.type.layout  # block, word, group, half, query
    return gl.convert_layout(keeps, gl.SliceLayout(1, gl.SliceLayout(3, all_five)))


@gluon.jit
def marked_by_blocks(p, keeps):
    """Weights (keys, queries), negative where dropout takes them: they are asked for once more, and a
    sign needs no register."""
    KEYS: gl.constexpr = p.shape[0]
    QUERIES: gl.constexpr = p.shape[1]
    scores: gl.constexpr = p.type.layout
    five = gl.zeros([KEYS, QUERIES], gl.int32, scores).reshape([KEYS // 32, 4, 4, 2, QUERIES])
    keeps = gl.expand_dims(gl.expand_dims(keeps.to(gl.int32), 1), 3) + five
    keeps = gl.convert_layout(keeps.reshape([KEYS, QUERIES]), scores)
    row = gl.arange(0, KEYS, gl.SliceLayout(1, scores))
    bit = row // 8 % 4 * 2 + row % 2
    return gl.where((keeps >> bit[:, None]) & 1 != 0, p, -p)


@gluon.jit
def marked_by_pairs(p, key, at, terms):
    """The same of a tile whose keys begin anywhere."""
    q_start, k_start, entry, head = at
    layout: gl.constexpr = p.type.layout
    j = k_start + gl.arange(0, p.shape[0], gl.SliceLayout(1, layout))
    i = q_start + gl.arange(0, p.shape[1], gl.SliceLayout(0, layout))
    bits = bits_of_pairs(key, i[None, :], j[:, None], entry, head)
    return gl.where(bits >= terms[THRESHOLD], p, -p)


@gluon.jit
def kept(p, terms):
    """Marked weights without those that dropout takes."""
    return p if terms[DROPOUT_KEY] is None else gl.maximum(p, 0.0)


@gluon.jit
def score_gradients(p, dp, minus_delta, terms):
    """P^T * (dP^T - delta) of marked weights. dp: less delta already. With dropout, both are as before
    weights that it keeps are scaled, and minus_delta is a buffer of the latter."""
    if terms[DROPOUT_KEY] is not None:
        row = minus_delta.load(gl.SliceLayout(0, p.type.layout))[None, :]
        dp = gl.where(p > 0, dp, -row) * terms[KEEP_SCALE]
    return p * dp
