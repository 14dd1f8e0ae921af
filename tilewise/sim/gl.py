"""`gluon.language` on NumPy: making tiles, arithmetic, shapes, reductions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilewise.sim import numerics
from tilewise.sim.dtypes import is_float, to_numpy
from tilewise.sim.values import (
    F32,
    Pointer,
    Tensor,
    charge,
    from_array,
    operate,
    option,
    raw,
    scalar,
    typed,
)

# ---- making tiles


def arange(start: int, end: int, layout: Any = None) -> Tensor:
    return Tensor(np.arange(int(start), int(end), dtype=np.int32), layout)


def full(shape: Any, value: Any, dtype: Any, layout: Any = None) -> Tensor:
    with np.errstate(all="ignore"):
        array = np.full([int(n) for n in shape], np.asarray(raw(value)).astype(to_numpy(dtype)))
    return Tensor(array, layout)


def zeros(shape: Any, dtype: Any, layout: Any = None) -> Tensor:
    return full(shape, 0, dtype, layout)


def full_like(
    input: Tensor, value: Any, shape: Any = None, dtype: Any = None, layout: Any = None
) -> Tensor:
    return full(
        input.shape if shape is None else shape,
        value,
        input.dtype if dtype is None else dtype,
        input.layout if layout is None else layout,
    )


def zeros_like(input: Tensor, shape: Any = None, dtype: Any = None, layout: Any = None) -> Tensor:
    return full_like(input, 0, shape, dtype, layout)


def to_tensor(x: Any) -> Any:
    dtype, constant = typed(x)
    return scalar(x, dtype) if constant else x


# ---- layouts and shapes: logical, as Gluon's own


def convert_layout(value: Any, layout: Any, assert_trivial: bool = False) -> Any:
    if isinstance(value, Pointer):
        return Pointer(value.memory, value.offset, layout)
    charge("layout", 0 if assert_trivial else value.numel, value.np_dtype)
    same = assert_trivial or layout == value.layout
    return value.renamed(value.held, layout) if same else Tensor(value.np, layout)


def set_auto_layout(value: Any, layout: Any) -> Any:
    return value.renamed(value.held, layout)


def reshape(input: Tensor, *shape: Any, can_reorder: bool = False) -> Tensor:
    return input.renamed(input.held.reshape(_flat(shape)))


def permute(input: Tensor, *order: Any) -> Tensor:
    order = _flat(order)
    return input.renamed(input.held.transpose(order or None))


def _flat(args: tuple[Any, ...]) -> tuple[int, ...]:
    if len(args) == 1 and isinstance(args[0], list | tuple):
        args = tuple(args[0])
    return tuple(int(n) for n in args)


def expand_dims(input: Any, axis: Any) -> Any:
    index: list[Any] = [slice(None)] * len(input.shape)
    for a in sorted([axis] if isinstance(axis, int) else axis):
        index.insert(a if a >= 0 else len(index) + 1 + a, None)
    return input[tuple(index)]


def broadcast(input: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    a, b = np.broadcast_arrays(input.held, other.held)
    return input.renamed(a, input.layout), other.renamed(b, other.layout)


def broadcast_to(input: Any, *shape: Any) -> Tensor:
    if isinstance(input, Tensor):
        return input.renamed(np.broadcast_to(input.held, _flat(shape)), input.layout)
    return Tensor(np.broadcast_to(raw(input), _flat(shape)))


def ravel(x: Tensor) -> Tensor:
    return x.renamed(x.held.reshape(-1))


def join(a: Any, b: Any) -> Tensor:
    return Tensor(np.stack([raw(a), raw(b)], axis=-1))


def split(a: Tensor) -> tuple[Any, Any]:
    if a.shape[-1] != 2:
        raise TypeError(f"split needs a last dimension of 2, not {a.shape}")
    return from_array(a.np[..., 0].copy()), from_array(a.np[..., 1].copy())


def gather(src: Tensor, index: Tensor, axis: int) -> Tensor:
    return Tensor(np.take_along_axis(src.np, index.np.astype(np.int64), axis), index.layout)


def histogram(input: Tensor, num_bins: int, mask: Any = None, layout: Any = None) -> Tensor:
    values = input.np if mask is None else input.np[raw(mask)]
    return Tensor(np.bincount(values, minlength=num_bins)[:num_bins].astype(np.int32), layout)


# ---- element by element


def where(condition: Any, x: Any, y: Any) -> Any:
    """Triton's `where`: x and y are brought to one type."""
    zero = operate("add", _zero_of(x), _zero_of(y))
    dtype = typed(zero)[0]
    if not any(isinstance(v, Tensor) for v in (condition, x, y)):
        return scalar(x if condition else y, dtype)
    with np.errstate(all="ignore"):
        a, b = (np.asarray(raw(v)).astype(dtype) for v in (x, y))
        result = np.where(raw(condition), a, b)
    charge("where", result.size, result.dtype)
    layouts = [
        v.layout for v in (condition, x, y) if isinstance(v, Tensor) and v.shape == list(result.shape)
    ]
    return Tensor(result, layouts[0] if layouts else None)


def _zero_of(x: Any) -> Any:
    """A scalar of the type of x that promotes as x does."""
    dtype, constant = typed(x)
    return x if constant else scalar(0, dtype)


def _unary(name: str, kind: str, fn: Callable[[Any], Any]) -> Callable[..., Any]:
    def op(x: Any) -> Any:
        dtype = typed(x)[0]
        array = np.asarray(raw(x), dtype)
        charge(kind, array.size, dtype)
        with np.errstate(all="ignore"):
            result = fn(
                array if dtype.itemsize >= 4 or not is_float(dtype) else array.astype(np.float32)
            )
        result = np.asarray(result).astype(dtype)
        return Tensor(result, x.layout) if isinstance(x, Tensor) else scalar(result.item(), dtype)

    op.__name__ = name
    return op


