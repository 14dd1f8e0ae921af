"""The papers' figure: bars per sequence length and contender, one panel per head dim and mask.

The background is transparent and all lines and letters are a grey between black and white, so that one
picture serves light and dark pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tilewise.dispatch import Direction
from tilewise.perf.results import Cell, Run
from tilewise.perf.summary import unit_of

INK = "#808080"
_CEILING = "#d1495b"
# Colours of middle lightness, told apart also by those who see less of red and green.
_OURS = ("#1f8a70", "#8fc93a", "#00b3b3", "#5f7f4f")
_OTHERS = ("#e08e2b", "#6c7fd8", "#b86bb0", "#3fa0e0", "#a67c52", "#c7b446", "#9a9a9a")
FORMATS = ("png", "svg")


class PlotError(RuntimeError):
    """Nothing can be drawn; the message is one line."""


def draw(run: Run, folder: Path, stem: str) -> list[Path]:
    """Draws each direction of a run into ``<stem>-<direction>.png`` and ``.svg``; returns the paths.

    Raises:
        PlotError: matplotlib is missing, there is no number, or the folder cannot be written.
    """
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise PlotError(
            "matplotlib is missing; install it with: pip install 'tilewise[bench]'"
        ) from None
    if not run.names:
        raise PlotError(f"{stem}: there is no number to draw")
    written = []
    for direction in run.directions:
        panels = _panels(run.of(direction))
        rows, columns = _shape(panels)
        figure = Figure(figsize=(1.2 + 4.4 * columns, 1.2 + 2.7 * rows), layout="constrained")
        FigureCanvasAgg(figure)  # draws without a screen
        grid = figure.subplots(rows, columns, squeeze=False, sharey="row")
        for place in grid.flat[len(panels) :]:
            place.set_visible(False)
        for place, (name, cells) in zip(grid.flat, panels.items(), strict=False):
            _panel(place, name, cells, run)
        for row in grid:
            row[0].set_ylabel(unit_of(run.of(direction))[0], color=INK)
        _frame(figure, grid.flat[0], run, direction)
        # The same input gives the same file: no date, no random names inside.
        options: dict[str, dict[str, Any]] = {"svg": {"metadata": {"Date": None}}}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for kind in FORMATS:
                path = folder / f"{stem}-{direction}.{kind}"
                with matplotlib.rc_context({"svg.hashsalt": "tilewise"}):
                    figure.savefig(path, dpi=150, transparent=True, **options.get(kind, {}))
                written.append(path)
        except OSError as error:
            raise PlotError(f"cannot write to {folder}: {error.strerror}") from None
        except ValueError as error:  # of matplotlib, such as for a picture of too many panels
            raise PlotError(f"{stem}: cannot be drawn: {error}") from None
    return written


def _literal(text: str) -> str:
    """Text as it is: matplotlib would read a formula between two dollar signs."""
    return text.replace("$", r"\$")


def colours(run: Run) -> dict[str, str]:
    """A colour for each contender that has a number: greens are this library's."""
    ours, others = iter(_endless(_OURS)), iter(_endless(_OTHERS))
    return {name: next(ours if run.own(name) else others) for name in run.names}


def _endless(values: tuple[str, ...]) -> Iterator[str]:
    while True:
        yield from values


def _panels(cells: list[Cell]) -> dict[str, list[Cell]]:
    """By panel; those of one mask stand side by side, so full ones come first."""
    found: dict[str, list[Cell]] = {}
    for cell in sorted(cells, key=lambda cell: cell.problem.causal):  # keeps the order within a mask
        found.setdefault(cell.problem.panel, []).append(cell)
    return found


def _shape(panels: dict[str, list[Cell]]) -> tuple[int, int]:
    """Rows and columns: a row per mask if that fills them, otherwise one row of up to three."""
    masks = [cells[0].problem.causal for cells in panels.values()]
    if masks.count(True) == masks.count(False):
        return 2, len(masks) // 2
    columns = min(3, len(masks))
    return -(-len(masks) // columns), columns


def _panel(axes: Any, name: str, cells: list[Cell], run: Run) -> None:
    direction, colour = cells[0].direction, colours(run)
    unit, factor = unit_of(run.of(direction))
    names = run.measured(direction)
    width = 0.84 / max(1, len(names))
    for n, contender in enumerate(names):
        places, heights, errors = [], [], []
        for at, cell in enumerate(cells):
            m = cell.numbers.get(contender)
            if m is None or m.tflops is None:
                continue
            places.append(at + (n - (len(names) - 1) / 2) * width)
            heights.append(m.tflops * factor)
            errors.append(m.tflops * factor * (m.spread or 0.0) / 2)
        axes.bar(
            places, heights, 0.92 * width, color=colour[contender], label=_literal(run.title(contender))
        )
        axes.errorbar(places, heights, errors, fmt="none", ecolor=INK, elinewidth=0.8)
    ceiling = run.ceiling_tflops
    highest = max((m.tflops or 0 for c in run.of(direction) for m in c.measurements), default=0)
    # A ceiling far above every bar would flatten them all; it is then only named.
    if ceiling is not None and ceiling < 4 * highest:
        label = f"matrix product, measured: {ceiling * factor:.0f} {unit}"
        axes.axhline(ceiling * factor, color=_CEILING, linestyle="--", linewidth=1.2, label=label)
    axes.set_title(_literal(name), color=INK, fontsize=11)
    ticks = [_literal(cell.problem.tick) for cell in cells]
    axes.set_xticks(range(len(cells)), ticks)
    if max(map(len, ticks)) > 6:
        axes.tick_params(axis="x", rotation=30)
    axes.tick_params(colors=INK, labelleft=True)
    axes.grid(axis="y", color=INK, alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(INK)


def _frame(figure: Any, axes: Any, run: Run, direction: Direction) -> None:
    """Title and one legend for all panels."""
    dtypes = ", ".join(dict.fromkeys(cell.problem.dtype for cell in run.of(direction)))
    title = _literal(f"Attention {direction}, {dtypes}, {run.machine.get('name', '')}, {run.date}")
    figure.suptitle(title, color=INK, fontsize=12)
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > len(run.measured(direction)):  # the line comes first by itself, and belongs last
        handles, labels = handles[1:] + handles[:1], labels[1:] + labels[:1]
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=min(4, len(labels)),
        frameon=False,
        labelcolor=INK,
        fontsize=9,
    )
