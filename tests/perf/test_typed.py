"""JSON as dataclasses: what fits is built, what does not is one line that names the place."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

import pytest

from tilewise.perf.typed import build


class Entry(TypedDict):
    name: str
    ours: bool


@dataclass(frozen=True)
class Part:
    size: int
    window: tuple[int | None, int | None] = (None, None)
    lengths: tuple[int, ...] | None = None


@dataclass
class Whole:
    ms: float | None
    kind: Literal["a", "b"]
    parts: list[Part]
    entries: list[Entry] = field(default_factory=list)
    more: dict[str, dict[str, float]] = field(default_factory=dict)
    anything: Any = None


GOOD = {"ms": 1, "kind": "a", "parts": [{"size": 3, "window": [1, None], "lengths": [1, 2]}]}


def test_what_fits_is_built():
    more = {"entries": [{"name": "x", "ours": True}], "more": {"x": {"y": 2}}, "anything": [{}]}
    whole = build(Whole, GOOD | more)
    assert whole == Whole(1.0, "a", [Part(3, (1, None), (1, 2))], **more)
    assert isinstance(whole.ms, float) and hash(whole.parts[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ms": "1"}, "x.ms: got '1'; allowed is float"),
        ({"ms": True}, "x.ms: got True; allowed is float"),
        ({"ms": float("nan")}, "x.ms: got nan; allowed is float"),
        ({"ms": 10**400}, "x.ms: got 1000000000000000000000000000000000000...; allowed is float"),
        ({"kind": "c"}, "x.kind: got 'c'; allowed is Literal['a', 'b']"),
        ({"kind": []}, "x.kind: got a list of 0; allowed is Literal['a', 'b']"),
        ({"parts": {}}, "x.parts: got an object; allowed is list["),
        ({"parts": [5]}, "x.parts[0]: got 5; allowed is an object"),
        ({"parts": [{}]}, "x.parts[0]: size is missing"),
        ({"parts": [{"size": 1.0}]}, "x.parts[0].size: got 1.0; allowed is int"),
        ({"parts": [{"size": 1, "depth": 2}]}, "x.parts[0]: got 'depth'; allowed are size, window"),
        ({"parts": [{"size": 1, "window": [1]}]}, "x.parts[0].window: got a list of 1; allowed is tu"),
        ({"parts": [{"size": 1, "lengths": ["1"]}]}, "x.parts[0].lengths[0]: got '1'; allowed is int"),
        ({"entries": [{"name": "x"}]}, "x.entries[0]: ours is missing"),
        ({"more": {"a": 5}}, "x.more.a: got 5; allowed is dict["),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(changes, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        build(Whole, GOOD | changes, "x")
