"""Launching a kernel again, past Triton's look at every argument, which takes longer than short kernels.

Triton reads from the arguments which variant of a kernel they need: types, alignment, strides of 1. All
of that but where tensors lie is the same for every call of a plan, so after its first call the variant
is known, and so are all arguments but addresses.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.compiler import CompiledKernel

from tilewise.backends.direct import Direct, write_down
from tilewise.backends.keys import settle
from tilewise.gluon.ragged import Box


class Relaunch:
    """A kernel with all arguments that are the same for every call of a plan, which are all but tensors.

    arguments: numbers and constants of the kernel, by name. options: the compiler's. boxes: of those
    arguments that are tensor descriptors. All tensors have the same types and strides, on one GPU.
    Whatever Triton's knobs ask of its compiler counts at the first call.
    """

    def __init__(
        self,
        programs: int,
        arguments: dict[str, Any],
        options: dict[str, Any],
        boxes: dict[str, Box] | None = None,
    ) -> None:
        self.programs = programs
        self.arguments = arguments
        self.options = options
        self.boxes = boxes or {}
        self._variants: dict[tuple[bool | None, ...], Direct] = {}

    def __call__(self, kernel: Any, **tensors: Tensor | None) -> None:
        """Launch ``kernel`` with tensors, by its names for them, always in the same order."""
        addresses = [None if t is None else t.data_ptr() for t in tensors.values()]
        # All that Triton reads from a tensor besides its type.
        kind = tuple([None if address is None else address % 16 == 0 for address in addresses])
        variant = self._variants.get(kind)
        if variant is not None and not _hooked(kernel) and variant(addresses):
            return
        settle(kernel)
        given = {name: self._described(name, t) for name, t in tensors.items()}
        compiled = kernel[(self.programs,)](**given, **self.arguments, **self.options)
        if isinstance(compiled, CompiledKernel):  # nothing is, in the simulator
            every = given | self.arguments
            ordered = {name: every[name] for name in kernel.arg_names}
            direct = write_down(compiled, (self.programs, 1, 1), ordered, tensors, self.boxes)
            if direct is not None:
                self._variants[kind] = direct

    def _described(self, name: str, t: Tensor | None) -> Any:
        box = self.boxes.get(name)
        return t if box is None or t is None else box.of(t)


def _hooked(kernel: Any) -> bool:
    """Whether somebody wants to be called before this kernel runs."""
    return bool(getattr(kernel, "pre_run_hooks", None))
