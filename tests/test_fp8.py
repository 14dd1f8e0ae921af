"""tilewise.fp8: what quantisation and rotation promise, whatever the numbers are."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tilewise import fp8

ROOT = Path(__file__).parents[1]

# Every number that e4m3 has, from its bits: sign, 4 of exponent (bias 7), 3 of mantissa; no infinity.
NUMBERS = sorted(
    {
        (8 + m if e else m) * 2.0 ** (max(e, 1) - 10)
        for e in range(16)
        for m in range(8)
        if (e, m) != (15, 7)
    }
)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def through(x: Tensor, used: range | None = None, tile: int | None = None) -> Tensor:
    return fp8.quantize(x, range(x.shape[1]) if used is None else used, tile).dequantized()


def test_a_number_goes_to_the_nearest_one_and_a_tie_to_the_even_one():
    """Truncation, ties away from zero, subnormal numbers flushed: all are biased."""
    numbers = torch.tensor(NUMBERS)
    assert len(numbers) == 127 and numbers[-1] == fp8.LARGEST
    assert torch.equal(fp8.encode(numbers).float(), numbers)
    low, high = numbers[:-1], numbers[1:]
    middle = (low + high) / 2
    even = torch.where(torch.arange(126) % 2 == 0, low, high)  # codes are numbered in order
    assert torch.equal(fp8.encode(middle).float(), even)
    for sign in (1, -1):
        assert torch.equal(fp8.encode(sign * (low + 0.49 * (high - low))).float(), sign * low)
        assert torch.equal(fp8.encode(sign * (low + 0.51 * (high - low))).float(), sign * high)


def test_beyond_the_largest_number_is_the_largest():
    """Conversion alone gives NaN there in some versions of PyTorch."""
    x = torch.tensor([448.0, 449.0, 464.0, 465.0, 1e30, -1e30])
    assert torch.equal(fp8.encode(x).float(), x.clamp(-448, 448))
    assert fp8.encode(torch.tensor(math.nan)).float().isnan()


@given(
    exponents=st.lists(st.integers(-14, 0), min_size=1, max_size=20),
    shift=st.integers(-90, 90),
    seed=st.integers(0, 99),
)
def test_powers_of_two_are_exact(exponents: list[int], shift: int, seed: int):
    """Within 15 binary orders of the largest, which is 448 of a scale that is itself rounded."""
    sign = 1 - 2 * torch.randint(2, (len(exponents),), generator=torch.Generator().manual_seed(seed))
    x = torch.ldexp(sign.float(), torch.tensor(exponents) - max(exponents) + shift).view(1, -1, 1, 1)
    assert torch.equal(through(x), x)


@given(
    rows=st.integers(1, 9),
    tile=st.sampled_from([None, 1, 4, 128]),
    spread=st.floats(0, 12),
    shift=st.integers(-90, 90),
    seed=st.integers(0, 99),
)
def test_each_element_is_within_half_a_step(rows, tile, spread, shift, seed):
    """A wrong scale, or one that belongs to another tile, head or member of the group."""
    x = normal(2, rows, 3, 5, seed=seed) * torch.exp2(normal(2, rows, 3, 5, seed=seed + 1) * spread)
    x = x.clamp(-1e9, 1e9) * 2.0**shift
    q = fp8.quantize(x, range(rows), tile)
    step = rows if tile is None else tile
    for start in range(0, rows, step):
        part = x[:, start : start + step]
        largest = part.abs().amax((1, 2, 3) if tile is None else (1, 3), keepdim=True)
        scale = largest.double() / 448
        bound = torch.maximum(part.double().abs() * 2.0**-4, scale * 2.0**-10) * (1 + 2.0**-20)
        got = q.dequantized()[:, start : start + step]
        assert ((got.double() - part.double()).abs() <= bound).all()
        top = got.abs().amax((1, 2, 3) if tile is None else (1, 3), keepdim=True)
        torch.testing.assert_close(top, largest, rtol=2.0**-23, atol=0)  # it is 448 of its scale


@given(shift=st.integers(-60, 60), seed=st.integers(0, 99), tile=st.sampled_from([None, 3]))
def test_a_power_of_two_as_a_factor_changes_no_code(shift: int, seed: int, tile: int | None):
    x = normal(2, 7, 2, 4, seed=seed)
    plain, scaled = (fp8.quantize(t, range(7), tile) for t in (x, x * 2.0**shift))
    assert torch.equal(plain.codes.view(torch.uint8), scaled.codes.view(torch.uint8))
    assert torch.equal(plain.descale * 2.0**shift, scaled.descale)


@given(
    rows=st.integers(1, 12),
    tile=st.integers(1, 5),
    which=st.integers(0, 11),
    value=st.sampled_from([1e30, math.inf, -math.inf, math.nan]),
)
def test_a_tile_does_not_depend_on_what_lies_in_others(rows, tile, which, value):
    x = normal(2, rows, 2, 4)
    dirty = x.clone()
    dirty[0, which % rows, 1] = value
    clean, got = through(x, tile=tile), through(dirty, tile=tile)
    same = torch.arange(rows) // tile != which % rows // tile
    assert torch.equal(got[:, same], clean[:, same])
    assert torch.equal(got[1], clean[1]) and torch.equal(got[0, :, 0], clean[0, :, 0])


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("tile", [None, 4])
def test_unused_rows_have_no_part_in_a_scale(tile: int | None, value: float):
    """Padding of a cache, which is whatever memory held before."""
    x = normal(2, 11, 2, 4)
    used = range(3, 6)
    clean = fp8.quantize(x, used, tile)
    x[:, :3] = x[:, 6:] = value
    got = fp8.quantize(x, used, tile)
    assert torch.equal(got.dequantized(), clean.dequantized())
    assert torch.equal(got.descale, clean.descale)
    assert (got.dequantized()[:, 6:] == 0).all() and got.dequantized()[:, 3:6].all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_spoils_itself_alone(value: float):
    """Through the scale it would spoil its whole tile, which rows see that do not see it."""
    x = normal(1, 6, 1, 4)
    clean = through(x.masked_fill(torch.arange(4) == 2, 0))
    x[..., 2] = value
    got = through(x)
    assert got[..., 2].isnan().all()
    assert torch.equal(got[..., :2], clean[..., :2]) and torch.equal(got[..., 3], clean[..., 3])


def test_zeros_have_the_scale_1():
    q = fp8.quantize(torch.zeros(1, 3, 1, 4), range(3), 2)
    assert (q.descale == 1).all() and (q.dequantized() == 0).all()


def test_the_smallest_numbers_do_not_become_nan():
    """448 divides them to 0, or to what a GPU takes for 0."""
    x = torch.full((1, 3, 1, 4), 1e-45)
    assert (through(x).abs() <= 1e-40).all()


@pytest.mark.parametrize("tile", [None, 2])
def test_no_rows_are_no_tiles(tile: int | None):
    assert through(torch.zeros(2, 0, 3, 4), tile=tile).shape == (2, 0, 3, 4)


# --- weights ------------------------------------------------------------------------------------------


def test_weights_keep_a_sixteenth_down_to_2_to_the_minus_14():
    p = torch.cat([torch.exp2(-torch.rand(1000) * 30), torch.tensor([0.0, 1.0])])
    got = fp8.round_weights_(p.clone())
    error = (got.double() - p.double()).abs()
    assert (error <= torch.maximum(p.double() * 2.0**-4, torch.tensor(2.0**-18))).all()
    assert got[-1] == 1 and got[-2] == 0
    assert (got[p <= 2.0**-18] == 0).all() and (got[p > 2.0**-17.9] > 0).all()


# --- rotation -----------------------------------------------------------------------------------------


def hadamard(width: int) -> Tensor:
    """By Sylvester's construction."""
    one = torch.ones(1, 1, dtype=torch.float64)
    while one.shape[0] < width:
        one = torch.cat([torch.cat([one, one], 1), torch.cat([one, -one], 1)])
    return one / width**0.5


