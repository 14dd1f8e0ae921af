"""An operator's derivative, registered without what makes ``torch.library.register_autograd`` slow.

That one reads the schema again in every call, to fill in arguments that the dispatcher leaves out when
they have their default values. For the 26 arguments of attention this takes longer than all that
Tilewise does before a launch. Tilewise's operators have no default values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def register_autograd(
    library: torch.library.Library,
    overload: torch._ops.OpOverload,
    backward: Callable[..., tuple[Any, ...]],
    setup_context: Callable[[Any, tuple[Any, ...], Any], None],
) -> None:
    """The same as ``torch.library.register_autograd`` for an operator without default values.

    backward: ctx and a gradient for each output -> a gradient, or None, for each input. Its
    ctx.needs_input_grad begins with one for the dispatch keys.
    setup_context: ctx, inputs, output -> saves what backward reads.
    """
    if any(a.has_default_value() for a in overload._schema.arguments):
        raise ValueError(f"{overload}: got arguments with default values; allowed are none")

    def below(keys: Any, *inputs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return overload.redispatch(keys & torch._C._after_autograd_keyset, *inputs)

    name = overload._schema.name.split("::")[1]
    arguments = enumerate(overload._schema.arguments)
    last = max(n for n, a in arguments if "Tensor" in str(a.type))
    differentiable = recorded(below, backward, setup_context, last)
    library.impl(f"{name}.{overload._overloadname}", differentiable, "Autograd", with_keyset=True)


def recorded(
    function: Callable[..., Any],
    backward: Callable[..., tuple[Any, ...]],
    setup_context: Callable[[Any, tuple[Any, ...], Any], None],
    last: int,
) -> Callable[..., Any]:
    """The function, of dispatch keys and inputs, with its derivative: see ``register_autograd``. No
    input after number ``last`` is a tensor."""

    class Derivative(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, keys: Any, *inputs: Any) -> Any:
            output = function(keys, *inputs)
            setup_context(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor | None) -> Any:
            return None, *backward(ctx, *gradients)

    def differentiable(keys: Any, *inputs: Any) -> Any:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs[: last + 1]):
            return Derivative.apply(keys, *inputs)
        return function(keys, *inputs)

    return differentiable
