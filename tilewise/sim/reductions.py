"""Reductions and scans of tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from triton.experimental.gluon import language as real

from tilewise.sim import engine
from tilewise.sim.dtypes import is_float, to_numpy
from tilewise.sim.ownership import register_box
from tilewise.sim.values import Tensor, charge, from_array, raw


def _reduced(x: Tensor, axis: int | None, keep_dims: bool) -> Any:
    """Layout of the result; refuses to reduce what is spread over CTAs."""
    if engine.running() and (p := engine.current()).cta.cluster.size > 1:
        box = register_box(x.layout, x.shape, p.cta.rank)
        axes = range(x.rank) if axis is None else [axis]
        if box is not None and any(box[a] != (0, x.shape[a]) for a in axes):
            raise NotImplementedError("a reduction across the CTAs of a cluster is not simulated")
    if axis is None or x.layout is None or keep_dims:
        return x.layout if keep_dims else None
    return real.SliceLayout(axis % x.rank, x.layout)


def _reduction(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    def op(input: Tensor, axis: int | None = None, keep_dims: bool = False, **other: Any) -> Any:
        extra = {k for k, v in other.items() if v not in (None, False, True)} - {"dtype"}
        if extra or other.get("return_indices"):
            return _with_index(name, input, axis, keep_dims)
        array = input.np
        dtype = array.dtype
        if other.get("dtype") is not None:
            dtype = to_numpy(other["dtype"])
        elif name == "sum" and dtype.kind in "iub" and dtype.itemsize < 4:
            dtype = np.dtype(np.int32 if dtype.kind == "i" else np.uint32)
        charge("reduce", array.size, dtype)
        layout = _reduced(input, axis, keep_dims)
        small = is_float(dtype) and dtype.itemsize < 4
        with np.errstate(all="ignore"):
            wide = array.astype(np.float32 if small else dtype)
            result = np.asarray(fn(wide, axis=axis, keepdims=keep_dims)).astype(dtype)
        return from_array(result, layout)

    op.__name__ = name
    return op


def _with_index(name: str, x: Tensor, axis: int | None, keep_dims: bool) -> Any:
    if axis is None or name not in ("max", "min"):
        raise NotImplementedError(f"{name} with these options is not simulated")
    layout = _reduced(x, axis, keep_dims)
    pick = np.argmax if name == "max" else np.argmin
    index = np.expand_dims(pick(x.np, axis=axis), axis)
    value = np.take_along_axis(x.np, index, axis)
    if not keep_dims:
        index, value = index.squeeze(axis), value.squeeze(axis)
    return from_array(value, layout), from_array(index.astype(np.int32), layout)


max_ = _reduction("max", np.fmax.reduce)
min_ = _reduction("min", np.fmin.reduce)
sum_ = _reduction("sum", np.add.reduce)
xor_sum = _reduction("xor_sum", np.bitwise_xor.reduce)
reduce_or = _reduction("reduce_or", np.bitwise_or.reduce)


def reduce(input: Any, axis: int | None, combine_fn: Callable[..., Any], keep_dims: bool = False) -> Any:
    """Any combination function, applied in halves along the axis."""
    tiles = input if isinstance(input, tuple) else (input,)
    layout = _reduced(tiles[0], axis, keep_dims)
    arrays = [t.np.reshape(-1) if axis is None else np.moveaxis(t.np, axis, 0) for t in tiles]
    while len(arrays[0]) > 1:
        half = len(arrays[0]) // 2
        left, right = [Tensor(a[:half]) for a in arrays], [Tensor(a[half:]) for a in arrays]
        out = combine_fn(*left, *right)
        arrays = [raw(o) for o in (out if isinstance(out, tuple) else (out,))]
    charge("reduce", tiles[0].numel, tiles[0].np_dtype)
    results = [a[0] if not keep_dims else np.expand_dims(a[0], axis or 0) for a in arrays]
    done = tuple(from_array(r, layout) for r in results)
    return done if isinstance(input, tuple) else done[0]


def associative_scan(
    input: Any, axis: int, combine_fn: Callable[..., Any], reverse: bool = False
) -> Any:
    tiles = input if isinstance(input, tuple) else (input,)
    order = slice(None, None, -1) if reverse else slice(None)
    arrays = [np.moveaxis(t.np, axis, 0)[order].copy() for t in tiles]
    for i in range(1, len(arrays[0])):
        out = combine_fn(*(from_array(a[i - 1]) for a in arrays), *(from_array(a[i]) for a in arrays))
        for a, o in zip(arrays, out if isinstance(out, tuple) else (out,), strict=True):
            a[i] = raw(o)
    done = tuple(
        Tensor(np.moveaxis(a[order], 0, axis), t.layout) for a, t in zip(arrays, tiles, strict=True)
    )
    return done if isinstance(input, tuple) else done[0]


def cumsum(input: Tensor, axis: int = 0, reverse: bool = False, dtype: Any = None) -> Tensor:
    return associative_scan(input, axis, lambda a, b: a + b, reverse)


def cumprod(input: Tensor, axis: int = 0, reverse: bool = False, dtype: Any = None) -> Tensor:
    return associative_scan(input, axis, lambda a, b: a * b, reverse)


for _name, _method in {
    "sum": sum_,
    "max": max_,
    "min": min_,
    "xor_sum": xor_sum,
    "reduce": reduce,
    "associative_scan": associative_scan,
    "cumsum": cumsum,
}.items():
    setattr(Tensor, _name, _method)
