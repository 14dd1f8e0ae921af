"""Every GPU kernel against the reference, in bf16, fp16 and fp32: edges, grids, random problems.

    python -m pytest tests/gpu -n 12                  all of tests/gpu
    python -m pytest tests/gpu -n 12 -k "edge or head_dim or length or group or feature"
    python -m pytest tests/gpu -n 12 -k random        1200 random problems for each kernel
    python -m pytest tests/gpu -n 12 -k "triton/fa2"  one kernel
    python -m pytest tests/gpu/test_large.py          tensors past 2**31 elements (60 GB of memory)
    TILEWISE_FUZZ=5000 python -m pytest tests/gpu -n 12 -k random

Without -n it takes many times as long: the time goes into compiling kernels.
"""

from __future__ import annotations

import os
from dataclasses import replace

import problems
import pytest
from edges import ALONE, EDGES
from gpu_rows import ROWS, skip_what_does_not_run, supported
from problems import Problem, Size, how

from tilewise import UnsupportedError, dispatch

DEVICE = "cuda"
DTYPES = ("bf16", "fp16", "fp32")
FUZZ = int(os.environ.get("TILEWISE_FUZZ", 1200))  # random problems for each kernel
BLOCK = 10  # of them in one test


@pytest.fixture(autouse=True)
def runs_here(request: pytest.FixtureRequest):
    skip_what_does_not_run(request)


def edge_cases():
    for n, (name, problem) in enumerate(EDGES.items()):
        for kernel in ROWS:
            # bf16 always, the other two in turn, the other way round for the other kernel.
            other = ("fp16", "fp32")[(n + ROWS.index(kernel)) % 2]
            for dtype in ("bf16", other):
                p = replace(problem, dtype=dtype, seed=n)
                if problems.features(p) <= supported(kernel):
                    yield pytest.param(kernel, p, id=f"{name}-{kernel}-{dtype}")


@pytest.mark.parametrize(("kernel", "problem"), list(edge_cases()))
def test_edge(kernel: str, problem: Problem):
    problems.check(problem, DEVICE, **how(kernel))


HEAD_DIMS = (1, 8, 16, 24, 40, 59, 64, 72, 80, 96, 111, 128, 136, 160, 192, 224, 256)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("kernel", ROWS)
def test_head_dim(kernel: str, head_dim: int, dtype: str):
    """Head dims that are no power of two: columns of padding must not be read or written."""
    p = Problem(((200, 210),), 2, 2, head_dim, head_dim, dtype, causal=True, seed=head_dim)
    problems.check(p, DEVICE, **how(kernel))


@pytest.mark.parametrize(("d", "dv"), [(192, 128), (64, 128), (128, 64), (16, 256), (256, 24), (72, 59)])
@pytest.mark.parametrize("kernel", ROWS)
def test_unequal_head_dims(kernel: str, d: int, dv: int):
    for deterministic in (False, True):
        p = Problem(((150, 210),), 2, 2, d, dv, "bf16", causal=True, deterministic=deterministic)
        problems.check(p, DEVICE, **how(kernel))


LENGTHS = (1, 2, 3, 17, 63, 64, 65, 97, 113, 127, 128, 129, 255, 257, 1023, 1024, 1025)


@pytest.mark.parametrize("form", ["full", "causal", "window"])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kernel", ROWS)
def test_length(kernel: str, length: int, form: str):
    """Lengths around every tile's, square and skewed."""
    window = (100, 30) if form == "window" else (None, None)
    p = Problem(
        head_dim=64, head_dim_v=64, dtype="bf16", causal=form == "causal", window=window, seed=length
    )
    for lengths in ((length, length), (length, 130), (67, length)):
        problems.check(replace(p, lengths=(lengths,)), DEVICE, **how(kernel))


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["free", "deterministic"])
@pytest.mark.parametrize("group", [1, 3, 4, 8, 12])
@pytest.mark.parametrize("kernel", ROWS)
def test_group(kernel: str, group: int, deterministic: bool, dtype: str):
    """Query heads per key head: which key head each reads, and that their gradients are summed."""
    heads_kv = 12 // group if group != 8 else 2
    p = Problem(
        ((130, 201),) * 2, heads_kv, group, 64, 64, dtype, causal=True, deterministic=deterministic
    )
    problems.check(p, DEVICE, **how(kernel))


@pytest.mark.parametrize("feature", ALONE)
@pytest.mark.parametrize("kernel", ROWS)
def test_feature_alone(kernel: str, feature: str):
    """Every cell of the support table that says yes runs and is right; every no refuses."""
    p = replace(ALONE[feature], loss="lse" if feature == "lse_grad" else "out")
    if p.dtype != feature and p.dtype not in supported(kernel):
        p = replace(p, dtype="bf16")
    if feature in supported(kernel):
        problems.check(p, DEVICE, **how(kernel))
    else:
        with pytest.raises(UnsupportedError, match=dispatch.FEATURES[feature]):
            problems.check(p, DEVICE, **how(kernel))


# Compiling takes longest, so that what a kernel is compiled for is varied less than what it is given.
SIZE = Size(
    lengths=(129, 1, 2, 3, 17, 64, 97, 113, 127, 200, 259, 320),
    head_dims=(64, 128, 16, 40, 96, 111, 256),
    sequences=(1, 2, 3, 0, 6),
    heads_kv=(1, 2, 3),
    groups=(1, 2, 3, 4, 8),
    dtypes=DTYPES,
)


@pytest.mark.parametrize("block", range(-(-FUZZ // BLOCK)))
@pytest.mark.parametrize("kernel", ROWS)
def test_random_problems(kernel: str, block: int):
    """A failing problem is printed whole; its number is its seed."""
    for seed in range(BLOCK * block, min(BLOCK * (block + 1), FUZZ)):
        p = problems.random_problem(seed, supported(kernel), SIZE)
        try:
            problems.check(p, DEVICE, **how(kernel))
        except Exception as error:
            raise AssertionError(f"random problem {seed}: {p}: {error}") from error
