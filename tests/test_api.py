"""The public functions: what each argument does to the call, and how they agree with one another."""

from __future__ import annotations

import copy
import math
import re
from dataclasses import replace
from typing import Any

import problems
import pytest
import torch
from problems import Problem

import tilewise
from tilewise import (
    UnsupportedError,
    attention,
    attention_varlen,
    dispatch,
    dropout_mask,
    explain,
    reference,
)
from tilewise.spec import Inputs, make_spec


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def qkv(
    sq: int = 9, sk: int = 12, *, batch: int = 2, heads: tuple[int, int] = (4, 2), dtype=torch.float32
) -> tuple[torch.Tensor, ...]:
    q, k, v = (torch.randn(batch, s, h, 16) for s, h in ((sq, heads[0]), (sk, heads[1]), (sk, heads[1])))
    return tuple(t.to(dtype) for t in (q, k, v))


# --- layout, out, return_lse --------------------------------------------------------------------------


def test_bhsd_is_bshd_with_heads_first():
    q, k, v = qkv()
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    heads_first = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
    other, other_lse = attention(*heads_first, causal=True, return_lse=True, layout="bhsd")
    assert torch.equal(other, out.transpose(1, 2)) and torch.equal(other_lse, lse)


def test_bhsd_gradients():
    q, k, v = (t.transpose(1, 2).contiguous().requires_grad_() for t in qkv())
    attention(q, k, v, layout="bhsd").square().sum().backward()
    plain = [t.detach().transpose(1, 2).requires_grad_() for t in (q, k, v)]
    attention(*plain).square().sum().backward()
    for a, b in zip((q, k, v), plain, strict=True):
        assert a.grad.shape == a.shape and torch.equal(a.grad, b.grad.transpose(1, 2))


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_out_is_written_and_returned(layout: str):
    q, k, v = qkv()
    want, lse = attention(q, k, v, return_lse=True)
    if layout == "bhsd":
        q, k, v, want = (t.transpose(1, 2) for t in (q, k, v, want))
    target = torch.empty(want.shape)
    got, got_lse = attention(q, k, v, out=target, return_lse=True, layout=layout)
    assert got is target and torch.equal(target, want) and torch.equal(lse, got_lse)


def test_out_may_be_a_slice_of_something_larger():
    """Strides of out are its own: writing as if it were contiguous would hit its neighbours."""
    q, k, v = qkv()
    room = torch.full((2, 9, 6, 20), 7.0)
    attention(q, k, v, out=room[:, :, 1:5, 3:19])
    assert torch.equal(room[:, :, 1:5, 3:19], attention(q, k, v))
    room[:, :, 1:5, 3:19] = 7
    assert (room == 7).all()


def test_out_rows_of_no_sequence_are_cleared():
    """What a reused buffer held before must not survive where no sequence is."""
    q, k, v = (torch.randn(9, h, 16) for h in (4, 2, 2))
    cu = torch.tensor([0, 3, 7], dtype=torch.int32)
    target = torch.full((9, 4, 16), 7.0)
    common = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 4, "max_seqlen_k": 4}
    out, lse = attention_varlen(q, k, v, **common, out=target, return_lse=True)
    assert out is target and (out[7:] == 0).all() and (lse[:, 7:] == -math.inf).all()
    used = torch.tensor([2, 0], dtype=torch.int32)
    out = attention(*qkv(), seqused_q=used, out=torch.full((2, 9, 4, 16), 7.0))
    assert (out[0, 2:] == 0).all() and (out[1] == 0).all()


def test_out_without_gradients_takes_leaves_that_could_have_some():
    q, k, v = qkv()
    with torch.no_grad():
        got = attention(q.requires_grad_(), k, v, out=torch.empty_like(q))
    assert torch.equal(got, attention(q, k, v))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_output_and_lse_dtypes_and_shapes(dtype: torch.dtype):
    q, k, v = qkv(dtype=dtype)
    out, lse = attention(q, k, v[..., :7], return_lse=True)
    assert out.dtype == dtype and out.shape == (2, 9, 4, 7)
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert lse.shape == (2, 4, 9)
    assert isinstance(attention(q, k, v), torch.Tensor)


# --- packed sequences ---------------------------------------------------------------------------------


