"""Launching a kernel again, past Triton's look at every argument, which takes longer than short kernels.

Triton reads from the arguments which variant of a kernel they need: types, alignment, strides of 1.
Calls of one plan differ in little of that, so the variant of a call is looked up by that little.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from triton.compiler import CompiledKernel

from tilewise.backends.keys import settle


class Relaunch:
    """A kernel with all arguments that are the same for every call of a plan.

    arguments: the kernel's last ones by name, in its order. options: the compiler's.
    """

    def __init__(self, programs: int, arguments: dict[str, Any], options: dict[str, Any]) -> None:
        self.programs = programs
        self.arguments = arguments
        self.options = options
        self._variants: dict[tuple[Any, ...], Callable[..., None]] = {}

    def __call__(self, kernel: Any, *given: Any) -> None:
        """Launch ``kernel`` with ``given``, its first arguments: tensors, descriptors, and integers that
        it is not specialised for. What Triton's debugging knobs ask for counts at the first call."""
        kind = (id(kernel), *[_kind(a) for a in given])
        run = self._variants.get(kind)
        if run is not None:
            run(*given, *self.arguments.values())
            return
        _check(kernel, given)
        settle(kernel)
        compiled = kernel[(self.programs,)](*given, **self.arguments, **self.options)
        if isinstance(compiled, CompiledKernel):  # nothing is, in the simulator
            self._variants[kind] = compiled[(self.programs, 1, 1)]


def _check(kernel: Any, given: tuple[Any, ...]) -> None:
    """Whether nothing is compiled in that ``_kind`` does not tell apart."""
    parameters = getattr(kernel, "params", ())  # Triton's interpreter is specialised for nothing
    for parameter, argument in zip(parameters, given, strict=False):
        if isinstance(argument, int | tuple) and not parameter.do_not_specialize:
            raise TypeError(f"{parameter.name}: an integer that the kernel is specialised for")


def _kind(argument: Any) -> Any:
    """What Triton would compile in, of an argument that may differ from call to call."""
    if isinstance(argument, Tensor):
        # What is compiled is loaded into one GPU's context.
        return argument.data_ptr() % 16 == 0, argument.dtype, argument.get_device()
    if isinstance(argument, int):
        return -(2**31) <= argument < 2**31
    return type(argument)
