"""Two results set against each other."""

from __future__ import annotations

from dataclasses import replace

import made_up
import pytest

from tilewise.perf.compare import compare
from tilewise.perf.results import Cell, Measurement

NAMES = ("triton/fa2", "fa2")


def changed(run, name, change):
    cells = [
        Cell(
            c.problem,
            c.direction,
            c.flops,
            tuple(change(m) if m.contender == name else m for m in c.measurements),
        )
        for c in run.cells
    ]
    return replace(run, cells=cells)


def test_the_same_twice_is_no_difference():
    found = compare(made_up.run(names=NAMES), made_up.run(names=NAMES))
    assert found.status == 0 and set(found.geomeans().values()) == {1.0}
    assert len(found.ratios) == 36 * 2 * 2


@pytest.mark.parametrize(("slowdown", "status"), [(1.039, 0), (1.041, 1), (0.5, 0)])
def test_slower_counts_only_beyond_both_spreads(slowdown, status):
    """Each run spreads by 2 %."""
    found = compare(made_up.run(names=NAMES), made_up.run(names=NAMES, slowdown=slowdown))
    assert found.status == status
    assert found.geomeans()["fa2", "backward"] == pytest.approx(1 / slowdown)


def test_one_slower_cell_is_enough():
    a = made_up.run(names=NAMES)
    slow = Measurement("fa2", "ok", ms=1e6, spread=0.0)
    b = replace(a, cells=[*a.cells[:-1], replace(a.cells[-1], measurements=(slow,))])
    found = compare(a, b)
    assert found.status == 1 and sum(r.slower for r in found.ratios) == 1


def test_a_number_that_is_lost_is_worse():
    a = made_up.run(names=NAMES)
    b = changed(a, "fa2", lambda m: Measurement("fa2", "wrong", "dq is off"))
    found = compare(a, b)
    assert found.status == 1 and len(found.lost) == 72 and "wrong: dq is off" in found.lost[0]


def test_what_b_did_not_try_is_no_loss():
    found = compare(made_up.run("paper", NAMES), made_up.run("paper", NAMES[:1]))
    assert found.status == 0 and set(found.geomeans()) == {
        ("triton/fa2", d) for d in ("forward", "backward")
    }


def test_cells_are_matched_by_problem_not_by_place():
    a, b = made_up.run(names=NAMES), made_up.run(names=NAMES)
    b.cells.reverse()
    assert set(compare(a, b).geomeans().values()) == {1.0}


def test_nothing_in_common_is_refused_in_one_line():
    with pytest.raises(ValueError, match="no measurement in common"):
        compare(made_up.run("paper"), made_up.run("gqa"))
