"""The tests' own safety net holds: uninitialised memory is never innocent."""

from __future__ import annotations

import pytest
import torch

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn]
WAYS = {
    "empty": lambda dtype: torch.empty(3, 5, dtype=dtype),
    "empty_like": lambda dtype: torch.empty_like(torch.zeros(3, 5), dtype=dtype),
    "empty_strided": lambda dtype: torch.empty_strided((3, 5), (5, 1), dtype=dtype),
    "empty_permuted": lambda dtype: torch.empty_permuted((3, 5), (1, 0), dtype=dtype),
    "new_empty": lambda dtype: torch.zeros(1).new_empty((3, 5), dtype=dtype),
    "new_empty_strided": lambda dtype: torch.zeros(1).new_empty_strided((3, 5), (5, 1), dtype=dtype),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_fresh_floats_are_nan(way, dtype):
    assert WAYS[way](dtype).float().isnan().all()


@pytest.mark.parametrize("way", WAYS)
def test_fresh_integers_are_the_largest(way):
    assert (WAYS[way](torch.int32) == torch.iinfo(torch.int32).max).all()


def test_a_fresh_parameter_still_takes_gradients():
    fresh = torch.empty(2, requires_grad=True)
    assert fresh.is_leaf and fresh.requires_grad and fresh.isnan().all()


def test_a_compiled_function_is_poisoned_too():
    compiled = torch.compile(lambda x: torch.empty_like(x) + x, fullgraph=True, backend="eager")
    assert compiled(torch.ones(4)).isnan().all()
