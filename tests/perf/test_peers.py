"""The contenders: what is absent says why, what is there computes the same thing."""

from __future__ import annotations

import sys
import types
import warnings
from dataclasses import replace

import pytest
import torch

from tilewise import dispatch
from tilewise.perf import grid, peers, truth
from tilewise.perf.problem import Problem, make

CPU, GPU = torch.device("cpu"), torch.device("cuda")
PLAIN = Problem(2, 16, 4, 4, 8, 8, "fp32", True)
# Triton's interpreter is slow, and has tests of its own.
HERE = [c for c in peers.everyone().values() if c.absent(CPU) is None and "triton" not in c.name]


def test_every_kernel_takes_part():
    """But those for fp8 alone, which no problem is in yet."""
    assert set(peers.own()) == {k.name for k in dispatch.KERNELS} - {"cpu/fa3"}


def test_supports_are_words_of_the_support_table():
    """A misspelt feature would silently be one that nobody supports."""
    everything = Problem(1, 16, 4, 2, 8, 4, "bf16", True, (3, 0), (16,), 1.0, True, True, True, True)
    assert everything.needs <= set(dispatch.FEATURES)
    data = make(replace(PLAIN, dtype="bf16"), CPU)
    for peer in peers.PEERS:
        assert peer.refusal(data, "forward") is None, peer.name


def test_what_is_not_supported_is_said_in_words():
    data = make(replace(PLAIN, dtype="bf16", window=(3, 0)), CPU)
    assert peers.peers()["fa3"].refusal(data, "forward") == "no forward with sliding window"
    assert peers.peers()["fa3"].refusal(data, "backward") == "no backward"
    assert peers.peers()["fa4"].refusal(data, "backward") is None


def test_our_refusals_come_from_dispatch(monkeypatch):
    kernel = next(k for k in dispatch.KERNELS if k.name == "cpu/fa2")
    lame = replace(kernel, backward=kernel.backward - {"causal"})
    monkeypatch.setattr(dispatch, "KERNELS", (lame,))
    contender = peers.own()["cpu/fa2"]
    data = make(PLAIN, CPU)
    assert contender.refusal(data, "forward") is None
    assert contender.refusal(data, "backward") == "no backward with causal mask"


@pytest.mark.parametrize("contender", HERE, ids=[c.name for c in HERE])
@pytest.mark.parametrize(
    "problem",
    grid.problems(
        grid.Axes((16,), (24,), (False, True), ("fp32",), tokens=48, heads=4, kind="features")
    ),
    ids=str,
)
def test_those_on_a_cpu_are_right(contender, problem):
    problem = replace(problem, kv_heads=2)
    data = make(problem, CPU)
    refusal = contender.refusal(data, "forward")
    if refusal is not None:
        assert refusal.startswith("no forward with ")
        return
    attend = contender.prepare(data)
    gradients = dict(zip(("dq", "dk", "dv"), peers.Graph(attend, data).backward(), strict=True))
    found = {"out": peers.forward(attend, data), **gradients}
    assert truth.judge(data, {"it": found})[1] == {"it": {}}


@pytest.mark.parametrize("name", ["fa2", "cudnn", "flex", "fa3", "fa4"])
def test_gpu_peers_are_absent_on_a_cpu_without_being_imported(name):
    absence = peers.peers()[name].absent(CPU)
    assert absence is not None and absence.reason == "runs on cuda, not on cpu" and not absence.broken


def test_what_is_not_installed_is_no_news(monkeypatch):
    monkeypatch.setattr(peers, "_installed", lambda module: False)
    absence = peers.peers()["fa3"].absent(GPU)
    assert absence == peers.Absence("fa3_fwd_interface is not installed")


def test_a_broken_wheel_is(tmp_path, monkeypatch):
    (tmp_path / "fa3_fwd_interface.py").write_text("raise OSError('undefined symbol:\\n  _Z1f')")
    monkeypatch.syspath_prepend(str(tmp_path))
    absence = peers.peers()["fa3"].absent(GPU)
    assert absence is not None and absence.broken
    assert absence.reason == "import fa3_fwd_interface: OSError: undefined symbol: _Z1f"


