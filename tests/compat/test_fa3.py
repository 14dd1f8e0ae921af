"""``tilewise.compat.fa3`` against plain PyTorch, every argument honoured or refused."""

from __future__ import annotations

import math

import pytest
import torch
from textbook import attend, attend_packed, leaves, same

from tilewise import UnsupportedError
from tilewise.compat import fa3

CU_Q = torch.tensor([0, 5, 5, 12, 13], dtype=torch.int32)
CU_K = torch.tensor([0, 7, 10, 10, 19], dtype=torch.int32)
LENGTHS = (CU_Q, CU_K, 7, 9)

CASES = {
    "defaults": ({}, {}),
    "scale": ({"softmax_scale": 0.3}, {"scale": 0.3}),
    "causal": ({"causal": True}, {"window": (None, 0)}),
    "window": ({"window_size": (3, 2)}, {"window": (3, 2)}),
    "left only": ({"window_size": (3, -1)}, {"window": (3, None)}),
    "causal beats right": ({"causal": True, "window_size": (3, 4)}, {"window": (3, 0)}),
    "softcap": ({"softcap": 1.5}, {"softcap": 1.5}),
    "deterministic": ({"deterministic": True}, {}),
    "sm_margin": ({"sm_margin": 8}, {}),
}
#: Only where queries and keys are apart; one for each argument of scheduling.
SCHEDULING = {"num_splits": ({"num_splits": 3}, {}), "pack_gqa": ({"pack_gqa": True}, {})}


def cases(*tables):
    rows = {name: row for table in tables for name, row in table.items()}
    return pytest.mark.parametrize(("asked", "meant"), rows.values(), ids=rows)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def dense(sq: int = 6, sk: int = 9) -> list[torch.Tensor]:
    return [torch.randn(2, *s).double() for s in ((sq, 4, 8), (sk, 2, 8), (sk, 2, 6))]


def packed() -> list[torch.Tensor]:
    return [torch.randn(*s).double() for s in ((13, 4, 8), (19, 2, 8), (19, 2, 6))]


@cases(CASES, SCHEDULING)
def test_dense(asked, meant):
    """An argument that is dropped, or means something else; also in the gradients."""
    tensors = dense()
    mine, theirs = leaves(*tensors), leaves(*tensors)
    got = fa3.flash_attn_func(*mine, return_attn_probs=True, **asked)
    same(got, attend(*theirs, **meant), mine, theirs)


@cases(CASES, SCHEDULING)
def test_varlen(asked, meant):
    """The same where sequences differ and some have no queries or no keys."""
    tensors = packed()
    mine, theirs = leaves(*tensors), leaves(*tensors)
    got = fa3.flash_attn_varlen_func(*mine, *LENGTHS, return_attn_probs=True, **asked)
    same(got, attend_packed(*theirs, CU_Q, CU_K, **meant), mine, theirs)


@cases(CASES)
def test_qkvpacked(asked, meant):
    """An argument that the packed form drops; a gradient that ends in a view; heads split wrongly."""
    qkv = torch.randn(2, 9, 3, 4, 8).double()
    (mine,), (theirs,) = leaves(qkv), leaves(qkv)
    got = fa3.flash_attn_qkvpacked_func(mine, return_attn_probs=True, **asked)
    same(got, attend(*theirs.unbind(2), **meant), [mine], [theirs])

    grouped = torch.randn(2, 9, 4 + 2 + 2, 8).double()
    (mine,), (theirs,) = leaves(grouped), leaves(grouped)
    got = fa3.flash_attn_qkvpacked_func(mine, num_heads_q=4, return_attn_probs=True, **asked)
    same(got, attend(*theirs.split([4, 2, 2], 2), **meant), [mine], [theirs])


def test_used_lengths():
    """Rows past the used lengths seen or written; masks aligned to the whole, not the used part."""
    used_q, used_k = torch.tensor([3, 0, 7, 1]).int(), torch.tensor([6, 2, 0, 4]).int()
    tensors = packed()
    mine, theirs = leaves(*tensors), leaves(*tensors)
    out, lse = fa3.flash_attn_varlen_func(
        *mine, *LENGTHS, used_q, used_k, causal=True, return_attn_probs=True
    )
    rows = torch.cat([torch.arange(a, a + n) for a, n in zip(CU_Q[:-1], used_q, strict=True)])
    unused = torch.ones(13, dtype=torch.bool).index_fill(0, rows, False)
    assert (out[unused] == 0).all() and (lse[:, unused] == -math.inf).all()
    keys = torch.cat([torch.arange(a, a + n) for a, n in zip(CU_K[:-1], used_k, strict=True)])
    short_q, short_k = (torch.cat([torch.zeros(1), u.cumsum(0)]).int() for u in (used_q, used_k))
    q, k, v = theirs
    want = attend_packed(q[rows], k[keys], v[keys], short_q, short_k, window=(None, 0))
    same((out[rows], lse[:, rows]), want, mine, theirs)


