"""Bias, ALiBi, sink and dropout in the Hopper kernels, both directions, in the simulator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import plans
import problems
import pytest
import torch
from problems import Problem, how

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
pytest.importorskip("greenlet")

from tilewise import attention, attention_varlen, dispatch, dropout_mask, schedule, sim
from tilewise.backends.hopper import around
from tilewise.backends.hopper.launch import plan_forward
from tilewise.backends.hopper.launch_backward import plan_backward
from tilewise.backends.hopper.terms import bias_unit, lay_terms, term_numbers, term_tensors

HOW = how("hopper/fa3")
ROW = next(k for k in dispatch.KERNELS if k.name == "hopper/fa3")
FORMS = {
    "bias": {"bias": (True, False, True, True), "bias_holes": True},
    "bias of keys, causal": {"bias": (False, True, False, True), "causal": True},
    "ALiBi": {"alibi": "batch"},
    "ALiBi, causal": {"alibi": "heads", "causal": True},
    "sink": {"sink": "bf16", "sink_off": True},
    "dropout": {"dropout_p": 0.3},
    "dropout, causal": {"dropout_p": 0.3, "causal": True},
    "dropout, keys from anywhere": {"dropout_p": 0.3, "window": (20, 5)},
    "everything": {
        **{"bias": (True,) * 4, "alibi": "heads", "sink": "fp32", "dropout_p": 0.2},
        **{"softcap": 5.0, "window": (60, 20)},
    },
}


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernel says that it can run here, on a GPU of two multiprocessors."""
    monkeypatch.setattr(dispatch, "KERNELS", (replace(ROW, unavailable=lambda device: None),))
    monkeypatch.setattr(schedule, "multiprocessors", lambda device: 2)
    kept = (plan_forward, plan_backward, around.space_of, around.plan_prepare, around.plan_finish)
    for plan in kept:
        plan.cache_clear()
    yield
    for plan in kept:
        plan.cache_clear()


def simulate(p: Problem, seed: int = 0) -> problems.Results:
    t = problems.tensors(p)
    with sim.intercept(seed=seed) as reports:
        got = problems.run(p, t, **HOW)
    assert reports
    for report in reports:
        report.raise_if_any()
    problems.check_results(p, t, got)
    return got


def run(function, *args, **options):
    with sim.intercept() as reports:
        found = function(*args, **options)
    for report in reports:
        report.raise_if_any()
    return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dims", [(64, 64), (192, 128)])
def test_every_variant_under_many_schedules(dims, form: str, sim_seeds: range):
    """A race or a deadlock shows in some order of events, not in all. Both backwards: that of narrow
    heads, and that of wide ones."""
    p = Problem(((70, 100),), 1, 1, *dims, "fp16", seed=dims[0], deterministic=True, **FORMS[form])
    results = [simulate(p, seed) for seed in sim_seeds]
    for other in results[1:]:
        assert all(torch.equal(results[0][name], other[name]) for name in other)


@pytest.mark.parametrize("form", [form for form in FORMS if "bias" not in FORMS[form]])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)])
def test_bf16(dims, form: str):
    """Whose softmax is another one in the forward. (A bias's gradient wants Triton's interpreter, which
    cannot multiply in bf16.)"""
    simulate(Problem(((150, 300),), 1, 2, *dims, "bf16", seed=dims[1], **FORMS[form]))


@pytest.mark.parametrize("form", FORMS)
def test_bf16_forward(form: str):
    simulate(Problem(((150, 300),), 1, 2, 128, 128, "bf16", loss="none", **FORMS[form]))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dims", [(64, 64), (192, 128)])
def test_packed_sequences(dims, form: str):
    """Which sequence it is and where its keys begin is told to consumers, and not by the tensors."""
    lengths = ((130, 200), (0, 30), (40, 100), (64, 0), (1, 1))
    p = Problem(lengths, 1, 2, *dims, "fp16", varlen=True, tail=(3, 2), **FORMS[form])
    simulate(p)
    simulate(replace(p, deterministic=True, lengths=lengths[::-1]))


