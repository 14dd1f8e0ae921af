"""The one table: which object of Gluon the simulator replaces by which of its own.

Keys are paths to real objects. A path that the installed Triton lacks is skipped, so a name that moved
between versions has a line for each place. Kernels are matched by object, not by spelling: however a
kernel imported something, it is found.
"""

from __future__ import annotations

import importlib
import types
from functools import cache
from typing import Any

from triton.experimental.gluon import language as real

from tilewise.sim import (
    ampere,
    asm,
    blackwell,
    clc,
    control,
    gl,
    global_ops,
    hopper,
    reductions,
    shared,
    values,
)
from tilewise.sim.tensor_memory import TensorView

LANGUAGE = "triton.experimental.gluon.language"
TRITON = "triton.language"
NVIDIA = f"{LANGUAGE}.nvidia"

# Names that gluon.language and triton.language have in common mean the same here.
_GL = """
    arange full zeros zeros_like full_like convert_layout set_auto_layout reshape permute expand_dims
    broadcast broadcast_to ravel join split gather histogram where exp exp2 log log2 sin cos erf
    sqrt sqrt_rn rsqrt floor ceil fma umulhi cast clamp maximum minimum fdiv div_rn add sub mul
    cdiv map_elementwise dot_fma to_tensor
"""
_REDUCTIONS = "xor_sum reduce_or reduce associative_scan cumsum cumprod"
_GLOBAL = """
    load store atomic_add atomic_max atomic_min atomic_and atomic_or atomic_xor atomic_xchg atomic_cas
    atomic_load atomic_store atomic_poll
"""
_CONTROL = """
    program_id num_programs num_warps num_ctas barrier thread_barrier static_assert static_print
    device_assert device_print assume warp_specialize
"""
_LANGUAGE: dict[str, Any] = {
    **{n: getattr(gl, n) for n in _GL.split()},
    **{n: getattr(reductions, n) for n in _REDUCTIONS.split()},
    **{n: getattr(global_ops, n) for n in _GLOBAL.split()},
    **{n: getattr(control, n) for n in _CONTROL.split()},
    "abs": gl.absolute,
    "max": reductions.max_,
    "min": reductions.min_,
    "sum": reductions.sum_,
    "static_range": range,
    "range": control.runtime_range,
    "allocate_shared_memory": shared.allocate_shared_memory,
    "inline_asm_elementwise": asm.inline_asm_elementwise,
    "inline_asm": asm.inline_asm,
    "debug_barrier": control.thread_barrier,
    "multiple_of": gl.unchanged,
    "max_contiguous": gl.unchanged,
    "max_constancy": gl.unchanged,
    "expect_zero": gl.unchanged,
}

_MBARRIER = {
    "allocate_mbarrier": hopper.allocate_mbarrier,
    "init": hopper.mbarrier_init,
    "invalidate": hopper.mbarrier_invalidate,
    "wait": hopper.mbarrier_wait,
    "arrive": hopper.mbarrier_arrive,
    "expect": hopper.mbarrier_expect,
}
_TMA = {
    "async_load": hopper.tma_load,  # 3.9
    "async_copy_global_to_shared": hopper.tma_load,  # 3.6
    "async_store": hopper.tma_store,  # 3.9
    "async_copy_shared_to_global": hopper.tma_store,  # 3.6
    "store_wait": hopper.store_wait,
    "make_tensor_descriptor": global_ops.make_tensor_descriptor,
    **{f"async_atomic_{k.lower()}": hopper.tma_reduction(k) for k in hopper.REDUCTIONS},  # 3.9
}
_CP_ASYNC = {
    "async_load": ampere.async_load,  # 3.9
    "async_copy_global_to_shared": ampere.async_load,  # 3.6
    "commit_group": ampere.commit_group,
    "wait_group": ampere.wait_group,
    "mbarrier_arrive": ampere.mbarrier_arrive,
}
_HOPPER = {
    "fence_async_shared": shared.fence_async_shared,
    "async_store": shared.async_store,  # 3.9
    "warpgroup_mma": hopper.warpgroup_mma,
    "warpgroup_mma_wait": hopper.warpgroup_mma_wait,
    "warpgroup_mma_init": hopper.warpgroup_mma_init,
}
_BLACKWELL = {
    "allocate_tensor_memory": blackwell.allocate_tensor_memory,
    "get_tmem_reg_layout": blackwell.get_tmem_reg_layout,  # 3.6
    "tcgen05_mma": blackwell.tcgen05_mma,
    "tcgen05_commit": blackwell.tcgen05_commit,
    "tcgen05_copy": blackwell.tcgen05_copy,
    "tcgen05_mma_barrier_count": blackwell.tcgen05_mma_barrier_count,
    "add2": blackwell.add2,  # 3.9
    "sub2": blackwell.sub2,
    "mul2": blackwell.mul2,
    "fma2": blackwell.fma2,
}