def test_varlen_equals_each_sequence_alone():
    lengths = ((5, 9), (0, 3), (7, 0), (12, 4), (1, 1))
    p = Problem(lengths, 2, 2, causal=True, varlen=True, tail=(2, 3))
    t = problems.tensors(p)
    out, lse = attention_varlen(**_packed(t), causal=True, return_lse=True)
    start_q = start_k = 0
    for sq, sk in lengths:
        rows, keys = slice(start_q, start_q + sq), slice(start_k, start_k + sk)
        alone = attention(
            t.x.q[None, rows], t.x.k[None, keys], t.x.v[None, keys], causal=True, return_lse=True
        )
        torch.testing.assert_close(out[None, rows], alone[0], rtol=0, atol=1e-6)
        torch.testing.assert_close(lse[None, :, rows], alone[1], rtol=0, atol=1e-6)
        start_q, start_k = start_q + sq, start_k + sk


def _packed(t: problems.Tensors) -> dict[str, Any]:
    x = t.x
    return {
        "q": x.q,
        "k": x.k,
        "v": x.v,
        "cu_seqlens_q": x.cu_seqlens_q,
        "cu_seqlens_k": x.cu_seqlens_k,
        "max_seqlen_q": t.spec.max_seqlen_q,
        "max_seqlen_k": t.spec.max_seqlen_k,
    }


def test_rows_past_the_last_sequence_are_zero_with_zero_gradients():
    t = problems.tensors(Problem(((3, 4), (2, 2)), varlen=True, tail=(4, 5)))  # NaN in those rows
    leaves = [a.requires_grad_() for a in t.x[:3]]
    out, lse = attention_varlen(**_packed(t), return_lse=True)
    assert (out[5:] == 0).all() and (lse[:, 5:] == -math.inf).all()
    dq, dk, dv = torch.autograd.grad(out, leaves, t.dout)
    assert (dq[5:] == 0).all() and (dk[6:] == 0).all() and (dv[6:] == 0).all()
    assert all(g.isfinite().all() for g in (dq, dk, dv))


def test_max_seqlen_may_be_a_tensor():
    t = problems.tensors(Problem(((3, 4), (2, 2)), varlen=True))
    packed = _packed(t)
    as_tensors = {n: torch.tensor(packed[n]) for n in ("max_seqlen_q", "max_seqlen_k")}
    assert torch.equal(attention_varlen(**packed), attention_varlen(**packed | as_tensors))


def test_max_seqlen_may_be_too_large():
    """Also where it enters the normalized window: a bound may only vanish where it binds nowhere."""
    t = problems.tensors(Problem(((3, 4), (2, 2)), varlen=True))
    for options in ({"causal": True}, {"window": (2, 1)}, {"window": (3, None)}):
        want = attention_varlen(**_packed(t), **options)
        much = _packed(t) | {"max_seqlen_q": 1000, "max_seqlen_k": 999}
        torch.testing.assert_close(attention_varlen(**much, **options), want, rtol=0, atol=1e-6)


# --- dropout and its seeds ----------------------------------------------------------------------------


def weights_used(seed: Any, p: float = 0.4) -> torch.Tensor:
    """The weights attention gave to each value, (B, H, Sq, Sk), read off by values that are units."""
    q = torch.zeros(2, 5, 3, 8)
    v = torch.eye(40).view(1, 40, 1, 40).expand(2, 40, 3, 40)
    return attention(q, torch.zeros(2, 40, 3, 8), v, dropout_p=p, seed=seed).permute(0, 2, 1, 3)


def test_dropout_mask_is_what_attention_uses():
    for seed in (0, 12345, (7, 3), (-5, 2**40)):
        keep = dropout_mask(2, 3, 5, 40, dropout_p=0.4, seed=seed)
        exact = 65536 / (65536 - round(0.4 * 65536)) / 40
        torch.testing.assert_close(weights_used(seed), keep * exact, rtol=1e-6, atol=0)


def test_dropout_mask_of_packed_sequences():
    p = Problem(((4, 7), (6, 5)), 1, 2, varlen=True, dropout_p=0.5, poison=False)
    t = problems.tensors(p)
    out = attention_varlen(**_packed(t), dropout_p=0.5, seed=9)
    keep = dropout_mask(2, 2, 6, 7, dropout_p=0.5, seed=9)
    q, k, v = (a[4 if n == 0 else 7 :].double() for n, a in enumerate(t.x[:3]))
    scores = torch.einsum("ihd,jd->hij", q, k[:, 0]) / 4
    weights = scores.softmax(-1) * keep[1, :, :6, :5] * 2
    torch.testing.assert_close(
        out[4:].double(), torch.einsum("hij,jd->ihd", weights, v[:, 0]), atol=1e-5, rtol=0
    )


