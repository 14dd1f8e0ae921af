"""flash_attn_combine of FlashAttention-3 and -4: parts of the keys give what all of them give."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from textbook import attend, leaves, same

from tilewise import UnsupportedError
from tilewise.compat import fa3, fa4

both = pytest.mark.parametrize("package", [fa3, fa4])


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def partial(q, k, v, cuts) -> tuple[torch.Tensor, torch.Tensor]:
    """Results over the keys between cuts, as the kernels leave them: heads last in the lse."""
    parts = [attend(q, k[:, a:b], v[:, a:b]) for a, b in pairwise(cuts)]
    outs, lses = zip(*parts, strict=True)
    return torch.stack(outs), torch.stack([lse.transpose(1, 2) for lse in lses])


def qkv(dtype=torch.float64) -> list[torch.Tensor]:
    return [torch.randn(2, s, 3, 8, dtype=dtype) for s in (5, 12, 12)]


@both
@pytest.mark.parametrize("cuts", [(0, 12), (0, 5, 12), (0, 0, 3, 4, 12)])
def test_parts_give_the_whole(package, cuts):
    """Weights, the lse's layout, a part without keys, one part alone; also in the gradients."""
    tensors = qkv()
    mine, theirs = leaves(*tensors), leaves(*tensors)
    out, lse = package.flash_attn_combine(*partial(*mine, cuts))
    assert lse.shape == (2, 5, 3)
    same((out, lse.transpose(1, 2)), attend(*theirs), mine, theirs)


@both
def test_packed(package):
    """(parts, total, H, Dv) taken for a batch."""
    q, k, v = (t[:1] for t in qkv())
    out_partial, lse_partial = partial(q, k, v, (0, 5, 12))
    out, lse = package.flash_attn_combine(out_partial[:, 0], lse_partial[:, 0])
    want, want_lse = attend(q, k, v)
    torch.testing.assert_close(out, want[0])
    torch.testing.assert_close(lse, want_lse[0].T)


@both
def test_dtypes(package):
    """A result that is rounded to the parts' dtype on its way to a finer one; an ignored out_dtype."""
    out_partial, lse_partial = partial(*qkv(torch.float32), (0, 5, 12))
    exact, _ = package.flash_attn_combine(out_partial, lse_partial)
    assert exact.dtype == torch.float32
    rounded, lse = package.flash_attn_combine(out_partial, lse_partial, out_dtype=torch.bfloat16)
    assert torch.equal(rounded, exact.bfloat16()) and lse.dtype == torch.float32
    halves = out_partial.bfloat16()
    assert package.flash_attn_combine(halves, lse_partial)[0].dtype == torch.bfloat16
    wide, _ = package.flash_attn_combine(halves, lse_partial, out_dtype=torch.float32)
    assert torch.equal(wide, package.flash_attn_combine(halves.float(), lse_partial)[0])


@both
def test_out(package):
    """A buffer that is not written, or of a dtype or shape that cannot hold the result."""
    out_partial, lse_partial = partial(*qkv(torch.float32), (0, 5, 12))
    want, _ = package.flash_attn_combine(out_partial, lse_partial, None, torch.float16)
    out = torch.full((2, 5, 3, 8), 7, dtype=torch.float16)
    got, _ = package.flash_attn_combine(out_partial, lse_partial, out)
    assert got is out and torch.equal(out, want)
    with pytest.raises(TypeError, match=r"out\.dtype"):
        package.flash_attn_combine(out_partial, lse_partial, out, torch.float32)
    with pytest.raises(ValueError, match=r"out\.shape"):
        package.flash_attn_combine(out_partial, lse_partial, out[:1])


@both
def test_bad_parts(package):
    """lse with heads before rows, as attention itself returns it: weights of other rows."""
    out_partial, lse_partial = partial(*qkv(torch.float32), (0, 5, 12))
    with pytest.raises(ValueError, match=r"lse_partial\.shape"):
        package.flash_attn_combine(out_partial, lse_partial.transpose(2, 3))
    with pytest.raises(TypeError, match=r"lse_partial\.dtype"):
        package.flash_attn_combine(out_partial, lse_partial.half())
    with pytest.raises(ValueError, match=r"out_partial\.shape"):
        package.flash_attn_combine(out_partial[0, 0], lse_partial[0, 0])
    with pytest.raises(ValueError, match=r"out_partial\.shape"):
        package.flash_attn_combine(out_partial[:0], lse_partial[:0])
    with pytest.raises(TypeError, match="out_partial"):
        package.flash_attn_combine(None, lse_partial)


@both
def test_rows_that_no_part_saw(package):
    """NaN from 0 / 0, or what the parts' outputs hold there."""
    out_partial = torch.full((2, 1, 4, 3, 8), math.nan)
    lse_partial = torch.full((2, 1, 4, 3), -math.inf)
    for n in (1, 2):
        out, lse = package.flash_attn_combine(out_partial[:n], lse_partial[:n])
        assert (out == 0).all() and (lse == -math.inf).all()


@pytest.mark.parametrize("name", ["cu_seqlens", "seqused", "virtual_batch_idx"])
def test_fa4_rows_to_leave_alone_are_refused(name):
    """Rows that the caller wants untouched, overwritten."""
    with pytest.raises(UnsupportedError, match=name):
        fa4.flash_attn_combine(*partial(*qkv(), (0, 12)), **{name: torch.zeros(2).int()})


def test_fa4_without_lse():
    """return_lse that is dropped."""
    assert fa4.flash_attn_combine(*partial(*qkv(), (0, 12)), return_lse=False)[1] is None
