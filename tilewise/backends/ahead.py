"""Kernels before their first launch: what the host code would launch, compiled for a GPU that need not
be there.

Every launch goes through Triton's own ``JITFunction``, which reads types, alignment and constants from
the arguments and makes of them the key under which it keeps the kernel on disk. Only its driver is
another one, which says what GPU there is without asking for any. So a process that has the GPU finds
what was compiled here.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import compiler
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from tilewise import schedule
from tilewise.backends.hopper.launch import plan_forward
from tilewise.backends.hopper.launch_backward import plan_backward
from tilewise.backends.triton.launch import plan_launch


@dataclass(frozen=True)
class Launch:
    """A launch as the host code asked for it, by position and by keyword."""

    kernel: JITFunction
    given: tuple[Any, ...]
    keywords: dict[str, Any]  # of the kernel, and options of the compiler

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)

    @property
    def arguments(self) -> dict[str, Any]:
        """The kernel's, by name."""
        names = inspect.signature(self.kernel.fn).parameters
        mine = {name: value for name, value in self.keywords.items() if name in names}
        return dict(inspect.signature(self.kernel.fn).bind(*self.given, **mine).arguments)


@contextmanager
def recording(family: str) -> Iterator[list[Launch]]:
    """In here nothing is launched but written down. Tensors are on the device ``meta``, which stands for
    a GPU of a family of ``schedule``."""
    recorded: list[Launch] = []

    def record(self: JITFunction, *given: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        recorded.append(Launch(self, given, keywords))

    for planned in (plan_launch, plan_forward, plan_backward):
        planned.cache_clear()  # they do not know of families, only of devices
    with _swapped(JITFunction, "run", record), _swapped(schedule, "_family", lambda device: family):
        yield recorded


def nvidia(capability: tuple[int, int]) -> GPUTarget:
    """NVIDIA's GPUs of a compute capability, as Triton calls those that it finds."""
    major, minor = capability
    return GPUTarget("cuda", major * 10 + minor, 32)


def compile_launch(launch: Launch, target: GPUTarget) -> Any:
    """What Triton builds for a launch, or finds on disk."""
    gpu = _Absent(target)
    with _swapped(driver, "_active", gpu):
        try:
            return launch.kernel.run(*launch.given, grid=(1,), warmup=True, **launch.keywords)
        finally:
            launch.kernel.device_caches.pop(gpu, None)  # in memory nobody will look for it


def cache_key(launch: Launch, target: GPUTarget) -> tuple[str, str]:
    """What a launch adds to the key under which Triton keeps its kernel on disk: hashes of source, types
    and constants, and of the compiler's options. The rest is versions and environment."""
    found: list[tuple[str, str]] = []

    def note(source: Any, target: GPUTarget, options: dict[str, Any]) -> None:
        parsed = compiler.make_backend(target).parse_options(dict(options))
        found.append((source.hash(), parsed.hash()))

    # Where JITFunction looks it up when it first meets a GPU.
    with _swapped(triton.compiler, "compile", note):
        compile_launch(launch, target)
    return found[0]


@contextmanager
def listening() -> Iterator[list[bool]]:
    """Of every kernel that is asked for in here, whether it was on disk."""
    found: list[bool] = []
    with _swapped(
        triton.knobs.compilation, "listener", lambda *, cache_hit, **_: found.append(cache_hit)
    ):
        yield found


def cache_folder() -> str:
    """Where Triton keeps kernels on disk."""
    return str(triton.knobs.cache.dir)


class _Absent:
    """All that Triton asks of a GPU before it compiles. Kernels in memory are kept by device, and this
    one is its own."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_device(self) -> _Absent:
        return self

    def get_current_stream(self, device: Any) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


@contextmanager
def _swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
