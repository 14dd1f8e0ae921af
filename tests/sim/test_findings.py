"""Every kind of finding: a small kernel with that defect, and what is said of it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from kernels import broken, features, turns
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewise import sim
from tilewise.sim import Report
from tilewise.sim.mutate import edit

SEEDS = range(6)
INIT = "mbarrier.init(full.index(i), count={})"


def findings(kernel: Any, *args: Any, grid: Any = (1,), **options: Any) -> dict[str, str]:
    """Kind -> first text, over a few seeds."""
    found: dict[str, str] = {}
    for seed in SEEDS:
        report = sim.launch(kernel, grid, args, seed=seed, num_warps=4, **options)
        for f in report.findings:
            found.setdefault(f.kind, str(f))
            assert f.seed == seed
            for site in f.sites:
                assert site.place in f.text or str(site) in f.text, f
    return found


def with_tiles(kernel: Any) -> dict[str, str]:
    return findings(kernel, *broken.descriptors())


@pytest.mark.parametrize(
    ("kernel", "kind", "sites"),
    [
        (broken.no_wait, "race", ["no_wait", "tile_in"]),
        (broken.no_fence, "fence", ["no_fence", "no_fence"]),
        (broken.overwritten_store, "race", ["overwritten_store", "overwritten_store"]),
        (broken.store_not_waited_for, "exit", ["store_not_waited_for"]),
        (broken.too_few_bytes, "deadlock", ["too_few_bytes"]),
        (broken.load_not_waited_for, "exit", ["tile_in"]),
        (broken.arrives_twice, "barrier", ["arrives_twice"]),
        (broken.never_initialised, "barrier", ["never_initialised"]),
        (broken.nobody_wrote, "uninit", ["nobody_wrote"]),
        (broken.half_written, "uninit", ["half_written"]),
        (broken.stage_beyond_the_last, "bounds", ["stage_beyond_the_last"]),
        (broken.lapped, "lap", ["leader"]),
    ],
    ids=lambda x: x.fn.__name__ if hasattr(x, "fn") else None,
)
def test_memory_and_barriers(kernel: Any, kind: str, sites: list[str]) -> None:
    found = with_tiles(kernel)
    assert kind in found, found
    named = re.findall(r"(\w+):\d+", found[kind])
    for site in sites:
        assert site in named, found[kind]
    assert "seed" in found[kind]


def test_a_deadlock_names_everyone_and_what_is_missing() -> None:
    text = with_tiles(broken.too_few_bytes)["deadlock"]
    assert "full, parity 0" in text
    assert "0 of 1 arrivals and 4096 bytes are missing" in text
    assert "arrived: too_few_bytes:" in text


@pytest.mark.parametrize(("what", "kind"), [(0, "register"), (1, "exit"), (2, "register")])
def test_registers_of_an_mma(what: int, kind: str) -> None:
    a, _ = broken.descriptors(64, 64, torch.bfloat16)
    found = findings(broken.product, a, torch.zeros(64, 64), what)
    assert kind in found, found
    assert found[kind].count("product:") == 2 or kind == "exit"


def test_a_right_product_is_not_reported() -> None:
    a, _ = broken.descriptors(64, 64, torch.bfloat16)
    y = torch.zeros(64, 64)
    assert not findings(broken.product, a, y, 3)
    assert torch.equal(y, torch.full((64, 64), 64.0))


@gluon.jit
def chained(x_ptr: Any, y_ptr: Any, READS: gl.constexpr) -> None:
    """Products into one accumulator with one in flight; READS: something else reads it meanwhile."""
    lay: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    smem = gl.allocate_shared_memory(gl.bfloat16, [64, 64], gl.NVMMASharedLayout(128, 16, 2))
    rows = gl.arange(0, 64, gl.SliceLayout(1, lay))[:, None]
    at = rows * 64 + gl.arange(0, 64, gl.SliceLayout(0, lay))[None, :]
    smem.store(gl.load(x_ptr + at))
    fence_async_shared()
    acc = gl.zeros([64, 64], gl.float32, lay)
    for _ in range(3):
        acc = warpgroup_mma(smem, smem, acc, is_async=True)
        acc = warpgroup_mma_wait(1, [acc])
        if READS == 1:
            gl.store(y_ptr + at, acc)
        if READS == 2:
            warpgroup_mma_wait(1, [warpgroup_mma(smem, smem, acc, is_async=True)])
    acc = warpgroup_mma_wait(0, [acc])
    gl.store(y_ptr + at, acc)


def test_an_accumulator_in_flight_may_be_accumulated_into() -> None:
    """From the second product on it was reported as used before its wait, and the result was NaN."""
    x = torch.randint(-2, 3, (64, 64), generator=torch.Generator().manual_seed(0)).bfloat16()
    y = torch.zeros(64, 64)
    assert not findings(chained, x, y, 0)
    assert torch.equal(y, 3 * (x.float() @ x.float()))


@pytest.mark.parametrize("reads", [1, 2])
def test_an_accumulator_in_flight_may_not_be_read(reads: int) -> None:
    """Neither by a store nor by two products that both add to it."""
    found = findings(chained, torch.ones(64, 64).bfloat16(), torch.zeros(64, 64), reads)
    assert found["register"].count("chained:") == 2


def ring(tiles: int = 6, early: bool = False, late: bool = False, consumers: int = 1) -> dict[str, str]:
    return findings(broken.ring_kernel, *broken.descriptors(), tiles, early, late, consumers)


def test_a_right_ring() -> None:
    assert not ring()


def test_ring_released_early_names_stage_and_tile() -> None:
    text = ring(early=True)["race"]
    assert re.search(r"stage [01] of X", text)
    assert re.search(r"0:use at use:\d+, tile \d", text)
    assert re.search(r"produce:\d+ \(load\) in 1:produce, tile \d", text)


def test_ring_filled_without_waiting() -> None:
    assert "race" in ring(late=True)


def test_ring_with_a_missing_consumer() -> None:
    text = ring(consumers=2)["deadlock"]
    assert "0:use waits for X.full[0]" in text
    assert "1:produce waits for X.empty[0]" in text
    assert "1 of 2 arrivals are missing" in text


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("freed", ["loaded", "renamed"])
def test_a_stage_is_freed_while_a_load_is_under_way(freed: str, seed: int) -> None:
    """An H200 did that: the last rows of a tile came from the next one. Every schedule must show it."""
    report = sim.launch(broken.keep_kernel, (1,), (*broken.descriptors(), 6, freed), seed=seed)
    assert report.kinds == {"race"}
    for finding in report.findings:
        write, load, release, use = finding.sites
        assert (write.helper, release.helper) == ("load", "release")
        assert load.line < release.line < use.line
        assert "stage " in finding.text and "of X" in finding.text
        assert f"read by 0:keep at {load.place}\n    given back at {release.place}\n" in finding.text
        assert f"first used at {use.place}\n    A load has read its bytes only when" in finding.text


@pytest.mark.parametrize("freed", ["used", "fenced", "ignored"])
def test_a_stage_may_be_freed_once_its_tile_is_read_or_not_wanted(freed: str) -> None:
    assert not findings(broken.keep_kernel, *broken.descriptors(), 6, freed)


def test_a_product_has_its_left_operand_when_it_begins() -> None:
    a, _ = broken.descriptors(64, 64, torch.bfloat16)
    y = torch.zeros(64, 64)
    assert not findings(broken.multiply_kernel, a, y, 4, False)
    assert torch.equal(y, torch.full((64, 64), 256.0))
    assert "of A" in findings(broken.multiply_kernel, a, y, 4, True)["race"]


def test_ordinary_stores_do_not_overtake_loads() -> None:
    y = torch.zeros(128)
    assert not findings(broken.told, y, 5)
    assert (y == 5).all()


def test_named_barriers_order_and_can_hang() -> None:
    y = torch.zeros(128)
    assert not findings(broken.named_barrier, y, True)
    assert (y == 3).all()
    found = findings(broken.named_barrier, y, False)
    assert "race" in found
    assert "named barrier 9" in found["deadlock"]
    assert "128 of 256 have arrived" in found["deadlock"]


def test_addresses_and_numbers() -> None:
    y = torch.zeros(128)
    assert "128 addresses lie outside y_ptr" in findings(broken.out_of_bounds, y, 64)["bounds"]
    assert "does not fit int32" in findings(broken.too_large, y, 5000)["overflow"]
    assert "N is negative" in findings(broken.asserts, y, 5)["assert"]


def test_spinning_is_a_livelock() -> None:
    flag = torch.zeros(1, dtype=torch.int32)
    assert "waits_for_ever:" in findings(broken.waits_for_ever, flag, 1)["livelock"]


def test_who_looks_in_vain_sleeps_but_may_give_up() -> None:
    """A loop that gives up is no livelock, though nothing that it looks at changes."""
    flag = torch.zeros(1, dtype=torch.int32)
    assert sim.launch(broken.waits_for_a_while, (1,), (flag, 1)).ok
    assert flag.item() == 50


@pytest.mark.skipif(not hasattr(gl, "atomic_poll"), reason="needs Triton 3.9")
def test_polling_is_a_deadlock() -> None:
    flag = torch.zeros(1, dtype=torch.int32)
    assert "to become 1" in findings(broken.polls_for_ever, flag, 1).get("deadlock", "")


def test_a_loop_without_operations_is_stopped() -> None:
    y = torch.zeros(128)
    report = sim.launch(broken.never_comes_back, (1,), (y, 1), watchdog_seconds=0.3)
    assert report.kinds == {"livelock"}
    assert "never_comes_back" in str(report)


def test_order_between_programs() -> None:
    found = findings(broken.add_without_turns, torch.zeros(128), 0, grid=(3,), together=True)
    assert found["global"].count("add_without_turns:") == 2
    flag = torch.zeros(1, dtype=torch.int32)
    text = ""
    for seed in SEEDS:
        flag.zero_()
        args = (torch.zeros(128), flag)
        report = sim.launch(broken.flag_without_release, (2,), args, seed=seed, together=True)
        text += str(report)
    assert "[global]" in text


@pytest.mark.parametrize(
    ("function", "old", "new", "kind"),
    [
        ("double", "mbarrier.wait(full.index(i), 0)", "pass", "race"),
        # As many arrivals as the partition has threads, no more and no fewer:
        ("copy_signals_kernel", INIT.format(32), INIT.format(1), "barrier"),
        ("copy_signals_kernel", INIT.format(32), INIT.format(64), "deadlock"),
    ],
)
def test_copies_that_signal(function: str, old: str, new: str, kind: str) -> None:
    broken = edit(features, function, "", old, new).load()
    with sim.intercept() as reports:
        broken.copy_signals(torch.ones(1536))
    assert kind in reports[0].kinds


def test_waiting_for_a_program_that_cannot_start() -> None:
    """Turns from the last program to the first need all of them to run; two at a time are not enough."""
    x = torch.ones(3, 128)

    def run(last_first: bool, resident: int | None) -> Report:
        with sim.intercept(together=True, resident=resident) as reports:
            turns.turns(x, last_first)
        return reports[0]

    assert run(True, None).ok and run(False, 2).ok and run(False, 1).ok
    assert run(True, 2).kinds == {"livelock"}


def test_findings_replay() -> None:
    def once(seed: int) -> Report:
        args = (*broken.descriptors(), 6, True, False, 1)
        return sim.launch(broken.ring_kernel, (1,), args, seed=seed)

    assert [str(f) for f in once(3).findings] == [str(f) for f in once(3).findings]


def test_check_stops_at_the_first_failing_seed() -> None:
    with pytest.raises(sim.SimulationError, match=r"seed \d"):
        sim.check(lambda: broken.ring_kernel[(1,)](*broken.descriptors(), 6, True, False, 1), seeds=10)
    with pytest.raises(AssertionError, match="wrong result with seed 0"):
        sim.check(
            lambda: turns.turns(torch.ones(2, 128)),
            2,
            lambda y: (_ for _ in ()).throw(AssertionError()),
            together=True,
        )


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="arch"):
        sim.launch(broken.asserts, (1,), (torch.zeros(1), 1), arch="pascal")
    with pytest.raises(TypeError, match="does not exist on ampere"):
        sim.launch(broken.no_wait, (1,), broken.descriptors(), arch="ampere")
    assert not sim.launch(
        features.features_kernel,
        (1,),
        (torch.zeros(8), torch.zeros(8), torch.zeros(1, dtype=torch.int32), 8, 128),
    ).findings


@gluon.jit
def unknown_operation(x_ptr: Any) -> None:
    gl.fp4_to_fp(gl.load(x_ptr), gl.float16, 0)


def test_what_is_not_simulated_says_so() -> None:
    with pytest.raises(NotImplementedError, match="fp4_to_fp"):
        sim.launch(unknown_operation, (1,), (torch.zeros(128),))
