"""Other packages' arguments in the core's terms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.errors import UnsupportedError
from tilewise.mask import Window
from tilewise.spec import brief, check_type, require


def refuse(**arguments: Any) -> None:
    """UnsupportedError for the first argument that is not idle: None, 0, False or empty."""
    for name, value in arguments.items():
        idle = value is None or (isinstance(value, (int, list, tuple)) and not value)
        if not idle:
            raise UnsupportedError(
                f"{name}: got {brief(value)}; no kernel does this, and without it the result is another"
            )


def pair(window_size: Any, allowed: str) -> tuple[Any, Any]:
    """Its two sides. ValueError unless it has two, TypeError unless each is an integer or None."""
    two = isinstance(window_size, (tuple, list)) and len(window_size) == 2
    require(two, "window_size", window_size, "a pair (left, right)")
    for n, side in enumerate(window_size):
        check_type(f"window_size[{n}]", side, (int, torch.SymInt, type(None)), allowed)
    left, right = window_size
    return left, right


def window_below_zero(window_size: Any) -> Window:
    """As FlashAttention-2 and -3 read it: a negative side is no bound."""
    left, right = (
        None if side is None or side < 0 else side
        for side in pair(window_size, "an integer; -1 is no bound")
    )
    return left, right


def softcap_or_none(softcap: float | None) -> float | None:
    """0 switches it off."""
    return None if softcap == 0 else softcap


def autocast(*tensors: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """A call's q, k, v and bias or mask as autocast has them for PyTorch's own attention."""
    assert tensors[0] is not None
    device = tensors[0].device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        narrow = {torch.float32, torch.float16, torch.bfloat16}
        tensors = tuple(t if t is None or t.dtype not in narrow else t.to(dtype) for t in tensors)
    q, k, v, mask = tensors
    assert q is not None and k is not None and v is not None
    return q, k, v, mask
