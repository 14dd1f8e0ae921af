"""The bounds as a picture: one panel per direction, one bar per resource."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tilewise.perf.roofline import Bound

# Mid-tones and a transparent ground: readable on white and on black.
_INK = "#808890"
_BAR = "#4a90c2"
_BINDING = "#d9822b"


def draw(bounds: Sequence[Bound], title: str, path: Path) -> None:
    """Draws PNG or SVG, by the name's ending. ValueError, one line, if that cannot be done."""
    if path.suffix.lower() not in (".png", ".svg"):
        raise ValueError(f"picture: got {path.name!r}; the name must end in .png or .svg")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ModuleNotFoundError as error:
        raise ValueError(
            "matplotlib is missing; install it with: pip install 'tilewise[bench]'"
        ) from error

    figure = Figure(figsize=(4.8 * len(bounds), 3.2), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a screen
    figure.suptitle(title, color=_INK, fontsize=11)
    for axes, bound in zip(figure.subplots(1, len(bounds), squeeze=False)[0], bounds, strict=True):
        names = list(bound.cycles)
        cycles = list(bound.cycles.values())
        colours = [_BINDING if name in bound.binds else _BAR for name in names]
        bars = axes.barh(names, cycles, color=colours)
        axes.bar_label(bars, labels=[f"{c:,.0f}" for c in cycles], padding=3, color=_INK, fontsize=9)
        axes.invert_yaxis()
        axes.margins(x=0.3)  # room for the labels
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_title(
            f"{bound.direction}: at best {bound.utilisation:.0%} of the tensor cores",
            color=_INK,
            fontsize=10,
        )
        axes.set_xlabel("cycles", color=_INK)
        axes.tick_params(colors=_INK, labelsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(_INK)
    try:
        figure.savefig(path, dpi=150, transparent=True)
    except OSError as error:
        raise ValueError(f"cannot write to {path}: {error.strerror}") from error
