"""How `tilewise demo` looks in a terminal, and in a file when there is none."""

from __future__ import annotations

from pathlib import Path

import torch
from rich import progress
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from tilewise import doctor
from tilewise.demo.corpus import Corpus
from tilewise.demo.longseq import LongSequence
from tilewise.demo.report import Check, Report, differences
from tilewise.demo.train import Plan

_BARS = "▁▂▃▄▅▆▇█"
_ROWS = 8


def introduce(screen: Console, text: Corpus, plan: Plan, device: torch.device) -> None:
    """Says what is about to happen."""
    shape = plan.shape
    screen.print(f"[bold]text[/]    {escape(text.source)}, {text.files} files, {_size(len(text.data))}")
    screen.print(
        f"[bold]model[/]   byte-level GPT, {shape.layers} layers, {shape.heads} heads, "
        f"width {shape.width}, context {shape.context}, fp32"
    )
    screen.print(f"[bold]device[/]  {escape(doctor.device_name(device))}\n")


class Progress:
    """A watcher of the demo that draws one bar a stage; without a terminal, one line a stage."""

    def __init__(self, screen: Console) -> None:
        self._bars = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.TimeElapsedColumn(),
            progress.TextColumn("[dim]{task.fields[note]}[/]"),
            console=screen,
        )
        self._current: progress.TaskID | None = None

    def __enter__(self) -> Progress:
        self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is None:
            self._finish()
        self._bars.stop()

    def begin(self, stage: str, steps: int | None) -> None:
        self._finish()
        self._current = self._bars.add_task(stage, total=steps, note="")

    def advance(self, note: str) -> None:
        if self._current is not None:
            self._bars.update(self._current, advance=1, note=note)

    def _finish(self) -> None:
        """Stages of unknown length are done when the next begins."""
        if self._current is not None and self._bars.tasks[self._current].total is None:
            self._bars.update(self._current, total=1, completed=1)


def show(screen: Console, report: Report, folder: Path, drawn: bool) -> None:
    """Prints the whole report, and where it was written."""
    screen.print()
    screen.print(_curves(report))
    screen.print(
        Panel(
            f"[bold]{escape(report.prompt)}[/]{escape(report.sample)}",
            title="a sample, from the model trained with Tilewise",
            title_align="left",
        )
    )
    screen.print(_long_sequence(report.long_sequence))
    screen.print(_checks(report.checks))
    written = "report.json and curves.png" if drawn else "report.json"
    screen.print(f"{written} written to [bold]{escape(str(folder))}[/]", soft_wrap=True)
    if not drawn:
        screen.print("no picture: matplotlib is not installed (pip install matplotlib)")


def _curves(report: Report) -> Table:
    tiled, materialised = report.curves
    steps = len(tiled.losses)
    apart = differences(report.curves)
    table = Table(title="loss, nats per byte", title_justify="left")
    for column in ("step", "Tilewise", "materialised", "difference"):
        table.add_column(column, justify="right")
    for step in sorted({round(i * (steps - 1) / _ROWS) for i in range(_ROWS + 1)}):
        table.add_row(
            str(step + 1),
            f"{tiled.losses[step]:.5f}",
            f"{materialised.losses[step]:.5f}",
            f"{apart[step]:.1e}",
        )
    table.add_section()
    table.add_row(
        "held out",
        f"{tiled.held_out_loss:.5f}",
        f"{materialised.held_out_loss:.5f}",
        f"{abs(tiled.held_out_loss - materialised.held_out_loss):.1e}",
    )
    table.add_row("time", f"{tiled.seconds:.1f} s", f"{materialised.seconds:.1f} s", "")
    table.add_row("", _spark(tiled.losses), _spark(materialised.losses), "")
    return table


def _long_sequence(run: LongSequence) -> str:
    scores = f"{_size(run.score_bytes_fp16)} in fp16"
    if run.score_bytes != run.score_bytes_fp16:  # bf16 is as wide as fp16
        scores += f", {_size(run.score_bytes)} in {run.dtype}"
    used = "unknown on this system" if run.extra_bytes is None else _size(run.extra_bytes)
    results = _size(run.result_bytes)
    return (
        f"[bold]{run.length:,} tokens[/], one head of {run.dim}, causal, {run.dtype}, {run.kernels}\n"
        f"  the score matrix alone would take {scores}\n"
        f"  really used, forward and backward: [bold]{used}[/], of which results {results}\n"
        f"  forward {run.forward_seconds:.3g} s, backward {run.backward_seconds:.3g} s\n"
        f"  error on {run.sampled_rows} rows against fp64: output {run.output_error:.1e}, "
        f"gradient of q {run.dq_error:.1e}\n"
    )


def _checks(checks: list[Check]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    for check in checks:
        verdict = "[green]ok[/]" if check.passed else "[bold red]FAILED[/]"
        table.add_row(verdict, check.claim, f"{check.value:.3g}", f"[dim]limit {check.limit:.3g}[/]")
    return table


def _spark(values: list[float], width: int = 12) -> str:
    """A curve as a row of little bars."""
    picked = [values[i * (len(values) - 1) // max(1, width - 1)] for i in range(width)]
    low, high = min(picked), max(picked)
    span = (high - low) or 1.0
    return "".join(_BARS[round((v - low) / span * (len(_BARS) - 1))] for v in picked)


def _size(count: int) -> str:
    amount = float(count)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.3g} {unit}"
        amount /= 1024
    return f"{amount:.3g} GiB"
