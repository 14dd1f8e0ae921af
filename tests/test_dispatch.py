"""tilewise.dispatch: who is chosen, who is passed over and why, and the tables made of the same data."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tilewise import UnsupportedError, dispatch
from tilewise.dispatch import FEATURES, KERNELS, Kernel, choose, support_markdown, support_table, survey
from tilewise.spec import ALGORITHMS, BACKENDS, AttentionSpec, Inputs, make_spec

EVERYTHING = frozenset(FEATURES)


def spec_of(**options) -> AttentionSpec:
    q = torch.zeros(1, 4, 2, 8)
    return make_spec(Inputs(q, q, q), **options)


def kernel(name: str, without: set[str] = frozenset(), missing: str | None = None, **changes) -> Kernel:
    backend, algorithm = name.split("/")
    supported = EVERYTHING - without
    made = Kernel(backend, algorithm, "nowhere", supported, supported, lambda device: missing)
    return replace(made, **changes)


@pytest.fixture
def use(monkeypatch):
    return lambda *kernels: monkeypatch.setattr(dispatch, "KERNELS", kernels)


def test_the_first_that_can_is_chosen(use):
    first, second = kernel("hopper/fa3"), kernel("triton/fa2")
    use(first, second)
    assert choose(spec_of(), "forward") is first
    assert survey(spec_of(), "forward") == (first, [])


def test_auto_passes_over_what_lacks_a_feature(use):
    """Never silently without the feature, and never an error while another kernel has it."""
    lacking, able = kernel("hopper/fa3", {"softcap"}), kernel("triton/fa2")
    use(lacking, able)
    assert choose(spec_of(), "forward") is lacking
    chosen, passed_over = survey(spec_of(softcap=3.0), "forward")
    assert chosen is able
    assert passed_over == [("hopper/fa3", "no forward with softcap")]


def test_directions_differ(use):
    inference, able = kernel("hopper/fa3", backward=frozenset()), kernel("triton/fa2")
    use(inference, able)
    assert choose(spec_of(), "forward") is inference
    chosen, passed_over = survey(spec_of(), "backward")
    assert chosen is able and passed_over == [("hopper/fa3", "has no backward")]


def test_a_feature_that_the_spec_does_not_know(use):
    use(kernel("hopper/fa3", {"lse_grad"}), kernel("triton/fa2"))
    assert choose(spec_of(), "backward").name == "hopper/fa3"
    assert choose(spec_of(), "backward", frozenset({"lse_grad"})).name == "triton/fa2"


def test_several_missing_features_are_all_named(use):
    use(kernel("triton/fa2", {"softcap", "causal", "dropout"}))
    _, passed_over = survey(spec_of(softcap=3.0, causal=True, dropout_p=0.1), "forward")
    assert passed_over == [("triton/fa2", "no forward with causal mask, softcap, dropout")]


def test_asking_by_name(use):
    fa2, fa3 = kernel("triton/fa2"), kernel("hopper/fa3")
    use(fa3, fa2)
    assert choose(spec_of(algorithm="fa2"), "forward") is fa2
    assert choose(spec_of(backend="triton"), "forward") is fa2
    assert choose(spec_of(backend="hopper", algorithm="fa3"), "forward") is fa3
    _, passed_over = survey(spec_of(backend="triton"), "forward")
    assert passed_over == [("hopper/fa3", "backend='triton' was asked for")]


def test_a_name_that_cannot_is_an_error_not_another_kernel(use):
    use(kernel("hopper/fa3", missing="needs sm_90a"), kernel("triton/fa2"))
    with pytest.raises(UnsupportedError) as error:
        choose(spec_of(algorithm="fa3"), "forward")
    assert "algorithm='fa3', backend='auto'" in str(error.value)
    assert "hopper/fa3: needs sm_90a" in str(error.value)
    assert "triton/fa2: algorithm='fa3' was asked for" in str(error.value)


def test_the_error_lists_every_kernel_and_its_reason(use):
    use(
        kernel("hopper/fa3", missing="needs sm_90a"),
        kernel("triton/fa2", {"bias"}),
        kernel("cpu/fa2", {"bias"}),
    )
    x = torch.zeros(1, 4, 2, 8)
    spec = make_spec(Inputs(x, x, x, bias=torch.zeros(1, 1, 4, 4)))
    with pytest.raises(UnsupportedError) as error:
        choose(spec, "backward")
    lines = str(error.value).splitlines()
    assert lines[0] == "no kernel runs this backward with algorithm='auto', backend='auto' on cpu:"
    assert lines[1:] == [
        "  hopper/fa3: needs sm_90a",
        "  triton/fa2: no backward with additive bias",
        "  cpu/fa2: no backward with additive bias",
    ]


def test_the_teaching_kernel_runs_only_by_name():
    """FlashAttention-1 is slower than its successor everywhere: auto must not fall back to it."""
    assert choose(spec_of(), "forward").name == "cpu/fa2"
    assert choose(spec_of(algorithm="fa1"), "forward").name == "cpu/fa1"
    assert choose(spec_of(algorithm="fa1"), "backward").name == "cpu/fa1"


def test_forward_and_backward_choose_the_same_algorithm_by_name():
    """A backward wants what its own forward saved."""
    for algorithm in ("fa1", "fa2"):
        spec = spec_of(algorithm=algorithm)
        chosen = {choose(spec, direction).algorithm for direction in ("forward", "backward")}
        assert chosen == {algorithm}


def test_triton_says_what_it_needs(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(dispatch, "_triton_missing", lambda: None)
    with pytest.raises(UnsupportedError, match="needs a GPU tensor"):
        choose(spec_of(backend="triton"), "forward")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose(spec_of(backend="triton"), "forward").name == "triton/fa2"
    monkeypatch.setattr(dispatch, "_triton_missing", lambda: "triton is not installed")
    with pytest.raises(UnsupportedError, match="triton/fa2: triton is not installed"):
        choose(spec_of(backend="triton"), "forward")


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0), (12, 0)])
def test_triton_needs_sm_80(capability, monkeypatch):
    monkeypatch.setattr(dispatch, "_triton_missing", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    spec = replace(spec_of(), device=torch.device("cuda", 0))
    chosen, passed_over = survey(spec, "forward")
    if capability >= (8, 0):
        assert chosen.name == "triton/fa2"
    else:
        assert (
            chosen is None
            and "needs sm_80 or newer, this GPU is sm_75" in dict(passed_over)["triton/fa2"]
        )
    assert dict(passed_over)["cpu/fa2"] == "needs CPU tensors, these are on cuda:0"


def test_kernels_are_well_formed():
    assert len({k.name for k in KERNELS}) == len(KERNELS)
    for k in KERNELS:
        assert k.backend in BACKENDS and k.algorithm in ALGORITHMS
        assert k.forward <= EVERYTHING and k.backward <= EVERYTHING
        if k.unavailable(torch.device("cpu")) is None:
            module = k.load()
            assert callable(module.forward) and hasattr(module, "backward") == bool(k.backward)


def test_every_feature_a_spec_can_ask_for_has_a_row():
    x = torch.zeros(1, 4, 2, 8)
    one = torch.tensor([4], dtype=torch.int32)
    key, bias, per_head = x[:, :, :1], torch.zeros(1, 1, 4, 4), torch.zeros(2)
    spec = make_spec(
        Inputs(x, key, key[..., :4], bias, per_head, per_head, seqused_q=one),
        causal=True, window_left=1, softcap=1.0, dropout_p=0.5, deterministic=True,
    )  # fmt: skip
    assert spec.features | {"varlen", "lse_grad", "fp16", "bf16", "fp64", "fp8"} == EVERYTHING


def test_support_table_is_made_from_the_kernels(use):
    use(
        kernel("cpu/fa2"),
        kernel("triton/fa2", {"bias"}),
        kernel("hopper/fa3", backward=EVERYTHING - {"bias"}),
    )
    rows = {row["feature"]: row for row in support_table()}
    assert list(rows) == list(FEATURES.values())
    assert rows["additive bias"] == {
        "feature": "additive bias",
        "cpu/fa2": "yes",
        "triton/fa2": "-",
        "hopper/fa3": "forward",
    }


def test_support_markdown_is_the_table():
    lines = support_markdown().splitlines()
    assert lines[0] == "| feature | " + " | ".join(k.name for k in KERNELS) + " |"
    assert lines[1] == "|" + "---|" * (len(KERNELS) + 1)
    assert len(lines) == 2 + len(FEATURES)
    assert all(line.count("|") == len(KERNELS) + 2 for line in lines)
