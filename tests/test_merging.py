"""tilewise.merging: parts of the keys joined are the whole, to the last bit that rounding leaves."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

from tilewise import attention, merge


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def qkv(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    q, k, v = (torch.randn(2, s, h, 16) for s, h in ((9, 4), (12, 2), (12, 2)))
    return tuple(t.to(dtype) for t in (q, k, v))


def parts_of(q, k, v, split: int, **options: Any) -> tuple[torch.Tensor, ...]:
    """Attention to the keys before ``split`` and from it on: out1, lse1, out2, lse2."""
    first = attention(q, k[:, :split], v[:, :split], return_lse=True, **options)
    second = attention(q, k[:, split:], v[:, split:], return_lse=True, **options)
    return *first, *second


@pytest.mark.parametrize("split", [0, 1, 5, 12])
def test_merge_of_parts_is_the_whole(split: int):
    """Also where one part has no key at all: its lse is -inf and it must not make NaN of the other."""
    q, k, v = qkv(dtype=torch.float64)
    out, lse = merge(*parts_of(q, k, v, split))
    want, want_lse = attention(q, k, v, return_lse=True)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, want_lse, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("split", [0, 5])
def test_merge_has_the_gradients_of_the_whole(split: int):
    """They reach the parts through lse too: a lse without gradient is silently wrong here."""
    leaves = [t.requires_grad_() for t in qkv(dtype=torch.float64)]
    dout, dlse = torch.randn(2, 9, 4, 16).double(), torch.randn(2, 4, 9).double()
    merged = merge(*parts_of(*leaves, split))
    whole = attention(*leaves, return_lse=True)
    got, want = (torch.autograd.grad(r, leaves, (dout, dlse)) for r in (merged, whole))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


def test_merge_of_nothing_is_nothing():
    out1, out2 = torch.zeros(1, 3, 2, 4), torch.zeros(1, 3, 2, 4)
    nothing = torch.full((1, 2, 3), -math.inf)
    tensors = [t.requires_grad_() for t in (out1, nothing.clone(), out2, nothing.clone())]
    out, lse = merge(*tensors)
    assert (out == 0).all() and (lse == -math.inf).all()
    for g in torch.autograd.grad([out, lse], tensors, [torch.ones_like(out), torch.ones_like(lse)]):
        assert g.isfinite().all()


def test_merge_passes_gradcheck():
    out1, out2 = (torch.randn(2, 3, 2, 4).double().requires_grad_() for _ in range(2))
    lse1, lse2 = (torch.randn(2, 2, 3).double().requires_grad_() for _ in range(2))
    assert torch.autograd.gradcheck(merge, (out1, lse1, out2, lse2))


def test_merge_is_exact_far_apart():
    """exp of the raw values would overflow or vanish."""
    ones = torch.ones(1, 1, 1, 2)
    for top in (1e4, -1e4):
        near, far = torch.full((1, 1, 1), top), torch.full((1, 1, 1), top - 200)
        out, lse = merge(ones, near, 3 * ones, far)
        assert torch.equal(out, ones) and torch.equal(lse, near)
        out, lse = merge(ones, near, 3 * ones, near)
        assert torch.equal(out, 2 * ones) and lse.item() == pytest.approx(top + math.log(2))


def test_merge_layouts_and_dtype():
    out1, out2 = torch.randn(2, 3, 4, 8).half(), torch.randn(2, 3, 4, 8).half()
    lse1, lse2 = torch.randn(2, 4, 3), torch.randn(2, 4, 3)
    out, lse = merge(out1, lse1, out2, lse2)
    assert out.dtype == torch.float16 and lse.dtype == torch.float32
    heads_first, same = merge(out1.transpose(1, 2), lse1, out2.transpose(1, 2), lse2, layout="bhsd")
    assert torch.equal(heads_first, out.transpose(1, 2)) and torch.equal(lse, same)
    packed, _ = merge(out1[0], lse1[0], out2[0], lse2[0])  # (total, H, Dv)
    assert torch.equal(packed, out[0])


def test_merge_bad_input():
    out, lse = torch.zeros(2, 3, 4, 8), torch.zeros(2, 4, 3)
    with pytest.raises(ValueError, match=r"out2.shape: got \(2, 3, 4, 7\); allowed is \(2, 3, 4, 8\)"):
        merge(out, lse, out[..., :7], lse)
    with pytest.raises(ValueError, match=r"lse2.shape: got \(2, 3, 4\); allowed is \(2, 4, 3\)"):
        merge(out, lse, out, lse.mT)
    with pytest.raises(ValueError, match=r"lse1.shape: got \(2, 4, 3\); allowed is \(2, 3, 4\)"):
        merge(out, lse, out, lse, layout="bhsd")
    with pytest.raises(ValueError, match="layout: got 'x'"):
        merge(out, lse, out, lse, layout="x")


def test_many_parts_are_rounded_once():
    """Joined in pairs, each step rounded to fp16: the error grew with the number of parts."""
    q, k, v = qkv(torch.float16)
    parts = [attention(q, k[:, n : n + 1], v[:, n : n + 1], return_lse=True) for n in range(12)]
    out, lse = merge(*(t for part in parts for t in part))
    doubles = [(out.double(), lse.double()) for out, lse in parts]
    exact, exact_lse = doubles[0]
    for part in doubles[1:]:
        exact, exact_lse = merge(exact, exact_lse, *part)
    assert (out.double() - exact).abs().max() <= 2**-11 * exact.abs().max()
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-6)
    assert torch.equal(out, exact.half()) or (out != exact.half()).float().mean() < 0.01


@pytest.mark.parametrize("rubbish", [math.nan, math.inf])
def test_a_part_without_weight_is_not_looked_at(rubbish: float):
    """0 * NaN is NaN, in the output and in the gradients."""
    out1, out2 = torch.randn(1, 3, 2, 4), torch.full((1, 3, 2, 4), rubbish)
    lse1, lse2 = torch.randn(1, 2, 3), torch.full((1, 2, 3), -math.inf)
    leaves = [t.requires_grad_() for t in (out1, lse1, out2, lse2)]
    out, lse = merge(*leaves)
    assert torch.equal(out, out1) and torch.equal(lse, lse1)
    for g in torch.autograd.grad([out, lse], leaves, [torch.ones_like(out), torch.ones_like(lse)]):
        assert g.isfinite().all()


def test_what_is_nan_with_weight_stays_nan():
    out, lse = torch.randn(1, 3, 2, 4), torch.randn(1, 2, 3)
    assert merge(out, lse, torch.full_like(out, math.nan), lse)[0].isnan().all()


OUT, LSE = torch.zeros(2, 3, 4, 8), torch.zeros(2, 4, 3)
GOOD = {"out1": OUT, "lse1": LSE, "out2": OUT, "lse2": LSE}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"out1": [1.0]}, TypeError, "out1: got list; allowed is a tensor"),
        ({"lse2": None}, TypeError, "lse2: got NoneType; allowed is a tensor"),
        ({"out2": OUT.to_sparse()}, TypeError, "out2.layout: got torch.sparse_coo; allowed"),
        ({"out1": OUT.int()}, TypeError, "out1.dtype: got torch.int32; allowed is fp16, bf16"),
        ({"out2": OUT.half()}, TypeError, "out2.dtype: got torch.float16; allowed is out1's"),
        ({"lse1": LSE.half()}, TypeError, "lse1.dtype: got torch.float16; allowed is torch.float32"),
        ({"lse2": LSE.double()}, TypeError, "lse2.dtype: got torch.float64; allowed is torch.float32"),
        (
            {"lse2": LSE.to("meta")},
            ValueError,
            "lse2.device: got device(type='meta'); allowed is out1's",
        ),
        ({"out1": torch.zeros(4, 8)}, ValueError, "out1.shape: got (4, 8); allowed is rank 4"),
    ],
)
def test_merge_names_what_is_wrong(changes, error, message):
    merge(**GOOD)
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        merge(**GOOD | changes)


def test_merge_of_parts_that_are_no_pairs():
    out, lse = OUT, LSE
    with pytest.raises(ValueError, match=r"^more: got 1; allowed is an even number of tensors$"):
        merge(out, lse, out, lse, out)
    with pytest.raises(ValueError, match=r"^lse3.shape: got \(2, 3, 4\); allowed is \(2, 4, 3\)$"):
        merge(out, lse, out, lse, out, lse.mT)
    with pytest.raises(ValueError, match=r"^out1.shape: got \(3, 4, 8\); allowed is rank 4"):
        merge(out[0], lse[0], out[0], lse[0], layout="bhsd")


def test_merge_compiles_whole_for_any_length():
    """Messages that are written before they are needed cannot be, of a length that is a symbol."""
    compiled = torch.compile(merge, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (3, 5):
        parts = torch.randn(2, rows, 4, 8), torch.randn(2, 4, rows), torch.randn(2, rows, 4, 8)
        torch.testing.assert_close(compiled(*parts, parts[1]), merge(*parts, parts[1]))
