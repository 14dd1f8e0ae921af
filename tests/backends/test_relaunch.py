"""A kernel is launched past Triton only where Triton would have launched the very same."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from tilewise.backends import direct, relaunch

TESTS = Path(__file__).parents[1]


def test_the_driver_is_given_what_triton_gives_it(tmp_path: Path):
    """Each launch of whole calls, parameter by parameter, byte by byte; hooks, streams, alignment.

    On a driver that launches nothing; compiling and the tests' interpreter exclude each other."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    pytest.importorskip("triton.backends.nvidia.driver")
    path = os.pathsep.join(filter(None, (str(TESTS.parent), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-W", "ignore", str(TESTS / "fake_gpu/launches.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "all the same"


class Compiled:
    """Stands for a compiled kernel."""


class Kernel:
    arg_names = ("n_ptr", "m_ptr", "heads")

    def __init__(self) -> None:
        self.launched: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(**keywords: Any) -> Compiled:
            self.launched.append((grid, keywords))
            return Compiled()

        return launch


@pytest.fixture
def written_down(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What launches that were written down were given."""
    runs: list[Any] = []

    def write_down(*_: Any) -> Any:
        return lambda addresses: runs.append(addresses) or True

    monkeypatch.setattr(relaunch, "CompiledKernel", Compiled)
    monkeypatch.setattr(relaunch, "write_down", write_down)
    return runs


def test_the_second_call_is_given_its_own_addresses(written_down: list[Any]):
    launch, kernel = relaunch.Relaunch(7, {"heads": 3}, {"num_warps": 4}), Kernel()
    first, second = torch.zeros(8), torch.ones(8)
    launch(kernel, n_ptr=first, m_ptr=None)
    launch(kernel, n_ptr=second, m_ptr=None)
    want = {"n_ptr": first, "m_ptr": None, "heads": 3, "num_warps": 4}
    assert kernel.launched == [((7,), want)]
    assert written_down == [[second.data_ptr(), None]]


@pytest.mark.parametrize(
    "other", [(torch.zeros(9)[1:], None), (torch.zeros(8), torch.zeros(8)), (None, None)]
)
def test_what_triton_would_compile_anew_is_compiled_anew(written_down: list[Any], other: Any):
    """What is not aligned, a tensor where there was none, none where there was one."""
    launch, kernel = relaunch.Relaunch(7, {"heads": 3}, {}), Kernel()
    launch(kernel, n_ptr=torch.zeros(8), m_ptr=None)
    launch(kernel, n_ptr=other[0], m_ptr=other[1])
    assert len(kernel.launched) == 2
    assert not written_down


def test_what_is_not_compiled_is_never_kept(written_down: list[Any], monkeypatch: pytest.MonkeyPatch):
    """The simulator returns a report, not a kernel."""
    launch, kernel = relaunch.Relaunch(7, {"heads": 3}, {}), Kernel()
    monkeypatch.setattr(relaunch, "CompiledKernel", type(None))
    for _ in range(2):
        launch(kernel, n_ptr=torch.zeros(8), m_ptr=None)
    assert len(kernel.launched) == 2


def test_who_wants_to_be_called_before_a_kernel_is(written_down: list[Any]):
    launch, kernel = relaunch.Relaunch(7, {"heads": 3}, {}), Kernel()
    launch(kernel, n_ptr=torch.zeros(8), m_ptr=None)
    kernel.pre_run_hooks = [print]  # type: ignore[attr-defined]
    launch(kernel, n_ptr=torch.zeros(8), m_ptr=None)
    assert len(kernel.launched) == 2
    assert not written_down


class CudaLauncher:
    """One of the known name that is made in another way."""

    launch = None


@pytest.mark.parametrize("launcher", [SimpleNamespace(launch=None), CudaLauncher()])
def test_an_unknown_launcher_is_left_to_triton(launcher: Any):
    """As that of AMD's GPUs is, and whatever a later Triton will have."""
    unknown = SimpleNamespace(run=launcher)
    assert direct.write_down(unknown, (1, 1, 1), {}, {}, {}) is None
