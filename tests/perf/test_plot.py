"""The picture: it is drawn for every preset, on any background, and says so if it cannot be."""

from __future__ import annotations

import sys

import made_up
import pytest

from tilewise.perf import grid, plot
from tilewise.perf.plot import PlotError


@pytest.mark.parametrize("preset", grid.PRESETS)
def test_every_preset_can_be_drawn(preset, tmp_path):
    drawn = plot.draw(made_up.run(preset), tmp_path / "new", preset)
    assert [path.name for path in drawn] == [
        f"{preset}-{direction}.{kind}" for direction in ("forward", "backward") for kind in plot.FORMATS
    ]
    assert all(path.stat().st_size > 5000 for path in drawn)


def test_the_background_is_transparent(tmp_path):
    image = pytest.importorskip("PIL.Image")
    png = plot.draw(made_up.run("gqa"), tmp_path, "x")[0]
    assert image.open(png).convert("RGBA").getpixel((0, 0))[3] == 0


def luminance(colour: str) -> float:
    """Relative luminance as WCAG defines it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("colour", [plot.INK])
def test_letters_are_readable_on_white_and_on_black(colour):
    assert 1.05 / (luminance(colour) + 0.05) > 3.5  # on white
    assert (luminance(colour) + 0.05) / 0.05 > 3.5  # on black


def test_no_two_contenders_share_a_colour():
    chosen = plot.colours(made_up.run())
    assert len(set(chosen.values())) == len(made_up.NAMES)


def test_the_legend_names_everyone_and_the_ceiling(tmp_path):
    """Text in an SVG is drawn as shapes, but each label stays behind as a comment."""
    forward, backward = (
        p.read_text() for p in plot.draw(made_up.run(), tmp_path, "x") if p.suffix == ".svg"
    )
    for name in made_up.NAMES:
        assert f"<!-- {name.upper()} -->" in forward
    assert "<!-- matrix product, measured: 700 TFLOP/s -->" in forward
    assert "<!-- FA3 -->" not in backward


def test_a_ceiling_far_above_would_flatten_the_bars(tmp_path):
    run = made_up.run()
    run.ceilings = {"before": {"matmul_flops_per_second": 1e18}}
    assert "matrix product" not in plot.draw(run, tmp_path, "x")[1].read_text()


def test_the_same_result_is_the_same_file(tmp_path):
    one, other = (plot.draw(made_up.run("gqa"), tmp_path / n, "x")[1].read_text() for n in "ab")
    assert one == other


def test_missing_matplotlib_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PlotError, match=r"pip install 'tilewise\[bench\]'"):
        plot.draw(made_up.run(), tmp_path, "x")


def test_dollar_signs_are_no_formula(tmp_path):
    """A name with two of them, from a file of somebody else's, ended in an error of the parser."""
    run = made_up.run("gqa")
    run.machine["name"] = r"$\nonsense$"
    run.contenders[0]["title"] = r"$\nonsense$"
    assert plot.draw(run, tmp_path, "x")


def test_what_matplotlib_refuses_is_one_line(tmp_path, monkeypatch):
    """As a picture of thousands of panels, which is too large for it."""

    def refuse(*_, **__):
        raise ValueError("Image size of 1x99999 pixels is too large")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", refuse)
    with pytest.raises(PlotError, match=r"^x: cannot be drawn: Image size"):
        plot.draw(made_up.run("gqa"), tmp_path, "x")


def test_a_run_without_numbers_is_refused(tmp_path):
    run = made_up.run()
    run.cells.clear()
    with pytest.raises(PlotError, match="no number"):
        plot.draw(run, tmp_path, "x")


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(PlotError, match="cannot write"):
        plot.draw(made_up.run("gqa"), tmp_path / "file", "x")