def test_seed_forms_that_mean_the_same():
    want = weights_used((11, 4))
    assert torch.equal(weights_used(torch.tensor([11, 4])), want)
    assert not torch.equal(weights_used((11, 5)), want)
    assert not torch.equal(weights_used((12, 4)), want)
    alone = weights_used(11)
    for same in ((11, 0), torch.tensor(11), torch.tensor([11]), torch.tensor([11, 0])):
        assert torch.equal(weights_used(same), alone)


def test_no_seed_draws_from_torchs_generator():
    torch.manual_seed(1)
    first, second = weights_used(None), weights_used(None)
    torch.manual_seed(1)
    assert torch.equal(weights_used(None), first)
    assert not torch.equal(first, second)


def test_no_dropout_draws_nothing():
    """Attention without dropout must not move the generator: it would change the run around it."""
    tensors = qkv()
    before = torch.get_rng_state()
    attention(*tensors)
    assert torch.equal(torch.get_rng_state(), before)


def test_dropout_mask_shapes_and_errors():
    assert dropout_mask(0, 3, 5, 4, dropout_p=0.4, seed=1).shape == (0, 3, 5, 4)
    assert dropout_mask(2, 3, 5, 4, dropout_p=0.0, seed=1).all()
    with pytest.raises(ValueError, match=r"dropout_p: got 1.0; allowed is in \[0, 1\)"):
        dropout_mask(1, 1, 1, 1, dropout_p=1.0, seed=1)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"batch": -1}, ValueError, "batch: got -1; allowed is 0 to 2**32 - 1"),
        ({"heads": 1.0}, TypeError, "heads: got 1.0 (float); allowed is an integer"),
        ({"seqlen_q": True}, TypeError, "seqlen_q: got True (bool); allowed is an integer"),
        ({"seqlen_k": 2**32}, ValueError, "seqlen_k: got 4294967296; allowed is 0 to 2**32 - 1"),
        ({"dropout_p": "1"}, TypeError, "dropout_p: got '1' (str); allowed is a number"),
        ({"dropout_p": math.nan}, ValueError, "dropout_p: got nan; allowed is in [0, 1)"),
        ({"seed": None}, ValueError, "seed: got None; allowed is an int, (seed, offset) or"),
        ({"seed": 1.5}, ValueError, "seed: got 1.5; allowed is an int, (seed, offset) or"),
        ({"device": "gpu"}, ValueError, "device: got 'gpu'; allowed is a device of torch"),
    ],
)
def test_dropout_mask_names_what_is_wrong(changes, error, message):
    """A seed of None gave a mask that no call would use."""
    good = {"batch": 1, "heads": 1, "seqlen_q": 1, "seqlen_k": 1, "dropout_p": 0.5, "seed": 1}
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        dropout_mask(**good | changes)


def test_backward_drops_what_forward_dropped():
    """Without a seed nobody else knows the mask. The output is linear in v, so sum(dv * v) must be
    sum(dout * out); with another mask in backward it is not."""
    q, k, v = (t.requires_grad_() for t in qkv(dtype=torch.float64))
    out = attention(q, k, v, dropout_p=0.3)
    dout = torch.randn_like(out)
    (dv,) = torch.autograd.grad(out, v, dout)
    assert (dv * v).sum().item() == pytest.approx((dout * out).sum().item(), rel=1e-9)


# --- which kernel, and why ----------------------------------------------------------------------------


def test_explain_as_text_and_data():
    q, k, v = qkv()
    found = explain(q, k, v, causal=True)
    assert found.data["forward"]["kernel"] == found.data["backward"]["kernel"] == "cpu/fa2"
    assert set(found.data["features"]) == {"causal", "fp32", "gqa"}
    assert "forward: cpu/fa2" in str(found) and "backward: cpu/fa2" in str(found)


def test_explain_gives_reasons():
    q, k, v = qkv()
    found = explain(q, k, v, algorithm="fa1")
    assert found.data["forward"]["kernel"] == "cpu/fa1"
    assert "fa1" in found.data["forward"]["passed_over"]["cpu/fa2"]
    assert "not cpu/fa2: algorithm='fa1' was asked for" in str(found)
    nothing = explain(q, k, v, algorithm="fa3")
    assert nothing.data["forward"]["kernel"] is None
    assert "no kernel" in str(nothing)
    assert set(nothing.data["forward"]["passed_over"]) == {kernel.name for kernel in dispatch.KERNELS}


