"""What the GPU tests run over: each kernel by its name, and what a user gets who asks for none."""

from __future__ import annotations

import pytest
import torch

from tilewise import dispatch

AUTO = "auto/auto"
_KERNELS = {k.name: k for k in dispatch.KERNELS if k.backend != "cpu"}
ROWS = [*_KERNELS, AUTO]


def supported(row: str) -> frozenset[str]:
    """Features of forward and backward."""
    if row != AUTO:
        return _KERNELS[row].forward & _KERNELS[row].backward
    return frozenset().union(*(k.forward & k.backward for k in _KERNELS.values()))


def skip_if_missing(row: str) -> None:
    if row != AUTO:
        missing = _KERNELS[row].unavailable(torch.device("cuda", 0))
        if missing is not None:
            pytest.skip(missing)


def skip_what_does_not_run(request: pytest.FixtureRequest) -> None:
    """Skips a test of a kernel that this machine does not have, or of a dtype that it does not take."""
    if "kernel" not in request.fixturenames:
        return
    row = request.getfixturevalue("kernel")
    skip_if_missing(row)
    if "dtype" in request.fixturenames and request.getfixturevalue("dtype") not in supported(row):
        pytest.skip(f"{row} does not take {request.getfixturevalue('dtype')}")
