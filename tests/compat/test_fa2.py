"""``tilewise.compat.fa2`` against plain PyTorch, every argument honoured or refused."""

from __future__ import annotations

import math

import pytest
import torch
from textbook import attend, attend_packed, leaves, same

from tilewise import UnsupportedError
from tilewise.compat import fa2

CU_Q = torch.tensor([0, 5, 5, 12, 13], dtype=torch.int32)
CU_K = torch.tensor([0, 7, 10, 10, 19], dtype=torch.int32)
LENGTHS = (CU_Q, CU_K, 7, 9)

SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
#: What is asked of flash_attn, and the same asked of plain PyTorch.
CASES = {
    "defaults": ({}, {}),
    "scale": ({"softmax_scale": 0.3}, {"scale": 0.3}),
    "causal": ({"causal": True}, {"window": (None, 0)}),
    "window": ({"window_size": (3, 2)}, {"window": (3, 2)}),
    "window of zero": ({"window_size": (0, 0)}, {"window": (0, 0)}),
    "left only": ({"window_size": (3, -1)}, {"window": (3, None)}),
    "right only": ({"window_size": [-1, 2]}, {"window": (None, 2)}),
    "causal and left": ({"causal": True, "window_size": (3, -1)}, {"window": (3, 0)}),
    "causal beats right": ({"causal": True, "window_size": (3, 4)}, {"window": (3, 0)}),
    "softcap": ({"softcap": 1.5}, {"softcap": 1.5}),
    "alibi": ({"alibi_slopes": SLOPES}, {"alibi_slopes": SLOPES}),
    "deterministic": ({"deterministic": True}, {}),
}
cases = pytest.mark.parametrize(("asked", "meant"), CASES.values(), ids=CASES)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def dense(sq: int = 6, sk: int = 9, heads_kv: int = 2) -> list[torch.Tensor]:
    return [torch.randn(2, s, h, 8).double() for s, h in ((sq, 4), (sk, heads_kv), (sk, heads_kv))]


def packed(heads_kv: int = 2) -> list[torch.Tensor]:
    return [torch.randn(n, h, 8).double() for n, h in ((13, 4), (19, heads_kv), (19, heads_kv))]


@cases
def test_dense(asked, meant):
    """An argument that is dropped, or means something else; also in the gradients."""
    tensors = dense()
    mine, theirs = leaves(*tensors), leaves(*tensors)
    out, lse, mask = fa2.flash_attn_func(*mine, return_attn_probs=True, **asked)
    assert mask is None
    same((out, lse), attend(*theirs, **meant), mine, theirs)


@cases
def test_varlen(asked, meant):
    """The same where sequences differ and some have no queries or no keys."""
    tensors = packed()
    mine, theirs = leaves(*tensors), leaves(*tensors)
    out, lse, mask = fa2.flash_attn_varlen_func(*mine, *LENGTHS, return_attn_probs=True, **asked)
    assert mask is None
    same((out, lse), attend_packed(*theirs, CU_Q, CU_K, **meant), mine, theirs)


def test_rows_without_keys():
    """NaN, or flash_attn's +inf, where a causal row sees nothing."""
    out, lse, _ = fa2.flash_attn_func(*dense(9, 6), causal=True, return_attn_probs=True)
    assert (out[:, :3] == 0).all() and (lse[..., :3] == -math.inf).all()
    assert lse[..., 3:].isfinite().all()


def test_alibi_slopes_of_each_sequence():
    """(B, H) slopes read as one row for all."""
    slopes = torch.rand(2, 4)
    q, k, v = dense()
    torch.testing.assert_close(
        fa2.flash_attn_func(q, k, v, alibi_slopes=slopes), attend(q, k, v, alibi_slopes=slopes)[0]
    )
    slopes = torch.rand(4, 4)
    q, k, v = packed()
    got = fa2.flash_attn_varlen_func(q, k, v, *LENGTHS, alibi_slopes=slopes)
    torch.testing.assert_close(got, attend_packed(q, k, v, CU_Q, CU_K, alibi_slopes=slopes)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    """A result in another dtype than the inputs', or an lse in theirs."""
    q, k, v = (t.to(dtype) for t in dense())
    out, lse, _ = fa2.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert out.dtype == dtype and lse.dtype == torch.float32
    want = attend(q.double(), k.double(), v.double(), window=(None, 0))[0]
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), want, atol=tolerance, rtol=tolerance)


