"""tilewise.reference, the definition of right, against what it does not share a line with: torch's own
attention, numbers worked out by hand, and finite differences."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from problems import Problem, tensors

from tilewise import philox
from tilewise.reference import attention
from tilewise.spec import Inputs, make_spec


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def reference(x: Inputs, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return attention(make_spec(x, **options), x)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


# --- against torch's own attention -------------------------------------------------------------------


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("lengths", [(5, 5), (4, 9), (9, 4), (1, 7), (7, 1)], ids=str)
@pytest.mark.parametrize("masked", ["full", "causal", "bias"])
def test_equals_torch(masked: str, lengths: tuple[int, int], group: int):
    """Output and gradients, with the mask given to torch element by element."""
    sq, sk = lengths
    q, k, v = normal(2, sq, 2 * group, 8), normal(2, sk, 2, 8), normal(2, sk, 2, 5)
    bias = normal(2, 2 * group, sq, sk) if masked == "bias" else None
    leaves = [t.requires_grad_() for t in (q, k, v, bias) if t is not None]
    out, _ = reference(Inputs(q, k, v, bias), causal=masked == "causal", scale=0.4)

    mask = bias
    if masked == "causal":
        mask = torch.ones(sq, sk, dtype=torch.bool).tril(sk - sq)
    theirs = F.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), attn_mask=mask, scale=0.4, enable_gqa=group > 1
    ).transpose(1, 2)
    if masked == "causal":  # torch gives NaN for rows without keys, in some versions
        theirs = theirs.masked_fill(~mask.any(1)[None, :, None, None], 0)
    torch.testing.assert_close(out, theirs, rtol=1e-12, atol=1e-12)

    if sq <= sk or masked != "causal":
        dout = normal(*out.shape)
        ours = torch.autograd.grad(out, leaves, dout)
        for a, b in zip(ours, torch.autograd.grad(theirs, leaves, dout), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_lse_equals_logsumexp():
    q, k, v = normal(2, 5, 4, 8), normal(2, 7, 2, 8), normal(2, 7, 2, 8)
    _, lse = reference(Inputs(q, k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) / math.sqrt(8)
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-13, atol=1e-13)


# --- by hand ----------------------------------------------------------------------------------------

ONE = torch.ones(1, 1, 1, 1, dtype=torch.float64)
VALUES = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64).view(1, 3, 1, 1)


def test_equal_scores_average_the_values():
    out, lse = reference(Inputs(ONE, ONE.expand(1, 3, 1, 1), VALUES))
    assert out.item() == pytest.approx(7 / 3)
    assert lse.item() == pytest.approx(1 + math.log(3))


def test_scores_weigh_the_values():
    """Scores log 1, log 2, log 5: weights 1/8, 2/8, 5/8."""
    k = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64).log().view(1, 3, 1, 1)
    out, lse = reference(Inputs(ONE, k, VALUES))
    assert out.item() == pytest.approx((1 + 4 + 20) / 8)
    assert lse.item() == pytest.approx(math.log(8))


def test_scale_multiplies_scores():
    k = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64).log().view(1, 3, 1, 1)
    out, _ = reference(Inputs(ONE, k, VALUES), scale=2.0)
    assert out.item() == pytest.approx((1 + 2 * 4 + 4 * 25) / 30)


def test_softcap_comes_after_scale_and_before_bias():
    bias = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64).view(1, 1, 1, 3)
    k = torch.tensor([0.0, 0.0, 6.0], dtype=torch.float64).view(1, 3, 1, 1)
    _, lse = reference(Inputs(ONE, k, VALUES, bias), scale=0.5, softcap=2.0)
    assert lse.item() == pytest.approx(math.log(1 + math.e + math.exp(2 * math.tanh(3 / 2))))


def test_sink_takes_weight_and_gives_no_value():
    sink = torch.tensor([1.0 + math.log(3)], dtype=torch.float64)  # as much as all three keys
    out, lse = reference(Inputs(ONE, ONE.expand(1, 3, 1, 1), VALUES, sink=sink))
    assert out.item() == pytest.approx(7 / 6)
    assert lse.item() == pytest.approx(1 + math.log(6))


def test_a_sink_of_minus_infinity_is_none():
    x = Inputs(ONE, ONE.expand(1, 3, 1, 1), VALUES)
    with_sink = reference(x._replace(sink=torch.tensor([-math.inf])))
    for a, b in zip(with_sink, reference(x), strict=True):
        assert torch.equal(a, b)


def test_alibi_measures_from_the_diagonal_at_the_bottom_right():
    """One query and three keys: it stands at the last key, distances 2, 1, 0."""
    slopes = torch.tensor([math.log(2)], dtype=torch.float32)
    out, _ = reference(Inputs(ONE, ONE.expand(1, 3, 1, 1), VALUES, alibi_slopes=slopes))
    assert out.item() == pytest.approx((1 / 4 + 2 / 2 + 4) / (1 / 4 + 1 / 2 + 1), rel=1e-6)


def test_alibi_penalizes_keys_ahead_too():
    slopes = torch.tensor([1.0])
    q = torch.zeros(1, 3, 1, 1, dtype=torch.float64)
    _, lse = reference(Inputs(q, q, q, alibi_slopes=slopes))
    e = math.e
    assert lse.flatten().tolist() == pytest.approx(
        [math.log(1 + 1 / e + 1 / e**2), math.log(1 + 2 / e), math.log(1 + 1 / e + 1 / e**2)]
    )


def test_dropout_keeps_lse_and_rescales_what_is_left():
    p, key = 0.25, philox.fold(torch.tensor([3]))
    x = Inputs(ONE, torch.zeros(1, 8, 1, 1).double(), torch.eye(8).double().view(1, 8, 1, 8))
    out, lse = reference(x._replace(dropout_key=key), dropout_p=p)
    keep = philox.keep_mask(key, 0, range(1), range(1), range(8), p)
    assert lse.item() == pytest.approx(math.log(8))
    torch.testing.assert_close(out.flatten(), keep.double().flatten() / 8 / (1 - p))


def test_gqa_reads_the_head_of_its_group():
    """Query head h reads key head h // group: neighbours share, not every other one."""
    q = torch.zeros(1, 1, 4, 1, dtype=torch.float64)
    v = torch.tensor([10.0, 20.0], dtype=torch.float64).view(1, 1, 2, 1)
    out, _ = reference(Inputs(q, torch.zeros_like(v), v))
    assert out.flatten().tolist() == [10, 10, 20, 20]


