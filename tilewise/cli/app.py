"""The commands: arguments in, exit status out. What they show is drawn by the `*_view` modules."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

import tilewise
from tilewise import doctor
from tilewise.cli import (
    bench_command,
    demo_view,
    doctor_view,
    roofline_command,
    trace_command,
    warmup_command,
)
from tilewise.demo import corpus, picture, run
from tilewise.demo.train import Plan

app = typer.Typer(
    help="Exact attention for PyTorch, tile by tile.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("bench")(bench_command.bench)
app.command("plot")(bench_command.plot)
app.command("roofline")(roofline_command.roofline)
app.command("trace")(trace_command.trace)
app.command("warmup")(warmup_command.warmup)
_screen = Console(highlight=False)


def _version(wanted: bool) -> None:
    if wanted:
        _screen.print(f"tilewise {tilewise.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command("demo")
def demo(
    text: Annotated[
        list[Path] | None,
        typer.Option(help="Train on these files and folders instead of Python's standard library."),
    ] = None,
    more_text: Annotated[list[Path] | None, typer.Argument(hidden=True)] = None,
    out: Annotated[Path, typer.Option(help="Folder for report.json and the picture.")] = Path(
        "tilewise-demo"
    ),
    steps: Annotated[
        int | None, typer.Option(min=1, help="Training steps; the device decides if not given.")
    ] = None,
    length: Annotated[
        int, typer.Option(min=256, max=2**24, help="Tokens of the long sequence.")
    ] = 32768,
) -> None:
    """Train a small GPT on real text with Tilewise and without, then run a very long sequence.

    Exit status: 0 if every check passed, 1 if one failed, 2 if the text or the folder is unusable.
    """
    if more_text and not text:
        raise typer.BadParameter(f"unexpected {more_text[0]}; name a text with --text PATH")
    try:  # before the work, not after it
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _refuse(f"cannot write to {out}: {error.strerror}")

    device = run.best_device()
    plan = Plan.for_device(device)
    plan = replace(plan, steps=steps or plan.steps)
    paths = [*(text or []), *(more_text or [])]
    try:
        read = corpus.from_paths(paths) if paths else corpus.standard_library()
        demo_view.introduce(_screen, read, plan, device)
        with demo_view.Progress(_screen) as progress:
            report = run.demonstrate(read, plan, length, device, progress)
    except corpus.TextError as error:
        _refuse(str(error))

    report.write(out)
    drawn = picture.draw(report, out / "curves.png")
    demo_view.show(_screen, report, out, drawn)
    raise typer.Exit(0 if report.passed else 1)


@app.command("doctor")
def examine(
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as JSON.")] = False,
    features: Annotated[
        bool, typer.Option("--features", help="Only what each kernel supports.")
    ] = False,
) -> None:
    """Show versions and devices, which kernels run here, and why the others do not."""
    found = doctor.examine()
    if as_json:
        print(json.dumps(found["features"] if features else found, indent=2))
    elif features:
        doctor_view.show_features(_screen, found)
    else:
        doctor_view.show(_screen, found)


def _refuse(message: str) -> NoReturn:
    typer.echo(f"tilewise demo: {message}", err=True)
    raise typer.Exit(2)
