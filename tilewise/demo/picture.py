"""The two loss curves and their difference as a picture; the one place that draws."""

from __future__ import annotations

from pathlib import Path

from tilewise.demo.report import ALL_LOSSES_COINCIDE, Report, differences


def draw(report: Report, path: Path) -> bool:
    """Draws the curves into a PNG at `path`; False, and no file, if matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return False

    tiled, materialised = report.curves
    limit = next(check.limit for check in report.checks if check.claim == ALL_LOSSES_COINCIDE)
    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a screen
    losses, apart = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])

    # The wide pale line under the thin dark one: two lines that coincide both stay visible.
    steps = range(1, len(tiled.losses) + 1)
    losses.plot(steps, materialised.losses, color="#f2b134", linewidth=5, label="materialised attention")
    losses.plot(
        steps, tiled.losses, color="#1b3a57", linewidth=1.2, label=f"Tilewise ({report.kernels})"
    )
    losses.set_ylabel("loss (nats per byte)")
    # A path may hold a dollar sign, which is no mathematics here.
    losses.set_title(f"The same model, the same seed: {report.text['source']}", parse_math=False)
    losses.legend(frameon=False)

    smallest = 1e-9  # a logarithmic axis has no place for losses that are equal to the last bit
    apart.semilogy(steps, [max(d, smallest) for d in differences(report.curves)], color="#1b3a57", lw=1)
    apart.axhline(limit, color="#b3362b", linestyle="--", linewidth=1, label="limit")
    apart.set_ylabel("|difference|")
    apart.set_xlabel("step")
    apart.legend(frameon=False)

    for axes in (losses, apart):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.2)
    figure.savefig(path, dpi=150)
    return True