def test_positions():
    """A call by position, as most are written, with arguments in another order."""
    q, k, v = dense()
    options = (0.3, True, None, None, None, None, (3, -1), 0, 1.5)
    meant = {"scale": 0.3, "window": (3, 0), "softcap": 1.5}
    out, lse = fa3.flash_attn_func(q, k, v, *options, 2, True, True, 4, True)
    want, want_lse = attend(q, k, v, **meant)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)

    q, k, v = packed()
    out, lse = fa3.flash_attn_varlen_func(
        q, k, v, *LENGTHS, None, None, *options, 2, True, True, 4, True
    )
    torch.testing.assert_close(out, attend_packed(q, k, v, CU_Q, CU_K, **meant)[0])

    qkv = torch.randn(2, 9, 8, 8)
    options = (0.3, True, None, None, None, (3, -1), 0, 1.5, True, 4, 2, True)
    out, lse = fa3.flash_attn_qkvpacked_func(qkv, *options)
    torch.testing.assert_close(out, attend(*qkv.split([4, 2, 2], 2), **meant)[0])


def test_without_probs_the_output_alone():
    """A tuple where callers expect a tensor."""
    assert fa3.flash_attn_func(*dense()).shape == (2, 6, 4, 6)
    assert fa3.flash_attn_varlen_func(*packed(), *LENGTHS).shape == (13, 4, 6)
    assert fa3.flash_attn_qkvpacked_func(torch.randn(2, 9, 3, 4, 8)).shape == (2, 9, 4, 8)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("qv", torch.randn(2, 6, 4, 6)),
        ("attention_chunk", 4),
    ],
)
def test_what_would_change_the_result_is_refused(name, value):
    """An argument that is dropped: the result would be of another formula."""
    with pytest.raises(UnsupportedError, match=name):
        fa3.flash_attn_func(*dense(), **{name: value})
    with pytest.raises(UnsupportedError, match=name):
        fa3.flash_attn_varlen_func(*packed(), *LENGTHS, **{name: value})
    if name != "qv":
        with pytest.raises(UnsupportedError, match=name):
            fa3.flash_attn_qkvpacked_func(torch.randn(2, 9, 3, 4, 8), **{name: value})


@pytest.mark.parametrize("name", ["q_descale", "k_descale", "v_descale"])
def test_scales_are_honoured_or_refused(name):
    """A scale that is dropped, of another tensor, or of another sequence or head."""
    scale = torch.tensor([[0.5, 2.0], [4.0, 0.25]])
    own = scale[CU_Q[:4] % 2]  # four sequences

    def scaled(t, by):
        return t.double() * by.repeat_interleave(t.shape[-2] // 2, -1)[..., None]

    tensors = [t.to(torch.float8_e4m3fn) for t in dense()]
    wide = [t.double() for t in tensors]
    n = ("q_descale", "k_descale", "v_descale").index(name)
    wide[n] = scaled(tensors[n], scale[:, None])
    out, lse = fa3.flash_attn_func(*tensors, **{name: scale}, return_attn_probs=True)
    want, want_lse = attend(*wide)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=1e-5)
    assert (out - want).norm() < 0.08 * want.norm()

    tensors = [t.to(torch.float8_e4m3fn) for t in packed()]
    wide = [t.double() for t in tensors]
    lengths = (CU_Q, CU_K, CU_K)[n].diff()
    wide[n] = scaled(tensors[n], own.repeat_interleave(lengths, 0))
    out, lse = fa3.flash_attn_varlen_func(*tensors, *LENGTHS, **{name: own}, return_attn_probs=True)
    want, want_lse = attend_packed(*wide, CU_Q, CU_K)
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=1e-5)
    assert (out - want).norm() < 0.08 * want.norm()

    qkv = torch.randn(2, 9, 3, 2, 8).to(torch.float8_e4m3fn)
    wide = list(qkv.double().unbind(2))
    wide[n] = scaled(wide[n], scale[:, None])
    out = fa3.flash_attn_qkvpacked_func(qkv, **{name: scale})
    want = attend(*wide)[0]
    assert (out - want).norm() < 0.08 * want.norm()

    with pytest.raises(ValueError, match=f"{name}: .*only fp8 tensors have scales"):
        fa3.flash_attn_func(*dense(), **{name: scale})


def test_bad_packing():
    """num_heads_q that leaves keys and values unequal, or contradicts the shape."""
    with pytest.raises(ValueError, match="num_heads_q"):
        fa3.flash_attn_qkvpacked_func(torch.randn(2, 9, 8, 8), num_heads_q=3)
    with pytest.raises(ValueError, match="num_heads_q"):
        fa3.flash_attn_qkvpacked_func(torch.randn(2, 9, 8, 8))
    with pytest.raises(ValueError, match="num_heads_q"):
        fa3.flash_attn_qkvpacked_func(torch.randn(2, 9, 3, 4, 8), num_heads_q=2)
    with pytest.raises(ValueError, match=r"qkv\.shape"):
        fa3.flash_attn_qkvpacked_func(torch.randn(2, 9, 4, 3, 8))
    with pytest.raises(TypeError, match=r"window_size\[1\]"):
        fa3.flash_attn_func(*dense(), window_size=(1, "all"))
