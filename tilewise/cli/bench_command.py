"""The commands `bench` and `plot`: options in, exit status out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from tilewise.cli import bench_view
from tilewise.perf import bench as runner
from tilewise.perf import compare as comparison
from tilewise.perf import plot as picture
from tilewise.perf import results
from tilewise.perf.grid import BadRequest
from tilewise.perf.request import HELP, Request
from tilewise.perf.timing import clock_for

_screen = Console(highlight=False)
_DEFAULT = Request()


def bench(
    preset: Annotated[str, typer.Option(help=HELP["preset"])] = _DEFAULT.preset,
    direction: Annotated[str, typer.Option(help=HELP["direction"])] = _DEFAULT.direction,
    head_dim: Annotated[str | None, typer.Option(help=HELP["head_dim"])] = None,
    seqlen: Annotated[str | None, typer.Option(help=HELP["seqlen"])] = None,
    causal: Annotated[str | None, typer.Option(help=HELP["causal"])] = None,
    dtype: Annotated[str | None, typer.Option(help=HELP["dtype"])] = None,
    tokens: Annotated[str | None, typer.Option(help=HELP["tokens"])] = None,
    heads: Annotated[str | None, typer.Option(help=HELP["heads"])] = None,
    kv_heads: Annotated[str | None, typer.Option(help=HELP["kv_heads"])] = None,
    algorithms: Annotated[str, typer.Option(help=HELP["algorithms"])] = _DEFAULT.algorithms,
    peers: Annotated[str, typer.Option(help=HELP["peers"])] = _DEFAULT.peers,
    rounds: Annotated[str, typer.Option(help=HELP["rounds"])] = _DEFAULT.rounds,
    time_limit: Annotated[str | None, typer.Option(help=HELP["time_limit"])] = None,
    device: Annotated[str, typer.Option(help=HELP["device"])] = _DEFAULT.device,
    out: Annotated[str | None, typer.Option(help=HELP["out"])] = None,
    cycles: Annotated[
        bool, typer.Option("--cycles", help="Also count cycles with Nsight Compute, where there is ncu.")
    ] = False,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="A.json B.json", help="Measure nothing; set B against A."),
    ] = None,
) -> None:
    """Time attention, ours and everybody's, in turns; who is wrong gets no number.

    Exit status: 0 if all ran and was right, 1 if something was not, 2 for bad input. With --compare:
    1 if B is slower than A by more than the noise.
    """
    if compare is not None:
        _compare(*compare)
    try:
        plan = Request(
            preset=preset,
            direction=direction,
            head_dim=head_dim,
            seqlen=seqlen,
            causal=causal,
            dtype=dtype,
            tokens=tokens,
            heads=heads,
            kv_heads=kv_heads,
            algorithms=algorithms,
            peers=peers,
            rounds=rounds,
            time_limit=time_limit,
            device=device,
            out=out,
        ).plan(count_cycles=cycles)
    except BadRequest as error:
        _refuse("bench", error)
    bench_view.introduce(_screen, plan)
    target = plan.out
    with bench_view.Progress(_screen) as progress:
        run = runner.execute(
            plan,
            clock_for(plan.device),
            progress,
            keep=lambda run: None if target is None else results.write(run, target),
        )
    bench_view.show(_screen, run)
    if target is not None:
        _screen.print(f"written to {target}", markup=False, soft_wrap=True)  # a path is for copying
    raise typer.Exit(run.status)


def _compare(a: Path, b: Path) -> NoReturn:
    try:
        found = comparison.compare(results.read(a), results.read(b))
    except ValueError as error:  # a ResultError among them
        _refuse("bench", error)
    bench_view.show_comparison(_screen, found)
    raise typer.Exit(found.status)


def plot(
    result: Annotated[list[Path], typer.Argument(help="Files that tilewise bench wrote.")],
    out: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path(),
) -> None:
    """Draw results: bars per sequence length, a panel per head dim and mask, as PNG and SVG.

    Exit status: 0 if all were drawn, 2 if one could not be; the others are drawn all the same.
    """
    status = 0
    for path in result:
        try:
            drawn = picture.draw(results.read(path), out, path.stem)
        except (results.ResultError, picture.PlotError) as error:
            typer.echo(f"tilewise plot: {error}", err=True)
            status = 2
            continue
        for made in drawn:
            _screen.print(str(made), markup=False)
    raise typer.Exit(status)


def _refuse(command: str, error: Exception) -> NoReturn:
    typer.echo(f"tilewise {command}: {error}", err=True)
    raise typer.Exit(2)
