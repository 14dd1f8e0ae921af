"""`tilewise warmup`: options in, exit status out."""

from __future__ import annotations

from typing import Annotated, NoReturn

import typer
from rich.console import Console

from tilewise import warmup as work
from tilewise.cli import warmup_view

_screen = Console(highlight=False)


def warmup(
    arch: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(work.ARCHES)}; this machine's GPU if not given."),
    ] = None,
    head_dim: Annotated[list[str] | None, typer.Option(help="Head dims (64,128).")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="bf16 (if not given), fp16, fp32.")] = None,
    heads: Annotated[
        list[str] | None,
        typer.Option(metavar="Q/KV", help="A model's, as 32/8; kinds of all models if not given."),
    ] = None,
    mask: Annotated[list[str] | None, typer.Option(help="full, causal (both if not given).")] = None,
    layout: Annotated[list[str] | None, typer.Option(help="dense, varlen (both if not given).")] = None,
    direction: Annotated[
        list[str] | None, typer.Option(help="forward, backward (both if not given).")
    ] = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Deterministic gradients too.")
    ] = False,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes; one a core if not given.")] = None,
) -> None:
    """Compile kernels ahead into Triton's cache on disk, for a GPU that need not be here.

    A process that has such a GPU, the same versions and this cache then compiles nothing. Options may
    be given several times or as lists, 64,128. Exit status: 0 if all are there, 1 if one does not
    compile, 2 for bad input.
    """
    try:
        request = work.Request(
            arches=_words(arch) or _own_arch(),
            head_dims=tuple(_number("--head-dim", text) for text in _words(head_dim)) or (64, 128),
            dtypes=_words(dtype) or ("bf16",),
            masks=_words(mask) or work.MASKS,
            layouts=_words(layout) or work.LAYOUTS,
            directions=_words(direction) or work.DIRECTIONS,
            heads=tuple(map(_heads, _words(heads))) or work.HEADS,
            deterministic=deterministic,
        )
    except work.RequestError as error:
        _refuse(str(error))
    reason = work.refusal()
    if reason is not None:
        _refuse(reason)
    planned = work.plan(request)
    outcomes = []
    with warmup_view.Progress(_screen, len(planned)) as progress:
        for outcome in work.execute(planned, jobs):
            outcomes.append(outcome)
            progress.advance(outcome)
    warmup_view.show(_screen, outcomes, work.cache_folder())
    raise typer.Exit(1 if any(outcome.error for outcome in outcomes) else 0)


def _words(given: list[str] | None) -> tuple[str, ...]:
    """Options given several times or as lists, as one list, each word once."""
    words = (word.strip() for text in given or () for word in text.split(","))
    return tuple(dict.fromkeys(word for word in words if word))


def _own_arch() -> tuple[str, ...]:
    own = work.own_arch()
    if own is None:
        raise work.RequestError(f"--arch: no NVIDIA GPU here; name one of {', '.join(work.ARCHES)}")
    return (own,)


def _number(option: str, text: str) -> int:
    if not text.isdecimal():
        raise work.RequestError(f"{option}: got {text!r}; allowed are whole numbers")
    return int(text)


def _heads(text: str) -> tuple[int, int]:
    q, _, kv = text.partition("/")
    return _number("--heads", q), _number("--heads", kv or q)


def _refuse(message: str) -> NoReturn:
    typer.echo(f"tilewise warmup: {message}", err=True)
    raise typer.Exit(2)