def test_a_missing_parent_package_is_not_an_error():
    assert not peers._installed("no_such_package.at.all")


@pytest.fixture
def wheels(monkeypatch):
    """Stand-ins with the wheels' own signatures, which record what they were given."""
    heard = {}

    def three(q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None,
              v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0):  # fmt: skip
        heard["fa3"] = (causal, softcap)
        return q

    def three_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None,
                     seqused_k=None, softmax_scale=None, causal=False, softcap=0.0):  # fmt: skip
        heard["fa3"] = (cu_seqlens_q.tolist(), max_seqlen_k, causal)
        return q

    def four(q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False,
             window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None,
             deterministic=False):  # fmt: skip
        heard["fa4"] = (causal, window_size, softcap, deterministic)
        return q, None

    def four_varlen(q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None,
                    max_seqlen_k=None, **more):  # fmt: skip
        heard["fa4"] = (cu_seqlens_k.tolist(), max_seqlen_q, more["causal"])
        return q, None

    modules = {
        "fa3_fwd_interface": {"flash_attn_func": three, "flash_attn_varlen_func": three_varlen},
        "flash_attn.cute": {"flash_attn_func": four, "flash_attn_varlen_func": four_varlen},
    }
    for name, functions in modules.items():
        module = types.ModuleType(name)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    peers._module.cache_clear()
    yield heard
    peers._module.cache_clear()


def test_wheels_are_called_as_they_want(wheels):
    data = make(replace(PLAIN, softcap=5.0, window=(3, 0), deterministic=True), CPU)
    for name in ("fa3", "fa4"):
        assert torch.equal(peers.forward(peers.peers()[name].prepare(data), data), data.q)
    assert wheels == {"fa3": (True, 5.0), "fa4": (True, (3, 0), 5.0, True)}


def test_wheels_are_called_as_they_want_when_packed(wheels):
    data = make(replace(PLAIN, lengths=(16, 4)), CPU)
    for name in ("fa3", "fa4"):
        assert torch.equal(peers.forward(peers.peers()[name].prepare(data), data), data.q)
    assert wheels == {"fa3": ([0, 16, 20], 16, True), "fa4": ([0, 16, 20], 16, True)}


@pytest.mark.parametrize(
    "problem", [replace(PLAIN, window=(3, 0)), replace(PLAIN, lengths=(16, 4))], ids=str
)
def test_flash_attention_2_is_called_with_the_operators_own_signature(problem, monkeypatch):
    """PyTorch checks it: a wrong keyword would be a TypeError, this one is only about the device."""
    data = make(replace(problem, dtype="bf16"), CPU)
    with pytest.raises(NotImplementedError, match="'CPU' backend"):
        peers.forward(peers.peers()["fa2"].prepare(data), data)


def test_flex_means_the_same(monkeypatch):
    """Its masks and scores, run without a compiler."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(torch.compiler, "reset", lambda: None)
    for changes in ({}, {"causal": False}, {"window": (5, 0)}, {"softcap": 2.0, "alibi": True}):
        data = make(replace(PLAIN, seqlen=32, kv_heads=2, **changes), CPU)
        out = peers.forward(peers.peers()["flex"].prepare(data), data)
        assert truth.judge(data, {"flex": {"out": out}})[1] == {"flex": {}}, changes


def test_pytorchs_reasons_get_into_its_error():
    """Without the headlines, which are about other backends."""
    with pytest.raises(RuntimeError, match=r"^Expected head_dim <= 256$"), peers.spoken_reasons():
        warnings.warn("Memory efficient kernel not used because:", stacklevel=1)
        warnings.warn("Expected\n head_dim <= 256", stacklevel=1)
        raise RuntimeError("No available kernel. Aborting execution.")


def test_other_errors_stay():
    with pytest.raises(RuntimeError, match=r"^something else$"), peers.spoken_reasons():
        raise RuntimeError("something else")


def test_reasons_are_one_short_line():
    shown = peers.one_line(ValueError("a\n\n  b " + "c" * 500))
    assert shown.startswith("ValueError: a b c") and "\n" not in shown and len(shown) < 200
    assert peers.one_line(torch.cuda.OutOfMemoryError("Tried to allocate...")) == "out of GPU memory"
