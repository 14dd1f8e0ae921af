"""The kernels under test are importable; without the simulator's packages nothing is collected."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
if not all(find_spec(name) for name in ("greenlet", "ml_dtypes", "triton")):
    collect_ignore_glob = ["test_*.py"]  # the extra `sim` is not installed
