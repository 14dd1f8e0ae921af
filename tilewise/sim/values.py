"""Register values: tiles, 32- and 64-bit scalars, and pointers.

A run-time scalar of a kernel is an `Int` or `Float` with its own type; a compile-time constant is an
ordinary Python number. Layouts are carried along but not interpreted: whether they fit is the compiler's
business, this looks at values and at order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewise.sim import engine, numerics
from tilewise.sim.dtypes import GLUON, constant_type, is_float, promote, to_numpy

if TYPE_CHECKING:
    from tilewise.sim.memory import Access

DType = np.dtype[Any]
BOOL, I32, I64, F32 = (np.dtype(t) for t in ("bool", "int32", "int64", "float32"))


def _truncated(a: int, b: int) -> int:
    if b == 0:
        return 0
    q = abs(a) // abs(b)
    return -q if (a < 0) != (b < 0) else q


def _c_divide(a: Any, b: Any) -> Any:
    with np.errstate(all="ignore"):
        if is_float(np.asarray(a).dtype):
            return np.floor_divide(a, b)
        q = np.floor_divide(a, b)
        return q + ((q < 0) & (q * b != a)).astype(q.dtype)


def _c_remainder(a: Any, b: Any) -> Any:
    return np.fmod(a, b)


# name: (on arrays, on Python numbers, what it is for the cost model, is it a comparison)
OPERATORS: dict[str, tuple[Callable[..., Any], Callable[..., Any], str, bool]] = {
    "add": (np.add, lambda a, b: a + b, "add", False),
    "sub": (np.subtract, lambda a, b: a - b, "add", False),
    "mul": (np.multiply, lambda a, b: a * b, "mul", False),
    "truediv": (np.true_divide, lambda a, b: a / b if b else float(np.float64(a) / b), "other", False),
    "floordiv": (_c_divide, _truncated, "other", False),
    "mod": (_c_remainder, lambda a, b: a - _truncated(a, b) * b, "other", False),
    "and": (np.bitwise_and, lambda a, b: a & b, "other", False),
    "or": (np.bitwise_or, lambda a, b: a | b, "other", False),
    "xor": (np.bitwise_xor, lambda a, b: a ^ b, "other", False),
    "lshift": (np.left_shift, lambda a, b: a << b, "other", False),
    "rshift": (np.right_shift, lambda a, b: a >> b, "other", False),
    "lt": (np.less, lambda a, b: a < b, "compare", True),
    "le": (np.less_equal, lambda a, b: a <= b, "compare", True),
    "gt": (np.greater, lambda a, b: a > b, "compare", True),
    "ge": (np.greater_equal, lambda a, b: a >= b, "compare", True),
    "eq": (np.equal, lambda a, b: a == b, "compare", True),
    "ne": (np.not_equal, lambda a, b: a != b, "compare", True),
}
_DIVISIONS = ("truediv", "floordiv", "mod")


def charge(kind: str, elements: int, dtype: np.dtype[Any]) -> None:
    """Tell the cost model about arithmetic on a tile."""
    if engine.running():
        p = engine.current()
        p.engine.cost.vector(p, kind, elements, 8 * dtype.itemsize)


def option(name: str, default: Any) -> Any:
    return getattr(engine.engine().options, name) if engine.running() else default


def raw(x: Any) -> Any:
    """The NumPy array or Python number behind a value."""
    return x.np if isinstance(x, Tensor) else x


def typed(x: Any) -> tuple[np.dtype[Any], bool]:
    """Data type of a value, and whether it is a compile-time constant."""
    if isinstance(x, Tensor | Int | Float):
        return x.np_dtype, False
    if isinstance(x, np.generic):
        return x.dtype, False
    return constant_type(x), True


def operate(name: str, a: Any, b: Any) -> Any:
    """`a name b` for any mixture of tiles, scalars and constants."""
    if isinstance(a, Pointer) or isinstance(b, Pointer):
        return NotImplemented
    try:
        (a_type, a_constant), (b_type, b_constant) = typed(a), typed(b)
    except TypeError:
        return NotImplemented
    dtype = promote(a_type, a_constant, b_type, b_constant, name in _DIVISIONS)
    if name == "truediv" and not is_float(dtype):
        dtype = F32
    on_arrays, on_numbers, kind, comparison = OPERATORS[name]
    if not isinstance(a, Tensor) and not isinstance(b, Tensor):
        a, b = (float(v) if is_float(dtype) else int(v) for v in (a, b))
        return scalar(on_numbers(a, b), BOOL if comparison else dtype)
    x, y = _as(raw(a), dtype), _as(raw(b), dtype)
    with np.errstate(all="ignore"):
        result = _fused(name, a, b, x, y) if dtype == F32 and name in ("add", "sub") else None
        if result is None:
            result = on_arrays(x, y)
        else:
            kind = "fma"
    if dtype == I32 and name in ("add", "sub", "mul"):
        _check_overflow(on_arrays, x, y, result)
    charge(kind, result.size, result.dtype)
    out = Tensor(result, common_layout(result, a, b))
    if name == "mul" and dtype == F32:
        out.factors = (x, y)
    return out


def _as(x: Any, dtype: np.dtype[Any]) -> Any:
    if isinstance(x, np.ndarray):
        return x if x.dtype == dtype else x.astype(dtype)
    if dtype.kind == "u" and x < 0:
        raise ValueError(f"{x} is out of range of {dtype}")
    return np.asarray(int(x) if dtype.kind in "iu" else x).astype(dtype)


def _fused(name: str, a: Any, b: Any, x: Any, y: Any) -> Any:
    """The sum as one fused multiply-add, if an operand is a product that ptxas would fuse."""
    left = a.factors if isinstance(a, Tensor) else None
    right = b.factors if isinstance(b, Tensor) else None
    if (left is None and right is None) or not option("fuse_multiply_add", True):
        return None
    if left is not None:
        return numerics.fma(*left, y if name == "add" else -y)
    u, v = right  # type: ignore[misc]
    return numerics.fma(u if name == "add" else -u, v, x)


def _check_overflow(fn: Callable[..., Any], x: Any, y: Any, result: Any) -> None:
    if (fn(x.astype(I64), y.astype(I64)) != result).any() and engine.running():
        site = engine.current().site()
        engine.report("overflow", f"int32 arithmetic on a tile overflows at {site}", site)


def common_layout(result: Any, *values: Any) -> Any:
    best = None
    for v in values:
        if isinstance(v, Tensor):
            if v.shape == list(result.shape):
                return v.layout
            best = v.layout if best is None else best
    return best


class Tensor:
    """A tile in registers: an array, its layout, the MMA that owns the registers, if any, and the loads
    from shared memory that may still be filling them.
    """

    __slots__ = ("_array", "busy", "factors", "layout", "loads")
    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self, array: Any, layout: Any = None, busy: Any = None, loads: Sequence[Access] = ()
    ) -> None:
        self._array = np.asarray(array)
        self.layout = layout
        self.busy = busy
        self.loads = loads
        self.factors: tuple[Any, Any] | None = None  # of a product, for fused multiply-add

    @property
    def np(self) -> Any:
        """The array for an instruction that needs its values."""
        for load in self.loads:
            load.use()
        self.loads = ()
        return self.held

    @property
    def held(self) -> Any:
        """The array for what only gives the registers another name, and waits for no load."""
        if self.busy is not None:
            self.busy.touch(self)
        return self._array

    def renamed(self, array: Any, layout: Any = None) -> Tensor:
        """The same registers as another tile, whose loads are still under way."""
        return Tensor(array, layout, loads=self.loads)

    @property
    def untouched(self) -> Any:
        """The array without asking whether the registers are free."""
        return self._array

    def settle(self, array: Any = None) -> None:
        """The registers are the program's again."""
        self.busy = None
        if array is not None:
            self._array = array

    @property
    def np_dtype(self) -> DType:
        return self._array.dtype

    @property
    def shape(self) -> list[int]:
        return list(self._array.shape)

    @property
    def dtype(self) -> Any:
        return GLUON[self._array.dtype]

    @property
    def type(self) -> Tensor:
        return self  # shape, dtype and layout are asked of a tensor's type, too

    scalar = element_ty = dtype

    @property
    def numel(self) -> int:
        return self._array.size

    @property
    def rank(self) -> int:
        return self._array.ndim

    def __getitem__(self, index: Any) -> Tensor:
        index = index if isinstance(index, tuple) else (index,)
        if any(i is not None and i != slice(None) for i in index):
            raise NotImplementedError("indexing a tile with anything but None and ':' is not simulated")
        layout = self.layout
        for axis, i in enumerate(index):
            if i is None and getattr(layout, "dim", None) == axis:
                layout = layout.parent
        return self.renamed(self.held[index], layout)

    def to(self, dtype: Any, fp_downcast_rounding: Any = None, bitcast: bool = False) -> Tensor:
        target = to_numpy(dtype)
        if bitcast:
            return self.renamed(np.ascontiguousarray(self.held).view(target), self.layout)
        charge("convert", self.numel, target)
        if target == self.np_dtype:
            return self.renamed(self.held, self.layout)
        array = self.np
        with np.errstate(all="ignore"):
            if target == BOOL:
                array = array != 0
            elif is_float(array.dtype) and not is_float(target):
                array = np.trunc(array.astype(np.float64))
                array = np.where(np.isfinite(array), array, 0)
            elif array.dtype.kind in "iu" and is_float(target) and target.itemsize < 4:
                array = array.astype(np.float32)
            elif is_float(array.dtype) and target.itemsize == 1 and is_float(target):
                array = _saturated(array, target)
            return Tensor(array.astype(target), self.layout)

    cast = to

    def __bool__(self) -> bool:
        return bool(self.np)

    def __index__(self) -> int:
        return int(self.np)

    def __neg__(self) -> Tensor:
        return Tensor(-self.np, self.layout)

    def __invert__(self) -> Tensor:
        return Tensor(~self.np, self.layout)

    def __repr__(self) -> str:
        return f"Tensor({self._array!r})"


