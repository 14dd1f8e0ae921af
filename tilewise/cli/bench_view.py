"""How `tilewise bench` looks in a terminal, and in a file when there is none."""

from __future__ import annotations

from rich import progress
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tilewise.perf import summary
from tilewise.perf.bench import Plan
from tilewise.perf.compare import Comparison
from tilewise.perf.results import Cell, Run


def introduce(screen: Console, plan: Plan) -> None:
    """Says what is about to be measured, and who takes part."""
    ways = " and ".join(plan.directions)
    screen.print(f"[bold]{len(plan.problems)} problems[/], {ways}, {plan.rounds} rounds each, in turns")
    screen.print("[bold]taking part[/] " + escape(", ".join(c.name for c in plan.contenders)))
    for contender, reason in plan.absent:
        screen.print(f"[dim]not {contender.name}: {escape(reason)}[/]")
    screen.print()


class Progress:
    """A watcher of a run that draws one bar."""

    def __init__(self, screen: Console) -> None:
        self._bars = progress.Progress(
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TextColumn("[dim]{task.fields[note]}[/]"),
            console=screen,
            transient=True,
        )
        self._task: progress.TaskID | None = None

    def __enter__(self) -> Progress:
        self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bars.stop()

    def begin(self, problems: int) -> None:
        self._task = self._bars.add_task("", total=problems, note="")

    def step(self, what: str) -> None:
        if self._task is not None:
            self._bars.update(self._task, note=escape(what))

    def advance(self, cells: list[Cell]) -> None:
        if self._task is not None:
            self._bars.advance(self._task)


def show(screen: Console, run: Run) -> None:
    """Prints the speeds, how ours stand to the others, and everything that did not run."""
    for table in summary.tables(run):
        drawn = _table(table.title, *table.head)
        for row, best in zip(table.rows, table.best, strict=True):
            drawn.add_row(
                *(f"[bold]{escape(c)}[/]" if n == best else escape(c) for n, c in enumerate(row))
            )
        screen.print(drawn, "")
    for direction in run.directions:
        rows = summary.against_peers(run, direction)
        if rows:
            drawn = _table(f"{direction}, times as fast", "", "as", "geometric mean", "least", "cells")
            for row in rows:
                drawn.add_row(*map(escape, row))
            screen.print(drawn, "")
    if run.ceiling_tflops is not None:
        screen.print(f"large matrix product: {run.ceiling_tflops:.3g} TFLOP/s")
    screen.print("±: half the distance of the quartiles; bold: the best", style="dim")
    for line in summary.complaints(run):
        screen.print(f"[yellow]{escape(line)}[/]")


def show_comparison(screen: Console, found: Comparison) -> None:
    """Prints B's speed over A's, cell by cell and on the whole."""
    table = _table("B as fast as A", "", "direction", "contender", "A ms", "B ms", "speed", "noise")
    for r in found.ratios:
        colour = "red" if r.slower else "green" if r.faster else "dim"
        table.add_row(
            escape(str(r.problem)),
            r.direction,
            escape(r.contender),
            f"{r.ms_a:.4g}",
            f"{r.ms_b:.4g}",
            f"[{colour}]{r.speedup:.3f}[/]",
            f"±{r.noise:.1%}",
        )
    screen.print(table, "")
    for (name, direction), mean in found.geomeans().items():
        screen.print(f"{escape(name)}, {direction}: geometric mean [bold]{mean:.3f}[/]")
    slower = sum(r.slower for r in found.ratios)
    if slower:
        screen.print(f"[red]slower by more than the noise: {slower} of {len(found.ratios)}[/]")
    for line in found.lost:
        screen.print(f"[red]no number any more: {escape(line)}[/]")


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(
        title=f"[bold]{title}[/]", title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0)
    )
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(escape(name), justify="right")
    return table
