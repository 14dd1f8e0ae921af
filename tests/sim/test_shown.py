"""What README and the documentation show of the simulator is what it does now."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import readme_simulator

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "simulator.md").read_text(encoding="utf-8")


def test_the_report_in_the_readme() -> None:
    text = readme_simulator.README.read_text(encoding="utf-8")
    assert readme_simulator.updated(text) == text, "run: python scripts/readme_simulator.py"
    assert "[deadlock]" in readme_simulator.report() and "V.empty" in readme_simulator.report()


def test_the_picture_in_the_readme() -> None:
    shown = readme_simulator.PICTURE.read_text(encoding="utf-8")
    assert shown == readme_simulator.drawn(), "run: python scripts/readme_simulator.py"


def test_a_readme_without_the_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="simulator:begin"):
        readme_simulator.updated("nothing here")


def test_the_example_prints_what_the_documentation_shows(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "find_a_race.py"), run_name="__main__")
    parts = capsys.readouterr().out.strip().split("\n\n")
    assert len(parts) == 3
    for part in parts:
        assert part in DOCS
