"""Attention in fp8 on the CPU, against the reference in fp64 with the bound of ``fp8_bound``."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import fp8_bound
import problems
import pytest
import torch
from edges import EDGES
from hypothesis import given
from hypothesis import strategies as st
from problems import Problem, Size
from torch import Tensor

from tilewise import attention, attention_varlen, dispatch, explain, fp8
from tilewise.backends.cpu import tile
from tilewise.spec import FP8

ROW = next(k for k in dispatch.KERNELS if k.name == "cpu/fa3")
FEATURES = ROW.forward - {"fp8"} | {"bf16", "fp16"}
# What q, k and v are, as arguments of Problem.
KINDS: dict[str, dict[str, Any]] = {
    "given": {"dtype": "fp8", "descale": True},
    "tensor": {"dtype": "bf16", "fp8": "tensor"},
    "block": {"dtype": "fp16", "fp8": "block"},
    "rotated": {"dtype": "bf16", "fp8": "rotated"},
}
SMALL = Size(
    lengths=(5, 1, 2, 17, 33, 64, 70, 127, 129, 140),
    head_dims=(16, 1, 2, 8, 24, 40, 64),
    dtypes=("bf16", "fp16"),
)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the loop, not of the scales: none of them aligned with another, and scales across them."""
    monkeypatch.setattr(tile, "ROWS", 24)
    monkeypatch.setattr(tile, "KEYS", 20)


def of_kind(p: Problem, kind: str) -> Problem:
    bias_dtype = "fp32" if kind == "given" else p.bias_dtype
    sink = "fp32" if kind == "given" and p.sink == "input" else p.sink
    return replace(p, **KINDS[kind], bias_dtype=bias_dtype, sink=sink, loss="none")


def check(p: Problem) -> float:
    t = problems.tensors(p)
    return fp8_bound.check(p, t, problems.run(p, t))


# --- right, as far as the format goes -----------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", EDGES)
def test_edge(name: str, kind: str, small_tiles: None):
    check(of_kind(EDGES[name], kind))


