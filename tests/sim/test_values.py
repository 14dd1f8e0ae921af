"""Arithmetic: C integers, fp32 scalars, promotion, and what differs from NumPy on a GPU."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise import sim
from tilewise.sim import numerics
from tilewise.sim.dtypes import promote
from tilewise.sim.gl import umulhi
from tilewise.sim.values import BOOL, F32, I32, I64, Tensor, scalar

U32 = np.dtype(np.uint32)
LINE: gl.constexpr = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


def tile(*values: Any, dtype: Any = np.float32) -> Tensor:
    return Tensor(np.array(values, dtype))


@given(st.integers(-(2**31), 2**31 - 1), st.integers(-(2**31), 2**31 - 1).filter(bool))
def test_division_truncates_as_in_c(a: int, b: int) -> None:
    if (a, b) == (-(2**31), -1):
        return
    quotient = int(math.copysign(abs(a) // abs(b), a * b)) if a else 0
    assert scalar(a, I32) // b == quotient
    assert scalar(a, I32) % b == a - quotient * b
    assert (tile(a, dtype=np.int32) // b).np[0] == quotient
    assert (tile(a, dtype=np.int32) % b).np[0] == a - quotient * b


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_uint32_wraps(a: int, b: int) -> None:
    x, y = scalar(a, U32), scalar(b, U32)
    assert (x + y, x - y, x * y) == ((a + b) % 2**32, (a - b) % 2**32, a * b % 2**32)
    s, t = tile(a, dtype=np.uint32), tile(b, dtype=np.uint32)
    assert (s * t).np[0] == a * b % 2**32
    assert umulhi(s, t).np[0] == umulhi(x, y) == a * b >> 32


def test_types_of_scalars() -> None:
    i = scalar(3, I32)
    assert (i + 1).np_dtype == I32
    assert (i * 1.5).np_dtype == F32
    assert (i + scalar(1, I64)).np_dtype == I64
    assert (i + scalar(1, U32)).np_dtype == U32
    assert (i < 4).np_dtype == BOOL
    assert not ~(i < 4)
    assert (1 / i).np_dtype == F32
    assert [10, 11, 12, 13][i] == 13
    assert scalar(0.1, F32) * 3 == np.float32(np.float32(0.1) * np.float32(3))
    assert scalar(-1, I32).to(gl.uint32, bitcast=True) == 2**32 - 1
    assert scalar(1.0, F32).to(gl.int32, bitcast=True) == 0x3F800000
    assert scalar(2.7, F32).to(gl.int32) == 2
    with pytest.raises(ValueError, match="out of range"):
        tile(1, dtype=np.uint32) + -1


def test_promotion_is_tritons() -> None:
    half, b = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
    assert promote(b, False, F32, True) == b  # a constant does not widen
    assert promote(b, False, F32, True, division=True) == F32
    assert promote(b, False, half, False) == half
    assert promote(b, False, F32, False) == F32
    assert promote(I32, False, F32, True) == F32
    assert promote(BOOL, False, np.dtype(np.int8), False) == np.dtype(np.int8)
    with pytest.raises(TypeError, match="signs"):
        promote(I32, False, U32, False, division=True)


def test_fused_multiply_add_shows_a_nan_that_two_roundings_hide() -> None:
    """s * scale - m * scale with a large finite mask: 0 in two roundings, 2**inf on the GPU."""
    s, m = tile(-1e30), tile(-1e30)
    scale = scalar(0.125 * 1.4426950408889634, F32)
    with np.errstate(all="ignore"):
        separate = s.np * np.float32(scale) - m.np * np.float32(scale)
    fused = s * scale - m * scale
    assert separate[0] == 0
    assert abs(fused.np[0]) > 1e20


@pytest.mark.parametrize("fuse", [True, False])
def test_fusing_is_an_option(fuse: bool) -> None:
    out = torch.zeros(128)
    sim.launch(masked_softmax_weight, (1,), (out, -1e30, 0.18), fuse_multiply_add=fuse).raise_if_any()
    assert (out == 1).all() != fuse


@gluon.jit
def masked_softmax_weight(out_ptr, value, scale):
    s = gl.full([128], 0.0, gl.float32, LINE) + value
    weight = gl.exp2(s * scale - s * scale)
    gl.store(out_ptr + gl.arange(0, 128, LINE), weight)


@given(st.floats(-140, 100, width=32))
def test_exp2_is_as_good_as_the_gpus_and_no_better(x: float) -> None:
    got = float(numerics.exp2(np.array([x], np.float32), True)[0])
    want = 2.0 ** float(np.float32(x))
    if want < 2.0**-126:
        assert got <= 2.0**-126  # flushed
    else:
        assert abs(got / want - 1) <= 2.0**-22


def test_exp2_keeps_infinities_and_integers() -> None:
    x = np.array([-np.inf, np.inf, np.nan, 0, 3], np.float32)
    assert np.array_equal(numerics.exp2(x, True), np.array([0, np.inf, np.nan, 1, 8]), equal_nan=True)


def test_hopper_fp8_accumulator_is_short() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((16, 4096)).astype(ml_dtypes.float8_e4m3fn) for _ in range(2))
    exact = a.astype(np.float64) @ b.astype(np.float64).T

    def rms(x: Any) -> float:
        return float(np.sqrt(((x - exact) ** 2).mean() / (exact**2).mean()))

    full = rms(numerics.dot(a, b.T))
    short = rms(numerics.dot_fp8_hopper(a, b.T, None, 13, 0))
    promoted = rms(numerics.dot_fp8_hopper(a, b.T, None, 13, 128))
    assert full < 1e-6 < promoted < short < 1e-2


def test_tf32_operands() -> None:
    a = np.full((8, 8), 1 + 2.0**-12, np.float32)
    assert (numerics.dot(a, a) == 8).all()


def test_inline_assembly_by_its_twin() -> None:
    out = torch.zeros(128, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match=r"popc\.b32"):
        sim.launch(population_count, (1,), (out,))
    sim.register_asm("popc.b32  $0, $1;", lambda x: np.array([int(v).bit_count() for v in x]))
    sim.launch(population_count, (1,), (out,)).raise_if_any()
    assert out.tolist() == [i.bit_count() for i in range(128)]


@gluon.jit
def population_count(out_ptr):
    x = gl.arange(0, 128, LINE)
    n = gl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1)
    gl.store(out_ptr + x, n)


@gluon.jit
def many_operations(x_ptr, out_ptr):
    i = gl.arange(0, 128, LINE)
    x = gl.load(x_ptr + i)
    y = gl.maximum(x, 0.0) + gl.where(i % 2 == 0, x, -1.0)
    total = gl.sum(y, axis=0)
    top = gl.max(x, axis=0)
    a, b = gl.split(x.reshape([64, 2]))
    joined = gl.join(a, b).reshape([128])
    running = gl.associative_scan(joined, 0, plus)
    folded = gl.reduce(x, 0, plus)
    y = y + total - top + running + folded
    gl.store(out_ptr + i, gl.convert_layout(y, LINE), mask=i < 100)


@gluon.jit
def plus(a, b):
    return a + b


def test_many_operations() -> None:
    x = torch.randn(128, generator=torch.Generator().manual_seed(0))
    out = torch.zeros(128)
    sim.launch(many_operations, (1,), (x, out)).raise_if_any()
    i = torch.arange(128)
    y = x.clamp_min(0) + torch.where(i % 2 == 0, x, -1.0)
    want = y + y.sum() - x.max() + x.cumsum(0) + x.sum()
    assert torch.allclose(out[:100], want[:100], atol=1e-4)
    assert (out[100:] == 0).all()
