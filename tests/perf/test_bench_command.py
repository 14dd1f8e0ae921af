"""`tilewise bench` and `tilewise plot` as a person types them."""

from __future__ import annotations

import json

import made_up
import pytest
from typer.testing import CliRunner

from tilewise.cli.app import app
from tilewise.perf import results

TINY = ["--device", "cpu", "--seqlen", "32", "--tokens", "32", "--rounds", "3", "--causal", "yes"]


def tilewise_command(*arguments: str):
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "140"})


@pytest.fixture
def files(tmp_path):
    for name, slowdown in (("a", 1.0), ("b", 1.5)):
        results.write(made_up.run("gqa", slowdown=slowdown), tmp_path / f"{name}.json")
    (tmp_path / "other.json").write_text("{}")
    return tmp_path


def test_bench_measures_shows_and_writes(tmp_path):
    path = tmp_path / "run.json"
    result = tilewise_command("bench", *TINY, "--out", str(path))
    assert result.exit_code == 0, result.output
    assert results.read(path).complete
    for words in ("cpu/fa2", "sdpa", "D=64, causal, S=32", "times as fast", "run.json"):
        assert words in result.output


def test_a_peer_that_is_not_here_is_one_line_and_exit_status_1():
    result = tilewise_command("bench", *TINY, "--peers", "naive,fa4")
    assert result.exit_code == 1
    assert "fa4 takes no part: runs on cuda, not on cpu" in result.output


def test_cycles_without_a_gpu_is_one_line_and_the_times_are_there():
    result = tilewise_command("bench", *TINY, "--cycles", "--peers", "none")
    assert result.exit_code == 1 and "no cycles: they are counted on an NVIDIA GPU" in result.output
    assert "FLOP/s" in result.output


def test_bad_input_is_one_line_and_exit_status_2():
    result = tilewise_command("bench", "--preset", "fast")
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("tilewise bench: --preset: got 'fast'")


def test_compare_says_where_b_is_slower(files):
    result = tilewise_command("bench", "--compare", str(files / "a.json"), str(files / "b.json"))
    assert result.exit_code == 1
    assert "geometric mean 0.667" in result.output and "slower by more than the noise" in result.output
    assert (
        tilewise_command("bench", "--compare", str(files / "b.json"), str(files / "a.json")).exit_code
        == 0
    )


def damaged(files):
    data = json.loads((files / "a.json").read_text())
    data["cells"][0]["measurements"][0]["ms"] = "fast"
    (files / "damaged.json").write_text(json.dumps(data))


@pytest.mark.parametrize("command", [["plot"], ["bench", "--compare", "damaged.json"]])
def test_a_damaged_result_is_one_line_and_exit_status_2(files, monkeypatch, command):
    """It was read without a look at its types, and a traceback came later."""
    damaged(files)
    monkeypatch.chdir(files)
    result = tilewise_command(*command, "damaged.json")
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"tilewise {command[0]}: damaged.json: damaged: result.cells[0]")


@pytest.mark.parametrize("other", ["other.json", "none.json"])
def test_compare_refuses_what_it_cannot_read(files, other):
    result = tilewise_command("bench", "--compare", str(files / "a.json"), str(files / other))
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1 and other in result.stderr


def test_plot_draws_what_it_can_and_says_what_it_cannot(files):
    arguments = [str(files / name) for name in ("other.json", "a.json")]
    result = tilewise_command("plot", *arguments, "--out", str(files / "plots"))
    assert result.exit_code == 2 and "other.json: not a result" in result.stderr
    assert sorted(p.name for p in (files / "plots").iterdir()) == [
        f"a-{direction}.{kind}" for direction in ("backward", "forward") for kind in ("png", "svg")
    ]
