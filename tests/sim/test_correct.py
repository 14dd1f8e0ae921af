"""Kernels run right: small problems of every kind against fp64, with no finding."""

from __future__ import annotations

import time

import pytest
import torch
from kernels import hopper_backward, hopper_forward, hopper_persistent
from problems_sim import OTHERS, Case, backward_case, error, forward_case

from tilewise import sim

GRID = [
    *(
        forward_case(hopper_forward, S, D, causal, PINGPONG=turns, WGS=consumers)
        for D in (64, 128)
        for S, consumers in ((256, 2), (384, 3))
        for causal in (False, True)
        for turns in (False, True)
    ),
    forward_case(hopper_forward, 384, 64, True, PINNED=True),
    forward_case(hopper_forward, 384, 64, True, dtype=torch.float16),
    forward_case(hopper_forward, 384, 64, True, H=2, BLOCK_N=64, STAGES=3),
    *(forward_case(hopper_persistent, 384, D, c, SMS=2) for D in (64, 128) for c in (False, True)),
    forward_case(hopper_persistent, 384, 64, True, WGS=3, PINNED=True, PINGPONG=True, SMS=2),
    *(backward_case(256, D, causal) for D in (64, 128) for causal in (False, True)),
    backward_case(256, 64, True, NW=4, BN=64, QS=1),
    backward_case(384, 128, True, H=2),
]


def check(case: Case, seed: int, **options: object) -> None:
    with sim.intercept(seed=seed, arch=case.arch, **{**case.options, **options}) as reports:
        result = case.run()
    assert reports, "nothing was launched"
    for report in reports:
        report.raise_if_any()
    errors = [error(x, y) for x, y in zip(result, case.right(), strict=True)]
    assert max(errors) < case.limit, f"errors {errors}, seed {seed}"


@pytest.mark.parametrize("case", GRID, ids=str)
def test_attention_on_hopper(case: Case) -> None:
    check(case, seed=len(case.name))


@pytest.mark.parametrize("case", OTHERS, ids=str)
def test_other_kernels(case: Case) -> None:
    for seed in range(3):
        check(case, seed)


def test_programs_interleaved() -> None:
    """With global memory watched as well, nothing is found in right kernels."""
    check(forward_case(hopper_forward, 256, 64, True, H=2), 1, together=True)
    check(backward_case(256, 64, True), 2, together=True)


def test_a_seed_replays_exactly() -> None:
    case = forward_case(hopper_forward, 256, 64, True)
    times = []
    for seed in (3, 3, 4):
        with sim.intercept(seed=seed) as reports:
            case.run()
        times.append([r.cycles for r in reports])
    assert times[0] == times[1] != times[2]


def test_fast_enough() -> None:
    """Under 2 s of processor time, which does not depend on what else the machine does."""
    case = forward_case(hopper_forward, 384, 128, False)
    began = time.process_time()
    check(case, 0)
    assert time.process_time() - began < 2


def test_host_code_is_untouched_outside() -> None:
    assert hopper_backward.bwd_kernel.fn.__globals__["gl"].__name__.startswith("triton")
