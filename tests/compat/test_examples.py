"""The adapters' examples run as they stand and stay short."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("adapter", ["fa2", "fa3", "fa4", "hf", "sdpa"])
def test_the_example_runs(adapter):
    """An example that a change of an adapter left behind."""
    if adapter == "hf":
        pytest.importorskip("transformers")
    path = FOLDER / f"compat_{adapter}.py"
    assert len(path.read_text().splitlines()) < 25
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
