"""Right kernels under many schedules: whatever is found here is a false alarm."""

from __future__ import annotations

import pytest
from problems_sim import CASES, Case, error

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