@pytest.mark.parametrize("dim", [1, 2, 3, 5, 16, 59, 64, 96, 128, 200, 256])
def test_the_fast_transform_is_the_matrix(dim: int):
    heads, width = range(2, 5), fp8.padded(dim)
    assert width >= dim > width // 2 and width & (width - 1) == 0
    x = normal(3, 4, 2, dim)
    sign = fp8.signs(heads, width).double()
    wide = torch.nn.functional.pad(x.double(), (0, width - dim)) * sign[:, None, None]
    torch.testing.assert_close(fp8.rotate(x, heads).double(), wide @ hadamard(width), rtol=0, atol=1e-5)


@given(dim=st.integers(1, 256), head=st.integers(0, 999), seed=st.integers(0, 99))
def test_a_rotation_leaves_products_as_they_are(dim: int, head: int, seed: int):
    """Signs that differ between queries and keys, a wrong factor, padding that is read."""
    q, k = normal(2, 1, 3, 1, dim, seed=seed)
    a, b = (fp8.rotate(t, range(head, head + 1)).double() for t in (q, k))
    want = torch.einsum("hiud,hjud->hij", q.double(), k.double())
    got = torch.einsum("hiud,hjud->hij", a, b)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * dim**0.5)


@pytest.mark.parametrize("width", [1, 2, 32, 128, 256])
def test_a_rotation_is_its_own_inverse_up_to_signs(width: int):
    """H is symmetric and orthogonal: diag(s) H, then H diag(s), is nothing."""
    heads = range(1)
    x, sign = normal(1, 5, 1, width), fp8.signs(heads, width)
    # rotate multiplies by the signs first; taken away again they leave H alone.
    back = fp8.rotate(fp8.rotate(x, heads) * sign, heads) * sign
    torch.testing.assert_close(back, x, rtol=0, atol=1e-5)


