"""``tilewise.compat.bert_padding``: what is packed comes back where it was, with its gradient."""

from __future__ import annotations

import pytest
import torch
from textbook import attend

from tilewise.compat import bert_padding, fa2

MASK = torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0], [0, 1, 0, 1], [1, 1, 1, 1]])


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int32, torch.float32])
@pytest.mark.parametrize("rest", [(), (5,), (2, 3)])
def test_round_trip(dtype, rest):
    """Tokens in other places, wrong lengths, a mask dtype that is read as something else."""
    x = torch.randn(4, 4, *rest)
    packed, indices, cu, longest, used = bert_padding.unpad_input(x, MASK.to(dtype))
    assert torch.equal(packed, x[MASK.bool()])
    assert indices.tolist() == [0, 1, 2, 9, 11, 12, 13, 14, 15] and indices.dtype == torch.int64
    assert cu.tolist() == [0, 3, 3, 5, 9] and cu.dtype == torch.int32
    assert longest == 4 and type(longest) is int
    assert used.tolist() == [3, 0, 2, 4] and used.dtype == torch.int32
    back = bert_padding.pad_input(packed, indices, 4, 4)
    assert torch.equal(back, x.masked_fill(~MASK.bool().view(4, 4, *[1] * len(rest)), 0))


def test_unused_tokens_take_room_and_do_not_count():
    """Room kept for later tokens that is left out, or counted as used."""
    x = torch.randn(2, 4, 3)
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]])
    room = torch.tensor([[0, 0, 1, 0], [0, 1, 1, 1]])
    for kind in (mask.dtype, torch.bool):
        packed, _, cu, longest, used = bert_padding.unpad_input(x, mask.to(kind), room.to(kind))
        assert torch.equal(packed, x[(mask | room).bool()])
        assert (cu.tolist(), longest, used.tolist()) == ([0, 3, 7], 4, [2, 1])


def test_gradients_are_those_of_indexing():
    """A gradient that is lost, or lands on another token."""
    x = torch.randn(4, 4, 3, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x: bert_padding.unpad_input(x, MASK)[0], x)
    indices = torch.tensor([3, 0, 5])
    y = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda y: bert_padding.pad_input(y, indices, 2, 3), y)
    twice = torch.tensor([1, 1, 0])
    torch.autograd.gradcheck(lambda y: bert_padding.index_first_axis(y, twice), y)
    assert torch.equal(bert_padding.index_first_axis(y, twice), y[twice])


def test_several_sequences_in_a_row():
    """Sequences that share a row run into one another, or into the row's padding."""
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0], [0] * 6])
    x = torch.randn(4, 6, 2)
    packed, indices, cu, longest = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert torch.equal(packed, torch.cat([x[0, :5], x[1, :5], x[2]]))
    assert (cu.tolist(), longest, cu.dtype) == ([0, 2, 5, 8, 10, 16], 6, torch.int32)
    back = bert_padding.pad_input(packed, indices, 4, 6)
    assert torch.equal(back[2], x[2]) and (back[0, 5:] == 0).all() and (back[3] == 0).all()


def test_attention_of_a_padded_batch():
    """The whole way: packed, attended to, padded again, and the gradient back."""
    x = torch.randn(4, 4, 3, 2, 8, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]])
    packed, indices, cu, longest, _ = bert_padding.unpad_input(x, mask)
    out = fa2.flash_attn_varlen_qkvpacked_func(packed, cu, longest, causal=True)
    padded = bert_padding.pad_input(out, indices, 4, 4)
    (got,) = torch.autograd.grad(padded.sin().sum(), x)
    want = torch.zeros_like(padded)
    rows = [x[b : b + 1, :n] for b, n in ((0, 3), (2, 1), (3, 4))]
    outs = [attend(*row.unbind(2), window=(None, 0))[0] for row in rows]
    for b, o in zip((0, 2, 3), outs, strict=True):
        want[b, : o.shape[1]] = o[0].detach()
    torch.testing.assert_close(padded, want)
    (want_grad,) = torch.autograd.grad(sum(o.sin().sum() for o in outs), x)
    torch.testing.assert_close(got, want_grad)


def test_nothing_to_pack():
    """Empty batches and masks of zeros, whose longest length is 0."""
    x = torch.randn(2, 3, 4)
    packed, indices, cu, longest, used = bert_padding.unpad_input(x, torch.zeros(2, 3))
    assert (
        packed.shape == (0, 4) and cu.tolist() == [0, 0, 0] and longest == 0 and used.tolist() == [0, 0]
    )
    assert (bert_padding.pad_input(packed, indices, 2, 3) == 0).all()
    _, _, cu, longest, _ = bert_padding.unpad_input(x[:0], torch.zeros(0, 3))
    assert cu.tolist() == [0] and longest == 0
    packed, _, cu, longest = bert_padding.unpad_input_for_concatenated_sequences(
        x, torch.zeros(2, 3).int()
    )
    assert packed.shape == (0, 4) and cu.tolist() == [0] and longest == 0


def test_shapes_that_do_not_fit():
    """A mask of another length, which would mark tokens of the next sequence."""
    with pytest.raises(ValueError, match=r"attention_mask\.shape"):
        bert_padding.unpad_input(torch.randn(2, 3, 4), torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"unused_mask\.shape"):
        bert_padding.unpad_input(torch.randn(2, 3, 4), torch.ones(2, 3), torch.ones(3))
    with pytest.raises(ValueError, match=r"attention_mask_in_length\.shape"):
        bert_padding.unpad_input_for_concatenated_sequences(torch.randn(2, 3, 4), torch.ones(2))
    with pytest.raises(ValueError, match=r"hidden_states\.shape"):
        bert_padding.unpad_input(torch.randn(3), torch.ones(3))