def _erf(x: Any) -> Any:
    from math import erf

    return np.vectorize(erf, otypes=[np.float64])(x)


exp2 = _unary("exp2", "exp", lambda x: numerics.exp2(x, option("approximate_exp2", True)))
exp = _unary("exp", "exp", lambda x: numerics.exp(x, option("approximate_exp2", True)))
log = _unary("log", "exp", np.log)
log2 = _unary("log2", "exp", np.log2)
sin = _unary("sin", "exp", np.sin)
cos = _unary("cos", "exp", np.cos)
erf = _unary("erf", "exp", _erf)
sqrt = sqrt_rn = _unary("sqrt", "exp", np.sqrt)
rsqrt = _unary("rsqrt", "exp", lambda x: 1 / np.sqrt(x))
floor = _unary("floor", "other", np.floor)
ceil = _unary("ceil", "other", np.ceil)
absolute = _unary("abs", "other", np.abs)


def fma(x: Any, y: Any, z: Any) -> Any:
    if any(isinstance(v, Tensor) for v in (x, y, z)):
        like = x if isinstance(x, Tensor) else y if isinstance(y, Tensor) else z
        result = numerics.fma(raw(x), raw(y), raw(z))
        charge("fma", result.size, F32)
        return Tensor(result, like.layout)
    return scalar(float(numerics.fma(x, y, z)), F32)


def umulhi(x: Any, y: Any) -> Any:
    """The high 32 bits of a 32 x 32 bit product."""
    dtype = typed(x)[0] if not typed(x)[1] else typed(y)[0]
    wide = np.uint64 if dtype.kind == "u" else np.int64
    a, b = (np.asarray(raw(v)).astype(wide) for v in (x, y))
    if dtype.itemsize != 4:
        raise NotImplementedError("umulhi of anything but 32 bits is not simulated")
    result = ((a * b) >> wide(32)).astype(dtype)
    layout = x.layout if isinstance(x, Tensor) else getattr(y, "layout", None)
    return from_array(result, layout)


def cast(input: Any, dtype: Any, fp_downcast_rounding: Any = None, bitcast: bool = False) -> Any:
    return to_tensor(input).to(dtype, bitcast=bitcast)


def clamp(x: Any, min: Any, max: Any, propagate_nan: Any = None) -> Any:
    return minimum(maximum(x, min), max)


def _pair(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Maximum or minimum; the operand that is a number wins over NaN, as in Triton by default."""

    def op(x: Any, y: Any, propagate_nan: Any = None) -> Any:
        if propagate_nan is not None and "ALL" in str(propagate_nan):
            raise NotImplementedError("propagate_nan=ALL is not simulated")
        dtype = typed(operate("add", _zero_of(x), _zero_of(y)))[0]
        constant = typed(x)[1] and typed(y)[1]
        with np.errstate(all="ignore"):
            a, b = (np.asarray(raw(v)).astype(dtype) for v in (x, y))
            result = fn(a, b).astype(dtype)
        if not isinstance(x, Tensor) and not isinstance(y, Tensor):
            return result.item() if constant else scalar(result.item(), dtype)
        charge("max", result.size, dtype)
        like = x if isinstance(x, Tensor) and x.shape == list(result.shape) else y
        return Tensor(result, getattr(like, "layout", None))

    return op


maximum, minimum = _pair(np.fmax), _pair(np.fmin)


def fdiv(x: Any, y: Any, ieee_rounding: bool = False) -> Any:
    return operate("truediv", x, y)


div_rn = fdiv


def add(x: Any, y: Any, sanitize_overflow: bool = True) -> Any:
    return operate("add", x, y)


def sub(x: Any, y: Any, sanitize_overflow: bool = True) -> Any:
    return operate("sub", x, y)


def mul(x: Any, y: Any, sanitize_overflow: bool = True) -> Any:
    return operate("mul", x, y)


def cdiv(x: Any, div: Any) -> Any:
    return (x + div - 1) // div


def map_elementwise(fn: Callable[..., Any], *args: Any, pack: int = 1) -> Any:
    """`fn` on whole tiles, `pack` neighbours of the last dimension at a time."""
    if pack == 1:
        return fn(*args)
    parts = [Tensor(a.np[..., i::pack]) for a in args for i in range(pack)]
    out = fn(*parts)
    out = out if isinstance(out, tuple) else (out,)
    results = []
    for i in range(0, len(out), pack):
        stacked = np.stack([raw(x) for x in out[i : i + pack]], axis=-1)
        results.append(Tensor(stacked.reshape(args[0].shape), args[0].layout))
    return tuple(results)


def dot_fma(a: Tensor, b: Tensor, acc: Tensor) -> Tensor:
    with np.errstate(all="ignore"):
        product = a.np.astype(np.float32) @ b.np.astype(np.float32)
    charge("fma", a.numel * b.shape[-1], F32)
    return Tensor((product + acc.np).astype(acc.np_dtype), acc.layout)


def unchanged(input: Any, *_: Any, **__: Any) -> Any:
    """max_contiguous and other hints for the compiler."""
    return input


_METHODS = {
    "reshape": reshape,
    "permute": permute,
    "trans": permute,
    "expand_dims": expand_dims,
    "broadcast_to": broadcast_to,
    "ravel": ravel,
    "split": split,
    "exp": exp,
    "exp2": exp2,
    "log": log,
    "log2": log2,
    "sqrt": sqrt,
    "rsqrt": rsqrt,
    "abs": absolute,
    "gather": gather,
}
for _name, _method in _METHODS.items():
    setattr(Tensor, _name, _method)
