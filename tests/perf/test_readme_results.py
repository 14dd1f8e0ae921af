"""The README's numbers are those of the files."""

from __future__ import annotations

import json

import made_up
import pytest
import readme_results

from tilewise.perf import results

TEXT = readme_results.README.read_text(encoding="utf-8")


def test_the_readme_shows_what_the_files_say():
    assert readme_results.updated(TEXT) == TEXT, "run: python scripts/readme_results.py"


def test_its_plots_are_there():
    for path, run in readme_results.newest():
        for direction in run.directions:
            assert readme_results.plot_of(path, direction, "png").exists()


def test_a_changed_number_changes_the_readme(tmp_path):
    marked = f"a\n{readme_results.BEGIN}\nold\n{readme_results.END}\nz\n"
    run = made_up.run()
    results.write(run, tmp_path / "run.json")
    text = readme_results.updated(marked, tmp_path)
    assert text.startswith("a\n") and text.endswith("\nz\n") and "old" not in text
    assert "**NVIDIA Imaginary**, 2030-01-01" in text and "1.21 (1.21)" in text
    assert readme_results.updated(text, tmp_path) == text
    results.write(made_up.run(slowdown=2.0), tmp_path / "run.json")
    assert readme_results.updated(text, tmp_path) != text


def test_only_the_newest_of_a_machine_and_preset_counts(tmp_path):
    for name, date in (("new", "2030-02-01"), ("old", "2030-01-01")):
        run = made_up.run("gqa")
        run.date = date
        results.write(run, tmp_path / f"{name}.json")
    results.write(made_up.run("paper"), tmp_path / "paper.json")
    (tmp_path / "cpu.json").write_text(json.dumps({"what": "another benchmark's"}))
    assert [path.name for path, _ in readme_results.newest(tmp_path)] == ["new.json", "paper.json"]


def test_a_readme_without_the_markers_is_refused():
    with pytest.raises(ValueError, match="results:begin"):
        readme_results.updated("no markers here")
