"""One key in Triton's cache on disk for one kernel, whatever a process launched before it.

The key covers the constants that a kernel's functions use. Before Triton 3.9, of a function that the
kernel calls it covers only what was hashed before: for another kernel, or not at all. Then a kernel that
one process compiled would not be found by another one that launches kernels in another order.
"""

from __future__ import annotations

import inspect
from typing import Any

from triton.runtime.jit import DependenciesFinder, JITCallable


def settle(kernel: Any) -> None:
    """Hash what a kernel calls before the kernel. Costs nothing but at its first launch."""
    if isinstance(kernel, JITCallable) and getattr(kernel, "hash", "") is None:
        nonlocals = inspect.getclosurevars(kernel.fn).nonlocals
        _Callees(kernel._fn_name, kernel.__globals__, nonlocals, kernel.src).visit(kernel.parse())
        kernel.cache_key  # noqa: B018


class _Callees(DependenciesFinder):
    """Triton's own walk over what a function refers to, which only settles what it meets."""

    def _update_hash(self, func: Any) -> None:
        settle(getattr(func, "__func__", func))  # of a method
