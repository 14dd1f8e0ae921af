"""Callers pass by position and inspect names: parameters are the namesakes', in order, with defaults.

``signatures.json`` records those of flash-attn 2.8, FlashAttention-3 (fa3_fwd 0.0.3), FlashAttention-4
(4.0.0b36) and PyTorch; "*" stands before what goes by keyword only.
"""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path

import pytest
import torch

TABLE = json.loads(Path(__file__).with_name("signatures.json").read_text())
FUNCTIONS = [(module, name) for module, functions in TABLE.items() for name in functions]


def parameters(function) -> list[list[object]]:
    found: list[list[object]] = []
    for p in inspect.signature(function).parameters.values():
        if p.kind is p.KEYWORD_ONLY and ["*"] not in found:
            found.append(["*"])
        assert p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD), f"{p} hides names"
        default = list(p.default) if isinstance(p.default, tuple) else p.default
        found.append([p.name] if p.default is p.empty else [p.name, default])
    return found


@pytest.mark.parametrize(("module", "name"), FUNCTIONS)
def test_parameters_are_the_recorded_ones(module: str, name: str):
    """A parameter that is missing, renamed, moved or has another default."""
    got = parameters(getattr(importlib.import_module(f"tilewise.compat.{module}"), name))
    want = TABLE[module][name]
    assert got == want
    assert [type(p[-1]) for p in got] == [type(p[-1]) for p in want]  # False is not 0, 0.0 is not 0


def test_the_record_of_pytorchs_is_the_installed_ones():
    """A release of PyTorch that adds a parameter, which callers would then find missing here."""
    schema = torch.ops.aten.scaled_dot_product_attention.default._schema
    want: list[list[object]] = []
    for a in schema.arguments:
        if a.kwarg_only and ["*"] not in want:
            want.append(["*"])
        want.append([a.name, a.default_value] if a.has_default_value() else [a.name])
    assert TABLE["sdpa"]["scaled_dot_product_attention"] == want


@pytest.mark.parametrize("module", sorted(TABLE))
def test_everything_public_is_recorded(module: str):
    """A function that was added without a record of what it stands in for."""
    found = importlib.import_module(f"tilewise.compat.{module}")
    public = {
        name
        for name, f in vars(found).items()
        if inspect.isfunction(f) and f.__module__ == found.__name__ and not name.startswith("_")
    }
    assert public - {"register"} == set(TABLE[module])