def test_dropout_drops_that_share_and_keeps_the_mean():
    """dropout_p that is dropped or not made up for; bits that manual_seed does not repeat."""
    q, k = torch.randn(2, 64, 4, 8), torch.randn(2, 64, 4, 8)
    ones = torch.ones(2, 64, 4, 8)

    def run():
        torch.manual_seed(3)
        return fa2.flash_attn_func(q, k, ones, 0.25, return_attn_probs=True)

    (out, lse, mask), (again, _, _) = run(), run()
    assert torch.equal(out, again) and mask is None
    assert not torch.equal(out, fa2.flash_attn_func(q, k, ones, 0.25))
    assert out.mean().item() == pytest.approx(1, abs=0.03) and out.std() > 0.05
    torch.testing.assert_close(lse, attend(q, k, ones)[1])  # of the weights before dropout

    # With unit vectors as values the output is the weights themselves.
    eye = torch.eye(64)[None, :, None].expand(2, 64, 4, 64)
    weights = fa2.flash_attn_func(q, k, eye, dropout_p=0.25)
    assert (weights == 0).double().mean().item() == pytest.approx(0.25, abs=0.02)


def test_dropout_in_packed_sequences():
    q, k, v = packed()
    ones = torch.ones_like(v)
    out = fa2.flash_attn_varlen_func(q, k, ones, *LENGTHS, 0.5)
    assert not torch.allclose(out[:5], torch.ones_like(out[:5]))


def test_positions():
    """A call by position, as most are written, with arguments in another order."""
    q, k, v = dense()
    options = (0.0, 0.3, True, (3, -1), 1.5, SLOPES, True, True)
    meant = {"scale": 0.3, "window": (3, 0), "softcap": 1.5, "alibi_slopes": SLOPES}
    out, lse, _ = fa2.flash_attn_func(q, k, v, *options)
    want, want_lse = attend(q, k, v, **meant)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)
    kv = torch.stack([k, v], 2)
    assert torch.equal(fa2.flash_attn_kvpacked_func(q, kv, *options)[0], out)
    qkv = torch.stack([k, k, v], 2).repeat_interleave(2, 3)
    got = fa2.flash_attn_qkvpacked_func(qkv, *options)
    torch.testing.assert_close(got[0], attend(*qkv.unbind(2), **meant)[0])

    q, k, v = packed()
    want, want_lse = attend_packed(q, k, v, CU_Q, CU_K, **meant)
    out, lse, _ = fa2.flash_attn_varlen_func(q, k, v, *LENGTHS, *options, None)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)
    out, lse, _ = fa2.flash_attn_varlen_kvpacked_func(q, torch.stack([k, v], 1), *LENGTHS, *options)
    torch.testing.assert_close(out, want)
    qkv = torch.stack([k, k, v], 1).repeat_interleave(2, 2)
    out, lse, _ = fa2.flash_attn_varlen_qkvpacked_func(qkv, CU_K, 9, *options)
    torch.testing.assert_close(out, attend_packed(*qkv.unbind(1), CU_K, CU_K, **meant)[0])


