"""Right kernels under many schedules: whatever is found here is a false alarm."""

from __future__ import annotations

import pytest
import soak
from problems_sim import CASES, TRITON, Case, error

from tilewise import sim


@pytest.mark.parametrize("together", [False, True], ids=["apart", "together"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_false_alarm(case: Case, together: bool, sim_seeds: range) -> None:
    right = case.right()

    def accept(result: tuple[object, ...]) -> None:
        errors = [error(x, y) for x, y in zip(result, right, strict=True)]  # type: ignore[arg-type]
        assert max(errors) < case.limit, errors

    options = {**case.options, "together": together or case.options.get("together", False)}
    sim.check(case.run, sim_seeds, accept, arch=case.arch, **options)


@pytest.mark.skipif(TRITON < (3, 9), reason="the record is of the newest Triton, which has more kernels")
def test_every_kernel_was_soaked() -> None:
    """The documentation has a line for each, of 200 schedules in both orders, and nothing was found."""
    text = soak.DOCS.read_text(encoding="utf-8")
    table = text.partition(soak.BEGIN)[2].partition(soak.END)[0]
    rows = [row.strip("| ").split(" | ") for row in table.strip().splitlines()[2:]]
    lines = {name: counts for name, *counts in rows}
    assert set(lines) == {*(case.name for case in soak.SOAK), "all"}
    for name, (launches, findings, wrong) in lines.items():
        assert int(launches) >= 400 and (findings, wrong) == ("0", "0"), name
