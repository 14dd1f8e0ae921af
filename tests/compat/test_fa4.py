"""``tilewise.compat.fa4`` against plain PyTorch, every argument honoured or refused."""

from __future__ import annotations

import math

import pytest
import torch
from textbook import attend, attend_packed, leaves, same

from tilewise import UnsupportedError
from tilewise.compat import fa4

CU_Q = torch.tensor([0, 5, 5, 12, 13], dtype=torch.int32)
CU_K = torch.tensor([0, 7, 10, 10, 19], dtype=torch.int32)
LENGTHS = {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, "max_seqlen_q": 7, "max_seqlen_k": 9}
SINK = torch.tensor([0.5, -1.0, 2.0, -math.inf])

CASES = {
    "defaults": ({}, {}),
    "scale": ({"softmax_scale": 0.3}, {"scale": 0.3}),
    "causal": ({"causal": True}, {"window": (None, 0)}),
    "window": ({"window_size": (3, 2)}, {"window": (3, 2)}),
    "left only": ({"window_size": (3, None)}, {"window": (3, None)}),
    "right only": ({"window_size": [None, 2]}, {"window": (None, 2)}),
    "negative moves the band": ({"window_size": (4, -2)}, {"window": (4, -2)}),
    "two negatives are none": ({"window_size": (-1, -1)}, {}),
    "causal beats right": ({"causal": True, "window_size": (3, -2)}, {"window": (3, 0)}),
    "softcap": ({"softcap": 1.5}, {"softcap": 1.5}),
    "sink": ({"learnable_sink": SINK}, {"sink": SINK}),
    "deterministic": ({"deterministic": True}, {}),
    "num_splits": ({"num_splits": 3}, {}),
    "pack_gqa": ({"pack_gqa": True}, {}),
    "return_lse": ({"return_lse": True}, {}),
}
cases = pytest.mark.parametrize(("asked", "meant"), CASES.values(), ids=CASES)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def dense(sq: int = 6, sk: int = 9, batch: int = 2) -> list[torch.Tensor]:
    return [torch.randn(batch, *s).double() for s in ((sq, 4, 8), (sk, 2, 8), (sk, 2, 6))]


def packed() -> list[torch.Tensor]:
    return [torch.randn(*s).double() for s in ((13, 4, 8), (19, 2, 8), (19, 2, 6))]


@cases
def test_dense(asked, meant):
    """An argument that is dropped, or means something else; also in the gradients; no lse."""
    tensors = dense()
    mine, theirs = leaves(*tensors), leaves(*tensors)
    same(fa4.flash_attn_func(*mine, **asked), attend(*theirs, **meant), mine, theirs)


@cases
def test_varlen(asked, meant):
    """The same where sequences differ and some have no queries or no keys."""
    tensors = packed()
    mine, theirs = leaves(*tensors), leaves(*tensors)
    got = fa4.flash_attn_varlen_func(*mine, **LENGTHS, **asked)
    same(got, attend_packed(*theirs, CU_Q, CU_K, **meant), mine, theirs)


def test_gradient_of_the_sink():
    """A sink without a gradient."""
    tensors = [*dense(), torch.randn(4).double()]
    mine, theirs = leaves(*tensors), leaves(*tensors)
    got = fa4.flash_attn_func(*mine[:3], learnable_sink=mine[3], causal=True)
    same(got, attend(*theirs[:3], sink=theirs[3], window=(None, 0)), mine, theirs)


@pytest.mark.parametrize(
    "hints",
    [
        {},
        {"max_seqlen_q": 7},
        {"max_seqlen_q": torch.tensor(7), "max_seqlen_k": torch.tensor(9)},
        {"max_seqlen_k": 9, "min_seqlen_k": 0},
        {"scheduler_metadata": object(), "disable_scheduler_metadata": True},
    ],
)
def test_hints_change_nothing(hints):
    """Lengths that must be given here though they need not be there."""
    q, k, v = packed()
    got = fa4.flash_attn_varlen_func(q, k, v, cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K, **hints)
    want = fa4.flash_attn_varlen_func(q, k, v, **LENGTHS)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("packs", ["", "q", "k", "qk"])
