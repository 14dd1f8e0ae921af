"""Run a `@gluon.jit` kernel's own Python function with the language replaced by the simulator."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any
from unittest import mock

import torch
from triton.experimental.gluon import language as real
from triton.runtime import jit as triton_jit

from tilewise.sim import hopper, names
from tilewise.sim.control import runtime_range
from tilewise.sim.cost import RandomCost
from tilewise.sim.cta import Cluster, Cta
from tilewise.sim.engine import Engine, Partition
from tilewise.sim.findings import Report
from tilewise.sim.global_memory import Descriptor, GlobalTensor
from tilewise.sim.options import Options
from tilewise.sim.values import BOOL, F32, I32, I64, Pointer, scalar

_BUILTIN = "__triton_builtin__"
_TRITON_ADDS = ("debug", "instrumentation_mode", "fpsan_homomorphic_casts")  # whatever its version
_defaults = Options()


@contextlib.contextmanager
def configure(**options: Any) -> Iterator[None]:
    """Change the options of every launch inside; see `Options`."""
    global _defaults
    previous = _defaults
    _defaults = replace(_defaults, **options)
    try:
        yield
    finally:
        _defaults = previous


def launch(
    kernel: Any, grid: Sequence[int] | Callable[..., Any], args: Sequence[Any], **keywords: Any
) -> Report:
    """Simulate `kernel[grid](*args, **keywords)`.

    kernel: a `@gluon.jit` function. grid: program counts, or a function of the arguments. args: CPU
    tensors (changed in place, as on the GPU), Gluon's TensorDescriptor, numbers, tuples, constants.
    keywords: further arguments of the kernel, launch options (num_warps, num_ctas, maxnreg), and any
    field of `Options`, such as seed=0, arch="hopper", together=True.

    Returns a Report; call its `raise_if_any()` to insist that nothing was found.
    """
    return _launch(kernel, grid, args, keywords, [])


def _launch(
    kernel: Any,
    grid: Sequence[int] | Callable[..., Any],
    args: Sequence[Any],
    keywords: dict[str, Any],
    reports: list[Report],
) -> Report:
    """The report is in `reports` as soon as the first program starts, so it outlives an exception."""
    fields = Options.__dataclass_fields__
    parameters = {p.name: p for p in kernel.params}
    chosen = {k: keywords.pop(k) for k in list(keywords) if k in fields and k not in parameters}
    options = replace(_defaults, **chosen)
    settings = {k: v for k, v in keywords.items() if k not in parameters}
    _check_settings(kernel.fn.__name__, settings, list(parameters))
    signature = inspect.signature(kernel.fn)
    bound = signature.bind(*args, **{k: v for k, v in keywords.items() if k in parameters})
    bound.apply_defaults()
    binder = Rebinder(options.arch)
    call = []
    for name, value in bound.arguments.items():
        constant = parameters[name].is_constexpr
        call.append(binder.rebind(value) if constant else argument(value, name))
    if callable(grid):
        grid = grid(dict(bound.arguments))
    sizes: Any = grid
    x, y, z = (*(int(n) for n in sizes), 1, 1)[:3]
    if min(x, y, z) < 1:
        raise ValueError(f"each side of the grid must be at least 1, not {tuple(sizes)}")
    programs = [(i, j, k) for k, j, i in itertools.product(range(z), range(y), range(x))]
    if options.programs is not None:
        programs = [p for p in programs if p in options.programs]
    if options.limit is not None:
        programs = programs[: options.limit]
    function = binder.rebind(kernel)
    report = Report(kernel.fn.__name__, options.seed)
    reports.append(report)
    _run(report, kernel.fn.__name__, function, call, programs, (x, y, z), settings, options)
    return report


def _check_settings(kernel: str, settings: dict[str, Any], parameters: list[str]) -> None:
    """What is neither of the kernel nor of `Options` must be a launch option that Triton knows."""
    from triton.backends.nvidia.compiler import CUDAOptions

    known = [*CUDAOptions.__dataclass_fields__, *_TRITON_ADDS]
    for name in settings:
        if name not in known:
            raise TypeError(
                f"launch of {kernel}: unknown keyword {name!r}. Allowed are its parameters "
                f"({', '.join(parameters)}), options of the simulator "
                f"({', '.join(Options.__dataclass_fields__)}) and Triton's launch options "
                f"({', '.join(sorted({*known} - {*Options.__dataclass_fields__}))})"
            )
    for name in ("num_warps", "num_ctas"):
        n = settings.get(name, 1)
        if not isinstance(n, Integral) or n < 1 or n & (n - 1):
            raise ValueError(f"{name} must be a power of two, not {n!r}")


def _run(
    report: Report,
    name: str,
    function: Any,
    call: list[Any],
    programs: list[tuple[int, int, int]],
    grid: tuple[int, int, int],
    settings: dict[str, Any],
    options: Options,
) -> None:
    pending = deque(programs)
    while pending:
        first = pending[0]
        cost = options.cost(first) if options.cost else RandomCost(f"{options.seed} {first}")
        engine = Engine(cost, options)
        engine.pending = pending
        report.engines.append(engine)
        resident = 1 if not options.together else options.resident or len(pending)
        _Programs(engine, name, function, call, grid, settings).start(resident)
        try:
            engine.run()
        finally:
            known = [f.what for f in report.findings]  # of other programs: say it once
            report.findings += [f for f in engine.findings if f.what not in known]
        if report.findings and options.stop_at_first:
            break


class _Programs:
    """Starts programs of a launch in one engine; with `together`, another as one ends."""

    def __init__(
        self,
        engine: Engine,
        name: str,
        function: Any,
        call: list[Any],
        grid: tuple[int, int, int],
        settings: dict[str, Any],
    ) -> None:
        self.engine, self.name, self.function, self.call = engine, name, function, call
        self.grid, self.settings = grid, settings
        self.num_warps, self.num_ctas = (
            int(settings.get(key, default)) for key, default in (("num_warps", 4), ("num_ctas", 1))
        )

    def start(self, count: int) -> None:
        ctas: list[Cta] = []
        for _ in range(min(count, len(self.engine.pending))):
            program, cluster = self.engine.pending.popleft(), Cluster(self.num_ctas)
            for _ in range(self.num_ctas):
                ctas.append(Cta(self.engine, program, self.grid, self.num_warps, cluster, self.settings))
        for cta in ctas:  # all exist before the first of them runs
            cta.main = Partition(cta, self.name, self.function, self.call, {}, self.num_warps)
            cta.main.joiners.append(lambda cluster=cta.cluster: self.ended(cluster))
            cta.main.start()

    def ended(self, cluster: Cluster) -> None:
        if self.engine.options.together and all(cta.main.done for cta in cluster.ctas):
            self.start(1)


def argument(value: Any, name: str) -> Any:
    """A run-time argument as the kernel sees it."""
    if isinstance(value, torch.Tensor):
        return Pointer(GlobalTensor(value, name))
    if hasattr(value, "block_shape") and hasattr(value, "base"):
        memory = GlobalTensor(value.base, name)
        return Descriptor(
            memory, value.shape, value.strides, value.block_shape, value.layout, value.padding
        )
    if isinstance(value, bool):
        return scalar(value, BOOL)
    if isinstance(value, int):
        return scalar(value, I32 if -(2**31) <= value < 2**31 else I64)
    if isinstance(value, float):
        return scalar(value, F32)
    if isinstance(value, tuple):
        items = [argument(v, f"{name}[{i}]") for i, v in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if value is None or isinstance(value, real.constexpr):
        return getattr(value, "value", value)
    raise TypeError(f"argument {name} of type {type(value).__name__}")


@contextlib.contextmanager
def intercept(**options: Any) -> Iterator[list[Report]]:
    """Host code inside runs unchanged: `kernel[grid](...)` of any Gluon kernel is simulated.

    Yields the list to which the reports of the launches are appended.
    """
    reports: list[Report] = []
    original = triton_jit.JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> Any:
        if not self.is_gluon():
            return original(self, *args, grid=grid, warmup=warmup, **keywords)
        return _launch(self, grid, args, keywords, reports)

    with configure(**options), mock.patch.object(triton_jit.JITFunction, "run", run):
        yield reports


class Jitted:
    """A jit function inside the simulator: called like any other."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.fn, self.__name__ = function, function.__name__

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self.fn(*args, **keywords)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)