def test_the_transform_is_linear_in_each_row_alone():
    """Rows that are mixed, or NaN that wanders from one to another."""
    x = normal(1, 5, 2, 16)
    clean = fp8.rotate(x, range(1))
    x[0, 3] = math.nan
    got = fp8.rotate(x, range(1))
    assert torch.equal(got[0, :3], clean[0, :3]) and torch.equal(got[0, 4], clean[0, 4])


def test_an_outlier_is_spread_over_all_components():
    x = torch.zeros(1, 1, 1, 64)
    x[..., 17] = 8.0
    assert torch.equal(fp8.rotate(x, range(1)).abs(), torch.ones(1, 1, 1, 64))


def test_signs_do_not_depend_on_which_heads_are_asked_for():
    """A backend makes those of one head, of some or of all."""
    every = fp8.signs(range(9), 256)
    assert torch.equal(fp8.signs(range(4, 7), 256), every[4:7])
    assert torch.equal(fp8.signs(range(9), 64), every[:, :64])


def test_signs_are_as_random_as_coins():
    every = fp8.signs(range(64), 256)
    assert set(every.unique().tolist()) == {-1.0, 1.0}
    products = (every @ every.T / 256).fill_diagonal_(0)
    assert every.mean().abs() < 4 / 128 and products.abs().max() < 5 / 16
    assert (every.mean(0).abs() < 5 / 8).all()


def test_signs_are_what_they_were():
    """Other signs are other results: a kernel elsewhere makes the same ones."""
    bits = (fp8.signs(range(2), 32) < 0).long() << torch.arange(32)
    assert [hex(n) for n in bits.sum(1).tolist()] == SIGNS


SIGNS = ["0x4673f4b3", "0xc20e9697"]


# --- the table of errors ------------------------------------------------------------------------------


def test_the_documents_table_is_the_recorded_one():
    """docs/fp8.md, benchmarks/results and the script that makes both."""
    path = ROOT / "benchmarks" / "fp8_errors.py"
    spec = importlib.util.spec_from_file_location("fp8_errors", path)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    rows = json.loads((path.parent / "results" / "fp8-errors-cpu.json").read_text())["rows"]
    assert script.markdown(rows) in (ROOT / "docs" / "fp8.md").read_text(encoding="utf-8")
    (row,) = (r for r in rows if (r["inputs"], r["head_dim"], r["length"]) == ("outliers", 64, 2048))
    again = script.measure("outliers", 64, 2048)
    for how in ("tensor", "block", "rotated"):
        error = row[how]["relative_rmse"]
        assert again[how]["relative_rmse"] == pytest.approx(error, rel=0.05)