def _saturated(array: Any, target: np.dtype[Any]) -> Any:
    """Conversions to fp8 saturate (cvt.satfinite) and leave NaN alone."""
    import ml_dtypes

    top = np.float32(ml_dtypes.finfo(target).max)
    array = array.astype(np.float32)
    return np.where(np.isnan(array), array, np.clip(array, -top, top))


class Int(int):
    """A run-time integer of a fixed width; division truncates as in C."""

    np_dtype: np.dtype[Any] = I32
    shape: tuple[()] = ()
    layout = None

    @property
    def dtype(self) -> Any:
        return GLUON[self.np_dtype]

    @property
    def type(self) -> Any:
        return GLUON[self.np_dtype]

    def to(self, dtype: Any, bitcast: bool = False) -> Any:
        target = to_numpy(dtype)
        if bitcast:
            return scalar(np.asarray(int(self)).astype(self.np_dtype).view(target).item(), target)
        if is_float(target):
            return scalar(float(int(self)), target)
        return scalar(int(self), target, wrap=True)

    cast = to

    def __neg__(self) -> Any:
        return operate("sub", 0, self)

    def __invert__(self) -> Any:
        return scalar(int(not self) if self.np_dtype == BOOL else ~int(self), self.np_dtype)

    def __bool__(self) -> bool:
        return int(self) != 0

    def __hash__(self) -> int:
        return hash(int(self))


