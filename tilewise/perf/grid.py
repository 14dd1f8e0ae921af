"""Which problems a benchmark measures: the presets, as data, and what a person may type instead."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from tilewise.perf.problem import Problem, short
from tilewise.spec import MAX_HEAD_DIM


class BadRequest(ValueError):
    """What was asked for makes no sense; the message is one line."""


@dataclass(frozen=True)
class Axes:
    """A grid of problems. ``tokens`` go into each problem: batch = tokens / seqlen, at least 1.

    heads: of queries; None takes as many as make a model of width 2048. kv_heads: None is as many.
    head_dim_v: of values; None is the head dim.
    """

    head_dims: tuple[int, ...] = (128,)
    seqlens: tuple[int, ...] = (4096,)
    causals: tuple[bool, ...] = (False, True)
    dtypes: tuple[str, ...] = ("bf16",)
    tokens: int = 16384
    heads: int | None = None
    kv_heads: int | None = None
    head_dim_v: int | None = None
    kind: str = "dense"


WIDTH = 2048
WINDOWS = (256, 512, 1024, 2048, 4096)
LONGEST = 8192  # of the mixed lengths
LARGEST = 2**24  # of every number that a person may ask for

_PAPER = Axes((64, 128, 256), (512, 1024, 2048, 4096, 8192, 16384))
_LONG = (1024, 2048, 4096, 8192, 16384)

PRESETS = {
    "paper": _PAPER,
    "gqa": Axes((128,), _LONG, heads=64, kv_heads=8),
    "mla": Axes((192,), _LONG, causals=(True,), heads=16, head_dim_v=128),
    "varlen": Axes((64, 128), (512, 2048, 8192), tokens=65536, kind="varlen"),
    "window": Axes((64, 128), (16384,), causals=(True,), kind="window"),
    "features": Axes((128,), (4096,), causals=(True,), kind="features"),
    "quick": Axes((64, 128), (1024, 4096)),
}
#: Two cores have to be done in two minutes.
_QUICK_ON_CPU = Axes((64,), (256, 512, 1024), dtypes=("fp32",), tokens=1024, heads=4)

#: What the preset `features` adds to a plain problem, one at a time.
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 30.0},
    "window": {"window": (1024, 0)},
    "bias": {"bias": True},
    "alibi": {"alibi": True},
    "sink": {"sink": True},
    "deterministic": {"deterministic": True},
}


def preset(name: str, device_type: str) -> Axes:
    """The axes of a preset on a "cpu" or "cuda" device. Raises BadRequest."""
    if name not in PRESETS:
        raise BadRequest(f"--preset: got {name!r}; allowed is one of {', '.join(PRESETS)}")
    return _QUICK_ON_CPU if name == "quick" and device_type == "cpu" else PRESETS[name]


def problems(axes: Axes) -> list[Problem]:
    """Every problem of the grid. Raises BadRequest if there is none or one makes no sense."""
    found = list(dict.fromkeys(_KINDS[axes.kind](axes)))
    if not found:
        raise BadRequest("the grid is empty")
    return found


def _dense(axes: Axes) -> Iterator[Problem]:
    for dtype in axes.dtypes:
        for head_dim in axes.head_dims:
            for causal in axes.causals:
                for seqlen in axes.seqlens:
                    yield _plain(axes, dtype, head_dim, causal, seqlen)


def _plain(axes: Axes, dtype: str, head_dim: int, causal: bool, seqlen: int) -> Problem:
    heads = axes.heads or max(1, WIDTH // head_dim)
    kv_heads = axes.kv_heads or heads
    if heads % kv_heads:
        raise BadRequest(f"--kv-heads: got {kv_heads}; allowed is a divisor of the {heads} query heads")
    batch = max(1, axes.tokens // seqlen)
    head_dim_v = axes.head_dim_v or head_dim
    for option, value in (("--head-dim", head_dim), ("--head-dim-v", head_dim_v)):
        if value > MAX_HEAD_DIM:
            raise BadRequest(f"{option}: got {value}; allowed is 1 to {MAX_HEAD_DIM}")
    return Problem(batch, seqlen, heads, kv_heads, head_dim, head_dim_v, dtype, causal)


def _windows(axes: Axes) -> Iterator[Problem]:
    for p in _dense(axes):
        for left in WINDOWS:
            if left < p.seqlen:
                right = 0 if p.causal else left
                yield replace(p, window=(left, right), name=f"w={short(left)}")


def _varlen(axes: Axes) -> Iterator[Problem]:
    """For each head dim and mask: equal lengths as long as the grid says, then a mix."""
    mix = mixed_lengths(axes.tokens)
    for p in _dense(replace(axes, seqlens=axes.seqlens[:1])):
        for seqlen in axes.seqlens:
            count = max(1, axes.tokens // seqlen)
            equal = (seqlen,) * count
            yield replace(p, batch=count, seqlen=seqlen, lengths=equal, name=f"{count}x{short(seqlen)}")
        yield replace(p, batch=len(mix), seqlen=max(mix), lengths=mix, name="mixed")


def mixed_lengths(tokens: int, seed: int = 0) -> tuple[int, ...]:
    """Lengths from 1 to 8192 (less where the tokens are few), together ``tokens``; always the same."""
    draw = random.Random(seed)
    longest = max(1, min(LONGEST, tokens // 4))
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(min(left, draw.randint(1, longest)))
    return tuple(lengths)


def _features(axes: Axes) -> Iterator[Problem]:
    for p in _dense(axes):
        for name, changes in FEATURES.items():
            yield replace(p, name=name, **changes)
        if p.head_dim <= 128:
            yield replace(p, head_dim=p.head_dim * 3 // 2, name="unequal dims")


_KINDS: dict[str, Callable[[Axes], Iterator[Problem]]] = {
    "dense": _dense,
    "window": _windows,
    "varlen": _varlen,
    "features": _features,
}


def size(text: str, option: str) -> int:
    """A whole number from 1 to LARGEST; "16k" is 16384. Raises BadRequest."""
    number, factor = (text[:-1], 1024) if text[-1:] in ("k", "K") else (text, 1)
    # The number of digits first: Python refuses to read very long ones.
    value = int(number) * factor if number.isdecimal() and len(number) < 10 else 0
    if not 1 <= value <= LARGEST:
        shown = repr(text if len(text) <= 40 else text[:37] + "...")
        allowed = f"a whole number from 1 to {LARGEST}, such as 512 or 16k"
        raise BadRequest(f"{option}: got {shown}; allowed is {allowed}")
    return value


def sizes(text: str, option: str) -> tuple[int, ...]:
    """A list of numbers and doubling ranges: "512..2k,3000" is 512, 1024, 2048, 3000."""
    found: list[int] = []
    for part in text.split(","):
        low, dots, high = part.strip().partition("..")
        first = size(low, option)
        last = size(high, option) if dots else first
        if last < first:
            raise BadRequest(f"{option}: got {part!r}; allowed is a range that goes up")
        while first <= last:
            found.append(first)
            first *= 2
    return tuple(dict.fromkeys(found))


def one_of(text: str, option: str, allowed: dict[str, Any]) -> Any:
    """The meaning of a word. Raises BadRequest, which lists the words."""
    if text not in allowed:
        raise BadRequest(f"{option}: got {text!r}; allowed is one of {', '.join(allowed)}")
    return allowed[text]


def words(text: str, option: str, allowed: tuple[str, ...]) -> tuple[str, ...]:
    """A list of words, each of them allowed. Raises BadRequest."""
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    if not found:
        raise BadRequest(f"{option}: got nothing; allowed is a list of {', '.join(allowed)}")
    return tuple(one_of(word, option, {name: name for name in allowed}) for word in found)