@pytest.mark.parametrize("form", [form for form in FORMS if "bias" not in FORMS[form]])
def test_broken_query_tiles(form: str, monkeypatch: pytest.MonkeyPatch):
    """A sink counts once, not once for each part; what dropout takes does not depend on parts."""
    monkeypatch.setattr(schedule, "multiprocessors", lambda device: 5)
    monkeypatch.setattr(schedule, "BETWEEN_QUERY_TILES", 16)
    monkeypatch.setattr(schedule, "WORTH_BREAKING", -1)
    monkeypatch.setattr(schedule, "JOINING", -1e6)
    p = Problem(((130, 700),), 1, 1, 128, 128, "bf16", loss="none", **FORMS[form])
    if "window" not in FORMS[form]:
        t = problems.tensors(p)
        assert plans.forward(t.spec, t.x).join is not None  # or this tests nothing
    simulate(p)


def test_query_tiles_with_a_bias_are_not_broken(monkeypatch: pytest.MonkeyPatch):
    """Parts know no more of their log-sum-exp than fp32 holds."""
    monkeypatch.setattr(schedule, "multiprocessors", lambda device: 5)
    monkeypatch.setattr(schedule, "JOINING", -1e6)
    p = Problem(((130, 700),), 1, 1, 128, 128, "bf16", bias=(False, False, False, True), loss="none")
    t = problems.tensors(p)
    assert plans.forward(t.spec, t.x).join is None


@pytest.mark.parametrize("low", [0, 32, 37])
def test_dropout_is_that_of_its_witness(low: int):
    """Every word of a counter, keys beyond one tile, a second batch entry; keys that begin anywhere."""
    queries, keys = 100, 160 + low
    window = (60, None) if low else (None, None)
    q = torch.zeros(2, queries, 4, 64, dtype=torch.float16)
    k = torch.zeros(2, keys, 2, 64, dtype=torch.float16)
    v = torch.zeros(2, keys, 2, 256, dtype=torch.float16)
    v[:, torch.arange(keys), :, torch.arange(keys)] = 1
    out = run(attention, q, k, v, window=window, dropout_p=0.3, seed=11, **HOW)
    keep = dropout_mask(2, 4, queries, keys, dropout_p=0.3, seed=11)
    i = torch.arange(queries)[:, None] + keys - queries
    seen = (torch.arange(keys) >= i - 60) if low else torch.ones(queries, keys, dtype=torch.bool)
    assert torch.equal(out.transpose(1, 2)[..., :keys] > 0, keep & seen)


def test_dropout_of_nothing_is_no_dropout():
    q, k, v = (torch.randn(1, 90, 2, 64, dtype=torch.bfloat16) for _ in range(3))
    plain = run(attention, q, k, v, **HOW)
    assert torch.equal(run(attention, q, k, v, dropout_p=0.0, seed=1, **HOW), plain)


