"""Run something under many schedules, and stop at the first that shows a defect."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tilewise.sim.findings import Report, SimulationError
from tilewise.sim.launch import configure, intercept


def check(
    run: Callable[..., Any],
    seeds: int | Iterable[int] = 5,
    accept: Callable[[Any], None] | None = None,
    **options: Any,
) -> list[Report]:
    """Call `run()` once per seed with every Gluon launch inside simulated.

    run: host code that launches kernels. seeds: a number of seeds, or the seeds. accept: called with
    what run returned, raises if it is wrong. options: fields of `Options`.

    Raises SimulationError at the first seed with findings, or lets `accept` raise; either message names
    the seed. Returns the reports of all launches.
    """
    reports: list[Report] = []
    for seed in range(seeds) if isinstance(seeds, int) else seeds:
        with intercept(seed=seed, **options) as launched:
            result = run()
        reports += launched
        findings = [f for r in launched for f in r.findings]
        if findings:
            names = ", ".join(dict.fromkeys(r.kernel for r in launched if r.findings))
            raise SimulationError(findings, f" in {names}, seed {seed}")
        if accept is not None:
            try:
                accept(result)
            except AssertionError as error:
                raise AssertionError(f"wrong result with seed {seed}: {error}") from error
    return reports


def first_failing_seed(run: Callable[[], Any], seeds: Iterable[int], **options: Any) -> int | None:
    """The first seed under which a launch inside `run` has findings; None if there is none."""
    for seed in seeds:
        with configure(stop_at_first=True), intercept(seed=seed, **options) as launched:
            run()
        if any(r.findings for r in launched):
            return seed
    return None