# --- rows without keys, and what has no effect --------------------------------------------------------

NO_KEYS = {
    "causal, more queries than keys": Problem(((5, 2),), causal=True, dtype="fp64"),
    "empty window": Problem(((4, 4),), window=(-3, 1), dtype="fp64"),
    "window beyond the keys": Problem(((4, 4),), window=(-9, None), dtype="fp64"),
    "no used keys": Problem(((4, 4),) * 2, used_k=(0, 4), dtype="fp64"),
    "no keys": Problem(((4, 0),), dtype="fp64"),
    "varlen": Problem(((4, 0), (4, 4)), varlen=True, dtype="fp64"),
    "bias": Problem(((9, 2),), bias=(True,) * 4, bias_holes=True, dtype="fp64"),
}


def results(p: Problem) -> tuple[torch.Tensor, ...]:
    """out, lse and the gradients of q, k, v (0 where not even autograd sees a connection)."""
    t = tensors(p)
    leaves = [a.detach().requires_grad_() for a in (t.x.q, t.x.k, t.x.v)]
    out, lse = attention(t.spec, t.x._replace(q=leaves[0], k=leaves[1], v=leaves[2]))
    pairs = [out, lse], leaves, [t.dout, t.dlse]
    return out.detach(), lse.detach(), *torch.autograd.grad(*pairs, materialize_grads=True)


@pytest.mark.parametrize("name", NO_KEYS)
def test_a_row_without_keys_is_zero(name: str):
    """out 0, lse -inf, dq 0, and no NaN for anybody else: softmax of nothing is 0 / 0."""
    p = NO_KEYS[name]
    out, lse, dq, dk, dv = results(p)
    dead = lse == -math.inf
    assert dead.any()
    rows = dead.transpose(-2, -1)
    assert (out[rows] == 0).all() and (dq[rows] == 0).all()
    assert all(t.isfinite().all() for t in (out, lse[~dead], dq, dk, dv))


