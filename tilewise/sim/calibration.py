"""The fitted constants of the time model, and the measured kernels they were fitted to or checked on.

The three constants marked "fitted" are the best point of a grid (`FITTED`) for the three cells marked
"fit": unmasked, of each kind of limit one. The others are held out: every causal one, every persistent
one, the other head dims and shapes. `tests/sim/calibrate.py --fit` repeats the search;
docs/simulator-timeline.md shows what is predicted for each cell.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from tilewise.sim.timing import Parameters

WITHIN = 0.10  # a prediction this close counts as right

# The constants that are searched, and the values that are tried for each.
FITTED = {
    "vector": (0.30, 0.34, 0.38, 0.42, 0.46, 0.6, 1.0),
    "shared": (0.90, 0.94, 1.0),
    "program": (500.0, 1500.0, 2500.0),
}

_HOPPER = Parameters(
    launch=4000.0,  # assumed, like every constant without a remark
    program=1500.0,  # fitted
    step=12.0,
    poll=20.0,
    mma_latency=40.0,
    tma_latency=700.0,
    global_latency=600.0,
    shared=1.0,  # fitted
    tensor=1.0,
    vector=0.38,  # fitted
)
# Nothing was measured on a B200, so nothing is fitted: the shares are those of the tables, the latencies
# Hopper's. Tensor memory: 16 bytes a cycle for each of its 128 lanes, which no table says.
_BLACKWELL = Parameters(program=1500.0, tensor_memory=2048.0)
# The H100 is the H200's chip. The A100 was not measured either: Hopper's constants stand in.
_PARAMETERS = {"h200": _HOPPER, "h100": _HOPPER, "b200": _BLACKWELL}


def parameters(gpu: str) -> Parameters:
    """The constants of a GPU, or the H200's if it has none of its own."""
    return _PARAMETERS.get(gpu.lower(), _HOPPER)


@dataclass(frozen=True)
class Cell:
    """One measurement: cycles of a whole kernel in bf16, batch 1.

    options: what its host function was called with besides. hoisted: what ptxas made of it, see
    `timing.SmCost`.
    """

    kernel: str
    head_dim: int
    causal: bool
    cycles: float
    use: Literal["fit", "check"]
    hoisted: bool = False
    seqlen: int = 8192
    gpu: str = "h200"
    options: Mapping[str, int] = field(default_factory=dict)
    note: str = ""

    @property
    def heads(self) -> int:
        return 2048 // self.head_dim

    def error(self, predicted: float) -> float:
        """Relative; positive if the prediction is too slow."""
        return predicted / self.cycles - 1


def _cycles(products: int, seqlen: int, utilisation: float) -> float:
    """Cycles on an H200 from a utilisation of its tensor cores; a product is 2 S^2 D FLOPs a head."""
    return 2.0 * products * seqlen**2 * 2048 / (utilisation * 132 * 4096)


_TURNS = {"PINGPONG": 1, "PINNED": 1}
_UNSURE = "variant and length assumed"

CELLS = (
    Cell("hopper_forward", 128, False, 1.369e6, "fit", options=_TURNS),
    Cell("hopper_forward", 128, True, 0.714e6, "check", options=_TURNS),
    Cell(
        "hopper_forward",
        256,
        False,
        _cycles(2, 8192, 0.854),
        "check",
        options={**_TURNS, "BLOCK_N": 64},
        note="key tile assumed",
    ),
    Cell(
        "hopper_forward",
        64,
        False,
        _cycles(2, 8192, 0.504),
        "fit",
        hoisted=True,
        options={"PINGPONG": 1},
        note="variant assumed",
    ),
    Cell(
        "hopper_forward",
        64,
        False,
        _cycles(2, 8064, 0.556),
        "check",
        hoisted=True,
        seqlen=8064,
        options={"PINGPONG": 1, "WGS": 3},
        note=_UNSURE,
    ),
    Cell(
        "hopper_forward",
        64,
        True,
        _cycles(1, 8064, 0.495),
        "check",
        hoisted=True,
        seqlen=8064,
        options={"PINGPONG": 1, "WGS": 3},
        note=_UNSURE,
    ),
    Cell("hopper_persistent", 128, False, 1.282e6, "check", hoisted=True),
    Cell("hopper_persistent", 128, True, 0.758e6, "check", hoisted=True),
    Cell("hopper_backward", 128, False, 3.932e6, "fit"),
    Cell("hopper_backward", 128, True, 2.215e6, "check"),
    Cell("hopper_backward", 64, False, _cycles(5, 8192, 0.439), "check"),
)