TABLE: dict[str, dict[str, Any]] = {
    LANGUAGE: _LANGUAGE,
    TRITON: _LANGUAGE,
    f"{TRITON}.core": _LANGUAGE,
    f"{TRITON}.math": _LANGUAGE,
    f"{TRITON}.standard": _LANGUAGE,
    f"{NVIDIA}.ampere": {"mma_v2": ampere.mma_v2},
    f"{NVIDIA}.ampere.mbarrier": {**_MBARRIER},
    f"{NVIDIA}.ampere.async_copy": _CP_ASYNC,
    f"{NVIDIA}.hopper": _HOPPER,
    f"{NVIDIA}.hopper.mbarrier": _MBARRIER,
    f"{NVIDIA}.hopper.tma": _TMA,
    f"{NVIDIA}.hopper.cluster": {"barrier": hopper.cluster_barrier},
    f"{NVIDIA}.blackwell": _BLACKWELL,
    f"{NVIDIA}.blackwell.tma": _TMA,
    f"{NVIDIA}.blackwell.clc": {
        "try_cancel": clc.try_cancel,
        "load_result": clc.load_result,
    },
    "tilewise.gluon.compat": {
        "tma_reduce_add": hopper.tma_reduction("ADD"),
        "tmem_register_layout": blackwell.get_tmem_reg_layout,
        "tmem_reinterpret": TensorView.reinterpret,
        "by_now": lambda x: x,
        "reciprocal": lambda x: values.operate("truediv", 1.0, x),
        "label": control.Label.label,
        "label_stages": control.Label.stages,
        "at_tile": control.Label.at_tile,
    },
}

# What only exists from one architecture on.
_SINCE = {"hopper": (f"{NVIDIA}.hopper",), "blackwell": (f"{NVIDIA}.blackwell",)}
_ORDER = ("ampere", "hopper", "blackwell")
_ONLY_HOPPER = ("warpgroup_mma", "warpgroup_mma_wait", "warpgroup_mma_init")


@cache
def replacements(arch: str) -> dict[int, Any]:
    """id of a real object -> what stands for it on this architecture."""
    found: dict[int, Any] = {}
    for path, members in TABLE.items():
        try:
            module = importlib.import_module(path)
        except ImportError:
            continue
        for name, replacement in members.items():
            real_object = getattr(module, name, None)
            if real_object is None:
                continue
            since = next((a for a, paths in _SINCE.items() if path.startswith(paths)), "ampere")
            shared_names = path.startswith(f"{NVIDIA}.blackwell") and name in _TMA
            wrong = _ORDER.index(arch) < _ORDER.index(since) and not shared_names
            if wrong or (name in _ONLY_HOPPER and arch != "hopper"):
                replacement = _unavailable(f"{path}.{name}", arch)
            found.setdefault(id(real_object), replacement)
    return found


def _unavailable(name: str, arch: str) -> Any:
    def refuse(*_: Any, **__: Any) -> Any:
        raise TypeError(f"{name} does not exist on {arch}; launch with another arch=")

    return refuse


class Namespace:
    """Stands for a module of the language. What it lacks is not simulated, and says so by name."""

    def __init__(self, module: types.ModuleType, arch: str) -> None:
        self._module, self._arch = module, arch

    def __getattr__(self, name: str) -> Any:
        value = stand_in(getattr(self._module, name), self._arch, f"{self._module.__name__}.{name}")
        setattr(self, name, value)
        return value


def is_language(module: types.ModuleType) -> bool:
    return module.__name__.startswith((LANGUAGE, TRITON))


def stand_in(obj: Any, arch: str, name: str) -> Any:
    """The simulated counterpart of an object of the language."""
    table = replacements(arch)
    if id(obj) in table:
        return table[id(obj)]
    if isinstance(obj, types.ModuleType):
        return Namespace(obj, arch)
    if obj is real.constexpr:
        return lambda value: getattr(value, "value", value)
    if isinstance(obj, real.constexpr):
        return obj.value
    if isinstance(obj, real.dtype | type) or type(obj).__name__ == "ConstexprFunction":
        return obj  # types and layouts are the real ones
    if callable(obj):

        def missing(*_: Any, **__: Any) -> Any:
            raise NotImplementedError(f"{name} is not simulated")

        return missing
    return obj


def mbarrier_layout(num_ctas: int, two_ctas: bool) -> Any:
    """The layout that allocate_mbarrier gives; on Triton 3.6 there is only the plain one."""
    layout = importlib.import_module(f"{NVIDIA}.hopper.mbarrier").MBarrierLayout
    if num_ctas == 1:
        return layout()
    bases = [[0]] if two_ctas else []
    left = num_ctas // 2 if two_ctas else num_ctas
    bases += [[2**i] for i in range(left.bit_length() - 1)]
    return layout(bases)
