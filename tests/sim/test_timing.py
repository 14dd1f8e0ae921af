"""The time model: units, one SM, whole kernels. All cycles are simulated, on any machine the same."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import calibrate
import numpy as np
import pytest
import torch
from kernels import gemm, hopper_forward

from tilewise.perf import gpus
from tilewise.sim import calibration
from tilewise.sim.cost import MmaShape
from tilewise.sim.kernels import blackwell
from tilewise.sim.predict import Prediction, _dealt, predict
from tilewise.sim.timing import EXP, SHARED, TENSOR, TENSOR_MEMORY, UNITS, Lane, operand_bytes

H200 = gpus.find("h200")
PARAMETERS = calibration.parameters("h200")


def forward(seqlen: int, causal: bool = False, heads: int = 1, **options: object) -> Prediction:
    x = torch.zeros(1, heads, seqlen, 128, dtype=torch.bfloat16)
    return predict(lambda: hopper_forward.fwd(x, x, x, causal, **options), "h200")


def test_a_lane_serves_at_its_rate() -> None:
    lane = Lane(128)
    assert lane.take(0, 1280) == (0, 10)
    assert lane.take(0, 1280) == (0, pytest.approx(20, abs=12))  # the same slices, what is left of them
    assert lane.busy() == 20


def test_a_small_request_does_not_queue_behind_a_slow_large_one() -> None:
    lane = Lane(128)
    _, large = lane.take(0, 96 * 1000, rate=96)
    _, small = lane.take(100, 256)
    assert large == pytest.approx(1000)
    assert small < 150


def test_a_full_lane_delays() -> None:
    lane = Lane(1)
    lane.take(0, 320)
    begin, end = lane.take(0, 32)
    assert begin >= 320 and end == pytest.approx(352)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        # 64 x 128 x 16, both in shared memory: 2 KiB of A and 4 KiB of B in 64 cycles, 96 bytes a cycle
        (MmaShape(64, 128, 16, 16, "shared", "shared", (4, 1), "wgmma"), 96 * 64),
        (MmaShape(64, 128, 16, 16, "registers", "shared", (4, 1), "wgmma"), 64 * 64),
        # two warpgroups of 64 rows read the right operand twice
        (MmaShape(128, 64, 16, 16, "registers", "shared", (8, 1), "wgmma"), 2 * 64 * 16 * 2),
    ],
)
def test_operand_bytes(shape: MmaShape, expected: int) -> None:
    assert operand_bytes(shape) == expected


def test_programs_are_dealt_to_the_first_free_sm() -> None:
    assert _dealt(np.full(7, 10.0), 3) == (30.0, 7 / 9)
    last, balance = _dealt(np.array([5.0, 3.0, 3.0, 1.0]), 2)
    assert (last, balance) == (6.0, 1.0)


def test_no_unit_is_busier_than_there_is_time() -> None:
    p = forward(1024)
    assert all(0 < share <= 1 for share in p.busy.values())
    assert p.cycles >= p.program_cycles
    assert p.tensor_flops >= 4 * 128 * 1024 * 128


def test_time_grows_with_the_work() -> None:
    short, long = forward(512), forward(1024)
    assert 1.5 < long.program_cycles / short.program_cycles < 2.0  # prologue and epilogue do not grow
    many = forward(1024, heads=80)
    assert forward(1024, causal=True, heads=80).cycles < 0.7 * many.cycles
    assert many.cycles > 4 * (long.cycles - PARAMETERS.launch)  # 640 programs on 132 SMs


def test_one_stage_leaves_the_tensor_cores_waiting() -> None:
    one, two = forward(1024, STAGES=1), forward(1024, STAGES=2)
    assert one.program_cycles > 1.2 * two.program_cycles
    assert two.busy[TENSOR] > one.busy[TENSOR]


def test_a_causal_grid_is_interpolated_well() -> None:
    """The sum over all programs is what simulating each of them gives."""
    x = torch.zeros(1, 1, 1024, 128, dtype=torch.bfloat16)
    p = predict(lambda: hopper_forward.fwd(x, x, x, True), "h200")
    longest = p.program_cycles + PARAMETERS.program + PARAMETERS.launch
    assert p.cycles == pytest.approx(longest, rel=1e-6)  # 8 programs, all at once
    assert 0.5 < p.balance * H200.sms / 8 < 0.75  # on average a little more than half as long


def test_the_slower_unit_binds() -> None:
    """Head dim 64 needs as many exponentials for half the products."""
    x = torch.zeros(1, 1, 1024, 64, dtype=torch.bfloat16)
    narrow = predict(lambda: hopper_forward.fwd(x, x, x, False), "h200")
    wide = forward(1024)
    assert narrow.busy[EXP] / narrow.busy[TENSOR] > 1.8 * wide.busy[EXP] / wide.busy[TENSOR]


def test_waiting_above_the_softmax_costs_time() -> None:
    x = torch.zeros(1, 1, 1024, 128, dtype=torch.bfloat16)

    def run() -> None:
        hopper_forward.fwd(x, x, x, False)

    assert predict(run, hoisted=True).program_cycles > predict(run).program_cycles


def test_less_shared_memory_bandwidth_costs_time() -> None:
    a, b = torch.zeros(128, 2048, dtype=torch.bfloat16), torch.zeros(64, 2048, dtype=torch.bfloat16)
    half = dataclasses.replace(PARAMETERS, shared=0.4)
    quick, slow = (predict(lambda: gemm.gemm(a, b), parameters=p) for p in (PARAMETERS, half))
    assert slow.cycles > 1.2 * quick.cycles
    assert slow.busy[SHARED] > 0.5


def test_nothing_launched_is_an_error() -> None:
    with pytest.raises(ValueError, match="no Gluon kernel"):
        predict(lambda: None)


@pytest.fixture(scope="module")
def predictions() -> list[Prediction]:
    """Every measured cell, with the constants as they are."""
    return [calibrate.measure(c) for c in calibration.CELLS]


def test_cells_that_were_not_fitted_are_predicted(predictions: list[Prediction]) -> None:
    """At least 80 % of those held out are right to within 10 %."""
    held_out = [
        abs(c.error(p.cycles)) <= calibration.WITHIN
        for c, p in zip(calibration.CELLS, predictions, strict=True)
        if c.use == "check"
    ]
    assert len(held_out) >= 8
    assert sum(held_out) >= 0.8 * len(held_out)


def test_the_documented_table_is_what_is_predicted(predictions: list[Prediction]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "simulator-timeline.md").read_text(encoding="utf-8")
    table = "\n".join([calibrate.HEAD, *map(calibrate.line, calibration.CELLS, predictions)])
    assert table in text, "copy what tests/sim/calibrate.py prints"
    assert calibrate.summary(calibration.CELLS, predictions) in text


def test_the_constants_are_points_of_the_grid() -> None:
    for name, values in calibration.FITTED.items():
        assert getattr(PARAMETERS, name) in values


def test_calibration_cells_are_complete() -> None:
    cells = calibration.CELLS
    assert {c.use for c in cells} == {"fit", "check"}
    assert len({(c.kernel, c.head_dim, c.causal, str(c.options)) for c in cells}) == len(cells)


def test_blackwell_has_tables_of_its_own() -> None:
    """Twice the tensor core and no faster exponentials: at head dim 64 these bind."""
    x = torch.zeros(1, 1, 1024, 64, dtype=torch.bfloat16)
    p = predict(lambda: blackwell.forward(x, x, x, False), "b200")
    assert set(p.busy) == set(UNITS)
    assert 0 < p.busy[TENSOR_MEMORY] < p.busy[EXP] <= 1
    assert p.binds == EXP
    products = 4 * 1024 * 256 * 64 / gpus.find("b200").tensor_flops_per_cycle["bf16"]
    assert p.busy[TENSOR] * p.program_cycles == pytest.approx(products)


def test_tensor_memory_is_a_unit_that_can_bind() -> None:
    x = torch.zeros(1, 1, 1024, 64, dtype=torch.bfloat16)
    constants = calibration.parameters("b200")
    slow = dataclasses.replace(constants, tensor_memory=constants.tensor_memory / 64)
    quick, slowed = (
        predict(lambda: blackwell.forward(x, x, x, False), "b200", c) for c in (constants, slow)
    )
    assert slowed.cycles > 1.5 * quick.cycles
    assert slowed.binds == TENSOR_MEMORY
