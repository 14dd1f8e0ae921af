"""The command line: what it prints, where it writes, how it exits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from typer.testing import CliRunner

import tilewise
from tilewise import dispatch
from tilewise.cli.app import app
from tilewise.demo import run
from tilewise.demo.report import Check
from tilewise.demo.train import Plan

TINY = ["--text", __file__, "--steps", "4", "--length", "512"]


def tilewise_command(*arguments: str):
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "120"})


@pytest.fixture(scope="module", autouse=True)
def tiny_plan():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Plan, "for_device", lambda device: tiny.PLAN)
        yield


@pytest.fixture(scope="module")
def tiny_demo(tiny_plan, tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "made" / "anew"
    return tilewise_command("demo", *TINY, "--out", str(folder)), folder


def test_the_demo_runs_and_writes_its_folder(tiny_demo):
    result, folder = tiny_demo
    assert result.exit_code == 0, result.output
    assert json.loads((folder / "report.json").read_text())["passed"] is True
    assert (folder / "curves.png").exists()


@pytest.mark.parametrize(
    "words",
    ["loss, nats per byte", "a sample", "512 tokens", "in fp16", "really used", "fp64", "curves.png"],
)
def test_the_demo_tells(tiny_demo, words):
    assert words in tiny_demo[0].output


def test_a_failed_check_is_exit_status_1(tmp_path, monkeypatch):
    honest = run.demonstrate

    def spoiled(*arguments):
        report = honest(*arguments)
        return replace(report, checks=[*report.checks, Check("pigs fly", 1.0, 0.0)])

    monkeypatch.setattr(run, "demonstrate", spoiled)
    result = tilewise_command("demo", *TINY, "--out", str(tmp_path))
    assert result.exit_code == 1
    assert "FAILED  pigs fly" in result.output
    assert json.loads((tmp_path / "report.json").read_text())["passed"] is False


def test_several_paths_may_follow_text(tmp_path, monkeypatch):
    for name in ("a.txt", "b.txt", "c.txt"):
        (tmp_path / name).write_text(name)
    seen = {}
    monkeypatch.setattr(run, "demonstrate", lambda text, *rest: seen.update(files=text.files) or 1 / 0)
    paths = [str(tmp_path / name) for name in ("a.txt", "b.txt", "c.txt")]
    tilewise_command("demo", "--text", *paths, "--out", str(tmp_path))
    assert seen == {"files": 3}


def test_a_path_without_text_is_a_usage_error():
    result = tilewise_command("demo", "a.txt")
    assert result.exit_code == 2 and "--text" in result.output


@pytest.mark.parametrize("content", [None, b"", b"tiny"], ids=["missing", "empty", "short"])
def test_unusable_text_is_one_line_and_exit_status_2(tmp_path, content):
    text = tmp_path / "text.txt"
    if content is not None:
        text.write_bytes(content)
    result = tilewise_command("demo", "--text", str(text), "--out", str(tmp_path))
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("tilewise demo: ") and "text.txt" in line


def test_an_error_is_no_traceback_for_a_person(tmp_path):
    """As a person runs it: a process of its own."""
    command = [
        sys.executable,
        "-c",
        "from tilewise.cli import main; main()",
        "demo",
        "--text",
        "nowhere",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "tilewise demo: cannot read nowhere: No such file or directory\n"


def as_a_person(command: str, **environment: str):
    """The line as a shell runs it, ``tilewise`` being this one."""
    code = "from tilewise.cli import main; main()"
    prelude = f"tilewise() {{ {sys.executable} -c '{code}' \"$@\"; }}\n"
    return subprocess.run(
        ["bash", "-c", prelude + command], capture_output=True, text=True, env=os.environ | environment
    )


@pytest.mark.parametrize("command", ["--version", "doctor", "doctor --json"])
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_one_line(command):
    """The output was lost with a traceback, or with nothing said but at the very end."""
    done = as_a_person(f"tilewise {command} > /dev/full")
    assert (done.returncode, done.stderr) == (2, "tilewise: cannot write: No space left on device\n")


def test_a_reader_that_has_seen_enough_is_no_error():
    done = as_a_person("tilewise doctor --json | head -1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "{\n", "")


@pytest.mark.parametrize("command", ["roofline --memory", "doctor", "--help"])
def test_a_terminal_without_unicode_shows_what_it_can(command):
    done = as_a_person(f"tilewise {command}", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.isascii()


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    result = tilewise_command("demo", *TINY, "--out", str(tmp_path / "file"))
    assert result.exit_code == 2 and "cannot write to" in result.stderr


def test_doctor_as_json():
    found = json.loads(tilewise_command("doctor", "--json").stdout)
    assert set(found) == {"versions", "devices", "kernels", "features"}


def test_doctor_names_each_kernel_and_why_not():
    shown = tilewise_command("doctor").stdout
    for kernel in dispatch.KERNELS:
        assert kernel.name in shown
        reason = kernel.unavailable(torch.device("cpu"))
        assert reason is None or reason.split()[0] in shown


def test_doctor_shows_the_features():
    shown = tilewise_command("doctor", "--features").stdout
    assert all(row["feature"] in shown for row in dispatch.support_table())
    assert (
        json.loads(tilewise_command("doctor", "--features", "--json").stdout) == dispatch.support_table()
    )


def test_version():
    assert tilewise_command("--version").stdout.strip() == f"tilewise {tilewise.__version__}"


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_there_is_one_clear_line(missing):
    code = f"import sys; sys.modules[{missing!r}] = None; from tilewise.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert (
        done.stderr == f"tilewise: {missing} is missing; install it with: pip install 'tilewise[cli]'\n"
    )
