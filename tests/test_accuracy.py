"""The tests of the tests: the accuracy rule lets an honest kernel pass and catches every planted bug."""

from __future__ import annotations

import math

import accuracy
import faulty
import problems
import pytest
import torch
from problems import Problem, Size

from tilewise import dispatch

INF, NAN = math.inf, math.nan
SMALL = Size(lengths=(1, 2, 3, 5, 8, 17, 33), head_dims=(16, 1, 2, 8, 24, 64))


@pytest.fixture(autouse=True)
def only_the_faulty_kernel(monkeypatch):
    monkeypatch.setattr(dispatch, "KERNELS", (faulty.kernel(dispatch),))


@pytest.mark.parametrize("block", range(8))
def test_an_honest_kernel_passes(block: int):
    """A rule that fails correct kernels by chance would be loosened until it is worthless."""
    features = dispatch.KERNELS[0].forward
    for seed in range(50 * block, 50 * block + 50):
        problems.check(problems.random_problem(seed, features, SMALL))


PLAIN = {"lengths": ((40, 50),) * 2, "heads_kv": 2, "group": 2, "head_dim": 32, "head_dim_v": 24}
LONG = PLAIN | {"lengths": ((190, 210),)}
CAUSAL = PLAIN | {"causal": True}
DROPOUT = PLAIN | {"dropout_p": 0.2}
VARLEN = PLAIN | {"varlen": True, "lengths": ((9, 30), (0, 7), (25, 12)), "tail": (3, 2), "causal": True}
BUGS = {
    "scale 1 % off": PLAIN,
    "last key lost": PLAIN,
    "key head of the wrong group": PLAIN,
    "group not summed": PLAIN,
    "delta lost": PLAIN,
    "dq not scaled": PLAIN,
    "dlse lost": PLAIN,
    "dlse with the wrong sign": PLAIN,
    "lse in log2": PLAIN,
    "mask a key too wide": CAUSAL,
    "mask a key too narrow": CAUSAL,
    "top-left mask": CAUSAL,
    "window a key too wide": PLAIN | {"window": (9, 4)},
    "slope of the softcap lost": PLAIN | {"softcap": 2.0},
    "sink lost": PLAIN | {"sink": "fp32"},
    "sink gradient with the wrong sign": PLAIN | {"sink": "fp32"},
    "bias gradient of the last batch": PLAIN | {"bias": (False, True, True, True)},
    "top-left ALiBi": PLAIN | {"alibi": "heads"},
    "dropout not rescaled": DROPOUT,
    "dropout forgotten in dP": DROPOUT,
    "dropout forgotten in dV": DROPOUT,
    "unseen keys loaded": PLAIN | {"window": (None, -5)},
    "dead rows are NaN": VARLEN,
    "lse of dead rows is finite": VARLEN,
    "rows of no sequence written": VARLEN,
}
# (bug, where the tile ends or the precision drops) -> the dtypes that can tell it from rounding
PRECISION_BUGS = {
    "bf16 products": (PLAIN, ("fp16", "fp32")),
    "tf32 products": (PLAIN, ("fp32",)),
    "last key lost in the last row": (LONG, ("fp16", "fp32")),
}


def caught(bug: str, problem: Problem, monkeypatch) -> str:
    """The complaint about a kernel with the bug, where the same kernel without it is fine."""
    problems.check(problem)
    monkeypatch.setattr(faulty, "BUG", [bug])
    with pytest.raises(AssertionError) as complaint:
        problems.check(problem)
    return str(complaint.value)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "fp64"])
@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_caught(bug: str, dtype: str, monkeypatch):
    said = caught(bug, Problem(**BUGS[bug], dtype=dtype), monkeypatch)
    assert any(words in said for words in ("error", "not finite", "wrongly, at", "not exactly 0"))


@pytest.mark.parametrize(
    ("bug", "dtype"), [(bug, dtype) for bug, (_, dtypes) in PRECISION_BUGS.items() for dtype in dtypes]
)
def test_lost_precision_is_caught(bug: str, dtype: str, monkeypatch):
    caught(bug, Problem(**PRECISION_BUGS[bug][0], dtype=dtype), monkeypatch)


@pytest.mark.parametrize(
    "bug", ["delta lost", "dlse lost", "dq not scaled", "scale 1 % off", "group not summed"]
)
def test_a_bug_is_caught_in_the_smallest_problems(bug: str, monkeypatch):
    """One row and one key leave the rule its least data; the bugs that show there must still show."""
    lengths = ((1, 1),) if bug in ("delta lost", "dlse lost") else ((2, 3),)
    for dtype in ("bf16", "fp16", "fp32"):
        with monkeypatch.context() as patch:
            # Values x3, since 1 % of a small score is less than bf16 can see.
            caught(bug, Problem(lengths=lengths, heads_kv=1, group=2, dtype=dtype, values=3.0), patch)


def _compare(x, ref, plain=None, terms=None, dtype=torch.float32, **how):
    x, ref = torch.tensor(x).double(), torch.tensor(ref).double()
    plain = ref if plain is None else torch.tensor(plain).double()
    terms = ref.abs() if terms is None else torch.tensor(terms).double()
    return accuracy.compare(x, ref, plain, terms, (dtype,), **how)


def test_infinities_must_be_in_the_same_places():
    assert _compare([-INF, 1.0], [-INF, 1.0]) is None
    assert "at [0]" in _compare([-1e38, 1.0], [-INF, 1.0])
    assert "wrongly, at [1]" in _compare([-INF, -INF], [-INF, 1.0])
    assert "not finite at [1]" in _compare([1.0, INF], [1.0, 1.0])


def test_nan_anywhere_fails():
    assert "not finite at [1]" in _compare([1.0, NAN, 1.0], [1.0, 1.0, 1.0])
    assert "not finite" in _compare([NAN], [0.0])
    assert _compare([NAN], [-INF]) is not None


def test_zero_terms_must_give_zero():
    assert _compare([0.0, 0.0], [0.0, 0.0]) is None
    assert "not exactly 0 at [1]" in _compare([0.0, 1e-30], [0.0, 0.0])
    assert _compare([1e-8, 1.0], [0.0, 1.0], terms=[0.1, 1.0]) is None


def test_empty_results_pass():
    assert _compare([], []) is None


def test_either_rule_fails_alone():
    """An outlier that the norm drowns fails the first rule, an error everywhere fails the second."""
    ones = [1.0] * 10000
    outlier = [1.02, *ones[1:]]
    assert "max error" in _compare(outlier, ones, dtype=torch.float16)
    bad_both = [1.001] * 10000  # within two ulp, but systematically
    assert "relative error" in _compare(bad_both, ones, dtype=torch.float16)


def test_the_baseline_is_a_ratio():
    """Twice the error of plain PyTorch is allowed, three times with softcap."""
    ref, plain, x = [1.0] * 100, [1.1, *[1.0] * 99], [1.25, *[1.0] * 99]
    bound = "max error"
    assert bound in _compare(x, ref, plain, dtype=torch.float16)
    said = _compare(x, ref, plain, dtype=torch.float16, factor=3)
    assert said is None or bound not in said


def test_ulp_is_the_step_at_a_size():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for size in (1.0, 1.5, 3.0, 100.0, 2.0**-10, 0.0, 1e-300):
            x = torch.tensor(size, dtype=dtype)
            step = torch.nextafter(x, torch.tensor(INF, dtype=dtype)) - x
            assert accuracy.ulp(dtype, size) == step.item(), (dtype, size)