@pytest.mark.parametrize("causal", [False, True])
def test_alibi_of_keys_far_from_the_first_tile(causal: bool, sim_seeds: range):
    """The score of a row's first key tile less its distance is no anchor: all others would be infinite;
    and a row that sees no near key has weights too small to keep their digits."""
    for lengths in ((64, 700), (700, 64)):
        p = Problem((lengths,), 1, 1, 64, 64, "bf16", causal=causal, loss="none")
        t = problems.tensors(p)
        q, k, v = t.x[:3]
        slopes = torch.tensor([3.0])
        out, lse = run(attention, q, k, v, causal=causal, alibi_slopes=slopes, return_lse=True, **HOW)
        x = problems.Inputs(q.double(), k.double(), v.double(), alibi_slopes=slopes)
        spec = problems.make_spec(x, causal=causal)
        want, want_lse = problems.reference.attention(spec, x, torch.float64)
        assert (out.double() - want).norm() <= 5e-3 * want.norm()
        torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("padding", [-1e9, 1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("with_sink", [False, True])
def test_weights_add_up_to_one_under_a_huge_additive_mask(padding: float, with_sink: bool, dtype):
    """In units of log2(e) the least number is no number, and lse has no room for log(number of keys)."""
    q, k, v = (torch.randn(1, 70, 2, 64, dtype=dtype, requires_grad=True) for _ in range(3))
    sink = torch.full((2,), padding, requires_grad=True) if with_sink else None
    bias = torch.full((1, 1, 1, 70), padding)
    weight = 1 / 71 if with_sink else 1 / 70
    out = run(attention, q, k, v, bias=bias, sink=sink, **HOW)
    mean = weight * v.sum(1, keepdim=True)
    torch.testing.assert_close(out, mean.expand_as(out), atol=1e-2, rtol=1e-2)
    dout = torch.randn_like(out)
    run(out.backward, dout)
    want = (weight * dout.sum(1, keepdim=True)).expand_as(v)
    torch.testing.assert_close(v.grad, want, atol=1e-2, rtol=1e-2)
    if sink is not None:
        torch.testing.assert_close(
            sink.grad, -weight * (dout * out).float().sum((0, 1, 3)), atol=2e-2, rtol=2e-2
        )


def test_rows_that_a_bias_hides_from_all_keys():
    """Their lse is -inf though no mask says so: exp(s - lse) would be infinite in the backward."""
    q, k, v = (torch.randn(1, 70, 2, 64, dtype=torch.float16, requires_grad=True) for _ in range(3))
    bias = torch.zeros(1, 1, 70, 70)
    bias[..., 3:20, :] = -torch.inf
    bias.requires_grad_()
    out, lse = run(attention, q, k, v, bias=bias, return_lse=True, **HOW)
    assert not out[:, 3:20].any() and (lse[..., 3:20] == -torch.inf).all()
    assert lse[..., :3].isfinite().all() and lse[..., 20:].isfinite().all()
    run(out.sum().backward)
    for t in (q, k, v, bias):
        assert t.grad is not None and t.grad.isfinite().all()
    assert not q.grad[:, 3:20].any() and not bias.grad[..., 3:20, :].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_sink_alone_is_the_log_sum_exp_of_rows_that_see_nothing(dtype: torch.dtype):
    """Whatever values hold: 0 times infinity is not a number, and such a row's lse is finite now."""
    q = torch.randn(1, 90, 2, 64, dtype=dtype)
    k, v = (torch.randn(1, 40, 2, 64, dtype=dtype) for _ in range(2))
    sink = torch.tensor([0.5, -torch.inf], requires_grad=True)
    out = run(attention, q, k, v * torch.inf, causal=True, sink=sink, **HOW)
    assert not out[:, :50].any()
    out, lse = run(attention, q, k, v, causal=True, sink=sink, return_lse=True, **HOW)
    assert (lse[0, 0, :50] == 0.5).all() and (lse[0, 1, :50] == -torch.inf).all()
    run(lse[0, 0].sum().backward)
    assert sink.grad is not None and sink.grad[0] > 50 and sink.grad[1] == 0


def test_no_keys_at_all():
    """Nothing is launched; the log-sum-exp is the sink's all the same."""
    q, k = torch.randn(1, 9, 2, 64).half(), torch.randn(1, 0, 2, 64).half()
    sink = torch.tensor([0.5, -torch.inf])
    out, lse = attention(q, k, k, sink=sink, return_lse=True, **HOW)
    assert not out.any() and (lse[0, 0] == 0.5).all() and (lse[0, 1] == -torch.inf).all()


@pytest.mark.parametrize(
    "p",
    [
        Problem(((5, 0), (3, 0)), 1, 2, 64, 64, "fp16", sink="fp32", varlen=True, tail=(3, 0)),
        Problem(((5, 0), (5, 0)), 1, 2, 64, 64, "fp16", sink="fp32", used_q=(2, 3)),
        Problem((), 1, 1, 64, 64, "fp16", sink="bf16", varlen=True, tail=(3, 0)),
    ],
)
def test_a_sink_is_no_log_sum_exp_of_rows_that_belong_to_no_sequence(p: Problem):
    """Where there are no keys nothing is launched: all rows got the sink, its gradient counted them."""
    t = problems.tensors(p)
    problems.check_results(p, t, problems.run(p, t, **HOW))


@pytest.mark.parametrize("cap", [5.0, 50.0, 400.0])
def test_softcap_is_as_exact_as_scores_are(cap: float):
    """An error relative to the cap is more than fp32 may lose of a log-sum-exp of few keys."""
    for seed in range(10):
        p = Problem(((65, 40),), 1, 1, 64, 64, "fp16", causal=True, window=(3, None), softcap=cap)
        simulate(replace(p, loss="none", seed=seed))


def test_most_weights_are_dropped():
    """A threshold above half of all 16-bit numbers is negative, or too large, in the upper half."""
    simulate(Problem(((33, 64),), 1, 1, 64, 64, "bf16", dropout_p=0.9))


@pytest.mark.parametrize("logit", [3e38, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sinks_at_the_ends_of_fp32(logit: float, dtype: torch.dtype):
    """In units of log2(e) they are infinite: no number, or no sink."""
    q, k = torch.randn(1, 90, 2, 64, dtype=dtype), torch.randn(1, 40, 2, 64, dtype=dtype)
    sink = torch.full((2,), logit, requires_grad=True)
    out, lse = run(attention, q, k, k, causal=True, sink=sink, return_lse=True, **HOW)
    assert out.isfinite().all() and not out[:, :50].any()
    assert (lse[..., :50] == logit).all() and (logit < 0 or not out.any())
    run(lse.sum().backward)
    torch.testing.assert_close(sink.grad, torch.full((2,), 50.0 if logit < 0 else 90.0))


def test_a_bias_lies_in_memory_as_it_likes():
    """Broadcast by strides of 0, transposed, a slice that begins anywhere, steps of every alignment."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, 2, 64, dtype=torch.float16) for n in (70, 90, 90))
    wide = torch.randn(2, 2, 75, 101)
    forms = {
        "contiguous": wide[..., :70, :90].contiguous(),
        "pairs": torch.randn(2, 2, 70, 98)[..., :90],
        "slice": wide[..., 3:73, 5:95],
        "transposed": torch.randn(2, 2, 90, 70).mT,
        "expanded": torch.randn(1, 1, 1, 90).expand(2, 2, 70, 90),
        "of queries": torch.randn(1, 2, 70, 1).expand(2, 2, 70, 90),
        "fp16": wide[..., :70, 1:91].half(),
    }
    units = set()
    for name, bias in forms.items():
        x = problems.Inputs(q, k, v, bias=bias)
        units.add(bias_unit(lay_terms(problems.make_spec(x), x)))
        got = run(attention, q, k, v, bias=bias, **HOW)
        want = problems.reference.attention(problems.make_spec(x), x, torch.float64)[0]
        torch.testing.assert_close(got.double(), want, atol=2e-3, rtol=2e-3, msg=name)
    assert units == {0, 1, 2, 8}  # or this does not test every way to address one


@pytest.mark.parametrize("varlen", [False, True])
def test_what_is_not_there_is_not_compiled_in(varlen: bool):
    """A kernel without terms is the one that it was."""
    p = Problem(((70, 90),), 1, 1, 64, 64, "bf16", varlen=varlen)
    t = problems.tensors(p)
    given = term_numbers(t.spec, lay_terms(t.spec, t.x)) | term_tensors(t.spec, t.x)
    assert set(given.values()) == {None}


def test_rows_beyond_max_seqlen_read_no_bias(monkeypatch: pytest.MonkeyPatch):
    """On a GPU nobody checks lengths: sequences longer than max_seqlen."""
    from tilewise import ops

    monkeypatch.setattr(ops, "check_values", lambda *_: None)
    t = torch.randn(40, 2, 64, dtype=torch.float16)
    cu = torch.tensor([0, 40], dtype=torch.int32)
    ends = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 17, "max_seqlen_k": 17}
    around_it = torch.full((17 * 17 + 400,), torch.nan)
    around_it[:289] = 0
    out = run(attention_varlen, t, t, t, bias=around_it[:289].view(1, 1, 17, 17), **ends, **HOW)
    assert out.isfinite().all() and not out[17:].any()
