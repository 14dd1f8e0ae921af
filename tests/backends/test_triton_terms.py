"""Bias, ALiBi, sink and dropout in the Triton kernels: what tiles of one size would not show."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import problems
import pytest
import torch
from problems import Problem

pytest.importorskip("triton")

from tilewise import attention, attention_varlen, dispatch, dropout_mask, ops, schedule
from tilewise.backends.triton import fa2
from tilewise.backends.triton.launch import plan_launch
from tilewise.schedule import Tile

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HOW = {"backend": "triton", "algorithm": "fa2"}
KERNEL = next(k for k in dispatch.KERNELS if k.name == "triton/fa2")
# As on GPUs: dropout's counters serve 32 keys, which the interpreter's usual tiles halve.
TILES = [Tile(16, 32, 1, 1), Tile(32, 64, 1, 1)]


@pytest.fixture(params=TILES, ids=lambda t: f"{t.q}x{t.k}")
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Tile:
    if DEVICE != "cpu":
        pytest.skip("tiles of a GPU are what they are")
    monkeypatch.setattr(schedule, "_INTERPRETER", request.param)
    plan_launch.cache_clear()
    yield request.param
    plan_launch.cache_clear()


def test_dropout_does_not_depend_on_the_tile(tile: Tile):
    """Keys and queries beyond one tile, a GQA group, a second batch entry: every word of the counter."""
    q = torch.zeros(2, 70, 4, 16, device=DEVICE)
    k = torch.zeros(2, 150, 2, 16, device=DEVICE)
    v = torch.eye(150, device=DEVICE).expand(2, 2, 150, 150).transpose(1, 2)
    out = attention(q, k, v, dropout_p=0.3, seed=11, **HOW)
    keep = dropout_mask(2, 4, 70, 150, dropout_p=0.3, seed=11).to(DEVICE)
    torch.testing.assert_close(out.transpose(1, 2) * 150 * 0.7 > 0.5, keep)


def test_gradients_with_everything(tile: Tile):
    """Masks, tiles and dropout bits are transposed in the backward."""
    p = Problem(
        ((45, 75), (33, 140)), 1, 2, 24, 16, "fp32", causal=True, softcap=4.0, varlen=True,
        bias=(False, True, True, True), alibi="heads", sink="fp32", dropout_p=0.4,
    )  # fmt: skip
    for deterministic in (False, True):
        problems.check(replace(p, deterministic=deterministic), DEVICE, **HOW)


BROADCASTS = list(product([False, True], repeat=4))  # over batch entries, heads, queries, keys


@pytest.mark.parametrize(
    ("broadcast", "varlen"), [*((b, False) for b in BROADCASTS), *((b, True) for b in BROADCASTS[::5])]
)
def test_bias_gradient_over_what_it_is_broadcast_over(broadcast: tuple[bool, ...], varlen: bool):
    """Sums over batch entries, heads, queries and keys, and the same bits each time."""
    torch.manual_seed(0)
    sizes = (2, 2, 40, 50)
    shape = [1 if one else n for one, n in zip(broadcast, sizes, strict=True)]
    lead = (80,) if varlen else (2, 40)
    lead_k = (100,) if varlen else (2, 50)
    q = torch.randn(*lead, 2, 16, device=DEVICE)
    k, v = (torch.randn(*lead_k, 1, 16, device=DEVICE) for _ in range(2))
    bias = torch.randn(shape, device=DEVICE).transpose(-1, -2).contiguous().transpose(-1, -2)
    bias.requires_grad_()
    ends: dict[str, object] = {}
    if varlen:
        cu_q = torch.tensor([0, 33, 73], dtype=torch.int32, device=DEVICE)
        cu_k = torch.tensor([0, 50, 99], dtype=torch.int32, device=DEVICE)
        ends = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 40, "max_seqlen_k": 50}

    def gradient(**how: str) -> torch.Tensor:
        call = attention_varlen if varlen else attention
        out = call(q, k, v, causal=True, bias=bias, **ends, **how)
        return torch.autograd.grad((out * torch.cos(torch.arange(16, device=DEVICE))).sum(), bias)[0]

    got = gradient(**HOW)
    assert torch.equal(got, gradient(**HOW))
    if DEVICE == "cpu":
        torch.testing.assert_close(got, gradient(backend="cpu"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("padding", [-1e9, 1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_weights_add_up_to_one_under_a_huge_additive_mask(
    padding: float, with_sink: bool, deterministic: bool
):
    """In units of log2(e) the least number is no number, and lse has no room for log(number of keys)."""
    q, k, v = (torch.randn(1, 40, 2, 8, device=DEVICE, requires_grad=True) for _ in range(3))
    sink = torch.full((2,), padding, device=DEVICE, requires_grad=True) if with_sink else None
    bias = torch.full((1, 1, 1, 40), padding, device=DEVICE)
    out = attention(q, k, v, bias=bias, sink=sink, deterministic=deterministic, **HOW)
    weight = 1 / 41 if with_sink else 1 / 40
    torch.testing.assert_close(out, (weight * v.sum(1, keepdim=True)).expand_as(out))
    dout = torch.randn_like(out)
    out.backward(dout)
    torch.testing.assert_close(v.grad, (weight * dout.sum(1, keepdim=True)).expand_as(v))
    if sink is not None:
        torch.testing.assert_close(sink.grad, -weight * (dout * out).sum((0, 1, 3)))


def test_rows_that_a_bias_hides_from_all_keys():
    """Their lse is -inf though no mask says so: exp(s - lse) would be infinite in the backward."""
    q, k, v = (torch.randn(1, 40, 2, 8, device=DEVICE, requires_grad=True) for _ in range(3))
    bias = torch.zeros(1, 1, 40, 40, device=DEVICE)
    bias[..., 3:20, :] = -torch.inf
    bias.requires_grad_()
    out, lse = attention(q, k, v, bias=bias, return_lse=True, **HOW)
    assert not out[:, 3:20].any() and (lse[..., 3:20] == -torch.inf).all()
    assert lse[..., :3].isfinite().all() and lse[..., 20:].isfinite().all()
    out.sum().backward()
    for t in (q, k, v, bias):
        assert t.grad is not None and t.grad.isfinite().all()
    assert not q.grad[:, 3:20].any() and not bias.grad[..., 3:20, :].any()


def test_a_sink_alone_is_the_log_sum_exp_of_rows_that_see_nothing():
    q = torch.randn(1, 9, 2, 8, device=DEVICE)
    k = torch.randn(1, 4, 2, 8, device=DEVICE)
    sink = torch.tensor([0.5, -torch.inf], device=DEVICE, requires_grad=True)
    out, lse = attention(q, k, k, causal=True, sink=sink, return_lse=True, **HOW)
    assert not out[:, :5].any()
    assert (lse[0, 0, :5] == 0.5).all() and (lse[0, 1, :5] == -torch.inf).all()
    lse[0, 0].sum().backward()
    assert sink.grad is not None and sink.grad[0] > 5 and sink.grad[1] == 0


@pytest.mark.parametrize("shape", [(1, 1, 1, 41), (1, 1, 41, 1), (1, 1, 41, 41), (1, 2, 1, 1)], ids=str)
def test_gradient_of_a_bias_for_longer_sequences_than_there_are(shape: tuple[int, ...]):
    """max_seqlen is cut to what there is: the rest of the gradient was never written."""
    q = torch.randn(5, 2, 8, device=DEVICE)
    cu = torch.tensor([0, 5], dtype=torch.int32, device=DEVICE)
    ends = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 41, "max_seqlen_k": 41}
    bias = torch.zeros(shape, device=DEVICE, requires_grad=True)
    attention_varlen(q, q, q, bias=bias, **ends, **HOW).sin().sum().backward()
    assert bias.grad is not None and bias.grad.isfinite().all()
    assert not bias.grad[:, :, 5:].any() and not bias.grad[..., 5:].any()


@pytest.mark.parametrize(("sq", "sk"), [(0, 5), (5, 0), (0, 0)])
def test_gradient_of_a_bias_that_nothing_uses(sq: int, sk: int):
    """No program ran, and what it would have summed up was handed out."""
    q, k = torch.randn(1, sq, 2, 16, device=DEVICE), torch.randn(1, sk, 1, 16, device=DEVICE)
    bias = torch.zeros(1, 1, 1, 1, device=DEVICE, requires_grad=True)
    attention(q, k, k, bias=bias, **HOW).sum().backward()
    assert bias.grad is not None and not bias.grad.any()


def test_no_gradient_of_a_mask_that_wants_none(monkeypatch: pytest.MonkeyPatch):
    """An expanded mask became a tensor of all scores, and a kernel filled it, for nobody."""
    monkeypatch.setattr(fa2, "fill_bias_gradient", None)
    q = torch.randn(2, 33, 2, 8, device=DEVICE, requires_grad=True)
    mask = torch.zeros(2, 1, 1, 33, device=DEVICE).expand(2, 2, 33, 33)
    sink = torch.zeros(2, device=DEVICE)
    attention(q, q, q, bias=mask, sink=sink, **HOW).sum().backward()
    assert q.grad is not None


@pytest.mark.parametrize("logit", [3e38, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("with_alibi", [False, True])
def test_sinks_at_the_ends_of_fp32(logit: float, with_alibi: bool):
    """In units of log2(e) they are infinite: no number, or no sink."""
    q = torch.randn(1, 9, 2, 8, device=DEVICE)
    k = torch.randn(1, 4, 2, 8, device=DEVICE)
    sink = torch.full((2,), logit, device=DEVICE, requires_grad=True)
    slopes = torch.ones(2, device=DEVICE) if with_alibi else None
    out, lse = attention(q, k, k, causal=True, sink=sink, alibi_slopes=slopes, return_lse=True, **HOW)
    assert out.isfinite().all() and not out[:, :5].any()
    assert (lse[..., :5] == logit).all() and (logit < 0 or not out.any())
    lse.sum().backward()
    torch.testing.assert_close(sink.grad, torch.full((2,), 5.0 if logit < 0 else 9.0, device=DEVICE))


def test_rows_beyond_max_seqlen_are_those_of_no_sequence(monkeypatch: pytest.MonkeyPatch):
    """On a GPU nobody checks lengths: a sequence longer than max_seqlen read past the bias, and row
    statistics that nobody had written."""
    monkeypatch.setattr(ops, "check_values", lambda *_: None)
    t = torch.randn(40, 2, 8, device=DEVICE, requires_grad=True)
    cu = torch.tensor([0, 40], dtype=torch.int32, device=DEVICE)
    ends = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 17, "max_seqlen_k": 17}
    around = torch.full((17 * 17 + 400,), torch.nan, device=DEVICE)
    around[:289] = 0
    out = attention_varlen(t, t, t, bias=around[:289].view(1, 1, 17, 17), **ends, **HOW)
    out.sum().backward()
    assert out.isfinite().all() and t.grad is not None and t.grad.isfinite().all()
    assert not out[17:].any() and not t.grad[17:].any()
