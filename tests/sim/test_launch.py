"""What `sim.launch` and `sim.check` refuse, and what they say when something goes wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernels import broken
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from tilewise import sim
from tilewise.gluon.compat import tma_store, tma_store_wait, tma_store_wait_written


@gluon.jit
def fills(y_ptr: Any, N: gl.constexpr) -> None:
    gl.store(y_ptr + gl.arange(0, 128, broken.LINE), gl.full([128], N, gl.float32, broken.LINE))


def launch(grid: tuple[int, ...] = (1,), **keywords: Any) -> sim.Report:
    return sim.launch(fills, grid, (torch.zeros(128),), **{"N": 1, **keywords})


def test_unknown_keywords_are_refused() -> None:
    """`togehter=True` was dropped, and with it the check that it asks for."""
    with pytest.raises(TypeError, match="unknown keyword 'togehter'") as refused:
        launch(togehter=True)
    for allowed in ("y_ptr, N", "together", "num_warps", "num_ctas", "num_stages", "maxnreg"):
        assert allowed in str(refused.value)
    with pytest.raises(TypeError, match="togehter"), sim.configure(togehter=True):
        pass
    with pytest.raises(TypeError, match="togehter"):
        sim.check(launch, togehter=True)
    with sim.intercept(), pytest.raises(TypeError, match="num_wraps"):
        fills[(1,)](torch.zeros(128), 1, num_wraps=4)
    assert launch(num_warps=8, num_ctas=1, num_stages=2, maxnreg=128, debug=True, together=True).ok


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"num_warps": 3}, ValueError, "num_warps must be a power of two, not 3"),
        ({"num_warps": 0}, ValueError, "num_warps must be a power of two, not 0"),
        ({"num_ctas": -1}, ValueError, "num_ctas must be a power of two, not -1"),
        ({"grid": (0,)}, ValueError, "side of the grid must be at least 1"),
        ({"grid": (2, -1)}, ValueError, "side of the grid must be at least 1"),
        ({"resident": 0, "together": True}, ValueError, "resident must be at least 1, not 0"),
        ({"limit": 0}, ValueError, "limit must be at least 1, not 0"),
        ({"seed": "3"}, TypeError, "seed must be an int or None, not '3'"),
        ({"seed": 0.5}, TypeError, "seed must be an int or None, not 0.5"),
    ],
)
def test_wrong_values_are_refused(
    keywords: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        launch(**keywords)


@pytest.mark.parametrize("seeds", [0, -1, []])
def test_a_check_without_seeds_is_refused(seeds: Any) -> None:
    with pytest.raises(ValueError, match="seeds must be at least 1"):
        sim.check(launch, seeds)


def test_check_names_seed_and_findings_if_the_run_raises() -> None:
    """An assert inside the run hid both."""

    def run(bad: bool, error: type[Exception]) -> None:
        kernel = broken.no_wait if bad else broken.ring_kernel
        kernel[(1,)](*broken.descriptors(), *(() if bad else (6, False, False, 1)))
        raise error("the numbers are wrong")

    with pytest.raises(sim.SimulationError, match=r"no_wait, seed 4, before .*numbers are wrong") as bad:
        sim.check(lambda: run(True, AssertionError), [4])
    assert "race" in {f.kind for f in bad.value.findings}
    assert isinstance(bad.value.__cause__, AssertionError)
    with pytest.raises(AssertionError, match="with seed 4: the numbers are wrong"):
        sim.check(lambda: run(False, AssertionError), [4])
    with pytest.raises(KeyError) as other:
        sim.check(lambda: run(False, KeyError), [4])
    assert "with seed 4" in getattr(other.value, "__notes__", ["with seed 4"])  # none before 3.11


@gluon.jit
def breaks_off(y_ptr: Any) -> None:
    gl.store(y_ptr + 128, 1.0)
    gl.fp4_to_fp(gl.load(y_ptr), gl.float16, 0)


def test_findings_outlive_a_kernel_that_raises() -> None:
    with pytest.raises(sim.SimulationError, match="before NotImplementedError") as error:
        sim.check(lambda: breaks_off[(1,)](torch.zeros(128)))
    assert {f.kind for f in error.value.findings} == {"bounds"}


MB: gl.constexpr = gl.constexpr(mbarrier.MBarrierLayout())


@gluon.jit
def make_barrier() -> Any:
    bar = gl.allocate_shared_memory(gl.int64, [1], MB)
    mbarrier.init(bar, count=1)
    return bar


@gluon.jit
def two_on_a_line(HOW: gl.constexpr) -> None:
    # fmt: off
    if HOW == 0:
        one = gl.allocate_shared_memory(gl.int64, [1], MB); two = gl.allocate_shared_memory(gl.int64, [1], MB)  # noqa: E501, E702
        mbarrier.init(one, count=1)
        mbarrier.init(two, count=1)
    else:
        one = make_barrier()
        two = make_barrier()
    # fmt: on
    mbarrier.arrive(one, count=1)
    mbarrier.wait(one, 0)
    mbarrier.wait(two, 0)


@pytest.mark.parametrize(("how", "name"), [(0, "two"), (1, "bar (no. 2)")])
def test_allocations_on_one_line_have_names_of_their_own(how: int, name: str) -> None:
    """The deadlock was said to be on the first barrier of the line."""
    (finding,) = sim.launch(two_on_a_line, (1,), (how,)).findings
    assert finding.kind == "deadlock"
    assert f"waits for {name}, parity 0" in finding.text


def test_a_livelock_names_the_program_and_what_may_help() -> None:
    flag = torch.zeros(1, dtype=torch.int32)
    text = str(sim.launch(broken.waits_for_ever, (1,), (flag, 1)))
    assert "without any change in program (0, 0, 0)" in text
    assert "together=True" not in text  # there is no other program
    report = sim.launch(broken.waits_for_ever, (2,), (flag, 1))
    assert len(report.findings) == 1  # of all programs
    assert "programs ran one after another; if one waits for another: together=True" in str(report)
    report = sim.launch(broken.waits_for_ever, (2,), (flag, 1), together=True)
    assert "in program (0, 0, 0), (1, 0, 0)" in str(report) and "one after" not in str(report)
    report = sim.launch(broken.never_comes_back, (1,), (torch.zeros(128), 1), watchdog_seconds=0.3)
    assert "never_comes_back of program (0, 0, 0) loops at" in str(report)


@pytest.mark.skipif(not hasattr(gl, "atomic_poll"), reason="needs Triton 3.9")
def test_a_deadlock_on_global_memory_says_what_may_help() -> None:
    flag = torch.zeros(1, dtype=torch.int32)
    for grid, together, helps in (((2,), False, True), ((1,), False, False), ((2,), True, False)):
        report = sim.launch(broken.polls_for_ever, grid, (flag, 1), together=together)
        assert report.kinds == {"deadlock"}
        assert ("if one waits for another: together=True" in str(report)) == helps


@gluon.jit
def stores_twice(y_desc: Any, WAITS: gl.constexpr) -> None:
    smem = gl.allocate_shared_memory(y_desc.dtype, [2, *y_desc.block_shape], y_desc.layout)
    for i in gl.static_range(2):
        smem.index(i).store(gl.full(y_desc.block_shape, i + 1.0, gl.float32, broken.LAYOUT))
    fence_async_shared()
    tma_store(y_desc, [0, 0], smem.index(0))
    if WAITS:
        tma_store_wait_written()
    else:  # has left shared memory, which says nothing about when it arrives
        tma_store_wait(0)
    tma_store(y_desc, [0, 0], smem.index(1))
    tma_store_wait(0)


@pytest.mark.parametrize("together", [False, True])
def test_two_tma_stores_to_the_same_place_need_an_order(together: bool) -> None:
    """Went unnoticed without `together`, though it is the affair of one program."""
    _, y = broken.descriptors()
    for waits in (True, False):
        report = sim.launch(stores_twice, (1,), (y, waits), together=together)
        assert report.kinds == (set() if waits else {"global"})
    assert str(report).count("TMA store of stores_twice") == 2


@gluon.jit
def stores_over_it(y_desc: Any) -> None:
    smem = gl.allocate_shared_memory(y_desc.dtype, y_desc.block_shape, y_desc.layout)
    for i in gl.static_range(2):
        smem.store(gl.full(y_desc.block_shape, i + 1.0, gl.float32, broken.LAYOUT))
    fence_async_shared()
    tma_store(y_desc, [0, 0], smem)
    tma_store_wait(0)


def test_what_was_overwritten_is_not_seen_later() -> None:
    """A store without a fence reached TMA after the one that had overwritten it."""
    for seed in range(20):
        _, y_desc = broken.descriptors()
        report = sim.launch(stores_over_it, (1,), (y_desc,), seed=seed)
        assert not report.kinds
        assert (y_desc.base == 2).all()
