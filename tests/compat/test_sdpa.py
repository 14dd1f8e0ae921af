"""``tilewise.compat.sdpa`` against PyTorch's own function, every argument honoured or refused."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from textbook import leaves
from torch.nn.attention.bias import causal_lower_right

from tilewise.compat.sdpa import scaled_dot_product_attention as sdpa


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def tensors(sq: int = 6, sk: int = 9, heads: tuple[int, int] = (4, 4), lead=(2,)) -> list[torch.Tensor]:
    shapes = ((heads[0], sq, 8), (heads[1], sk, 8), (heads[1], sk, 5))
    return [torch.randn(*lead, *s, dtype=torch.float64) for s in shapes]


def agree(inputs: list[torch.Tensor], **options) -> None:
    """Output and gradients, the mask's among them if it has one, are PyTorch's."""
    mine, theirs = leaves(*inputs), leaves(*inputs)
    asked = [dict(options), dict(options)]
    mask = options.get("attn_mask")
    if mask is not None and mask.requires_grad:
        for all_leaves, o in zip((mine, theirs), asked, strict=True):
            (o["attn_mask"],) = leaves(mask)
            all_leaves.append(o["attn_mask"])
    got, want = sdpa(*mine[:3], **asked[0]), F.scaled_dot_product_attention(*theirs[:3], **asked[1])
    torch.testing.assert_close(got, want, check_stride=False)
    for out, all_leaves in ((got, mine), (want, theirs)):
        out.sin().sum().backward()
        assert all(leaf.grad is not None for leaf in all_leaves)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-10, rtol=1e-7)


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize(("sq", "sk"), [(6, 9), (9, 6), (7, 7), (1, 5), (5, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_causal_is_top_left(sq, sk, causal, scale):
    """The core's bottom-right mask, which differs whenever lengths do; a scale that is dropped."""
    agree(tensors(sq, sk), is_causal=causal, scale=scale)


