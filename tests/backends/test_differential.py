"""Every kernel that runs on this machine against the reference: edges, grids, random problems.

On a machine without a GPU that is the CPU backend and, in Triton's interpreter, the Triton backend, in
fp16 and fp32 (its bf16 products are wrong). ``tests/gpu`` does the same on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import accuracy
import problems
import pytest
import torch
from edges import ALONE, EDGES
from hypothesis import given, settings
from problems import Problem, Size, how

from tilewise import attention, dispatch
from tilewise.backends.cpu import tile

CPU = torch.device("cpu")
# What has fp8 alone, and so no backward, is held to a bound of its own in ``test_fp8``.
KERNELS = {k.name: k for k in dispatch.KERNELS if k.unavailable(CPU) is None and k.backward}
INTERPRETED = [name for name in KERNELS if name.startswith("triton")]
COMPILED = [name for name in KERNELS if name not in INTERPRETED]

# Lengths around a tile's, of the CPU's small tiles below and of the interpreter's.
SMALL = Size(lengths=(5, 1, 2, 3, 16, 17, 31, 33, 64, 70), head_dims=(16, 1, 2, 8, 24, 40, 64))
TINY = Size(
    lengths=(5, 1, 2, 3, 17, 33, 40),
    head_dims=(16, 1, 8, 24),
    sequences=(1, 2, 0, 3),
    heads_kv=(1, 2),
    groups=(1, 3),
    dtypes=("fp32", "fp16"),
)


def supported(kernel: str) -> frozenset[str]:
    found = KERNELS[kernel].forward & KERNELS[kernel].backward
    return found - {"bf16"} if kernel in INTERPRETED else found


@pytest.fixture(autouse=True, scope="module")
def small_tiles() -> Iterator[None]:
    """CPU tiles so small that a small problem has many, none of them aligned with another."""
    before = tile.ROWS, tile.KEYS
    tile.ROWS, tile.KEYS = 24, 20
    yield
    tile.ROWS, tile.KEYS = before


def edge_cases() -> Iterator[Any]:
    for n, (name, problem) in enumerate(EDGES.items()):
        for kernel in KERNELS:
            dtypes = ["fp32", "bf16"]
            if kernel in INTERPRETED:  # slow; fp32 where that is what makes the edge hard
                dtypes = ["fp16", "fp32"] if n % 3 == 0 or problem.softcap else ["fp16"]
            for dtype in dtypes:
                p = replace(problem, dtype=dtype, seed=n)
                if problems.features(p) <= supported(kernel):
                    yield pytest.param(kernel, p, id=f"{name}-{kernel}-{dtype}")


@pytest.mark.parametrize(("kernel", "problem"), list(edge_cases()))
def test_edge(kernel: str, problem: Problem):
    problems.check(problem, **how(kernel))


HEAD_DIMS = (1, 8, 16, 24, 40, 59, 64, 72, 80, 96, 111, 128, 136, 160, 192, 224, 256)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("kernel", COMPILED)
def test_head_dim(kernel: str, head_dim: int, dtype: str):
    """Head dims that are no power of two: columns of padding must not be read or written."""
    p = Problem(
        ((37, 45),), 1, 2, head_dim, head_dim, dtype, causal=True, layout="sliced", seed=head_dim
    )
    problems.check(p, **how(kernel))


@pytest.mark.parametrize("head_dim", [8, 59, 111, 256])
@pytest.mark.parametrize("kernel", INTERPRETED)
def test_head_dim_interpreted(kernel: str, head_dim: int):
    p = Problem(
        ((9, 19),), head_dim=head_dim, head_dim_v=16, dtype="fp16", layout="sliced", seed=head_dim
    )
    problems.check(p, **how(kernel))
    problems.check(replace(p, head_dim=16, head_dim_v=head_dim), **how(kernel))


LENGTHS = (1, 2, 3, 17, 97, 113, 127, 128, 129, 511, 512, 513, 1023, 1025)


@pytest.mark.parametrize("window", [(None, None), (100, 30)], ids=["full", "window"])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kernel", COMPILED)
def test_length(kernel: str, length: int, window, monkeypatch):
    """Lengths around the tile sizes that are really used, square and skewed."""
    monkeypatch.setattr(tile, "ROWS", 256)
    monkeypatch.setattr(tile, "KEYS", 512)
    p = Problem(head_dim=16, causal=window == (None, None), window=window, seed=length)
    for lengths in ((length, length), (length, 130), (67, length)):
        problems.check(replace(p, lengths=(lengths,)), **how(kernel))


@pytest.mark.parametrize("dtype", ["fp64", "bf16"])
@pytest.mark.parametrize("group", [1, 3, 4, 8, 12])
@pytest.mark.parametrize("kernel", COMPILED)
def test_group(kernel: str, group: int, dtype: str):
    """Query heads per key head: which key head each reads, and that their gradients are summed."""
    p = Problem(((30, 41),) * 2, 12 // group if group != 8 else 1, group, 16, 24, dtype, causal=True)
    problems.check(p, **how(kernel))


def test_every_feature_has_a_cell():
    assert set(ALONE) == set(dispatch.FEATURES) - {"fp8"}


@pytest.mark.parametrize("feature", ALONE)
@pytest.mark.parametrize("kernel", KERNELS)
def test_support_table_tells_the_truth(kernel: str, feature: str):
    """Every cell that says yes runs and is right; every cell that says no refuses."""
    if kernel in INTERPRETED and feature == "bf16":
        pytest.skip("the interpreter's bf16 products are wrong")
    loss = "lse" if feature == "lse_grad" else "out"
    p = replace(ALONE[feature], loss=loss)
    if feature in KERNELS[kernel].forward & KERNELS[kernel].backward:
        problems.check(p, **how(kernel))
    else:
        with pytest.raises(dispatch.UnsupportedError, match=dispatch.FEATURES[feature]):
            problems.check(p, **how(kernel))


@pytest.mark.parametrize("block", range(6))
@pytest.mark.parametrize("kernel", COMPILED)
def test_random_problems(kernel: str, block: int):
    for seed in range(50 * block, 50 * block + 50):
        problems.check(problems.random_problem(seed, supported(kernel), SMALL), **how(kernel))


@pytest.mark.parametrize("kernel", COMPILED)
def test_fuzz(kernel: str):
    @given(problems.problems(supported(kernel), SMALL))
    def right(problem: Problem):
        problems.check(problem, **how(kernel))

    right()


@pytest.mark.parametrize("kernel", INTERPRETED)
def test_fuzz_interpreted(kernel: str):
    examples = 200 if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" else 12

    @settings(max_examples=examples)
    @given(problems.problems(supported(kernel), TINY))
    def right(problem: Problem):
        problems.check(problem, **how(kernel))

    right()


# --- what must hold bit for bit ---------------------------------------------------------------------

DTYPES = {name: ("fp16",) if name in INTERPRETED else ("fp32", "bf16") for name in KERNELS}
KERNEL_AND_DTYPE = [(kernel, dtype) for kernel, dtypes in DTYPES.items() for dtype in dtypes]


def assert_same(a: problems.Results, b: problems.Results) -> None:
    for name in a:
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize(("kernel", "dtype"), KERNEL_AND_DTYPE)
def test_window_of_all_keys_equals_causal(kernel: str, dtype: str):
    """(S - 1, 0) and causal are the same mask and must take the same path."""
    for lengths in ((33, 33), (20, 41), (41, 20)):
        p = Problem((lengths,), 1, 2, dtype=dtype, causal=True)
        same = replace(p, causal=False, window=(lengths[1] - 1, 0))
        assert_same(*(problems.run(a, problems.tensors(a), **how(kernel)) for a in (p, same)))


@pytest.mark.parametrize(("kernel", "dtype"), KERNEL_AND_DTYPE)
def test_what_has_no_effect_changes_no_bit(kernel: str, dtype: str):
    """NaN and inf in keys that no query sees and in rows of no sequence: 0 * NaN must not happen."""
    windowed = Problem(
        ((20, 45),) * 2, 1, 2, dtype=dtype, window=(3, -9), used_k=(45, 30), used_q=(20, 7)
    )
    packed = Problem(((20, 45), (7, 0)), 1, 2, dtype=dtype, causal=True, varlen=True, tail=(3, 9))
    for p in (windowed, packed):
        clean, dirty = (replace(p, poison=poison) for poison in (False, True))
        assert_same(*(problems.run(a, problems.tensors(a), **how(kernel)) for a in (clean, dirty)))


@pytest.mark.parametrize(("kernel", "dtype"), KERNEL_AND_DTYPE)
def test_deterministic_is_bitwise_the_same_again(kernel: str, dtype: str):
    p = Problem(((40, 41),), 1, 2, dtype=dtype, causal=True, deterministic=True)
    t = problems.tensors(p)
    first = problems.run(p, t, **how(kernel))
    for _ in range(2):
        assert_same(first, problems.run(p, t, **how(kernel)))


@pytest.mark.parametrize(("kernel", "dtype"), KERNEL_AND_DTYPE)
def test_a_sequence_does_not_depend_on_its_batch(kernel: str, dtype: str):
    """The same rows alone, beside others and packed: bitwise the same output and log-sum-exp."""
    p = Problem(((33, 41),) * 2, 1, 2, dtype=dtype, causal=True)
    t = problems.tensors(p)
    options = {"causal": True, "return_lse": True, **how(kernel)}
    out, lse = attention(t.x.q, t.x.k, t.x.v, **options)
    for b in range(2):
        alone = attention(t.x.q[b : b + 1], t.x.k[b : b + 1], t.x.v[b : b + 1], **options)
        assert torch.equal(alone[0], out[b : b + 1]) and torch.equal(alone[1], lse[b : b + 1])


@pytest.mark.parametrize("kernel", KERNELS)
def test_equal_maxima_are_rounded_without_bias(kernel: str):
    """When all scores of a row tie, every P is exp(0): a kernel that rounds them one way is off on
    average, not at random. The mean signed error stays within a quarter of an ulp."""
    dtype = "fp16" if kernel in INTERPRETED else "bf16"
    p = Problem(((70, 70),), 2, 2, 16, 16, dtype, causal=True, equal_keys=True)
    t = problems.tensors(p)
    t.x.v.abs_().neg_().sub_(1)  # of one sign, or a bias would cancel
    out = problems.run(p, t, **how(kernel))["out"].double()
    error = out - problems.reference_results(t, "both", torch.float64)["out"]
    step = accuracy.ulp(t.spec.dtype, float(out.abs().mean()))
    assert abs(float(error.mean())) <= step / 4


@pytest.mark.parametrize("kernel", [k for k in KERNELS if {"sink", "alibi"} <= KERNELS[k].forward])
def test_parameters_of_heads_may_have_any_strides(kernel: str):
    """Kernels step from one to the next: of every other element, or one for all, that was wrong."""
    q, k, v = (torch.randn(2, 30, 4, 16) for _ in range(3))
    whole = {"sink": torch.randn(8), "alibi_slopes": torch.rand(4, 2)}
    cut = {"sink": whole["sink"][::2], "alibi_slopes": whole["alibi_slopes"].T}
    one = {"sink": torch.randn(1).expand(4), "alibi_slopes": torch.rand(1).expand(4)}
    for parameters in (cut, one):
        want = attention(q, k, v, **{n: t.contiguous() for n, t in parameters.items()}, **how(kernel))
        assert torch.equal(attention(q, k, v, **parameters, **how(kernel)), want)


@pytest.mark.parametrize("kernel", [k for k in KERNELS if "dropout" in KERNELS[k].forward])
def test_no_dropout_is_the_path_without(kernel: str):
    """p = 0, and a p that rounds to 0 in 16 bits, must not change a bit."""
    p = Problem(((20, 30),), causal=True)
    t = problems.tensors(p)
    without = problems.run(p, t, **how(kernel))
    assert_same(without, problems.run(replace(p, dropout_p=1e-9), t, **how(kernel)))
