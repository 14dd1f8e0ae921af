"""The operators under the transforms of ``torch.func``: grad, vjp, jacrev, vmap and their compositions.

The autograd that ``torch.library`` makes for an operator refuses these, so here each operator is an
``autograd.Function`` as well, with the same formulas. Imported on the first such call, because
``torch.compiler`` takes a second to import.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType, peek_interpreter_stack

from tilewise import ops
from tilewise.errors import UnsupportedError


class _Operator(torch.autograd.Function):
    """What both have in common; ``name`` is the operator's."""

    name: str

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, ...]:
        """One call after another: the samples may differ in anything, lengths and dropout included."""
        if info.batch_size == 0:
            raise ValueError("vmap: got a dimension of size 0; allowed is at least 1")
        samples = [
            cls.apply(*(a if d is None else a.select(d, n) for a, d in zip(args, in_dims, strict=True)))
            for n in range(info.batch_size)
        ]
        results = tuple(torch.stack(parts) for parts in zip(*samples, strict=True))
        return results, (0,) * len(results)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        raise UnsupportedError(ops.NO_FORWARD_MODE)


class _Forward(_Operator):
    @staticmethod
    def forward(*args: Any) -> Any:
        return torch.ops.tilewise.forward(*args)

    setup_context = staticmethod(ops.setup_context)
    backward = staticmethod(ops.gradients)


class _Backward(_Operator):
    @staticmethod
    def forward(*args: Any) -> Any:
        return torch.ops.tilewise.backward(*args)

    setup_context = staticmethod(ops.keep_nothing)
    backward = staticmethod(ops.no_double_backward)


_FUNCTIONS = {"forward": _Forward, "backward": _Backward}


@torch.compiler.disable(
    reason="tilewise: under a transform of torch.func attention runs outside the graph"
)
def call(name: str, *args: Any) -> Any:
    """The operator of this name, under the transforms that are active."""
    if peek_interpreter_stack().key() == TransformType.Functionalize:  # operators know this one
        return getattr(torch.ops.tilewise, name)(*args)
    return _FUNCTIONS[name].apply(*args)
