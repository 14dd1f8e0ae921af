"""`pytest --sim-seeds N` runs every simulated case under N schedules."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
if not all(find_spec(name) for name in ("greenlet", "ml_dtypes", "triton")):
    collect_ignore_glob = ["test_*.py"]  # the extra `sim` is not installed


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "sim_seeds" in metafunc.fixturenames:
        metafunc.parametrize(
            "sim_seeds", [range(metafunc.config.getoption("--sim-seeds"))], ids=["seeds"]
        )
