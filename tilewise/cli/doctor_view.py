"""How `tilewise doctor` looks in a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table


def show(screen: Console, found: dict[str, Any]) -> None:
    """Prints what `doctor.examine` found, the features excepted."""
    versions = _plain_table("versions")
    for name, version in found["versions"].items():
        versions.add_row(name, version or "[dim]none[/]")
    screen.print(versions, "")

    devices = _plain_table("devices")
    for device in found["devices"]:
        details = ", ".join(_detail(key, value) for key, value in list(device.items())[2:])
        devices.add_row(device["device"], f"{escape(device['name'])} [dim]({details})[/]")
    screen.print(devices, "")

    kernels = _plain_table("kernels")
    for entry in found["kernels"]:
        verdict = "[green]runs[/]" if entry["available"] else "[yellow]not here[/]"
        kernels.add_row(entry["kernel"], entry["device"], verdict, escape(entry["reason"] or ""))
    screen.print(kernels, "")
    screen.print("What each kernel supports: [bold]tilewise doctor --features[/]")


def show_features(screen: Console, found: dict[str, Any]) -> None:
    """Prints the support table: features down, kernels across."""
    rows = found["features"]
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for column in rows[0]:
        table.add_column(column.replace("/", "/\n"), no_wrap=True)  # all fit in 80 columns
    for row in rows:
        table.add_row(*(_coloured(cell) for cell in row.values()))
    screen.print(table)


def _plain_table(title: str) -> Table:
    return Table(
        title=f"[bold]{title}[/]",
        title_justify="left",
        show_header=False,
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )


def _detail(key: str, value: Any) -> str:
    if key == "memory_bytes":
        return f"{value / 2**30:.0f} GiB"
    return str(value) if key == "architecture" else f"{value} {key}"


def _coloured(cell: str) -> str:
    colour = {"yes": "green", "-": "dim"}.get(cell)
    return f"[{colour}]{cell}[/]" if colour else escape(cell)
