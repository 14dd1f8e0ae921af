"""`tilewise trace`, the trace file and the picture."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
from problems_sim import attention, error, inputs

from tilewise import sim
from tilewise.sim import picture, trace
from tilewise.sim.catalogue import CATALOGUE, find
from tilewise.sim.kernels.forward import forward
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
    assert names >= {*UNITS, "0:consume", "1:consume"}


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
        (["nonsense"], "unknown kernel 'nonsense'; known are hopper-forward"),
        (["hopper-forward", "--gpu", "b200"], "B200 is blackwell"),
        (["hopper-forward", "--gpu", "abacus"], "unknown GPU 'abacus'"),
        (["hopper-forward", "--seqlen", "100"], "multiple of 128"),
        (["hopper-forward", "--head-dim", "96"], "64, 128 or 256"),
    ],
)
def test_command_refuses_clearly(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["trace", *arguments])
    assert result.exit_code == 2
    assert message in result.output


def test_catalogue() -> None:
    assert all(find(name).name == name for name in CATALOGUE)
    assert find("hopper-forward").flops(16, 8192, 128, True) == 2 * 16 * 8192**2 * 128
