"""Writes what was measured into README.md, between its two markers, and draws the plots beside it.

python scripts/readme_results.py

The results are those of `tilewise bench` in benchmarks/results: of each machine and preset the newest.
"""

from __future__ import annotations

from pathlib import Path

from tilewise.perf import plot, results, summary
from tilewise.perf.results import Run

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
PLOTS = ROOT / "docs" / "plots"
BEGIN = "<!-- results:begin -->"
END = "<!-- results:end -->"


def newest(folder: Path = RESULTS) -> list[tuple[Path, Run]]:
    """The newest result of each machine and preset, in the order of their names."""
    found: dict[tuple[str, str], tuple[Path, Run]] = {}
    for path, run in sorted(results.read_all(folder), key=lambda pair: pair[1].date):
        found[str(run.machine.get("name")), str(run.request.get("preset"))] = (path, run)
    return sorted(found.values(), key=lambda pair: pair[0].name)


def updated(text: str, folder: Path = RESULTS) -> str:
    """`text` with what the results say now. Raises ValueError if a marker is missing."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md has no {BEGIN} followed by {END}")
    sections = [section(path, run) for path, run in newest(folder)]
    body = "\n\n".join(sections) or "Nothing has been measured with `tilewise bench` yet."
    return f"{before}{BEGIN}\n{body}\n{END}{after}"


def section(path: Path, run: Run) -> str:
    """One result as Markdown: what ran where, ours against the others, the longest problems, plots."""
    name = run.machine.get("name")
    known = {key: run.versions.get(key) for key in ("torch", "triton")}
    versions = ", ".join(f"{key} {version}" for key, version in known.items() if version)
    parts = [
        f"**{name}**, {run.date}, {versions}, commit `{run.commit[:12]}`; "
        f"`tilewise bench --preset {run.request.get('preset')}`, [all numbers]({_place(path)})."
    ]
    if ratios := _ratios(run):
        parts += ["How many times as fast, geometric mean over the grid (and the least):", ratios]
    parts += [_longest(run)]
    images = (plot_of(path, direction, "png") for direction in run.directions)
    parts += [f"![{image.stem}]({_place(image)})" for image in images]
    return "\n\n".join(parts)


def plot_of(result: Path, direction: str, kind: str) -> Path:
    return PLOTS / f"{result.stem}-{direction}.{kind}"


def _place(path: Path) -> str:
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name


def _ratios(run: Run) -> str:
    """Our kernels down, the others across."""
    others = [name for name in run.names if not run.own(name)]
    rows = []
    for direction in run.directions:
        found = {(ours, peer): f"{mean} ({least})"
                 for ours, peer, mean, least, _ in summary.against_peers(run, direction)}  # fmt: skip
        for ours in filter(run.own, run.names):
            cells = [found.get((ours, peer), "-") for peer in others]
            rows.append([f"{ours}, {direction}", *cells])
    return _markdown(["", *(f"as {run.title(name)}" for name in others)], rows) if others else ""


def _longest(run: Run) -> str:
    """The last problem of each panel: in the papers' grid the longest sequences."""
    unit, factor = summary.unit_of(run.cells)
    rows = []
    for direction in run.directions:
        last = {cell.problem.panel: cell for cell in run.of(direction)}
        for cell in last.values():
            shown = [cell.numbers.get(name) for name in run.names]
            speeds = [
                "-" if m is None or m.tflops is None else f"{m.tflops * factor:.0f}" for m in shown
            ]
            rows.append([f"{direction}, {cell.problem}", *speeds])
    return _markdown([unit, *map(run.title, run.names)], rows)


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    rule = "|---|" + "--:|" * (len(head) - 1)
    first, *others = ("| " + " | ".join(row) + " |" for row in [head, *rows])
    return "\n".join([first, rule, *others])


def main() -> None:
    for path, run in newest():
        plot.draw(run, PLOTS, path.stem)
    README.write_text(updated(README.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