SHAPES = [(6, 9), (1, 9), (6, 1), (4, 6, 9), (2, 1, 6, 9), (1, 4, 1, 9), (2, 4, 6, 9), (2, 1, 1, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float_masks(shape):
    """A mask broadcast along another dimension; its gradient, summed where it was broadcast."""
    agree(tensors(), attn_mask=torch.randn(shape, dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bool_masks(shape):
    """True taken for masked, as elsewhere in PyTorch."""
    mask = torch.rand(shape) > 0.4
    mask[..., 0] = True  # each row sees a key: PyTorch's kernels disagree about rows that see none
    agree(tensors(), attn_mask=mask)


def test_masks_of_infinity():
    """-inf in a float mask, as most libraries write it: NaN from inf - inf."""
    mask = torch.zeros(6, 9, dtype=torch.float64).masked_fill(torch.ones(6, 9).triu(2).bool(), -math.inf)
    agree(tensors(), attn_mask=mask)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_rows_without_keys_are_zero(kind):
    """NaN where a row of the mask allows nothing, which spreads through a batch's gradients."""
    q, k, v = leaves(*tensors())
    mask = torch.ones(6, 9, dtype=torch.bool)
    mask[2] = False
    if kind == "float":
        mask = torch.zeros(6, 9).masked_fill(~mask, -math.inf)
    out = sdpa(q, k, v, mask)
    out.sum().backward()
    assert (out[:, :, 2] == 0).all() and (q.grad[:, :, 2] == 0).all()
    assert all(t.grad.isfinite().all() for t in (q, k, v))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("heads", [(4, 2), (4, 1), (4, 4)])
def test_grouped_heads(heads, masked):
    """Query heads paired with other key heads than PyTorch's."""
    mask = torch.randn(2, 4, 6, 9, dtype=torch.float64) if masked else None
    agree(tensors(heads=heads), enable_gqa=True, attn_mask=mask)


@pytest.mark.parametrize("lead", [(), (3,), (3, 2), (1, 2, 2)])
@pytest.mark.parametrize("masked", [False, True])
def test_any_number_of_leading_dimensions(lead, masked):
    """Without a batch, or with two: heads taken for batches, a mask that meets the wrong ones."""
    options = {}
    if masked:
        options["attn_mask"] = torch.randn(*lead, 1, 6, 9, dtype=torch.float64)
    agree(tensors(lead=lead), **options)
    if len(lead) > 1:
        agree(tensors(lead=lead), attn_mask=torch.randn(4, 1, 9, dtype=torch.float64), is_causal=False)


def test_without_heads():
    """(L, E) tensors."""
    q, k, v = (t[0, 0] for t in tensors())
    agree([q, k, v], is_causal=True)
    agree([q, k, v], attn_mask=torch.randn(6, 9, dtype=torch.float64))


def test_leading_dimensions_broadcast():
    """One head, or one batch, of keys for all; the gradient is the sum over them."""
    q, k, v = tensors()
    agree([q, k[:, :1], v[:, :1]])
    agree([q, k[:1], v[:1]])
    agree([q[:1], k, v])
    agree([q[0], k, v])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    """A result in the mask's dtype; masks in fp32 or in the inputs'."""
    q, k, v = (t.to(dtype) for t in tensors())
    for mask in (torch.randn(6, 9), torch.randn(6, 9).to(dtype)):
        got = sdpa(q, k, v, mask)
        want = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), mask.double())
        assert got.dtype == dtype
        tolerance = 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)


def test_autocast():
    """Queries that a rotary embedding left in fp32 beside values in bf16, which PyTorch takes."""
    q, k, v = (t.float() for t in tensors())
    mask = torch.randn(6, 9).half()  # cast as well, or it fits nothing
    with torch.autocast("cpu", torch.bfloat16):
        got = sdpa(q, k, v.bfloat16(), mask)
        want = F.scaled_dot_product_attention(q, k, v.bfloat16(), mask)
        assert got.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(got, want, atol=0.03, rtol=0.03, check_stride=False)
    with torch.autocast("cpu", torch.bfloat16):
        assert sdpa(*tensors()).dtype == torch.float64


def test_dropout():
    """dropout_p that is dropped or not made up for; bits that manual_seed does not repeat."""
    q, k = torch.randn(2, 4, 64, 8), torch.randn(2, 4, 64, 8)
    eye = torch.eye(64).expand(2, 4, 64, 64)  # with which the output is the weights
    torch.manual_seed(3)
    weights = sdpa(q, k, eye, dropout_p=0.25)
    torch.manual_seed(3)
    assert torch.equal(weights, sdpa(q, k, eye, None, 0.25))
    kept = weights != 0
    assert kept.double().mean().item() == pytest.approx(0.75, abs=0.02)
    whole = F.scaled_dot_product_attention(q, k, eye)
    torch.testing.assert_close(weights[kept], whole[kept] / 0.75)


def test_positions():
    """A call by position; keyword-only arguments taken by position."""
    q, k, v = tensors()
    mask = torch.randn(6, 9, dtype=torch.float64)
    torch.testing.assert_close(
        sdpa(q, k, v, mask, 0.0, False), F.scaled_dot_product_attention(q, k, v, mask, 0.0, False)
    )
    with pytest.raises(TypeError):
        sdpa(q, k, v, mask, 0.0, False, 0.3)


def test_no_keys_and_no_queries():
    """Lengths of zero."""
    q, k, v = tensors(6, 0)
    assert (sdpa(q, k, v) == 0).all() and (sdpa(q, k, v, is_causal=True) == 0).all()
    assert sdpa(*tensors(0, 9)).shape == (2, 4, 0, 5)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"attn_mask": torch.zeros(6, 9), "is_causal": True}, ValueError, "attn_mask.*is_causal"),
        ({"attn_mask": torch.zeros(6, 8)}, ValueError, r"attn_mask\.shape"),
        ({"attn_mask": torch.zeros(3, 1, 6, 9)}, ValueError, r"attn_mask\.shape"),
        ({"attn_mask": torch.zeros(1, 2, 4, 6, 9)}, ValueError, r"attn_mask\.shape"),
        ({"attn_mask": torch.zeros(6, 9).int()}, TypeError, r"attn_mask\.dtype"),
        ({"attn_mask": torch.zeros(6, 9).half()}, TypeError, r"attn_mask\.dtype"),
        ({"attn_mask": True}, TypeError, "attn_mask"),
        ({"attn_mask": causal_lower_right(6, 9)}, TypeError, "CausalBias"),
        ({"dropout_p": 1.0}, ValueError, "dropout_p"),
        ({"scale": -1.0}, ValueError, "scale"),
        ({"is_causal": 1}, TypeError, "is_causal"),
        ({"enable_gqa": None}, TypeError, "enable_gqa"),
    ],
)
def test_bad_options(options, error, message):
    """Nonsense that is taken for a default."""
    with pytest.raises(error, match=message):
        sdpa(*tensors(), **options)


def test_bad_tensors():
    """Fewer key heads without enable_gqa: a mistake, not grouped heads."""
    with pytest.raises(ValueError, match="enable_gqa=True"):
        sdpa(*tensors(heads=(4, 2)))
    with pytest.raises(ValueError, match=r"query\.shape"):
        sdpa(torch.randn(8), *tensors()[1:])
    with pytest.raises(TypeError, match="value"):
        sdpa(*tensors()[:2], None)
    with pytest.raises(ValueError, match="heads"):
        sdpa(*tensors(heads=(4, 3)), enable_gqa=True)
