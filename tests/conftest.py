"""What holds for every test: poisoned fresh memory, hypothesis profiles, GPU tests only on a GPU."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

import hypothesis
import poison
import pytest
import torch

# Without a GPU, Triton's kernels run in its interpreter; Triton reads this once, when it is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# What another version's operators were compiled to is none of this one's business.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="tilewise-inductor-")
atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)

_GPU_TESTS = Path(__file__).parent / "gpu"

# One test run must mean the same as the next, so the everyday profile draws the same examples each
# time; HYPOTHESIS_PROFILE=thorough goes looking for new ones.
hypothesis.settings.register_profile("ci", deadline=None, max_examples=50, derandomize=True)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=1000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sim-seeds", type=int, default=5, help="schedules per simulated kernel (20 in CI; default: 5)"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "sim_seeds" in metafunc.fixturenames:
        seeds = range(metafunc.config.getoption("--sim-seeds"))
        metafunc.parametrize("sim_seeds", [seeds], ids=["seeds"])


def pytest_configure() -> None:
    poison.install()


def pytest_unconfigure() -> None:
    poison.remove()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _GPU_TESTS in item.path.parents:
            item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
