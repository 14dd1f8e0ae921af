"""The one module that knows Triton versions: Gluon's names from 3.6 to 3.9, under one spelling.

Kernels write `from tilewise.gluon.compat import tma_load, tma_store, thread_barrier`, and import
from Triton itself only what all versions name alike.
"""

from __future__ import annotations

from typing import Any

import triton
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language._semantic import _compute_tmem_reg_layout
from triton.experimental.gluon.language.nvidia.blackwell import tma as _blackwell_tma
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])


def _first(module: object, *names: str) -> object:
    """The first of these names that the installed Triton has and means."""
    for name in names:
        if name in getattr(module, "__all__", ()) and hasattr(module, name):
            return getattr(module, name)
    for name in names:
        if hasattr(module, name):
            return getattr(module, name)
    raise ImportError(f"triton {triton.__version__} has none of {names} in {module}")


tma_load = _first(tma, "async_load", "async_copy_global_to_shared")
tma_store = _first(tma, "async_store", "async_copy_shared_to_global")
tma_store_wait = tma.store_wait
tma_gather = getattr(_blackwell_tma, "async_gather", None)
thread_barrier = _first(gl, "barrier", "thread_barrier")

if VERSION >= (3, 9):

    @gluon.jit
    def tma_store_wait_written():
        """Wait until all stores of the partition have reached global memory, not only left its own."""
        tma_store_wait(0, read_only=False)

else:

    @gluon.jit
    def tma_store_wait_written():
        """Wait until all stores of the partition have reached global memory, not only left its own."""
        gl.inline_asm_elementwise(
            "cp.async.bulk.wait_group 0; mov.b32 $0, $1;",
            "=r,r",
            [gl.program_id(0)],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )


@gluon.jit
def reciprocal(x):
    """1 / x, off by one unit in the last place; 0 of infinity. A division looks at sizes first."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def by_now(x):
    """uint32 x, computed before what follows: compilers move arithmetic to where results are used."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=gl.uint32, is_pure=False, pack=1
    )


aggregate: Any
if hasattr(triton, "aggregate"):
    aggregate = triton.aggregate
else:
    from triton.language.core import _aggregate

    aggregate = _aggregate

if hasattr(tma, "async_atomic_add"):
    tma_reduce_add = tma.async_atomic_add
else:

    @builtin
    def tma_reduce_add(tensor_desc, coord, src, _semantic=None):
        """Add a tile of shared memory to global memory: in the builder of Triton 3.6, not its Gluon."""
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
        _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, coord, src.handle)


@gluon.constexpr_function
def tmem_layout(dtype, shape, alloc_shape, layout, num_warps, variant="32x32b"):
    """The same for a part of an allocation."""
    shape, alloc_shape = [int(n) for n in shape], [int(n) for n in alloc_shape]
    if VERSION >= (3, 9):
        return _compute_tmem_reg_layout(dtype, shape, alloc_shape, layout, num_warps, variant)
    return _compute_tmem_reg_layout(dtype, shape, layout, num_warps, variant, [])


@gluon.constexpr_function
def tmem_register_layout(dtype, shape, layout, num_warps):
    """The register layout in which `num_warps` warps load a tile [rows, columns] of tensor memory."""
    return tmem_layout(dtype, shape, shape, layout, num_warps)


@builtin
def tmem_reinterpret(view, dtype, shape, layout, _semantic=None):
    """The same lanes and columns of tensor memory as another type."""
    method = getattr(view, "reinterpret", None) or view._reinterpret
    return method(dtype, shape, layout, _semantic=_semantic)


# Names for findings of the simulator. In a compiled kernel they are nothing.


@builtin
def label(value, name, _semantic=None):
    """Call a buffer or barrier by this name."""


@builtin
def label_stages(value, name, _semantic=None):
    """Call the parts of a buffer "stage i of `name`"."""


@builtin
def at_tile(tile, _semantic=None):
    """This partition now works on that tile."""


__all__ = [
    "VERSION",
    "aggregate",
    "at_tile",
    "builtin",
    "gl",
    "gluon",
    "label",
    "label_stages",
    "mbarrier",
    "thread_barrier",
    "tma_load",
    "tma_reduce_add",
    "tma_store",
    "tma_store_wait",
    "tma_store_wait_written",
    "tmem_register_layout",
    "tmem_reinterpret",
]