def test_explain_takes_every_argument_of_the_call():
    q, k, v = (t.transpose(1, 2) for t in qkv())
    slopes, sink, used = torch.rand(4), torch.rand(4), torch.tensor([3, 9], dtype=torch.int32)
    found = explain(
        q, k, v, causal=True, window=(3, 1), scale=1.0, softcap=2.0, bias=torch.zeros(1, 1, 9, 12),
        alibi_slopes=slopes, sink=sink, dropout_p=0.1, seed=3, seqused_q=used, seqused_k=used,
        layout="bhsd", deterministic=True, algorithm="fa2", backend="cpu", return_lse=True, out=None,
    )  # fmt: skip
    asked = {"window", "softcap", "bias", "alibi", "sink", "dropout", "seqused", "deterministic"}
    assert asked <= set(found.data["features"])
    t = problems.tensors(Problem(((3, 4), (2, 2)), varlen=True))
    assert "varlen" in explain(**_packed(t)).data["features"]


def test_explain_says_what_the_call_would_say():
    q, k, v = qkv()
    with pytest.raises(ValueError, match="softcap: got -1"):
        explain(q, k, v, softcap=-1.0)
    with pytest.raises(TypeError, match="causal: got 1"):
        explain(q, k, v, causal=1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'casual'"):
        explain(q, k, v, casual=True)  # was a bare KeyError
    with pytest.raises(TypeError, match="missing a required argument: 'cu_seqlens_k'"):
        explain(q, k, v, cu_seqlens_q=q)
    with pytest.raises(ValueError, match="out: got a tensor while gradients are recorded"):
        explain(q.requires_grad_(), k, v, out=torch.empty_like(q))


def test_explain_runs_nothing():
    q, k, v = qkv()
    before = torch.get_rng_state()
    explain(q, k, v, dropout_p=0.5)
    assert torch.equal(torch.get_rng_state(), before)
    q, k, v = (t.to("meta") for t in (q, k, v))
    assert explain(q, k, v).data["forward"]["kernel"] is None  # no kernel for this device, and no error


@pytest.mark.parametrize("algorithm", ["fa3", "fa4"])
def test_what_cannot_run_here_says_why(algorithm: str):
    with pytest.raises(UnsupportedError) as error:
        attention(*qkv(), algorithm=algorithm)
    assert all(kernel.name in str(error.value) for kernel in dispatch.KERNELS)
    assert algorithm in str(error.value)


def test_descales_are_refused_not_ignored():
    for name in ("q_descale", "k_descale", "v_descale"):
        for call in (attention, explain):
            with pytest.raises(ValueError, match=f"{name}: .*only fp8 tensors have scales"):
                call(*qkv(), **{name: torch.ones(1)})


def test_fp8_is_refused_with_reasons():
    q = torch.zeros(1, 4, 2, 16).to(torch.float8_e4m3fn)
    with pytest.raises(UnsupportedError, match="cpu/fa2: no forward with fp8 e4m3"):
        attention(q, q, q, algorithm="fa2")


# --- gradients ----------------------------------------------------------------------------------------


def test_second_derivatives_are_refused():
    """A wrong number would be silent: gradient penalties and Hessians would train on it."""
    q, k, v = (t.requires_grad_() for t in qkv())
    (dq,) = torch.autograd.grad(attention(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(UnsupportedError, match="second derivatives"):
        dq.sum().backward()


def test_gradients_equal_the_reference_for_every_argument():
    """The wiring, once more and by hand: each gradient arrives at its own argument."""
    p = Problem(
        ((9, 12),) * 2, 2, 2, dtype="fp64", causal=True, window=(6, None), softcap=4.0, bias=(True,) * 4,
        bias_dtype="input", alibi="batch", sink="input", dropout_p=0.3, scale=0.5, used_k=(12, 7),
    )  # fmt: skip
    t = problems.tensors(p)
    leaves = {n: getattr(t.x, n).clone().requires_grad_() for n in ("q", "k", "v", "bias", "sink")}
    x = t.x._replace(**leaves)
    given = {
        n: getattr(x, n)
        for n in Inputs._fields
        if n not in ("dropout_key", "cu_seqlens_q", "cu_seqlens_k")
    }
    options = {"causal": True, "scale": 0.5, "softcap": 4.0, "dropout_p": 0.3}
    got = attention(**given, window=(6, None), seed=p.seed, return_lse=True, **options)
    want = reference.attention(make_spec(x, window_left=6, **options), x)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    got, want = (torch.autograd.grad(r, leaves.values(), (t.dout, t.dlse)) for r in (got, want))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


# --- the package --------------------------------------------------------------------------------------


def test_public_names_are_documented():
    """Public docstrings give arguments, results, errors and the source."""
    for name in tilewise.__all__:
        if name != "__version__":
            assert getattr(tilewise, name).__doc__, name
    for function in (attention, attention_varlen):
        assert all(f"\n    {part}:" in function.__doc__ for part in ("Args", "Returns", "Raises"))


def test_arguments_are_left_as_they_were():
    """An operator that writes into its inputs is a bug that shows somewhere else."""
    t = problems.tensors(Problem(((9, 12),), 2, 2, sink="fp32", bias=(True,) * 4, layout="sliced"))
    before = copy.deepcopy([a for a in t.x if a is not None])
    attention(t.x.q, t.x.k, t.x.v, sink=t.x.sink, bias=t.x.bias, causal=True)
    assert all(torch.equal(a, b) for a, b in zip(before, (a for a in t.x if a is not None), strict=True))


def test_a_problem_can_be_run_from_its_description():
    """The tests' own machinery, where it touches the public functions."""
    p = Problem(((9, 12),), 2, 2, causal=True)
    again = replace(p, seed=1)
    t = problems.tensors(p)
    assert torch.equal(problems.run(p, t)["out"], attention(t.x.q, t.x.k, t.x.v, causal=True))
    assert not torch.equal(problems.tensors(again).x.q, t.x.q)


def test_torch_deterministic_mode_is_obeyed():
    """Someone who asks torch for determinism must not get atomic sums from here."""
    q, k, v = (torch.randn(1, 5, 2, 8) for _ in range(3))
    assert "deterministic" not in explain(q, k, v).data["features"]
    torch.use_deterministic_algorithms(True)
    try:
        assert "deterministic" in explain(q, k, v).data["features"]
        compiled = torch.compile(lambda q: attention(q, k, v), fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(q), attention(q, k, v))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("derivative", [torch.func.jacfwd, None], ids=["jacfwd", "jvp"])
def test_forward_mode_derivatives_are_refused(derivative):
    """They passed the operator by and came out as zeros."""
    q, k, v = (torch.randn(1, 4, 1, 8) for _ in range(3))

    def function(q):
        return attention(q, k, v)

    with pytest.raises(UnsupportedError, match="forward-mode"):
        if derivative is None:
            torch.func.jvp(function, (q,), (q,))
        else:
            derivative(function)(q)


@pytest.mark.parametrize("name", ["q", "k", "v", "shifted"])
def test_out_may_share_memory_with_an_input(name):
    """Rows were stored over keys that other tiles had still to read."""
    buffer = torch.randn(2 * 300 * 4 * 8 + 8)
    q, k, v = (torch.randn(2, 300, 4, 8) for _ in range(3))
    k = buffer[:-8].view(2, 300, 4, 8)
    want = attention(q, k, v)
    out = {"q": q, "k": k, "v": v, "shifted": buffer[8:].view(2, 300, 4, 8)}[name]
    torch.testing.assert_close(attention(q, k, v, out=out), want)


def test_out_that_overlaps_an_input_through_another_storage():
    """Two tensors over one buffer have two storages: their addresses tell, their storages do not."""
    memory = bytearray(4 * 39000)
    q = torch.randn(1, 600, 1, 64)
    k, out = (
        torch.frombuffer(memory, dtype=torch.float32, count=38400, offset=4 * n).view(1, 600, 1, 64)
        for n in (0, 100)
    )
    k.normal_()
    want = attention(q, k, k)
    attention(q, k, k, out=out)
    torch.testing.assert_close(out, want)


def test_out_that_overlaps_itself_is_refused():
    q, k, v = (torch.randn(1, 64, 2, 16) for _ in range(3))
    with pytest.raises(ValueError, match="one place for each element"):
        attention(q, k, v, out=torch.empty(1, 1, 2, 16).expand(1, 64, 2, 16))


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_what_is_no_tensor_is_a_type_error(name, layout):
    arguments = {n: torch.randn(1, 4, 2, 8) for n in "qkv"} | {name: [1.0]}
    with pytest.raises(TypeError, match=f"^{name}: got list; allowed is a tensor"):
        attention(**arguments, layout=layout)
