"""How `tilewise warmup` looks in a terminal, and in a file when there is none."""

from __future__ import annotations

from rich import progress
from rich.console import Console
from rich.markup import escape

from tilewise.warmup import Outcome


class Progress:
    """One bar: kernels that are there, of all."""

    def __init__(self, screen: Console, kernels: int) -> None:
        self._bars = progress.Progress(
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TextColumn("[dim]{task.fields[note]}[/]"),
            console=screen,
            transient=True,
        )
        self._task = self._bars.add_task("", total=kernels, note="")

    def __enter__(self) -> Progress:
        self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bars.stop()

    def advance(self, outcome: Outcome) -> None:
        note = f"{outcome.job.case}: {outcome.job.kernel}"
        self._bars.update(self._task, advance=1, note=escape(note))


def show(screen: Console, outcomes: list[Outcome], cache: str) -> None:
    """Prints what became of the kernels, and where they are."""
    failed = [outcome for outcome in outcomes if outcome.error]
    found = sum(outcome.found for outcome in outcomes)
    compiled = len(outcomes) - found - len(failed)
    screen.print(f"[bold]{len(outcomes)} kernels[/]: {compiled} compiled, {found} there before")
    for job, _, error in failed:
        screen.print(f"[red]{escape(f'{job.case}: {job.kernel}: {error}')}[/]", soft_wrap=True)
    screen.print(f"cache: {cache}", markup=False, soft_wrap=True)  # a path is for copying
