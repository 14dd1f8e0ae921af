"""`tilewise roofline`: arguments in, exit status out."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tilewise.cli import roofline_view
from tilewise.perf import gpus, measured, memory, roofline_picture
from tilewise.perf.memory import SelfAttention
from tilewise.perf.roofline import ITEMSIZES, Plan, problem_bound, tile_bound
from tilewise.perf.tile_work import Tile

_ARTICLES_TILE = "128,128,128"
_LARGEST = 2**31 - 1


def roofline(
    gpu: Annotated[str | None, typer.Option(help="a100, h100, h200 or b200 (if not given).")] = None,
    tile: Annotated[
        str | None, typer.Option(metavar="M,N,D", help="Queries, keys and head dim of one tile.")
    ] = None,
    seqlen: Annotated[
        int | None, typer.Option(min=1, max=_LARGEST, help="A whole problem of this length.")
    ] = None,
    head_dim: Annotated[int, typer.Option(min=1, max=256)] = 128,
    heads: Annotated[int, typer.Option(min=1, max=_LARGEST)] = 16,
    batch: Annotated[int, typer.Option(min=1, max=_LARGEST)] = 1,
    causal: Annotated[bool, typer.Option("--causal", help="Causal mask.")] = False,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp8.")] = "bf16",
    two_cta: Annotated[
        bool, typer.Option("--two-cta", help="Blackwell: backward by pairs of CTAs.")
    ] = False,
    exchange_ds: Annotated[
        bool, typer.Option("--exchange-ds", help="The pair also exchanges dS and halves dQ's traffic.")
    ] = False,
    q_registers: Annotated[
        bool, typer.Option("--q-registers", help="Hopper, Ampere: forward holds Q in registers.")
    ] = False,
    loads: Annotated[
        bool, typer.Option("--loads", help="Count the loads of tiles into shared memory too.")
    ] = False,
    exp_fraction: Annotated[
        float, typer.Option(help="Part of the exponentials computed on the FMA units, 0 to 1.")
    ] = 0.0,
    result: Annotated[
        Path | None, typer.Option("--measured", help="Set a benchmark's JSON against the bound.")
    ] = None,
    count_memory: Annotated[
        bool, typer.Option("--memory", help="Bytes moved and memory needed, by algorithm.")
    ] = False,
    sram: Annotated[
        int | None,
        typer.Option(
            min=1, max=_LARGEST, help="With --memory: bytes on chip instead of the GPU's; tiles follow."
        ),
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the bounds: FILE.png or FILE.svg.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as JSON.")] = False,
) -> None:
    """The cycles each part of a GPU needs for attention, what binds, and the best possible utilisation.

    For one tile, or with --seqlen for a whole problem. Exit status 2 if something cannot be computed.
    """
    screen = Console(highlight=False)
    plan = Plan(dtype, two_cta, exchange_ds, q_registers, loads, exp_fraction)
    try:
        if picture is not None and (result is not None or count_memory):
            raise ValueError("picture: only the bounds are drawn, not --memory or --measured")
        table = gpus.find("b200" if gpu is None else gpu)
        if result is not None:
            data = _measured(screen, result, table if gpu is not None else None, plan, as_json)
        elif count_memory:
            p = SelfAttention(seqlen or 8192, head_dim, heads, batch, causal, _itemsize(dtype))
            data = _memory(screen, p, _tile(tile, p.head_dim), sram or table.shared_bytes, as_json)
        else:
            problem = SelfAttention(seqlen, head_dim, heads, batch, causal) if seqlen else None
            data = _bounds(screen, table, plan, tile, problem, picture, as_json)
    except ValueError as error:
        typer.echo(f"tilewise roofline: {error}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        print(json.dumps(data, indent=2))


def _bounds(
    screen: Console,
    gpu: gpus.GPU,
    plan: Plan,
    text: str | None,
    problem: SelfAttention | None,
    picture: Path | None,
    quiet: bool,
) -> dict[str, Any]:
    plan.check(gpu)
    if problem is None:
        tile = _tile(text or _ARTICLES_TILE)
        assert tile is not None
        bounds = [tile_bound(gpu, direction, tile, plan) for direction in plan.directions()]
        title = f"one tile of {tile.q} queries, {tile.k} keys, head dim {tile.d}"
    else:
        tile = _tile(text, problem.head_dim)
        sides = tile and (tile.q, tile.k)
        bounds = [problem_bound(gpu, d, problem, plan, sides) for d in plan.directions()]
        title = _problem_title(problem)
    title = f"{title}, {plan.dtype} on {gpu.name}"
    if not quiet:
        roofline_view.show_bounds(screen, title, bounds, gpu, whole=problem is not None)
        if plan.dtype == "fp8":
            screen.print("forward only: there is no backward in fp8")
    if picture is not None:
        roofline_picture.draw(bounds, title, picture)
    return {
        "gpu": gpu.name,
        "plan": asdict(plan),
        "problem": problem and asdict(problem),
        "bounds": [bound.as_data() for bound in bounds],
    }


def _memory(
    screen: Console, p: SelfAttention, tile: Tile | None, sram: int, quiet: bool
) -> dict[str, Any]:
    fa1_tile = tile[:2] if tile else memory.fa1_tile(sram, p)
    fa2_tile = tile[:2] if tile else memory.fa2_tile(sram, p)
    accounts = {
        "materialised": memory.materialised(p),
        "fa1": memory.fa1(p, *fa1_tile),
        "fa2": memory.fa2(p, *fa2_tile),
    }
    if not quiet:
        rows = [
            ("materialised", "Nd + N²", accounts["materialised"]),
            (f"FA1, tiles {fa1_tile[0]} by {fa1_tile[1]}", "N²d²/M", accounts["fa1"]),
            (f"FA2 and later, tiles {fa2_tile[0]} by {fa2_tile[1]}", "N²d²/M", accounts["fa2"]),
        ]
        where = "" if tile else f", {sram / 1024:,.0f} KiB on chip"
        roofline_view.show_memory(screen, _problem_title(p) + where, rows)
    return {
        "problem": asdict(p),
        "sram_bytes": None if tile else sram,
        "tiles": {"fa1": fa1_tile, "fa2": fa2_tile},
        "algorithms": {
            name: {
                direction: {
                    "moved_bytes": account.moved,
                    "extra_bytes": account.extra_bytes,
                    "flows": [asdict(flow) for flow in account.flows],
                }
                for direction, account in both.items()
            }
            for name, both in accounts.items()
        },
    }


def _measured(
    screen: Console, path: Path, gpu: gpus.GPU | None, plan: Plan, quiet: bool
) -> dict[str, Any]:
    found, cells = measured.compare(path, gpu, plan)
    if not quiet:
        roofline_view.show_measured(screen, f"{path.name} on {found.name}", cells)
    return {"gpu": found.name, "cells": [{**asdict(cell), "share": cell.share} for cell in cells]}


def _tile(text: str | None, head_dim: int | None = None) -> Tile | None:
    """--tile as numbers; head_dim must be the problem's, if there is one."""
    if text is None:
        return None
    sides = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if len(sides) != 3 or min(sides) < 1 or sides[2] > 256 or max(sides) > 2**20:
        raise ValueError(
            f"tile: got {text!r}; allowed is M,N,D, positive, D at most 256, as {_ARTICLES_TILE}"
        )
    if head_dim not in (None, sides[2]):
        raise ValueError(f"tile: got {text!r}; its D must be the head dim, {head_dim}")
    return Tile(*sides)


def _itemsize(dtype: str) -> int:
    if dtype not in ITEMSIZES:
        raise ValueError(f"dtype: got {dtype!r}; allowed are {', '.join(ITEMSIZES)}")
    return ITEMSIZES[dtype]


def _problem_title(p: SelfAttention) -> str:
    masked = ", causal" if p.causal else ""
    return f"batch {p.batch}, {p.heads} heads, length {p.seqlen:,}, head dim {p.head_dim}{masked}"
