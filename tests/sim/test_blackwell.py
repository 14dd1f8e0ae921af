"""Tensor memory, products on pairs of CTAs, and what goes wrong with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from problems_sim import TRITON

from tilewise import sim
from tilewise.sim.mutate import edit
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


def broken(function: str, old: str, new: str) -> Any:
    """The kernels for clusters, with `old` replaced by `new`."""
    from kernels import clusters

    return edit(clusters, function, "", old, new).load()


@needs_clusters
@pytest.mark.parametrize(
    ("host", "function", "old", "new", "kind"),
    [
        ("multicast", "multicast_kernel", "mbarrier.wait(full, i & 1)", "pass", "race"),
        ("multicast", "multicast_kernel", "mbarrier.wait(empty, (i & 1) ^ 1)", "pass", "race"),
        ("multicast", "multicast_kernel", "mbarrier.arrive(empty, count=1)", "pass", "deadlock"),
        ("exchange", "exchange_kernel", "mbarrier.wait(full, 0)", "pass", "race"),
        (
            "exchange",
            "exchange_kernel",
            "mbarrier.expect(full, x_s.nbytes_per_cta)",
            "mbarrier.expect(full, x_s.nbytes_per_cta // 2)",  # those of one CTA, but both send
            "race",
        ),
        (
            "remote",
            "announce",
            "mbarrier.arrive(go, count=1, from_cta=0)",
            "mbarrier.arrive(go, count=1)",  # each at its own barrier
            "global",
        ),
    ],
)
def test_defects_between_ctas(host: str, function: str, old: str, new: str, kind: str) -> None:
    x = [torch.ones(192, 32)] if host == "multicast" else [torch.ones(64, 64)] * (host == "exchange")
    module, found = broken(function, old, new), set()
    for seed in range(6):
        with sim.intercept(seed=seed, arch="blackwell", together=True) as reports:
            getattr(module, host)(*x)
        found |= reports[0].kinds
    assert kind in found


@needs_clusters
def test_a_deadlock_between_ctas_names_both() -> None:
    module = broken("remote_kernel", "mbarrier.init(go, count=1)", "mbarrier.init(go, count=2)")
    with sim.intercept(seed=0, arch="blackwell") as reports:
        module.remote()
    text = str(reports[0])
    assert "go of CTA 0" in text and "go of CTA 1" in text
    assert "1 of 2 arrivals are missing" in text


def takeovers(
    seed: int, num_ctas: int = 1, module: Any = None, **options: object
) -> tuple[sim.Report, torch.Tensor]:
    from kernels import clusters

    with sim.intercept(seed=seed, arch="blackwell", **options) as reports:
        y = (module or clusters).takeover(num_ctas)
    return reports[0], y


@needs_clusters
@pytest.mark.parametrize("num_ctas", [1, 2])
@pytest.mark.parametrize("resident", [1, 2, None])
def test_programs_are_taken_over_once_each(
    num_ctas: int, resident: int | None, sim_seeds: range
) -> None:
    """Whoever runs a program, every row gets its number once, and those taken over never start."""
    started = set()
    for seed in sim_seeds:
        report, y = takeovers(seed, num_ctas, together=True, resident=resident)
        report.raise_if_any()
        assert (y == torch.arange(1, 7)[:, None]).all()
        ctas = report.engines[0].ctas
        assert len({c.program_id for c in ctas}) == len(ctas) / num_ctas
        started.add(len(ctas) // num_ctas)
    if resident is None:
        assert started == {6}  # all are running, so there is nothing to take over
    else:
        assert min(started) >= resident and max(started) < 6


@needs_clusters
def test_one_after_another_the_first_program_takes_over_all() -> None:
    report, y = takeovers(0)
    report.raise_if_any()
    assert len(report.engines) == 1
    assert (y == torch.arange(1, 7)[:, None]).all()


ANSWER = "more = clc.load_result(answers.index(i % 2)).is_canceled()"
READ = "mbarrier.arrive(empty.index(i % 2), count=1)"


@needs_clusters
@pytest.mark.parametrize(
    ("num_ctas", "old", "new", "kind"),
    [
        (1, "mbarrier.wait(full.index(i % 2), (i // 2) & 1)", "pass", "race"),
        # The first CTA asks for all; it may do so again before the second has read the last answer.
        (2, f"{ANSWER}\n{READ}", f"{READ}\n{ANSWER}", "race"),
        (1, ANSWER, f"{ANSWER}\nif i < 7:\n    more = gl.to_tensor(True)", "launch"),
    ],
)
def test_takeovers_gone_wrong(num_ctas: int, old: str, new: str, kind: str) -> None:
    module, found = broken("ask", old, new), set()
    for seed in range(4):
        report, _ = takeovers(seed, num_ctas, module, together=True, resident=2)
        found |= report.kinds
    assert kind in found


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