class _Semantic:
    """What a kernel's own @builtin function asks of `_semantic`."""

    builder = hopper.Builder()

    @staticmethod
    def _convert_to_ir_values(values: Any, require_i64: bool = False) -> Any:
        return values

    @staticmethod
    def to_tensor(value: Any) -> Any:
        return value


class Rebinder:
    """Copies functions with their globals replaced; every object is copied once."""

    def __init__(self, arch: str) -> None:
        self.arch = arch
        self.table = names.replacements(arch)
        self.memo: dict[Any, Any] = {}
        self.alive: list[Any] = []  # ids are only unique among the living

    def rebind(self, obj: Any) -> Any:
        """The simulated counterpart of anything that a kernel may refer to."""
        if id(obj) in self.table:
            return self.table[id(obj)]
        if isinstance(obj, types.ModuleType):
            return names.Namespace(obj, self.arch) if names.is_language(obj) else obj
        kind = type(obj).__name__
        if isinstance(obj, triton_jit.JITFunction) or kind == "InterpretedFunction":
            return self._jitted(obj)
        if kind == "ConstexprFunction":
            library = obj.fn.__module__.startswith("triton.")
            return _plain(obj.fn) if library else self._function(obj.fn)
        if getattr(obj, "__triton_aggregate__", False) and isinstance(obj, type):
            return self._aggregate(obj)
        if getattr(obj, _BUILTIN, False) and isinstance(obj, types.FunctionType):
            if obj.__module__.startswith("triton."):
                return names.stand_in(obj, self.arch, f"{obj.__module__}.{obj.__name__}")
            return lambda *a, **k: obj(*a, **k, _semantic=_Semantic())
        if obj is real.constexpr or isinstance(obj, real.constexpr):
            return names.stand_in(obj, self.arch, "constexpr")
        if type(obj) in (tuple, list):
            return type(obj)(self.rebind(x) for x in obj)
        return obj

    def _jitted(self, jit: Any) -> Any:
        if id(jit) not in self.memo:
            self.alive.append(jit)
            made = self._function(jit.fn, lambda new: self.memo.update({id(jit): Jitted(new)}))
            self.memo[id(jit)] = Jitted(made)
        return self.memo[id(jit)]

    def _function(self, fn: Any, early: Callable[[Any], None] = lambda new: None) -> Any:
        key = ("globals", id(fn.__globals__))
        fresh = key not in self.memo
        space = self.memo.setdefault(key, {})
        cells = tuple(types.CellType() for _ in fn.__closure__ or ())
        new = types.FunctionType(fn.__code__, space, fn.__name__, fn.__defaults__, cells or None)
        new.__kwdefaults__, new.__annotations__ = fn.__kwdefaults__, fn.__annotations__
        early(new)  # before the globals: functions may refer to each other
        if fresh:
            space["__builtins__"] = __builtins__
            space["__name__"] = fn.__globals__.get("__name__", "kernel")
            for name, value in list(fn.__globals__.items()):
                if not name.startswith("__"):
                    space[name] = self.rebind(value)
            space["range"] = runtime_range
        for cell, old in zip(cells, fn.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # a cell that is still empty
                cell.cell_contents = self.rebind(old.cell_contents)
        return new

    def _aggregate(self, aggregate: Any) -> Any:
        """A class with the same members; the user's class hides in a closure of Triton's wrapper."""
        if id(aggregate) not in self.memo:
            code = aggregate.__new__.__code__
            hidden = dict(zip(code.co_freevars, aggregate.__new__.__closure__, strict=True))
            cls = hidden["cls"].cell_contents
            new = self.memo[id(aggregate)] = type(cls.__name__, (), {})
            self.alive.append(aggregate)
            for name, member in vars(cls).items():
                if isinstance(member, triton_jit.JITFunction):
                    setattr(new, name, self._jitted(member))
                elif type(member).__name__ == "ConstexprFunction":
                    setattr(new, name, self._function(member.fn))
                elif isinstance(member, types.FunctionType):
                    setattr(new, name, self._function(member))
            if "__init__" not in vars(cls):
                setattr(new, "__init__", _field_init(cls))  # noqa: B010
        return self.memo[id(aggregate)]


def _field_init(cls: Any) -> Callable[..., None]:
    fields = list(inspect.get_annotations(cls))

    def init(self: Any, *args: Any, **keywords: Any) -> None:
        for name in fields:
            if hasattr(cls, name):
                setattr(self, name, getattr(cls, name))
        for name, value in [*zip(fields, args, strict=False), *keywords.items()]:
            setattr(self, name, value)

    return init


def _plain(fn: Any) -> Any:
    """A constexpr function of the library, called with plain values."""

    def call(*args: Any, **keywords: Any) -> Any:
        result = fn(*args, **keywords)
        return getattr(result, "value", result)

    return call
