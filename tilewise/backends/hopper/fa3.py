"""FlashAttention-3 for Hopper: both directions, as ``tilewise.dispatch`` calls them."""

from tilewise.backends.hopper.backward import backward
from tilewise.backends.hopper.forward import bind, forward

__all__ = ["backward", "bind", "forward"]