def test_a_row_without_keys_has_its_sink_for_lse():
    t = tensors(Problem(((5, 2),), causal=True, sink="fp32", group=2))
    out, lse = attention(t.spec, t.x)
    assert torch.equal(lse[0, :, :3], t.x.sink.double()[:, None].expand(2, 3))
    assert (out[0, :3] == 0).all()


@pytest.mark.parametrize(
    "p",
    [
        Problem(((6, 9),), window=(2, -3), dtype="fp64"),
        Problem(((9, 9),) * 2, used_q=(9, 3), used_k=(4, 0), dtype="fp64"),
        Problem(((3, 5), (0, 2)), varlen=True, tail=(2, 3), dtype="fp64"),
    ],
    ids=["unseen keys", "padding", "past the last sequence"],
)
def test_nan_without_effect_changes_nothing(p: Problem):
    """0 * NaN is NaN: what no query may see has to be left out, not multiplied by a zero weight."""
    clean, dirty = (results(replace(p, poison=poison)) for poison in (False, True))
    assert any(t.isnan().any() for t in tensors(p).x[:3])
    for a, b in zip(clean, dirty, strict=True):
        assert torch.equal(a, b)


def test_rows_of_no_sequence_are_zero():
    out, lse, dq, dk, dv = results(Problem(((3, 5),), varlen=True, tail=(2, 3), dtype="fp64"))
    assert (out[3:] == 0).all() and (lse[:, 3:] == -math.inf).all()
    assert (dq[3:] == 0).all() and (dk[5:] == 0).all() and (dv[5:] == 0).all()


def test_huge_scores_do_not_overflow():
    """exp of a score may be inf: the maximum has to be taken off first."""
    q = normal(1, 3, 1, 4)
    out, lse = reference(Inputs(q, q, q), scale=1e4)
    assert out.isfinite().all() and lse.isfinite().all()


# --- gradients by finite differences ------------------------------------------------------------------

FEATURES = {
    "plain": {},
    "causal, more queries than keys": {"lengths": ((4, 2),), "causal": True},
    "window": {"window": (1, -1)},
    "softcap": {"softcap": 1.5},
    "bias": {"bias": (True, True, True, True)},
    "bias, broadcast": {"bias": (False, True, False, True)},
    "alibi": {"alibi": "batch"},
    "sink": {"sink": "input"},
    "sink, a row without keys": {"sink": "input", "lengths": ((4, 2),), "causal": True},
    "dropout": {"dropout_p": 0.3},
    "gqa": {"group": 3},
    "varlen": {"varlen": True, "lengths": ((2, 3), (0, 1), (1, 2)), "causal": True},
    "used lengths": {"lengths": ((3, 3),) * 2, "used_q": (3, 1), "used_k": (2, 3)},
    "everything": {
        "softcap": 2.0,
        "bias": (True, False, True, True),
        "alibi": "heads",
        "sink": "input",
        "dropout_p": 0.2,
        "group": 2,
        "window": (2, 1),
    },
}


@pytest.mark.parametrize("name", FEATURES)
def test_gradients_equal_finite_differences(name: str):
    """Of output and lse together, in q, k, v, bias and sink."""
    form = {"lengths": ((3, 4),), "head_dim": 3, "head_dim_v": 2, "dtype": "fp64"} | FEATURES[name]
    t = tensors(Problem(**form, bias_dtype="input", poison=False))
    names = [n for n in ("q", "k", "v", "bias", "sink") if getattr(t.x, n) is not None]

    def results(*leaves: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = attention(t.spec, t.x._replace(**dict(zip(names, leaves, strict=True))))
        return out, lse.masked_fill(lse == -math.inf, 0)  # finite differences of -inf are NaN

    leaves = [getattr(t.x, n).clone().requires_grad_() for n in names]
    assert torch.autograd.gradcheck(results, leaves)


# --- precision --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_other_precisions_are_near(dtype: torch.dtype):
    t = tensors(Problem(((9, 12),), group=2, causal=True))
    exact, near = attention(t.spec, t.x), attention(t.spec, t.x, dtype)
    for a, b in zip(exact, near, strict=True):
        assert b.dtype == dtype
        torch.testing.assert_close(b.double(), a, rtol=0, atol=16 * torch.finfo(dtype).eps)
