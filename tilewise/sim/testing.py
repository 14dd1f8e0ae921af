"""Run something under many schedules, and stop at the first that shows a defect."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

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

    Raises SimulationError at the first seed with findings, even if `run` raised after them. Otherwise
    an AssertionError of `run` or `accept` is raised again with the seed in its message, and any other
    exception with the seed in a note. Returns the reports of all launches.
    """
    reports: list[Report] = []
    chosen = list(range(seeds) if isinstance(seeds, int) else seeds)
    if not chosen:
        raise ValueError(f"seeds must be at least 1, not {seeds!r}")
    for seed in chosen:
        with intercept(seed=seed, **options) as launched:
            try:
                result = run()
            except Exception as error:
                _raise_findings(launched, seed, error)
                _raise_again(error, f"with seed {seed}")
        reports += launched
        _raise_findings(launched, seed)
        if accept is not None:
            try:
                accept(result)
            except Exception as error:
                _raise_again(error, f"wrong result with seed {seed}")
    return reports


def _raise_findings(reports: list[Report], seed: int, error: Exception | None = None) -> None:
    findings = [f for r in reports for f in r.findings]
    if findings:
        names = ", ".join(dict.fromkeys(r.kernel for r in reports if r.findings))
        then = "" if error is None else f", before {type(error).__name__}: {error}"
        raise SimulationError(findings, f" in {names}, seed {seed}{then}") from error


def _raise_again(error: Exception, context: str) -> NoReturn:
    if isinstance(error, AssertionError):
        raise AssertionError(f"{context}: {error}") from error
    if hasattr(error, "add_note"):  # since Python 3.11
        error.add_note(context)
    raise error


def first_failing_seed(run: Callable[[], Any], seeds: Iterable[int], **options: Any) -> int | None:
    """The first seed under which a launch inside `run` has findings; None if there is none."""
    for seed in seeds:
        with configure(stop_at_first=True), intercept(seed=seed, **options) as launched:
            run()
        if any(r.findings for r in launched):
            return seed
    return None
