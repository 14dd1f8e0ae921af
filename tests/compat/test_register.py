"""Tilewise as PyTorch's flash attention: the operators, their derivatives, and that it can be undone.

Without a GPU the operators are registered for CPU tensors, which PyTorch itself has no kernels of them
for, and called by name.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from textbook import attend, attend_packed, leaves

from tilewise import UnsupportedError, dropout_mask
from tilewise.compat import aten, sdpa

flash = torch.ops.aten._flash_attention_forward
CU_Q = torch.tensor([0, 5, 5, 12, 13], dtype=torch.int32)
CU_K = torch.tensor([0, 7, 10, 10, 19], dtype=torch.int32)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def on_cpu():
    handle = aten.implement("CPU")
    yield
    handle.remove()


def qkv(sq: int = 6, sk: int = 9, heads: int = 4) -> list[torch.Tensor]:
    return [torch.randn(2, s, h, 8) for s, h in ((sq, 4), (sk, heads), (sk, heads))]


def gradients_agree(got, want, mine, theirs) -> None:
    torch.testing.assert_close(got, want, check_stride=False)
    losses = got.sin().sum(), want.sin().sum()
    for a, b in zip(*map(torch.autograd.grad, losses, (mine, theirs)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [4, 2])
def test_sdpa_operator(causal, heads):
    """Heads and length exchanged; a gradient of another call; the layout compiled code counts on."""
    mine, theirs = leaves(*qkv(7, 7, heads)), []
    theirs = leaves(*mine)
    heads_first = [t.transpose(1, 2) for t in mine]
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        *heads_first, 0.0, causal, False, scale=0.3
    )
    assert out.stride() == torch.empty_like(heads_first[0]).stride()
    want, want_lse = attend(*theirs, window=(None, 0 if causal else None), scale=0.3)
    torch.testing.assert_close(lse, want_lse)
    gradients_agree(out.transpose(1, 2), want, mine, theirs)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("causal", "window", "meant"),
    [
        (False, (None, None), (None, None)),
        (True, (-1, -1), (None, 0)),
        (False, (3, -1), (3, None)),
        (False, (3, 2), (3, 2)),
        (True, (3, None), (3, 0)),
    ],
)
def test_flash_operator(causal, window, meant):
    """Windows dropped in one direction; -1 taken for a band that has moved."""
    sides = {"window_size_left": window[0], "window_size_right": window[1]}
    inputs = qkv()
    mine, theirs = leaves(*inputs), leaves(*inputs)
    out = flash(*mine, None, None, 6, 9, 0.0, causal, False, **sides)[0]
    gradients_agree(out, attend(*theirs, window=meant)[0], mine, theirs)

    inputs = [torch.randn(n, 4, 8) for n in (13, 19, 19)]
    mine, theirs = leaves(*inputs), leaves(*inputs)
    out, lse, *_ = flash(*mine, CU_Q, CU_K, 7, 9, 0.0, causal, False, **sides)
    assert lse.shape == (4, 13)
    gradients_agree(out, attend_packed(*theirs, CU_Q, CU_K, window=meant)[0], mine, theirs)


@pytest.mark.usefixtures("on_cpu")
def test_dropout_reaches_the_backward():
    """A backward with another mask than its forward."""
    inputs = qkv(32, 32)
    mine, theirs = leaves(*inputs), leaves(*inputs)
    out, _, rng_state, *_ = flash(*mine, None, None, 32, 32, 0.25, False, False)
    key = rng_state.view(torch.int64)[:1]
    keep = dropout_mask(2, 4, 32, 32, dropout_p=0.25, seed=key)
    gradients_agree(out, attend(*theirs, keep=keep, dropout_p=0.25)[0], mine, theirs)
    assert rng_state.shape == (2,) and rng_state.dtype == torch.uint64
    assert not torch.equal(rng_state, flash(*inputs, None, None, 32, 32, 0.25, False, False)[2])


@pytest.mark.usefixtures("on_cpu")
def test_used_keys():
    """Keys beyond a cache's used part seen."""
    q, k, v = qkv()
    used = torch.tensor([4, 9], dtype=torch.int32)
    out = flash(q, k, v, None, None, 6, 9, 0.0, False, False, seqused_k=used)[0]
    torch.testing.assert_close(out[:1], attend(q[:1], k[:1, :4], v[:1, :4])[0])
    torch.testing.assert_close(out[1:], attend(q[1:], k[1:], v[1:])[0])
    with pytest.raises(UnsupportedError, match="seqused_k"):  # whose backward would see all keys
        flash(*leaves(q, k, v), None, None, 6, 9, 0.0, False, False, seqused_k=used)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.skipif(
    not hasattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace"),
    reason="this PyTorch has no such operator",
)
def test_out_is_written():
    """An output that goes to a new tensor instead."""
    q, k, v = qkv()
    out = torch.full_like(q, 7)
    lse = torch.ops.aten._flash_attention_forward_no_dropout_inplace(
        out, q, k, v, None, None, 6, 9, 0.0, True, False
    )
    want, want_lse = attend(q, k, v, window=(None, 0))
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    "options", [{"alibi_slopes": torch.ones(4)}, {"block_table": torch.zeros(2, 1).int()}, {}]
)
def test_what_cannot_be_honoured_is_refused(options):
    """Paged keys read in the wrong order; slopes that the backward never hears of; no debug mask."""
    with pytest.raises(UnsupportedError, match=next(iter(options), "return_debug_mask")):
        flash(*qkv(), None, None, 6, 9, 0.0, False, not options, **options)


def test_removed_operators_are_pytorchs_again():
    """Operators that stay replaced after the handle was removed."""
    handle = aten.implement("CPU")
    flash(*qkv(), None, None, 6, 9, 0.0, False, False)
    handle.remove()
    with pytest.raises(NotImplementedError, match="CPU"):
        flash(*qkv(), None, None, 6, 9, 0.0, False, False)


needs_registry = pytest.mark.skipif(
    not hasattr(torch.nn.attention, "register_flash_attention_impl"),
    reason="this PyTorch has one flash implementation",
)


@needs_registry
def test_register_and_remove():
    """A registration that PyTorch does not know of, that stays, or that removes another's."""
    current = torch.nn.attention.current_flash_attention_impl
    assert current() is None
    registered = sdpa.register()
    assert current() == "TILEWISE"
    registered.remove()
    registered.remove()
    assert current() is None
    with sdpa.register(), sdpa.register():
        assert current() == "TILEWISE"
        assert F.scaled_dot_product_attention(*qkv(9, 9)).shape == (2, 9, 4, 8)  # CPUs: PyTorch's own
    assert current() is None
    torch.nn.attention.register_flash_attention_impl("OTHER", register_fn=lambda: Other())
    registered = sdpa.register()
    torch.nn.attention.activate_flash_attention_impl("OTHER")
    registered.remove()
    assert current() == "OTHER"
    torch.nn.attention.restore_flash_attention_impl()


class Other:
    def remove(self) -> None:
        pass


def test_an_older_pytorch_is_named(monkeypatch):
    """AttributeError from the inside of a PyTorch that cannot do this."""
    monkeypatch.delattr(torch.nn.attention, "register_flash_attention_impl", raising=False)
    with pytest.raises(UnsupportedError, match=r"this PyTorch.*register_flash_attention_impl"):
        sdpa.register()
