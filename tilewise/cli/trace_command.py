"""`tilewise trace`: where a kernel's cycles go, simulated on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from tilewise.perf import gpus

_screen = Console(highlight=False)

LARGEST_SEQLEN = 2**17  # the simulation takes a minute or more
LARGEST_TENSOR = 2**30  # elements of one of the problem's tensors
LEAST_WAIT = 0.001  # share of a program's time; shorter waits are not listed


def trace(
    kernel: Annotated[str, typer.Argument(help="Which kernel, e.g. hopper-forward.")],
    head_dim: Annotated[int, typer.Option(help="Head dim.")] = 128,
    seqlen: Annotated[int, typer.Option(help="Queries and keys.")] = 2048,
    heads: Annotated[int, typer.Option(min=1, help="Heads; the batch is 1.")] = 16,
    causal: Annotated[bool, typer.Option("--causal", help="With a causal mask.")] = False,
    gpu: Annotated[
        str | None, typer.Option(help="GPU whose tables are used: h200, h100, b200.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Write the timeline for Perfetto or Chrome here.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the steady state here, as .svg or .html.")
    ] = None,
) -> None:
    """Simulate a kernel on one SM, predict the cycles of the whole kernel and say what binds.

    No GPU is needed. Without --gpu: h200 for Hopper's kernels, b200 for Blackwell's. Exit status: 0, or
    2 if the kernel or the GPU is not known, or the size or a file's name is refused.
    """
    try:
        from tilewise.sim import catalogue, predict
        from tilewise.sim import picture as pictures
        from tilewise.sim import trace as traces
    except ImportError as error:
        _refuse(str(error))
    try:
        traced = catalogue.find(kernel)
        chip = gpus.find(gpu or catalogue.USUAL_GPU[traced.family])
        if picture is not None:
            pictures.check_name(picture)
    except ValueError as error:
        _refuse(str(error))
    if chip.family != traced.family:
        _refuse(f"{kernel} is a kernel for {traced.family}; {chip.name} is {chip.family}")
    if seqlen <= 0 or seqlen % traced.multiple:
        _refuse(f"--seqlen must be a positive multiple of {traced.multiple}, not {seqlen}")
    if head_dim not in traced.head_dims:
        _refuse(f"--head-dim must be one of {', '.join(map(str, traced.head_dims))}, not {head_dim}")
    if seqlen > LARGEST_SEQLEN:
        _refuse(f"--seqlen must be at most {LARGEST_SEQLEN}, not {seqlen}")
    if heads * seqlen * head_dim > LARGEST_TENSOR:
        most = LARGEST_TENSOR // (seqlen * head_dim)
        _refuse(
            f"--heads must be at most {most} with --seqlen {seqlen} --head-dim {head_dim}, not {heads}"
        )
    for path in (out, picture):
        if path is not None and not path.parent.is_dir():
            _refuse(f"{path}: there is no folder {path.parent}")
    size = heads, seqlen, head_dim, causal
    prediction = predict.predict(lambda: traced.run(chip.name, *size), chip.name, hoisted=traced.hoisted)
    _screen.print(traced.what)
    _show(prediction, traced.flops(*size))
    if out is not None:
        traces.write(prediction, out)
        _screen.print(f"timeline: {out} (open it in https://ui.perfetto.dev; 1 us is 1 cycle)")
    if picture is not None:
        pictures.write(prediction, picture)
        _screen.print(f"picture: {picture}")


def _show(prediction: object, flops: float) -> None:
    from tilewise.sim.predict import Prediction

    assert isinstance(prediction, Prediction)
    p = prediction
    _screen.print(f"[bold]{p.kernel}[/] on {p.gpu.name}, simulated: a prediction, not a measurement")
    _screen.print(f"{p.cycles:,.0f} cycles, {p.utilisation(flops):.1%} of the tensor cores' peak")
    _screen.print(
        f"grid {p.grid}: {p.waves:.2f} waves over {p.gpu.sms} SMs, together {p.balance:.1%} occupied; "
        f"longest program {p.program_cycles:,.0f} cycles"
    )
    table = Table("unit", "busy", title="one program", title_justify="left")
    for unit, share in p.busy.items():
        table.add_row(unit, f"{share:.1%}")
    _screen.print(table)
    roles = Table("role", "works", "waits", "for", title="its roles", title_justify="left")
    for role, waits in sorted(p.waits.items()):
        most = sorted(waits.items(), key=lambda item: -item[1])
        reasons = ", ".join(f"{what} {share:.1%}" for what, share in most if share >= LEAST_WAIT)
        roles.add_row(role, f"{p.works[role]:.1%}", f"{sum(waits.values()):.1%}", reasons)
    _screen.print(roles)
    _screen.print(f"what binds: {p.binds}, at {p.busy[p.binds]:.0%}")


def _refuse(message: str) -> NoReturn:
    typer.echo(f"tilewise trace: {message}", err=True)
    raise typer.Exit(2)
