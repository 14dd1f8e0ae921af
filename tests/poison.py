"""Fresh memory that is never zero by luck.

`torch.empty` hands out whatever memory held before, which is zeros often enough to hide a kernel that
reads what it never wrote. Here every way to ask for uninitialised memory fills it with a value that
does not go unnoticed: NaN, or the largest integer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_PLACES = [
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch, "empty_permuted"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
]
_originals: dict[tuple[Any, str], Callable[..., torch.Tensor]] = {}


def install() -> None:
    """Poisons fresh memory until `remove`. Python's own patching, not torch's deterministic mode:
    that one would also change which algorithms the code under test picks."""
    for owner, name in _PLACES:
        original = getattr(owner, name)
        _originals[owner, name] = original
        setattr(owner, name, _poisoned(original))


def remove() -> None:
    """Gives the original functions back."""
    while _originals:
        (owner, name), original = _originals.popitem()
        setattr(owner, name, original)


def _poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(allocate)
    def allocate_poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        fresh = allocate(*args, **kwargs)
        with torch.no_grad():
            return fresh.fill_(_value(fresh.dtype))

    return allocate_poisoned


def _value(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max