class Float(float):
    """A run-time floating-point number, rounded to its type after every operation."""

    np_dtype: np.dtype[Any] = F32
    shape: tuple[()] = ()
    layout = None

    @property
    def dtype(self) -> Any:
        return GLUON[self.np_dtype]

    @property
    def type(self) -> Any:
        return GLUON[self.np_dtype]

    def to(self, dtype: Any, bitcast: bool = False) -> Any:
        target = to_numpy(dtype)
        if bitcast:
            return scalar(np.asarray(float(self)).astype(self.np_dtype).view(target).item(), target)
        if is_float(target):
            return scalar(float(self), target)
        return scalar(int(self) if np.isfinite(self) else 0, target, wrap=True)

    cast = to

    def __neg__(self) -> Any:
        return scalar(-float(self), self.np_dtype)

    def __hash__(self) -> int:
        return hash(float(self))


_INTS = {d: type(d.name, (Int,), {"np_dtype": d}) for d in GLUON if d.kind in "iub"}
_FLOATS = {d: type(d.name, (Float,), {"np_dtype": d}) for d in GLUON if is_float(d)}
_RANGES = {d: (0, 1) if d == BOOL else (int(np.iinfo(d).min), int(np.iinfo(d).max)) for d in _INTS}


def scalar(value: Any, dtype: np.dtype[Any], wrap: bool = False) -> Any:
    """A run-time scalar. A signed result that does not fit is a finding; unsigned arithmetic wraps."""
    if dtype in _FLOATS:
        with np.errstate(all="ignore"):
            rounded = value if dtype.itemsize == 8 else float(np.float32(value).astype(dtype))
        return _FLOATS[dtype](rounded)
    value = int(value)
    low, high = _RANGES[dtype]
    if not low <= value <= high:
        if not wrap and dtype.kind == "i" and engine.running():
            site = engine.current().site()
            engine.report("overflow", f"{value} does not fit {dtype} at {site}", site)
        value = (value - low) % (high - low + 1) + low
    return _INTS[dtype](value)


