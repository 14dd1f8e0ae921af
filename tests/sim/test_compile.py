"""What runs in the simulator also compiles, without a GPU, with the installed Triton."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton.backends.nvidia.compiler")


def test_the_test_kernels_compile() -> None:
    program = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.count("ok ") >= 10