@pytest.mark.parametrize("kind", KINDS)
def test_random_problems(kind: str, small_tiles: None):
    for seed in range(60):
        p = problems.random_problem(seed, FEATURES, SMALL)
        check(of_kind(p, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_fuzz(kind: str):
    @given(problems.problems(FEATURES, SMALL))
    def right(p: Problem):
        check(of_kind(p, kind))

    right()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim", [1, 3, 8, 59, 64, 96, 128, 200, 256])
def test_head_dim(head_dim: int, kind: str):
    """Those that the rotation pads, and values whose head dim is another."""
    p = Problem(((30, 140),), 2, 2, head_dim, 24, layout="sliced", seed=head_dim)
    check(of_kind(p, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_an_honest_forward_needs_most_of_the_bound(kind: str):
    """Or there would be room for a bug."""
    p = Problem(((130, 300),), 2, 2, 64, 64, causal=True)
    assert 0.4 < check(of_kind(p, kind)) < 0.8


def wrong(monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    quantize, rotate, encode = fp8.quantize, fp8.rotate, fp8.encode
    if bug == "the scale of the tile before":

        def shifted(x: Tensor, used: range, tile: int | None = None) -> fp8.Quantized:
            q = quantize(x, used, tile)
            return q._replace(descale=q.descale.roll(1, dims=1))

        monkeypatch.setattr(fp8, "quantize", shifted)
    elif bug == "queries are not rotated":
        calls: list[int] = []

        def only_keys(x: Tensor, heads: range) -> Tensor:
            calls.append(1)
            return x.float() if len(calls) % 2 else rotate(x, heads)

        monkeypatch.setattr(fp8, "rotate", only_keys)
    elif bug == "signs of another head":
        monkeypatch.setattr(
            fp8, "rotate", lambda x, heads: rotate(x, range(x.shape[2], x.shape[2] + len(heads)))
        )
    elif bug == "two bits of mantissa":
        monkeypatch.setattr(fp8, "encode", lambda x: encode(x.to(torch.float8_e5m2).float()))
    else:
        assert bug == "weights without a scale"
        monkeypatch.setattr(fp8, "WEIGHT_SCALE", 2.0**-6)


@pytest.mark.parametrize(
    "bug",
    [
        "the scale of the tile before",
        "queries are not rotated",
        "signs of another head",
        "two bits of mantissa",
        "weights without a scale",
    ],
)
def test_the_bound_finds(bug: str, monkeypatch: pytest.MonkeyPatch):
    p = of_kind(Problem(((130, 300),), 2, 2, 64, 64), "rotated")
    check(p)
    wrong(monkeypatch, bug)
    with pytest.raises(AssertionError, match="error"):
        check(p)


def outliers(*shape: int, seed: int) -> Tensor:
    """N(0, 1) + N(0, 100) * Bernoulli(0.001), by which the article measures."""
    random = torch.Generator().manual_seed(seed)
    normal, large = (torch.randn(shape, generator=random) for _ in range(2))
    return (normal + 10 * large * (torch.rand(shape, generator=random) < 1e-3)).bfloat16()


@pytest.mark.parametrize("how", FP8)
@pytest.mark.parametrize("length", [127, 128, 129, 256])
def test_last_tiles_and_values_with_outliers(length: int, how: str):
    """Rows past the last key that get weight, or whose scale is used: the direction would be lost."""
    random = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(2, length, 4, 64, generator=random).bfloat16() for _ in range(3))
    v = v + 10 * outliers(*v.shape, seed=length) * (torch.rand(v.shape, generator=random) < 1e-2)
    out = attention(q, k, v, fp8=how).double()
    want = attention(q.double(), k.double(), v.double())
    assert float(torch.nn.functional.cosine_similarity(out.flatten(), want.flatten(), dim=0)) > 0.99


@pytest.mark.parametrize(("head_dim", "length", "heads"), [(256, 8192, 4), (128, 16384, 4)])
def test_rotation_takes_outliers_away(head_dim: int, length: int, heads: int):
    """What it is for. The share grows with length and head dim: see docs/fp8.md."""
    lengths = 512, length, length
    q, k, v = (outliers(1, n, heads, head_dim, seed=s) for s, n in enumerate(lengths))
    want = attention(q.double(), k.double(), v.double())

    def error(how: str) -> float:
        return float((attention(q, k, v, fp8=how).double() - want).norm() / want.norm())

    assert error("tensor") >= 2.6 * error("rotated")


def test_a_sink_far_above_the_scores_leaves_weights_their_range():
    """Measured against the sink, all weights were below e4m3's smallest number, and the output 0."""
    q, k, v = (torch.randn(1, 40, 2, 32).bfloat16() for _ in range(3))
    sink = torch.full((2,), 30.0)
    out = attention(q, k, v, sink=sink, fp8="block").double()
    want = attention(q.double(), k.double(), v.double(), sink=sink)
    assert float((out - want).norm() / want.norm()) < 0.1


# --- what must hold bit for bit -----------------------------------------------------------------------


def same(a: problems.Results, b: problems.Results) -> None:
    for name in a:
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_what_has_no_effect_changes_no_bit(kind: str):
    """NaN and inf where no query looks: through the scale of their tile they would be everywhere."""
    windowed = Problem(((20, 45),) * 2, 1, 2, window=(3, -9), used_k=(45, 30), used_q=(20, 7))
    packed = Problem(((20, 45), (7, 0)), 1, 2, causal=True, varlen=True, tail=(3, 9))
    for p in (windowed, packed):
        runs = (of_kind(replace(p, poison=poison), kind) for poison in (False, True))
        same(*(problems.run(a, problems.tensors(a)) for a in runs))


@pytest.mark.parametrize("how", FP8)
def test_a_query_without_keys_may_be_nan(how: str):
    """It shares its tile's scale with those that have some."""
    q, k, v = (torch.randn(1, n, 2, 16).bfloat16() for n in (30, 20, 20))
    clean = attention(q, k, v, causal=True, fp8=how)
    q[:, :10] = torch.nan
    assert torch.equal(attention(q, k, v, causal=True, fp8=how), clean)


@pytest.mark.parametrize("how", FP8)
def test_a_hidden_key_may_be_nan(how: str):
    """Also one that other rows of its tile see: they alone are NaN."""
    q, k, v = (torch.randn(1, 20, 2, 8).bfloat16() for _ in range(3))
    k[:, 13] = 0
    clean = attention(q, k, v, causal=True, fp8=how)
    k[:, 13] = torch.nan
    out = attention(q, k, v, causal=True, fp8=how)
    assert torch.equal(out[:, :13], clean[:, :13])
    assert out[:, 13:].isnan().all()


@pytest.mark.parametrize("how", FP8)
def test_a_sequence_does_not_depend_on_its_batch(how: str):
    """Alone, beside others, packed: scales are its own, and tiles begin where it begins."""
    q, k, v = (torch.randn(2, n, 4, 16).bfloat16() for n in (33, 200, 200))
    out, lse = attention(q, 100 * k, v, return_lse=True, fp8=how)
    cu_q, cu_k = (torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (33, 200))
    packed, packed_lse = attention_varlen(
        *(t.flatten(0, 1) for t in (q, 100 * k, v)), cu_seqlens_q=cu_q, cu_seqlens_k=cu_k,
        max_seqlen_q=33, max_seqlen_k=200, return_lse=True, fp8=how,
    )  # fmt: skip
    assert torch.equal(packed.view(out.shape), out)
    assert torch.equal(packed_lse.unflatten(1, (2, 33)).transpose(0, 1), lse)
    for b in range(2):
        alone = attention(q[b : b + 1], 100 * k[b : b + 1], v[b : b + 1], fp8=how)
        assert torch.equal(alone, out[b : b + 1])


@pytest.mark.parametrize("kind", KINDS)
def test_threads_change_nothing(kind: str):
    """How heads are shared out to threads is nothing that a scale or a sign may depend on."""
    p = of_kind(Problem(((40, 50),) * 2, 6, 2, causal=True, dropout_p=0.3), kind)
    t = problems.tensors(p)
    before, results = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            results.append(problems.run(p, t))
    finally:
        torch.set_num_threads(before)
    same(*results)


def test_tensors_that_are_fp8_are_as_those_that_become_it():
    """Scales by key head, for the query heads of its group, too; None is 1."""
    q, k, v = (torch.randn(2, n, h, 16).bfloat16() for n, h in ((30, 6), (70, 2), (70, 2)))
    codes, descales = [], []
    for t, group in ((q, 3), (k, 1), (v, 1)):
        grouped = t.unflatten(2, (2, group)).transpose(1, 2)  # (B, Hkv, S, G, D)
        made = [fp8.quantize(one, range(one.shape[1])) for one in grouped]
        codes.append(torch.stack([m.codes for m in made]).transpose(1, 2).flatten(2, 3))
        descales.append(torch.stack([m.descale.flatten() for m in made]))
    names = ("q_descale", "k_descale", "v_descale")
    got = attention(*codes, **dict(zip(names, descales, strict=True)), return_lse=True)
    for a, b in zip(got, attention(q, k, v, fp8="tensor", return_lse=True), strict=True):
        assert torch.equal(a, b)
    ones = dict.fromkeys(names, torch.ones(2, 2))
    assert torch.equal(attention(*codes), attention(*codes, **ones))


@given(shift=st.integers(-20, 20))
def test_scales_take_powers_of_two_away(shift: int):
    """Of values exactly; of keys, if the scale of the scores takes them back."""
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 20, 1, 16, generator=random).bfloat16() for _ in range(3))
    out = attention(q, k, v, fp8="rotated", scale=0.25)
    got = attention(q, k * 2.0**shift, v * 2.0**shift, fp8="rotated", scale=0.25 * 2.0**-shift)
    assert torch.equal(got, out * 2.0**shift)


# --- gradients ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", FP8)
@pytest.mark.parametrize(
    "p",
    [
        Problem(((40, 150),), 2, 2, causal=True, dtype="bf16"),
        Problem(((40, 150),), 2, 2, shift=200.0, dtype="fp16"),
        Problem(
            ((30, 40), (7, 0), (5, 33)), 1, 2, dtype="bf16", varlen=True, softcap=5.0, alibi="heads",
            bias=(True,) * 4, sink="fp32", dropout_p=0.2, tail=(2, 3),
        ),
    ],
    ids=["causal", "one large channel", "everything"],
)  # fmt: skip
def test_gradients_are_those_without_fp8(p: Problem, how: str):
    """With the log-sum-exp or the output of the fp8 forward, weights do not add up to 1 nor dS to 0, and
    a channel that is large in all keys reaches dq."""
    without = problems.check(p)
    quantized = replace(p, fp8=how)
    got = problems.run(quantized, problems.tensors(quantized))
    assert not torch.equal(got["out"], without["out"])
    for name in got:
        if name.startswith("d"):
            assert torch.equal(got[name], without[name]), name


def test_a_forward_asked_for_by_name_has_a_backward():
    q, k, v = (torch.randn(1, 9, 2, 16).bfloat16().requires_grad_() for _ in range(3))
    asked = {"algorithm": "fa3", "backend": "cpu", "fp8": "block"}
    attention(q, k, v, **asked).sum().backward()
    assert q.grad is not None and q.grad.isfinite().all()
    found = explain(q, k, v, **asked).data
    assert found["forward"]["kernel"] == "cpu/fa3" and found["backward"]["kernel"] == "cpu/fa2"


def test_fp8_tensors_have_no_backward():
    """Not even of a sink, for which the weights would have to be computed again."""
    q = torch.randn(1, 9, 2, 16).to(torch.float8_e4m3fn)
    sink = torch.zeros(2, requires_grad=True)
    out = attention(q, q, q, sink=sink)
    with pytest.raises(dispatch.UnsupportedError, match="cpu/fa2: no backward with fp8 e4m3"):
        out.sum().backward()


# --- who runs it --------------------------------------------------------------------------------------


def test_only_this_kernel_runs_fp8_and_fp8_alone():
    """A kernel that ignores the argument would be exact, and nobody would see it."""
    q = torch.randn(1, 9, 2, 16).bfloat16()
    forward = explain(q, q, q, fp8="tensor").data["forward"]
    assert forward["kernel"] == "cpu/fa3"
    assert forward["passed_over"]["cpu/fa2"] == "no forward with fp8 e4m3"
    with pytest.raises(dispatch.UnsupportedError, match="cpu/fa3: no forward with bf16"):
        attention(q, q, q, algorithm="fa3")
    spec = problems.tensors(Problem(dtype="bf16", fp8="block")).spec
    for kernel in dispatch.KERNELS:
        if kernel is not ROW:
            assert kernel.lack(spec, "forward", frozenset()) == "no forward with fp8 e4m3"


@pytest.mark.parametrize("kind", KINDS)
def test_results_are_of_the_promised_dtype(kind: str):
    p = of_kind(Problem(((9, 12),)), kind)
    t = problems.tensors(p)
    assert problems.run(p, t)["out"].dtype == (torch.float16 if kind == "block" else torch.bfloat16)
    into = torch.zeros_like(t.x.q, dtype=torch.bfloat16)
    if kind == "given":
        attention(t.x.q, t.x.k, t.x.v, out=into)
        assert torch.equal(into, attention(t.x.q, t.x.k, t.x.v))
        with pytest.raises(TypeError, match=r"that of fp8 inputs, torch\.bfloat16"):
            attention(t.x.q, t.x.k, t.x.v, out=torch.zeros_like(t.x.q))


def test_a_row_that_sees_nothing_is_as_ever():
    q, k = torch.randn(1, 9, 2, 16).bfloat16(), torch.randn(1, 4, 2, 16).bfloat16()
    out, lse = attention(q, k, k, causal=True, fp8="rotated", return_lse=True)
    assert (out[:, :5] == 0).all() and (lse[..., :5] == -math.inf).all()
    assert (out[:, 5:] != 0).any() and lse[..., 5:].isfinite().all()
