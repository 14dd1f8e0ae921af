"""Tensor memory, products on pairs of CTAs, and what goes wrong with them."""

from __future__ import annotations

import pytest
import torch
from problems_sim import TRITON

from tilewise import sim
from tilewise.sim.ownership import box_of, permuted, register_box
from tilewise.sim.regions import inside, overlap, region, shared_bytes

needs_clusters = pytest.mark.skipif(TRITON < (3, 9), reason="Triton expresses clusters from 3.9 on")


def test_regions_overlap_by_bytes() -> None:
    whole = region(0, (128, 64), (256, 4), 4)  # fp32 [128, 64]
    left = region(0, (128, 64), (256, 2), 2)  # bf16 over its left half
    right = region(128, (128, 32), (256, 4), 4)
    assert overlap(whole, left) and inside(left, whole) and not inside(whole, left)
    assert not overlap(left, right)
    assert shared_bytes(whole, right) == right.size == 128 * 128


def test_parts_of_a_cluster() -> None:
    assert box_of((256, 64), ((1, 0),), 1) == ((128, 256), (0, 64))
    assert box_of((3, 256, 64), ((0, 1),), 0) == ((0, 3), (0, 256), (0, 32))
    assert box_of((256, 64), ((0, 0),), 1) is None
    assert permuted(((1, 0),), (1, 0)) == ((0, 1),)
    from triton.experimental.gluon import language as gl

    if TRITON >= (3, 9):
        layout = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0], cga_layout=[[0, 1]])
        assert register_box(layout, (256, 128), 1) == ((0, 256), (64, 128))
        assert register_box(gl.SliceLayout(0, layout), (128,), 1) == ((64, 128),)
        assert register_box(gl.SliceLayout(1, layout), (256,), 1) is None


@needs_clusters
@pytest.mark.parametrize("defect", ["full", "done"])
def test_a_pair_that_does_not_wait(defect: str) -> None:
    from kernels import blackwell_pair

    a, b = torch.randn(256, 192).bfloat16(), torch.randn(128, 192).bfloat16()
    for seed in range(3):
        with sim.intercept(seed=seed, arch="blackwell") as reports:
            blackwell_pair.gemm(a, b, defect=defect)
        assert "race" in reports[0].kinds, reports[0]


@needs_clusters
def test_an_overlay_in_tensor_memory() -> None:
    from kernels import blackwell_pair

    for seed in range(5):
        out = torch.zeros(2, 128, 64)
        sim.launch(
            blackwell_pair.overlay_kernel, (1,), (out, True), seed=seed, arch="blackwell"
        ).raise_if_any()
        assert (out[0, :, :32] == 2).all() and (out[0, :, 32:] == 8).all() and (out[1] == 64).all()
        report = sim.launch(
            blackwell_pair.overlay_kernel, (1,), (out, False), seed=seed, arch="blackwell"
        )
        assert "race" in report.kinds
        assert "tcgen05 of overlay_kernel" in str(report)
