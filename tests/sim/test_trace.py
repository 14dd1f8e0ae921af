"""`tilewise trace`, the trace file and the picture."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from problems_sim import attention, error, inputs

from tilewise import sim
from tilewise.sim import picture, trace
from tilewise.sim.catalogue import CATALOGUE, USUAL_GPU, Traced, find
from tilewise.sim.kernels.hopper import forward
from tilewise.sim.predict import Prediction, predict
from tilewise.sim.timing import TENSOR, UNITS

pytest.importorskip("typer")
from typer.testing import CliRunner

from tilewise.cli.app import app

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def prediction() -> Prediction:
    x = torch.zeros(1, 2, 1024, 128, dtype=torch.bfloat16)
    return predict(lambda: forward(x, x, x, False))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("D", [64, 128])
def test_the_kernel_that_is_shown_is_right(D: int, causal: bool, sim_seeds: range) -> None:
    q, k, v, _ = inputs(1, 1, 256, D)
    right = attention(q.double(), k.double(), v.double(), causal)

    def accept(result: tuple[torch.Tensor, ...]) -> None:
        assert max(error(x, y) for x, y in zip(result, right, strict=True)) < 4e-3

    sim.check(lambda: forward(q, k, v, causal, BLOCK=64), sim_seeds, accept)


def test_trace_has_a_track_for_each_unit_and_role(prediction: Prediction) -> None:
    names = {e["args"]["name"] for e in trace.events(prediction) if e["name"] == "thread_name"}
    units = {u for u in UNITS if u != "tensor memory"}  # there is none on Hopper
    waits = {"0:consume waits", "1:consume waits", "2:produce waits"}
    assert names == {*units, "0:consume", "1:consume", *waits}  # the producer does nothing but wait


def test_trace_events_lie_within_the_program(prediction: Prediction, tmp_path: Path) -> None:
    trace.write(prediction, tmp_path / "trace.json")
    data = json.loads((tmp_path / "trace.json").read_text())
    spans = [e for e in data["traceEvents"] if e["ph"] == "X"]
    assert len(spans) > 100
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in spans)
    assert max(e["ts"] for e in spans) <= prediction.program_cycles
    assert {e["args"]["by"] for e in spans} == {"0:consume", "1:consume", "2:produce"}


def test_steady_state_is_a_few_products_from_the_middle(prediction: Prediction) -> None:
    start, stop = trace.steady(prediction, products=12)
    inside = [s for s in prediction.spans if s.track == TENSOR and start <= s.start < stop]
    assert len(inside) == 12
    assert start < prediction.program_cycles / 2 < stop


def test_picture_is_one_well_formed_file(prediction: Prediction, tmp_path: Path) -> None:
    picture.write(prediction, tmp_path / "p.svg")
    root = ET.parse(tmp_path / "p.svg").getroot()
    texts = [e.text for e in root.iter(f"{SVG}text")]
    assert {TENSOR, "exponentials", "0:consume", "cycles"} <= set(texts)
    width = float(root.get("width", 0))
    for bar in root.iter(f"{SVG}rect"):
        assert 0 <= float(bar.get("x", -1)) <= width
    assert "http" not in ET.tostring(root, "unicode").replace(SVG[1:-1], "")
    picture.write(prediction, tmp_path / "p.html")
    assert "<svg" in (tmp_path / "p.html").read_text()
    with pytest.raises(ValueError, match=r"must end in \.svg or \.html"):
        picture.write(prediction, tmp_path / "p.png")


def test_command(tmp_path: Path) -> None:
    out, drawn = tmp_path / "t.json", tmp_path / "p.svg"
    arguments = ["trace", "hopper-forward", "--head-dim", "64", "--causal", "--seqlen", "512"]
    result = CliRunner().invoke(
        app, [*arguments, "--gpu", "h200", "-o", str(out), "--picture", str(drawn)]
    )
    assert result.exit_code == 0, result.output
    assert "cycles" in result.output and "what binds" in result.output and "prediction" in result.output
    assert out.exists() and drawn.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "unknown kernel 'nonsense'; known are blackwell-demo"),
        (["hopper-forward", "--gpu", "b200"], "B200 is blackwell"),
        (["hopper-forward", "--gpu", "abacus"], "unknown GPU 'abacus'"),
        (["blackwell-demo", "--gpu", "h200"], "H200 is hopper"),
        (["hopper-demo", "--seqlen", "100"], "multiple of 128"),
        (["blackwell-demo", "--seqlen", "384"], "multiple of 256"),
        (["hopper-forward", "--head-dim", "96"], "one of 64, 128, 256"),
        (["blackwell-demo", "--head-dim", "256"], "one of 64, 128, not 256"),
        # Each of these ended in a traceback, of the allocator or of the file system:
        (["hopper-forward", "--seqlen", "10000000"], "--seqlen must be at most 131072, not 10000000"),
        (["hopper-forward", "--heads", "10000000"], "--heads must be at most 4096"),
        (["hopper-demo", "--picture", "nowhere/s.svg"], "there is no folder nowhere"),
        # These were written as SVG under that name:
        (["hopper-demo", "--picture", "s.png"], "got 's.png'; the name must end in .svg or .html"),
        (["hopper-demo", "--picture", "s.foo"], "got 's.foo'; the name must end in .svg or .html"),
    ],
)
def test_command_refuses_clearly(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["trace", *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_command_on_blackwell(tmp_path: Path) -> None:
    out = tmp_path / "t.json"
    result = CliRunner().invoke(app, ["trace", "blackwell-forward", "--seqlen", "512", "-o", str(out)])
    assert result.exit_code == 0, result.output
    assert "B200" in result.output and "tensor memory" in result.output and "S.full" in result.output
    assert json.loads(out.read_text())["otherData"]["gpu"] == "B200"


@pytest.mark.parametrize("row", CATALOGUE, ids=lambda row: row.name)
def test_every_kernel_of_the_catalogue_is_traced(row: Traced) -> None:
    for head_dim in row.head_dims:
        size = 1, 2 * row.multiple, head_dim, False
        gpu = USUAL_GPU[row.family]
        p = predict(lambda gpu=gpu, size=size: row.run(gpu, *size), gpu, hoisted=row.hoisted)
        assert p.tensor_flops > 0
        assert 0 < p.utilisation(row.flops(*size)) < 1


def test_names_and_flops() -> None:
    assert len({row.name for row in CATALOGUE}) == len(CATALOGUE)
    assert all(find(row.name) is row for row in CATALOGUE)
    assert find("hopper-forward").family == "hopper" and find("blackwell-forward").family == "blackwell"
    assert find("hopper-demo").flops(16, 8192, 128, True) == 2 * 16 * 8192**2 * 128


def test_a_row_is_all_that_another_kernel_needs() -> None:
    host = "kernels.hopper_backward:bwd"
    row = Traced("mine", "a backward", host, "backward", "hopper", (64,), 128, {64: {"NW": 4, "BN": 64}})
    p = predict(lambda: row.run("h200", 1, 256, 64, True))
    assert p.kernel == "bwd_kernel"
    assert row.flops(1, 256, 64, True) == 5 * 256**2 * 64
    assert p.tensor_flops > 0


def test_a_persistent_kernel_fills_the_gpu() -> None:
    host = "kernels.hopper_persistent:fwd"
    row = Traced("mine", "persistent", host, "forward", "hopper", (64,), 128, sms="SMS")
    p = predict(lambda: row.run("h200", 80, 256, 64, False))
    assert p.grid == (132, 1, 1)


def test_what_a_role_waits_for() -> None:
    """The producer waits for free stages, consumers for full ones: the longer the fewer stages."""
    x = torch.zeros(1, 1, 1024, 128, dtype=torch.bfloat16)
    one, two = (predict(lambda n=n: forward(x, x, x, False, STAGES=n)) for n in (1, 2))
    assert set(two.waits) == {"0:consume", "1:consume", "2:produce"}
    assert set(two.waits["2:produce"]) == {"K.empty", "V.empty"}
    reasons = {"K.full", "V.full", "q_full", "the warpgroup MMA", "the other partitions"}
    assert reasons >= set(two.waits["0:consume"])
    assert one.waits["0:consume"]["K.full"] > two.waits["0:consume"].get("K.full", 0) + 0.05
    for p in (one, two):
        for role, waits in p.waits.items():
            assert 0 < sum(waits.values()) + p.works[role] <= 1.001


def test_a_role_does_not_work_while_it_waits(prediction: Prediction) -> None:
    for role in prediction.works:
        mine = [s for s in prediction.spans if s.kind != "unit" and s.track == role]
        mine.sort(key=lambda s: s.start)
        assert mine
        for before, after in pairwise(mine):
            if "wait" in (before.kind, after.kind):
                assert before.end <= after.start + 1e-6, (before, after)
