"""What must hold bit for bit on a GPU, and what a call may not do there."""

from __future__ import annotations

from dataclasses import replace

import accuracy
import problems
import pytest
import torch
from gpu_rows import ROWS, skip_what_does_not_run, supported
from problems import Problem, how

from tilewise import attention, attention_varlen, explain

DEVICE = "cuda"
RUNS = 200

BIG = Problem(((1000, 1100),) * 2, 2, 2, 64, 64, "bf16", causal=True, deterministic=True)
FORMS = {
    "d64": BIG,
    "d128": replace(BIG, head_dim=128, head_dim_v=128, dtype="fp16"),
    "d256, window": replace(BIG, head_dim=256, head_dim_v=256, causal=False, window=(300, 100)),
    "fp32": replace(BIG, dtype="fp32", lengths=((500, 600),) * 2),
    "varlen": replace(
        BIG, lengths=((1000, 1100), (3, 900), (0, 0), (700, 20)), varlen=True, softcap=20.0
    ),
}


@pytest.fixture(autouse=True)
def runs_here(request: pytest.FixtureRequest):
    skip_what_does_not_run(request)


def assert_same(a: problems.Results, b: problems.Results) -> None:
    for name in a:
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kernel", ROWS)
def test_deterministic_over_many_runs(kernel: str, form: str):
    """Races and atomics show now and then, not every time."""
    if not problems.features(FORMS[form]) <= supported(kernel):
        pytest.skip(f"{kernel} does not take {form}")
    t = problems.tensors(FORMS[form], DEVICE)
    first = problems.run(FORMS[form], t, **how(kernel))
    problems.check_results(FORMS[form], t, first)
    for _ in range(RUNS - 1):
        assert_same(first, problems.run(FORMS[form], t, **how(kernel)))


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("kernel", ROWS)
def test_window_of_all_keys_equals_causal(kernel: str, dtype: str):
    """(S - 1, 0) and causal are the same mask and must take the same path."""
    for lengths in ((333, 333), (200, 411), (411, 200)):
        p = Problem((lengths,), 1, 2, 64, 64, dtype, causal=True, deterministic=True)
        same = replace(p, causal=False, window=(lengths[1] - 1, 0))
        assert_same(*(problems.run(a, problems.tensors(a, DEVICE), **how(kernel)) for a in (p, same)))


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("kernel", ROWS)
def test_what_has_no_effect_changes_no_bit(kernel: str, dtype: str):
    """NaN and inf in keys that no query sees and in rows of no sequence: 0 * NaN must not happen."""
    p = Problem(((200, 450),) * 2, 1, 2, 64, 64, dtype, deterministic=True)
    windowed = replace(p, window=(30, -90), used_k=(450, 300), used_q=(200, 70))
    packed = replace(p, lengths=((200, 450), (70, 0)), causal=True, varlen=True, tail=(30, 90))
    for form in (windowed, packed):
        clean, dirty = (replace(form, poison=poison) for poison in (False, True))
        assert_same(
            *(problems.run(a, problems.tensors(a, DEVICE), **how(kernel)) for a in (clean, dirty))
        )


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("kernel", ROWS)
def test_a_sequence_does_not_depend_on_its_batch(kernel: str, dtype: str):
    """The same rows alone and beside others: bitwise the same results, gradients too."""
    p = Problem(((333, 411),) * 3, 2, 2, 64, 64, dtype, causal=True, deterministic=True)
    t = problems.tensors(p, DEVICE)
    together = problems.run(p, t, **how(kernel))
    alone = replace(p, lengths=p.lengths[:1])
    for b in range(3):
        part = slice(b, b + 1)
        x = t.x._replace(q=t.x.q[part], k=t.x.k[part], v=t.x.v[part])
        got = problems.run(alone, problems.Tensors(t.spec, x, t.dout[part], t.dlse[part]), **how(kernel))
        assert_same(got, {name: value[part] for name, value in together.items()})


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("kernel", ROWS)
def test_equal_maxima_are_rounded_without_bias(kernel: str, dtype: str):
    """When all scores of a row tie, every P is exp(0): a kernel that rounds them one way is off on
    average, not at random. The mean signed error stays within a quarter of an ulp."""
    p = Problem(((700, 700),), 2, 2, 64, 64, dtype, causal=True, equal_keys=True)
    t = problems.tensors(p, DEVICE)
    t.x.v.abs_().neg_().sub_(1)  # of one sign, or a bias would cancel
    out = problems.run(p, t, **how(kernel))["out"].double()
    error = out - problems.reference_results(t, "both", torch.float64)["out"]
    assert abs(float(error.mean())) <= accuracy.ulp(t.spec.dtype, float(out.abs().mean())) / 4