@cases
def test_packed_heads_give_the_gradient_of_the_packed_tensor(asked, meant):
    """An argument that the packed forms drop; a gradient that ends in a view."""
    qkv = torch.randn(2, 9, 3, 4, 8).double()
    (mine,), (theirs,) = leaves(qkv), leaves(qkv)
    got = fa2.flash_attn_qkvpacked_func(mine, return_attn_probs=True, **asked)
    same(got[:2], attend(*theirs.unbind(2), **meant), [mine], [theirs])

    q, k, v = dense()
    kv = torch.stack([k, v], 2)
    mine, theirs = leaves(q, kv), leaves(q, kv)
    got = fa2.flash_attn_kvpacked_func(*mine, return_attn_probs=True, **asked)
    same(got[:2], attend(theirs[0], *theirs[1].unbind(2), **meant), mine, theirs)

    qkv = torch.randn(19, 3, 4, 8).double()
    (mine,), (theirs,) = leaves(qkv), leaves(qkv)
    got = fa2.flash_attn_varlen_qkvpacked_func(mine, CU_K, 9, return_attn_probs=True, **asked)
    same(got[:2], attend_packed(*theirs.unbind(1), CU_K, CU_K, **meant), [mine], [theirs])

    q, k, v = packed()
    kv = torch.stack([k, v], 1)
    mine, theirs = leaves(q, kv), leaves(q, kv)
    got = fa2.flash_attn_varlen_kvpacked_func(*mine, *LENGTHS, return_attn_probs=True, **asked)
    same(got[:2], attend_packed(theirs[0], *theirs[1].unbind(1), CU_Q, CU_K, **meant), mine, theirs)


def test_without_probs_the_output_alone():
    """A tuple where callers expect a tensor."""
    q, k, v = dense()
    assert fa2.flash_attn_func(q, k, v).shape == q.shape
    qkv = torch.randn(2, 9, 3, 4, 8)
    assert fa2.flash_attn_qkvpacked_func(qkv).shape == (2, 9, 4, 8)
    assert fa2.flash_attn_varlen_qkvpacked_func(qkv[0], torch.tensor([0, 9]).int(), 9).shape == (9, 4, 8)


def test_no_sequence_at_all():
    """Empty batches, which a data loader's last step may bring."""
    empty = torch.zeros(1, dtype=torch.int32)
    qkv = torch.randn(0, 3, 4, 8, requires_grad=True)
    out = fa2.flash_attn_varlen_qkvpacked_func(qkv, empty, 0)
    out.sum().backward()
    assert out.shape == (0, 4, 8) and qkv.grad.shape == qkv.shape


def test_paged_keys_are_refused():
    """A block table that is dropped: keys would be read in the wrong order."""
    with pytest.raises(UnsupportedError, match="block_table"):
        fa2.flash_attn_varlen_func(*packed(), *LENGTHS, block_table=torch.zeros(4, 1).int())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"window_size": 3}, ValueError, "window_size"),
        ({"window_size": (1, 2, 3)}, ValueError, "window_size"),
        ({"window_size": (1.5, 2)}, TypeError, r"window_size\[0\]"),
        ({"softcap": -1.0}, ValueError, "softcap"),
        ({"dropout_p": 1.0}, ValueError, "dropout_p"),
        ({"softmax_scale": "big"}, TypeError, "scale"),
        ({"causal": 2}, TypeError, "causal"),
        ({"alibi_slopes": torch.ones(3)}, ValueError, "alibi_slopes"),
        ({"deterministic": None}, TypeError, "deterministic"),
        ({"return_attn_probs": 1}, TypeError, "return_lse"),
    ],
)
def test_bad_options(options, error, message):
    """Nonsense that is taken for a default."""
    with pytest.raises(error, match=message):
        fa2.flash_attn_func(*dense(), **options)


def test_bad_packing():
    """kv packed as (B, S, H, 2, D) and the like, which would unbind into something."""
    with pytest.raises(ValueError, match=r"qkv\.shape: .*\(B, S, 3, H, D\)"):
        fa2.flash_attn_qkvpacked_func(torch.randn(2, 9, 4, 3, 8))
    with pytest.raises(ValueError, match=r"kv\.shape"):
        fa2.flash_attn_kvpacked_func(dense()[0], torch.randn(2, 9, 3, 4, 8))
    with pytest.raises(ValueError, match=r"kv\.shape"):
        fa2.flash_attn_varlen_kvpacked_func(packed()[0], torch.randn(2, 19, 2, 2, 8), *LENGTHS)
    with pytest.raises(TypeError, match="qkv"):
        fa2.flash_attn_varlen_qkvpacked_func(None, CU_Q, 7)
