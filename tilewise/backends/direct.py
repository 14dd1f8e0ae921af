"""A compiled kernel's launch, written down once and repeated with other addresses.

From a call to the CUDA driver Triton goes through the arguments in Python and has a tensor map encoded
for each descriptor. What its launcher then hands to C is the same every time, but for the stream,
addresses and maps; and a map is the same for the same address. So the launcher is asked once what it
would hand over, with marks in the place of tensors, and from then on C is called with that.

This relies on how Triton's launcher is made. Of one that is made otherwise nothing is written down, and
Triton launches every time.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable
from types import CellType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.knobs import HookChain
from triton.runtime.driver import driver

from tilewise.gluon.ragged import Box

MAPS_KEPT = 4096  # of each descriptor


class Direct:
    """A launch that needs nothing but addresses."""

    def __init__(
        self,
        launch: Callable[..., None],
        handed: tuple[Any, ...],
        nested: bool,
        stream: object,
        places: list[tuple[int, int]],
        maps: list[tuple[int, int, _Maps]],
        kernel: object,
    ) -> None:
        """launch: of C. handed: to it, the kernel's arguments in a sequence at the end if nested.
        stream: what stands for the stream. places, maps: which address goes where in the kernel's
        arguments, as it is or as a tensor map. kernel: is loaded as long as it is held."""
        self._launch = launch
        before = handed[: handed.index(stream)]
        after = handed[len(before) + 1 :]
        self._before, self._after = before, after[:-1] if nested else ()
        self._nested = nested
        self._arguments = list(after[-1] if nested else after)
        self._places, self._maps = places, maps
        self._kernel = kernel

    def __call__(self, addresses: list[int | None]) -> bool:
        """Launch, on the current stream. False: nothing was, for somebody wants to see launches."""
        if not (_idle(knobs.runtime.launch_enter_hook) and _idle(knobs.runtime.launch_exit_hook)):
            return False
        arguments = self._arguments.copy()
        for number, place in self._places:
            arguments[place] = addresses[number]
        for number, place, maps in self._maps:
            arguments[place] = maps.of(addresses[number])
        gpu = driver.active
        stream = gpu.get_current_stream(gpu.get_current_device())
        if self._nested:
            self._launch(*self._before, stream, *self._after, arguments)
        else:
            self._launch(*self._before, stream, *arguments)
        return True


def write_down(
    compiled: Any,
    grid: tuple[int, int, int],
    arguments: dict[str, Any],
    tensors: dict[str, Tensor | None],
    boxes: dict[str, Box],
) -> Direct | None:
    """The launch of a kernel that was launched before; None if its launcher is made in some other way.

    arguments: all of the kernel's, in its order. tensors: those of them that are addresses, in the order
    in which addresses will come. boxes: of those that are tensor descriptors.
    """
    try:
        return _written_down(compiled, grid, arguments, tensors, boxes)
    except (AttributeError, LookupError, TypeError, ValueError):  # parts that a later Triton lacks
        return None


def _written_down(
    compiled: Any,
    grid: tuple[int, int, int],
    arguments: dict[str, Any],
    tensors: dict[str, Tensor | None],
    boxes: dict[str, Box],
) -> Direct | None:
    launcher = compiled.run
    if type(launcher).__name__ != "CudaLauncher" or _wants_memory(launcher):
        return None
    nvidia = sys.modules[type(launcher).__module__]  # which not every Triton has
    handed: list[tuple[Any, ...]] = []
    around = _instead(launcher.launch, lambda *given: handed.append(given))
    if around is None:
        return None
    launch, observe = around
    stream, marks = object(), {name: object() for name, t in tensors.items() if t is not None}
    described = [name for name in arguments if name in marks and name in boxes]
    marked = {name: mark for name, mark in marks.items() if name not in boxes}
    observer = copy.copy(launcher)
    observer.launch = observe
    order = [marked.get(name, value) for name, value in arguments.items()]
    observer(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *order)
    [found] = handed
    nested = hasattr(launcher, "arg_annotations")
    flat = list(found[-1]) if nested else list(found[found.index(stream) + 1 :])
    encoded = [n for n, value in enumerate(flat) if type(value) is nvidia.PyCUtensorMap]
    metadata = getattr(compiled.metadata, "tensordesc_meta", None) or ()
    if not len(encoded) == len(described) == len(metadata):
        return None
    numbers = {name: number for number, name in enumerate(tensors)}
    places = [(numbers[name], flat.index(mark)) for name, mark in marked.items()]
    maps = [
        (numbers[name], place, _Maps(nvidia, boxes[name], arguments[name].base.dtype, form))
        for name, place, form in zip(described, encoded, metadata, strict=True)
    ]
    return Direct(launch, found, nested, stream, places, maps, compiled)


def _wants_memory(launcher: Any) -> bool:
    """Whether Triton allocates something for each launch."""
    sizes = launcher.global_scratch_size, launcher.profile_scratch_size
    return any(sizes) or getattr(launcher, "gsan_enabled", False)


def _instead(
    launch: Callable[..., None], other: Callable[..., None]
) -> tuple[Callable[..., None], Callable[..., None]] | None:
    """The function of C under what a launcher calls, and what it calls with another one in its place.
    None if that cannot be found."""
    if not isinstance(launch, FunctionType):
        return launch, other
    names, cells = launch.__code__.co_freevars, launch.__closure__ or ()
    if "launcher" not in names:
        return None
    under = cells[names.index("launcher")].cell_contents
    swapped = tuple(
        CellType(other) if name == "launcher" else cell for name, cell in zip(names, cells, strict=True)
    )
    return under, FunctionType(launch.__code__, launch.__globals__, closure=swapped)


def _idle(hook: Any) -> bool:
    return hook is None or (type(hook) is HookChain and not hook.calls)


class _Maps:
    """Tensor maps of one descriptor, by address."""

    def __init__(self, nvidia: ModuleType, box: Box, dtype: torch.dtype, form: Any) -> None:
        """form: how the kernel reads them."""
        self._box, self._dtype, self._form = box, dtype, form
        self._encode = nvidia.make_tensordesc_arg
        self._more = (None,) * (len(inspect.signature(self._encode).parameters) - 2)
        self._kept: dict[int, Any] = {}

    def of(self, address: int | None) -> Any:
        assert address is not None
        found = self._kept.get(address)
        if found is None:
            if len(self._kept) >= MAPS_KEPT:
                self._kept.clear()
            described = self._box.of(_Address(address, self._dtype))  # type: ignore[arg-type]
            found = self._kept[address] = self._encode(described, self._form, *self._more)[0]
        return found


class _Address:
    """As much of a tensor as a descriptor asks for."""

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self._address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self._address
