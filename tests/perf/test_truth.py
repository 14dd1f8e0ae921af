"""The judge: right kernels pass, wrong ones do not, and slices of the truth are the truth."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tilewise
from tilewise.perf import peers, truth
from tilewise.perf.problem import Problem, make

CPU = torch.device("cpu")
PLAIN = Problem(2, 24, 4, 2, 8, 8, "fp32", True)
PROBLEMS = {
    "causal": PLAIN,
    "full": replace(PLAIN, causal=False),
    "window": replace(PLAIN, window=(5, 0)),
    "wide": replace(PLAIN, causal=False, window=(3, 6)),
    "softcap": replace(PLAIN, softcap=2.0),
    "bias": replace(PLAIN, bias=True),
    "alibi": replace(PLAIN, alibi=True),
    "alibi and bias": replace(PLAIN, alibi=True, bias=True),
    "sink": replace(PLAIN, sink=True),
    "unequal": replace(PLAIN, head_dim_v=12),
    "packed": replace(PLAIN, batch=3, lengths=(9, 24, 2), kv_heads=4),
}


def results(attend, data):
    graph = peers.Graph(attend, data)
    gradients = dict(zip(("dq", "dk", "dv"), graph.backward(), strict=True))
    return {"out": peers.forward(attend, data), **gradients}


def ours(data):
    return peers.own()["cpu/fa2"].prepare(data)


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS.keys())
def test_slices_row_by_row_are_the_truth(problem, monkeypatch):
    """Few rows at a time, so that masks and distances have to move with them."""
    monkeypatch.setattr(truth, "_SCORES_AT_ONCE", 24 * 2 * 5)
    data = make(problem, CPU)
    errors, faults = truth.judge(data, {"ours": results(ours(data), data)})
    assert faults == {"ours": {}}
    assert max(errors["ours"].values()) < 1e-5


@pytest.mark.parametrize("tensor", ["out", "dq", "dk", "dv"])
def test_a_wrong_slice_is_found_alone(tensor):
    data = make(PLAIN, CPU)
    found = results(ours(data), data)
    found[tensor] = found[tensor] * 1.01
    _, faults = truth.judge(data, {"wrong": found})
    assert list(faults["wrong"]) == [tensor] and "is off by 1.0e-02" in faults["wrong"][tensor]


def test_nan_is_wrong():
    data = make(PLAIN, CPU)
    found = results(ours(data), data)
    found["out"] = torch.full_like(found["out"], float("nan"))
    assert "out" in truth.judge(data, {"nan": found})[1]["nan"]


def test_what_is_wrong_outside_the_slices_is_outvoted():
    data = make(replace(PLAIN, batch=4), CPU)  # the slices are of the first and the last sequence
    right = results(ours(data), data)
    wrong = {**right, "dv": right["dv"].clone()}
    wrong["dv"][1] += 1.0
    _, faults = truth.judge(data, {"a": right, "wrong": wrong, "b": right})
    assert faults["a"] == faults["b"] == {}
    assert "elsewhere not that of a, b" in faults["wrong"]["dv"]


def test_two_that_disagree_get_no_number_either_of_them():
    data = make(replace(PLAIN, batch=4), CPU)
    right = {"out": peers.forward(ours(data), data)}
    other = {"out": right["out"].clone()}
    other["out"][1] += 1.0
    _, faults = truth.judge(data, {"a": right, "b": other})
    assert "out" in faults["a"] and "out" in faults["b"]


def test_a_forward_alone_is_judged_without_gradients():
    data = make(PLAIN, CPU)
    errors, faults = truth.judge(data, {"ours": {"out": peers.forward(ours(data), data)}})
    assert list(errors["ours"]) == ["out"] and faults == {"ours": {}}


def test_the_longest_and_the_last_sequence_are_sampled():
    packed = replace(PLAIN, batch=3, lengths=(9, 24, 2))
    assert truth.slices(packed) == [(1, 0), (2, 1)]
    assert truth.slices(replace(PLAIN, batch=1, kv_heads=1, heads=1)) == [(0, 0)]


def test_one_missing_key_tile_is_above_the_limit():
    """The limit of bf16 lets rounding pass and not a kernel that forgets 32 of 1024 keys."""
    data = make(
        replace(PLAIN, batch=1, seqlen=1024, heads=1, kv_heads=1, dtype="bf16", causal=False), CPU
    )
    whole = tilewise.attention(data.q, data.k, data.v)
    short = tilewise.attention(data.q, data.k[:, 32:], data.v[:, 32:])
    _, faults = truth.judge(data, {"whole": {"out": whole}})
    assert faults == {"whole": {}}
    assert "out" in truth.judge(data, {"short": {"out": short}})[1]["short"]
