"""JSON as dataclasses, checked by their annotations: a file may come from anywhere."""

from __future__ import annotations

import math
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict


def build(kind: Any, value: Any, where: str = "") -> Any:
    """What the annotation ``kind`` says, from what JSON has for it.

    Knows dataclasses, TypedDicts, lists, tuples, dicts by strings, literals, unions with None and
    plain values.

    Raises:
        ValueError: one line that begins with the place.
    """
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if is_dataclass(kind) or is_typeddict(kind):
        return _record(kind, value, where)
    if origin in (Union, UnionType):
        (other,) = (part for part in parts if part is not NoneType)
        return None if value is None else build(other, value, where)
    if origin is Literal and value in parts:
        return value
    if origin is dict and isinstance(value, dict):
        return {name: build(parts[1], each, f"{where}.{name}") for name, each in value.items()}
    if origin in (list, tuple) and isinstance(value, list):
        kinds = list(parts) if origin is tuple and parts[-1] is not ... else [parts[0]] * len(value)
        if len(kinds) == len(value):
            pairs = enumerate(zip(kinds, value, strict=True))
            return origin(build(each, part, f"{where}[{n}]") for n, (each, part) in pairs)
    if kind is float and type(value) in (int, float) and _is_finite(value):
        return float(value)
    if kind in (int, str, bool) and type(value) is kind:
        return value
    raise ValueError(f"{where}: got {_brief(value)}; allowed is {_name(kind)}")


def _record(kind: Any, value: Any, where: str) -> Any:
    """A dataclass or a TypedDict."""
    if not isinstance(value, dict):
        raise ValueError(f"{where}: got {_brief(value)}; allowed is an object")
    hints = get_type_hints(kind)
    for name in value:
        if name not in hints:
            raise ValueError(f"{where}: got {_brief(name)}; allowed are {', '.join(hints)}")
    for name in _required(kind):
        if name not in value:
            raise ValueError(f"{where}: {name} is missing")
    return kind(**{name: build(hints[name], each, f"{where}.{name}") for name, each in value.items()})


def _required(kind: Any) -> list[str]:
    if is_typeddict(kind):
        return sorted(kind.__required_keys__)
    return [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False


def _brief(value: Any) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else f"a list of {len(value)}"
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
