"""Run Gluon kernels on a CPU: right answers, races, deadlocks; see docs/simulator.md.

from tilewise import sim

report = sim.launch(kernel, grid, args, seed=0, arch="hopper", num_warps=4)
report.raise_if_any()
"""

try:
    import greenlet as _greenlet  # noqa: F401
    import ml_dtypes as _ml_dtypes  # noqa: F401
    import numpy as _numpy  # noqa: F401
except ImportError as _error:
    raise ImportError(
        f"tilewise.sim needs numpy, ml_dtypes and greenlet ({_error.name} is missing): "
        "pip install 'tilewise[sim]'"
    ) from None

from tilewise.sim.asm import register_asm
from tilewise.sim.cost import CostModel, MmaShape, RandomCost
from tilewise.sim.findings import KINDS, Finding, Report, SimulationError, Site
from tilewise.sim.launch import configure, intercept, launch
from tilewise.sim.options import Options
from tilewise.sim.testing import check

__all__ = [
    "KINDS",
    "CostModel",
    "Finding",
    "MmaShape",
    "Options",
    "RandomCost",
    "Report",
    "SimulationError",
    "Site",
    "check",
    "configure",
    "intercept",
    "launch",
    "register_asm",
]