def test_either_side_may_be_a_padded_batch(packs):
    """Mixed forms refused or cut at the wrong rows; a result that is not in the queries' form."""
    lengths = {"q": [5, 2], "k": [3, 9]}
    tensors = dense(sq=5, sk=9)
    mine, theirs = leaves(*tensors), leaves(*tensors)
    q, k, v = mine
    given = {}
    for side in "qk":
        used = torch.tensor(lengths[side]).int()
        if side in packs:
            rows = torch.arange(q.shape[1] if side == "q" else k.shape[1]) < used[:, None]
            if side == "q":
                q = q[rows]
            else:
                k, v = k[rows], v[rows]
            given[f"cu_seqlens_{side}"] = torch.tensor([0, *used.cumsum(0).tolist()]).int()
        else:
            given[f"seqused_{side}"] = used
    out, lse = fa4.flash_attn_varlen_func(q, k, v, causal=True, **given)
    assert out.shape == (*q.shape[:-1], 6)
    if "q" in packs:
        parts = [(out[:5], lse[:, :5]), (out[5:], lse[:, 5:])]
    else:
        assert lse.shape == (2, 4, 5) and (out[1, 2:] == 0).all() and (lse[1, :, 2:] == -math.inf).all()
        parts = [(out[0], lse[0]), (out[1, :2], lse[1, :, :2])]
    q, k, v = theirs
    want = [
        attend(q[b : b + 1, :n], k[b : b + 1, :m], v[b : b + 1, :m], window=(None, 0))
        for b, (n, m) in enumerate(zip(lengths["q"], lengths["k"], strict=True))
    ]
    got = torch.cat([o for o, _ in parts]), torch.cat([x for _, x in parts], 1)
    same(got, (torch.cat([o[0] for o, _ in want]), torch.cat([x[0] for _, x in want], 1)), mine, theirs)


@pytest.mark.parametrize(("sq", "sk", "batch"), [(0, 9, 2), (6, 0, 2), (6, 9, 0)])
def test_empty_padded_batches(sq, sk, batch):
    """A length of zero, of which cu_seqlens cannot be counted in steps."""
    q, k, v = dense(sq, sk, batch)
    cu = torch.zeros(batch + 1, dtype=torch.int32)
    out, lse = fa4.flash_attn_varlen_func(q, k.flatten(0, 1), v.flatten(0, 1), cu_seqlens_k=cu)
    assert out.shape == (batch, sq, 4, 6) and lse.shape == (batch, 4, sq) and (out == 0).all()


def test_positions():
    """A call by position, with arguments in another order."""
    q, k, v = dense()
    meant = {"scale": 0.3, "window": (3, 0), "softcap": 1.5, "sink": SINK}
    options = (0.3, True, (3, None), SINK, 1.5, 2, True, True)
    nothing = (None,) * 7
    out, lse = fa4.flash_attn_func(q, k, v, None, None, *options, *nothing, True, False, None)
    want, want_lse = attend(q, k, v, **meant)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)
    q, k, v = packed()
    lengths = (None, CU_Q, CU_K, 7, 9, 0, None, None, None, None)
    out, lse = fa4.flash_attn_varlen_func(
        q, k, v, *lengths, *options, None, None, None, None, None, None, False, None, None, True
    )
    torch.testing.assert_close(out, attend_packed(q, k, v, CU_Q, CU_K, **meant)[0])


def a_mod(*args):
    return args[0]


REFUSED = {
    "qv": torch.randn(2, 6, 4, 6),
    "gather_kv_indices": torch.zeros(2, 6, 4).int(),
    "score_mod": a_mod,
    "score_mod_bwd": a_mod,
    "mask_mod": a_mod,
    "aux_tensors": [torch.ones(2)],
    "aux_scalars": (1.0,),
    "block_sparse_tensors": object(),
    "block_sparse_tensors_bwd": object(),
    "gather_bwd_recompute_p": True,
    "gather_bwd_token_chunk": 64,
    "page_table": torch.zeros(4, 1).int(),
    "seqlen_k_per_split": 128,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_the_result_is_refused(name):
    """An argument that is dropped: the result would be of another formula, or other keys."""
    if name not in ("page_table", "seqlen_k_per_split"):
        with pytest.raises(UnsupportedError, match=name):
            fa4.flash_attn_func(*dense(), **{name: REFUSED[name]})
    if name != "block_sparse_tensors_bwd":
        with pytest.raises(UnsupportedError, match=name):
            fa4.flash_attn_varlen_func(*packed(), **LENGTHS, **{name: REFUSED[name]})


def test_no_mods_in_a_list_are_none():
    """Empty lists, which callers pass for nothing, refused."""
    fa4.flash_attn_func(*dense(), aux_tensors=[], aux_scalars=())


def test_bad_options():
    """Nonsense that is taken for a default; packed rows taken for a batch."""
    with pytest.raises(ValueError, match="window_size"):
        fa4.flash_attn_func(*dense(), window_size=None)
    with pytest.raises(TypeError, match=r"window_size\[0\]"):
        fa4.flash_attn_func(*dense(), window_size=(1.5, None))
    with pytest.raises(ValueError, match=r"k\.shape: .*cu_seqlens_k"):
        fa4.flash_attn_varlen_func(*packed(), cu_seqlens_q=CU_Q, max_seqlen_q=7)
    with pytest.raises(ValueError, match=r"q\.shape: .*cu_seqlens_q"):
        fa4.flash_attn_varlen_func(*packed(), cu_seqlens_k=CU_K)
