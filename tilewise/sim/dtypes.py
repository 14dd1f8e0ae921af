"""Element types: Gluon's, NumPy's and PyTorch's names for them, and Triton's rules of promotion."""

from __future__ import annotations

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import torch
from triton.experimental.gluon import language as gl

_TABLE = [
    # Gluon, NumPy, PyTorch
    (gl.int1, np.bool_, torch.bool),
    (gl.int8, np.int8, torch.int8),
    (gl.int16, np.int16, torch.int16),
    (gl.int32, np.int32, torch.int32),
    (gl.int64, np.int64, torch.int64),
    (gl.uint8, np.uint8, torch.uint8),
    (gl.uint16, np.uint16, torch.uint16),
    (gl.uint32, np.uint32, torch.uint32),
    (gl.uint64, np.uint64, torch.uint64),
    (gl.float16, np.float16, torch.float16),
    (gl.bfloat16, ml_dtypes.bfloat16, torch.bfloat16),
    (gl.float32, np.float32, torch.float32),
    (gl.float64, np.float64, torch.float64),
    (gl.float8e4nv, ml_dtypes.float8_e4m3fn, torch.float8_e4m3fn),
    (gl.float8e5, ml_dtypes.float8_e5m2, torch.float8_e5m2),
]
NUMPY: dict[Any, np.dtype[Any]] = {g: np.dtype(n) for g, n, _ in _TABLE}
GLUON: dict[np.dtype[Any], Any] = {np.dtype(n): g for g, n, _ in _TABLE}
TORCH: dict[torch.dtype, Any] = {t: g for g, _, t in _TABLE}


def to_numpy(dtype: Any) -> np.dtype[Any]:
    dtype = getattr(dtype, "value", dtype)  # a constexpr
    if dtype not in NUMPY:
        raise NotImplementedError(f"data type {dtype} is not simulated")
    return NUMPY[dtype]


def is_float(dtype: np.dtype[Any]) -> bool:
    return dtype.kind == "f" or (dtype.kind == "V" and dtype in GLUON)


def is_fp8(dtype: np.dtype[Any]) -> bool:
    return dtype.itemsize == 1 and is_float(dtype)


def poison(dtype: np.dtype[Any]) -> Any:
    """What memory holds that nobody has written: NaN, or an implausible integer."""
    if is_float(dtype):
        return np.array(np.nan).astype(dtype)
    return np.array(0x5A5A5A5A5A5A5A5A, np.uint64).astype(dtype)


def _kind(dtype: np.dtype[Any]) -> int:
    if dtype == np.bool_:
        return 0
    return 2 if is_float(dtype) else 1


def constant_type(value: Any) -> np.dtype[Any]:
    """The type that Triton gives to a Python number."""
    if isinstance(value, bool | np.bool_):
        return np.dtype(np.bool_)
    if isinstance(value, int):
        for lowest, beyond, name in (
            (-(2**31), 2**31, "int32"),
            (2**31, 2**32, "uint32"),
            (-(2**63), 2**63, "int64"),
            (2**63, 2**64, "uint64"),
        ):
            if lowest <= value < beyond:
                return np.dtype(name)
        raise OverflowError(f"{value} does not fit 64 bits")
    if isinstance(value, float):
        finite = value == value and abs(value) != float("inf")
        small = not finite or value == 0 or 2.0**-126 <= abs(value) <= (2 - 2.0**-23) * 2.0**127
        return np.dtype(np.float32 if small else np.float64)
    raise TypeError(f"{type(value).__name__} is not a number of a kernel")


@cache
def promote(
    a: np.dtype[Any], a_constant: bool, b: np.dtype[Any], b_constant: bool, division: bool = False
) -> np.dtype[Any]:
    """Triton's `computation_type_impl`: in which type `a op b` is computed."""
    if a_constant != b_constant:
        constant, tensor = (a, b) if a_constant else (b, a)
        if _kind(constant) <= _kind(tensor):
            a = b = tensor
    f64, f32, f16 = np.dtype(np.float64), np.dtype(np.float32), np.dtype(np.float16)
    if f64 in (a, b):
        return f64
    if f32 in (a, b) or (division and (is_float(a) or is_float(b))):
        return f32
    if f16 in (a, b):
        return f16
    if BF16 in (a, b):
        return BF16 if a == b else f32
    if is_fp8(a) and is_fp8(b):
        return a if a == b else f16
    if is_float(a) or is_float(b):
        raise TypeError(f"unexpected types {a} and {b}")
    if a.kind == b.kind == "i" or "i" not in (a.kind, b.kind):
        return a if _bits(a) > _bits(b) else b
    if division:
        raise TypeError(f"division or remainder of {a} and {b}: the signs of the types differ")
    unsigned, signed = (b, a) if a.kind == "i" else (a, b)
    return unsigned if _bits(unsigned) >= _bits(signed) else signed


BF16 = np.dtype(ml_dtypes.bfloat16)


def _bits(dtype: np.dtype[Any]) -> int:
    return 1 if dtype == np.bool_ else 8 * dtype.itemsize
