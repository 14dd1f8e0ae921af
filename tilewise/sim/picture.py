"""A simulated timeline as one self-contained SVG: the steady state, as papers draw their pipelines.

Colours and greys are chosen to read on white and on black, so the picture has no background of its own.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

from tilewise.sim.predict import Prediction
from tilewise.sim.timing import FMA, SHARED, Span
from tilewise.sim.trace import steady, tracks

WIDTH, LEFT, RIGHT = 1120, 128, 16  # pixels
ROW, GAP, TOP, BOTTOM = 26, 8, 58, 62
COLOURS = ("#2f6fd0", "#c2571a", "#3a8f4a", "#8a55b5", "#b03a6b", "#5d7a8a")  # by warp role
GREY = "#808080"
LETTER = 6.4  # pixels, at size 11


def draw(prediction: Prediction, window: tuple[float, float] | None = None) -> str:
    """The SVG. window: from and to which cycle; a few tiles from the middle if not given."""
    start, stop = window or steady(prediction)
    spans = [s for s in prediction.spans if s.end > start and s.start < stop and s.end > s.start]
    rows = list(dict.fromkeys(_row(kind, track) for kind, track in tracks(spans)))
    roles = sorted({s.partition for s in prediction.spans})
    colours = {role: COLOURS[n % len(COLOURS)] for n, role in enumerate(roles)}
    scale = (WIDTH - LEFT - RIGHT) / (stop - start)
    height = TOP + len(rows) * (ROW + GAP) + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" font-family="sans-serif" font-size="11">',
        _text(LEFT, 18, _title(prediction), size=13),
        _text(LEFT, 36, _subtitle(prediction)),
    ]
    for n, row in enumerate(rows):
        y = TOP + n * (ROW + GAP)
        parts.append(_text(LEFT - 8, y + ROW / 2 + 4, row[1], anchor="end"))
        parts.append(_line(LEFT, y + ROW, WIDTH - RIGHT, y + ROW))
        for s in spans:
            if _row(s.kind, s.track) == row:
                parts.append(_bar(s, start, stop, scale, y, colours[s.partition]))
    bottom = TOP + len(rows) * (ROW + GAP)
    parts += _axis(start, stop, scale, bottom)
    parts += _legend(colours, bottom + 44)
    return "\n".join([*parts, "</svg>"]) + "\n"


def check_name(path: Path) -> None:
    """ValueError, one line, if a picture cannot have this name."""
    if path.suffix.lower() not in (".svg", ".html"):
        raise ValueError(f"picture: got {path.name!r}; the name must end in .svg or .html")


def write(prediction: Prediction, path: Path) -> None:
    """As .svg, or wrapped into a page if the name ends in .html; ValueError for another ending."""
    check_name(path)
    svg = draw(prediction)
    if path.suffix.lower() == ".html":
        head = '<!doctype html><meta charset="utf-8"><meta name="color-scheme" content="light dark">'
        svg = f"{head}<title>{escape(_title(prediction))}</title>\n{svg}"
    path.write_text(svg, encoding="utf-8")


def _row(kind: str, track: str) -> tuple[str, str]:
    """A role's waits are drawn between its work."""
    return ("role" if kind == "wait" else kind, track)


def _title(p: Prediction) -> str:
    return f"{p.kernel} on {p.gpu.name}: steady state of one SM, simulated"


def _subtitle(p: Prediction) -> str:
    shares = ", ".join(f"{unit} {share:.0%}" for unit, share in p.busy.items())
    return f"busy over the whole program: {shares}"


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 11, fill: str = GREY) -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{fill}"'
    return f"<text {where}>{escape(text)}</text>"


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
        f'stroke="{GREY}" stroke-opacity="0.5" stroke-width="0.6"/>'
    )


def _bar(s: Span, start: float, stop: float, scale: float, y: float, colour: str) -> str:
    x = LEFT + (max(s.start, start) - start) * scale
    width = max(0.6, (min(s.end, stop) - max(s.start, start)) * scale)
    label = s.name.removeprefix(s.partition).strip()
    wait = s.kind == "wait"
    what = f"waits for {s.name}" if wait else s.name
    tip = f"{s.partition}: {what}, cycles {s.start:.0f} to {s.end:.0f}{f', {s.tile}' if s.tile else ''}"
    look = 'fill-opacity="0.12" stroke-dasharray="3 2"' if wait else 'fill-opacity="0.85"'
    bar = (
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW}" fill="{colour}" {look} '
        f'stroke="{colour}" stroke-width="0.5"><title>{escape(tip)}</title></rect>'
    )
    if width > LETTER * len(label) + 4 and label and s.track not in (FMA, SHARED):  # those overlap
        bar += _text(x + width / 2, y + ROW / 2 + 4, label, "middle", fill=GREY if wait else "#ffffff")
    return bar


def _axis(start: float, stop: float, scale: float, y: float) -> list[str]:
    step = 10 ** (len(str(int(stop - start))) - 1)
    step = step if (stop - start) / step >= 4 else step // 2 or 1
    parts = []
    for n in range(int((stop - start) // step) + 1):
        x = LEFT + n * step * scale
        parts.append(_line(x, TOP, x, y + 4))
        parts.append(_text(x, y + 18, f"{n * step}", "middle"))
    return [*parts, _text(LEFT - 8, y + 18, "cycles", "end")]


def _legend(colours: dict[str, str], y: float) -> list[str]:
    parts, x = [], float(LEFT)
    for role, colour in colours.items():
        parts.append(f'<rect x="{x:.1f}" y="{y - 9}" width="10" height="10" fill="{colour}"/>')
        parts.append(_text(x + 15, y, role))
        x += 15 + LETTER * len(role) + 24
    return parts
