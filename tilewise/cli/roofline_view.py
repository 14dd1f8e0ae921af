"""How `tilewise roofline` looks in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tilewise.perf.gpus import GPU
from tilewise.perf.measured import Cell
from tilewise.perf.memory import Account
from tilewise.perf.roofline import Bound


def show_bounds(screen: Console, title: str, bounds: Sequence[Bound], gpu: GPU, whole: bool) -> None:
    """Cycles by resource and direction, what binds, and what goes through shared memory.

    whole: the bounds are of a whole problem; its tiles and its time are shown too.
    """
    _heading(screen, f"cycles, {title}")
    table = _table()
    table.add_column("")
    for bound in bounds:
        table.add_column(bound.direction, justify="right")
    for name in bounds[0].cycles:
        table.add_row(name, *(_binding(b, name) for b in bounds))
    table.add_section()
    table.add_row("binds", *(", ".join(b.binds) for b in bounds))
    table.add_row("utilisation at best", *(f"{b.utilisation:.1%}" for b in bounds))
    if whole:
        table.add_row("tile (M, N)", *(f"{b.tile.q}, {b.tile.k}" for b in bounds))
        table.add_row("time at best", *(f"{b.limit / gpu.boost_hz * 1e3:,.3f} ms" for b in bounds))
        table.add_row(
            "TFLOP/s at best", *(f"{b.flops * gpu.boost_hz / b.limit / 1e12:,.0f}" for b in bounds)
        )
    screen.print(table, "")

    for bound in bounds:
        _heading(screen, f"shared memory, {bound.direction}, one tile")
        moves = _table()
        moves.add_column("")
        moves.add_column("bytes", justify="right")
        moves.add_column("cycles", justify="right")
        for move in bound.shared:
            cycles = move.bytes / gpu.shared_bytes_per_cycle
            moves.add_row(move.what, f"{move.bytes:,}", f"{cycles:,.0f}")
        screen.print(moves, "")


def show_memory(
    screen: Console, title: str, rows: Sequence[tuple[str, str, dict[str, Account]]]
) -> None:
    """Each algorithm's traffic and extra memory. rows: name, what it grows with, accounts."""
    _heading(screen, f"bytes between kernels and memory, {title}")
    table = _table()
    for column in ("", "forward", "backward", "extra forward", "extra backward", "numbers moved"):
        table.add_column(column, justify="left" if column in ("", "numbers moved") else "right")
    for name, growth, accounts in rows:
        both = [accounts["forward"], accounts["backward"]]
        moved, extra = [_size(a.moved) for a in both], [_size(a.extra_bytes) for a in both]
        table.add_row(escape(name), *moved, *extra, growth)
    screen.print(table)
    screen.print("[dim]extra: memory at the peak beside inputs and results; M: numbers on chip[/]")


def show_measured(screen: Console, title: str, cells: Sequence[Cell]) -> None:
    """Measurements beside the bound of each."""
    _heading(screen, f"measured against the bound, {title}")
    table = _table()
    for column in ("", "direction", "D", "S", "mask"):
        table.add_column(column)
    for column in ("TFLOP/s", "at best", "reached"):
        table.add_column(column, justify="right")
    table.add_column("binds")
    for c in cells:
        table.add_row(
            escape(c.contender),
            c.direction,
            str(c.head_dim),
            str(c.seqlen),
            "causal" if c.causal else "full",
            f"{c.tflops:,.0f}",
            f"{c.bound_tflops:,.0f}",
            f"{c.share:.0%}",
            ", ".join(c.binds),
        )
    screen.print(table)
    screen.print("[dim]at best: at the boost clock, which a power limit may not allow for long[/]")


def _heading(screen: Console, text: str) -> None:
    """Above a table rather than its title, which would be wrapped to the table's width."""
    screen.print(f"[bold]{escape(text)}[/]")


def _table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))


def _binding(bound: Bound, name: str) -> str:
    cycles = f"{bound.cycles[name]:,.0f}"
    return f"[bold yellow]{cycles}[/]" if name in bound.binds else cycles


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
