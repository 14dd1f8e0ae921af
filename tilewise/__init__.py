"""Exact attention for PyTorch, tile by tile: FlashAttention 1 to 4, forward and backward."""

from tilewise.api import attention, attention_varlen, dropout_mask, explain
from tilewise.errors import UnsupportedError
from tilewise.merging import merge

__version__ = "0.1.0"

__all__ = [
    "UnsupportedError",
    "__version__",
    "attention",
    "attention_varlen",
    "dropout_mask",
    "explain",
    "merge",
]