def from_array(array: Any, layout: Any = None) -> Any:
    """A tile, or a scalar if there is no dimension."""
    if np.ndim(array) == 0:
        return scalar(np.asarray(array).item(), np.asarray(array).dtype)
    return Tensor(array, layout)


class Pointer:
    """A pointer, or a tile of pointers, into one global tensor; offsets in elements of `memory`."""

    __slots__ = ("layout", "memory", "offset")

    def __init__(self, memory: Any, offset: Any = 0, layout: Any = None) -> None:
        self.memory, self.offset, self.layout = memory, offset, layout

    def __add__(self, other: Any) -> Pointer:
        if isinstance(other, Tensor):
            return Pointer(
                self.memory, self.offset + other.np.astype(np.int64), other.layout or self.layout
            )
        return Pointer(self.memory, self.offset + int(other), self.layout)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Pointer:
        return self + (-other)

    def __getitem__(self, index: Any) -> Pointer:
        return Pointer(self.memory, np.asarray(self.offset)[index], self.layout)

    @property
    def shape(self) -> list[int]:
        return list(np.shape(self.offset))

    @property
    def dtype(self) -> Any:
        from triton.experimental.gluon import language as gl

        return gl.pointer_type(GLUON[self.memory.dtype])

    @property
    def type(self) -> Any:
        return self if self.shape else self.dtype


def _install() -> None:
    for name in OPERATORS:
        reflected = name not in ("lt", "le", "gt", "ge", "eq", "ne")

        def forward(a: Any, b: Any, name: str = name) -> Any:
            return operate(name, a, b)

        def backward(a: Any, b: Any, name: str = name) -> Any:
            return operate(name, b, a)

        for cls in (Tensor, Int, Float):
            setattr(cls, f"__{name}__", forward)
            if reflected:
                setattr(cls, f"__r{name}__", backward)
    for kind in (*_INTS.values(), *_FLOATS.values()):
        kind.__hash__ = kind.__mro__[1].__hash__  # type: ignore[method-assign]


_install()