def test_a_gpu_gets_a_gpu_kernel():
    q = torch.zeros(1, 4, 2, 16, device=DEVICE, dtype=torch.bfloat16)
    chosen = explain(q, q, q)
    assert all(chosen.data[d]["kernel"].split("/")[0] != "cpu" for d in ("forward", "backward"))


@pytest.fixture
def syncs_are_errors():
    before = torch.cuda.get_sync_debug_mode()
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
@pytest.mark.parametrize("kernel", ROWS)
def test_a_call_does_not_wait_for_the_device(kernel: str, varlen: bool, syncs_are_errors):
    """Reading lengths back from the GPU would stall every layer of a model."""
    p = Problem(((100, 120), (100, 120)), 2, 2, 64, 64, "bf16", causal=True, varlen=varlen)
    t = problems.tensors(p, DEVICE)
    problems.run(p, t, **how(kernel))  # compiles
    torch.cuda.synchronize()
    syncs_are_errors()
    problems.run(p, t, **how(kernel))


@pytest.mark.parametrize("kernel", ROWS)
def test_a_call_runs_on_the_current_stream(kernel: str):
    p = Problem(((500, 600),), 2, 2, 64, 64, "bf16", causal=True, deterministic=True)
    t = problems.tensors(p, DEVICE)
    want = problems.run(p, t, **how(kernel))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # whatever does not wait for this stream is too early
        late = t.x._replace(q=t.x.q * 1, k=t.x.k * 1, v=t.x.v * 1)
        got = problems.run(p, t._replace(x=late), **how(kernel))
    stream.synchronize()
    assert_same(want, got)


@pytest.mark.parametrize("kernel", ROWS)
def test_a_graph_replays_with_new_lengths(kernel: str):
    """cu_seqlens and max_seqlen stay on the device: a captured call serves other partitions."""
    q, k, v = (torch.randn(300, 2, 64, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    cu = torch.tensor([0, 100, 120, 300], dtype=torch.int32, device=DEVICE)
    options = {"causal": True, **how(kernel)}
    longest = torch.tensor(180, device=DEVICE)

    def call() -> torch.Tensor:
        return attention_varlen(
            q,
            k,
            v,
            cu_seqlens_q=cu,
            cu_seqlens_k=cu,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            **options,
        )

    # Compile for what a capture uses: the total in place of a length that cannot be read.
    attention_varlen(
        q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=300, max_seqlen_k=300, **options
    )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for lengths in ((100, 20, 180), (1, 0, 299), (300, 0, 0)):
        cu.copy_(torch.tensor([0, *lengths], device=DEVICE).cumsum(0))
        graph.replay()
        for start, stop in zip(cu.tolist()[:-1], cu.tolist()[1:], strict=True):
            rows = (t[None, start:stop] for t in (q, k, v))
            alone = attention(*rows, **options)[0]
            torch.testing.assert_close(out[start:stop], alone, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("kernel", ROWS)
def test_compile_on_a_gpu(kernel: str):
    p = Problem(((100, 120),), 2, 2, 64, 64, "bf16")
    t = problems.tensors(p, DEVICE)

    def function(q, k, v):
        out, lse = attention(q, k, v, causal=True, return_lse=True, deterministic=True, **how(kernel))
        return out.float().square().sum() + lse.sum()

    leaves = [a.requires_grad_() for a in t.x[:3]]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    got, want = (torch.autograd.grad(f(*leaves), leaves) for f in (compiled, function))
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
