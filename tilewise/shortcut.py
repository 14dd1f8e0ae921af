"""When PyTorch's dispatcher would do nothing for a call but pass it on.

To go through it twice with all arguments of attention takes longer than a short kernel. Plain tensors in
plain eager code need none of it: no mode looks on, no tensor is more than its memory.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet

# PyTorch's own names for these, which another version may not have: then nothing is ever free.
_ASKED = (
    "_dispatch_tls_local_include_set",
    "_dispatch_tls_local_exclude_set",
    "_has_torch_function",
    "_len_torch_function_stack",
    "_dispatch_keys",
)
_CAN_ASK = all(hasattr(torch._C, name) for name in _ASKED) and hasattr(DispatchKeySet, "raw_repr")


def _bits(*names: str) -> int:
    """DispatchKeySets as integers, one bit for each functionality and each backend."""
    bits = 0
    for name in names if _CAN_ASK else ():
        bits |= DispatchKeySet(getattr(DispatchKey, name)).raw_repr()
    return bits


# What is left, or switched on, where there is nothing to look on.
_QUIET = _bits("BackendSelect", "ADInplaceOrView")
# What a tensor brings along that is its memory, perhaps in a graph of autograd. Autocast passes
# operators by that it does not know.
_PLAIN = _bits(
    *("CPU", "AutogradCPU", "AutocastCPU"),
    *("CUDA", "AutogradCUDA", "AutocastCUDA"),
    "ADInplaceOrView",
)


# Set while somebody is below autograd, whatever the backend.
_AUTOGRAD = _bits("AutogradCPU") & _bits("AutogradCUDA")


def is_free(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether nobody but the kernel wants to see a call with these tensors.

    Not asked, for PyTorch does not tell: observers that are no profiler (``ExecutionTraceObserver``);
    whether somebody has registered kernels of their own for Tilewise's operators.
    """
    if not _CAN_ASK or torch.compiler.is_compiling():
        return False
    if torch.autograd.profiler._is_profiler_enabled or torch._C._autograd._profiler_enabled():
        return False
    if torch._C._dispatch_tls_local_include_set().raw_repr() & ~_QUIET:
        return False
    # Below autograd nothing is recorded, though grad mode says that it would be.
    excluded = torch._C._dispatch_tls_local_exclude_set().raw_repr()
    if excluded & _AUTOGRAD and torch.is_grad_enabled():
        return False
    if torch._C._len_torch_function_stack() or torch._C._has_torch_function(tensors):
        return False
    together = 0
    for t in tensors:
        if t is not None:
            together |= torch._C._dispatch_keys(t).raw_repr()
    return not together & ~_PLAIN
