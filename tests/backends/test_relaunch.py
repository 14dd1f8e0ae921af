"""A kernel is launched past Triton only where Triton would have chosen the same variant."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tilewise.backends import relaunch


class Compiled:
    """Stands for a compiled kernel; runs are written down."""

    def __init__(self, runs: list[Any]) -> None:
        self.runs = runs

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args: self.runs.append((grid, args))


class Kernel:
    def __init__(self, specialised: bool = False) -> None:
        self.params = [SimpleNamespace(name="n", do_not_specialize=not specialised)] * 4
        self.compiled_for: list[Any] = []
        self.runs: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **keywords: Any) -> Compiled:
            self.compiled_for.append((args, keywords))
            return Compiled(self.runs)

        return launch


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> tuple[relaunch.Relaunch, Kernel]:
    monkeypatch.setattr(relaunch, "CompiledKernel", Compiled)
    return relaunch.Relaunch(7, {"heads": 3, "TILE": 64}, {"num_warps": 4}), Kernel()


def test_the_second_call_runs_the_first_ones_variant_with_its_own_arguments(launched):
    launch, kernel = launched
    first, second = torch.zeros(8), torch.ones(8)
    launch(kernel, first, 8, None, 5)
    launch(kernel, second, 8, None, 6)
    assert kernel.compiled_for == [((first, 8, None, 5), {"heads": 3, "TILE": 64, "num_warps": 4})]
    [(grid, args)] = kernel.runs
    assert grid == (7, 1, 1)
    assert args[0] is second
    assert args[1:] == (8, None, 6, 3, 64)


@pytest.mark.parametrize(
    "other",
    [
        (torch.zeros(9)[1:], 8, None),  # not aligned
        (torch.zeros(8), 2**40, None),  # beyond 32 bits
        (torch.zeros(8), 8, torch.zeros(8)),  # a tensor where there was none
        (None, 8, None),
    ],
)
def test_what_triton_would_compile_anew_is_compiled_anew(launched, other):
    launch, kernel = launched
    launch(kernel, torch.zeros(8), 8, None)
    launch(kernel, *other)
    assert len(kernel.compiled_for) == 2
    assert not kernel.runs


def test_another_kernel_is_another_variant(launched):
    launch, kernel = launched
    launch(kernel, torch.zeros(8))
    launch(other := Kernel(), torch.zeros(8))
    assert len(other.compiled_for) == 1


def test_what_is_not_compiled_is_never_kept(launched, monkeypatch: pytest.MonkeyPatch):
    """The simulator returns a report, not a kernel."""
    launch, kernel = launched
    monkeypatch.setattr(relaunch, "CompiledKernel", type(None))
    launch(kernel, torch.zeros(8))
    launch(kernel, torch.zeros(8))
    assert len(kernel.compiled_for) == 2


@pytest.mark.parametrize("argument", [8, (8, 1)])
def test_an_integer_that_is_compiled_in_is_refused(launched, argument: Any):
    """A second call with another one would run the first one's variant."""
    launch, _ = launched
    with pytest.raises(TypeError, match="n: an integer"):
        launch(Kernel(specialised=True), torch.zeros(8), argument)
