"""The file: what is written is read back, and what is not ours is refused in one line."""

from __future__ import annotations

import json
import os
import threading

import made_up
import pytest

from tilewise.perf import results, summary
from tilewise.perf.results import ResultError


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "run.json"
    results.write(made_up.run("varlen"), path)
    return path


def test_what_is_written_is_read_back(path):
    run, back = made_up.run("varlen"), results.read(path)
    assert back == run  # tuples and all: problems are keys


def test_a_write_leaves_nothing_else_behind(path):
    assert [p.name for p in path.parent.iterdir()] == ["run.json"]


def test_a_write_that_fails_leaves_the_last_file(path, monkeypatch):
    before = path.read_text()
    monkeypatch.setattr(results.os, "replace", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        results.write(made_up.run(), path)
    assert path.read_text() == before


def damaged(path, **changes):
    data = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in {**data, **changes}.items() if v != "gone"}))
    return path


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "other"}, "not a result of tilewise bench"),
        ({"kind": "gone"}, "not a result of tilewise bench"),
        ({"schema": 99}, "schema 99; this version reads 1"),
        ({"schema": "gone"}, "schema None"),
        ({"cells": "gone"}, "damaged"),
        ({"cells": [{"direction": "forward"}]}, "damaged"),
        ({"machine": "gone"}, "damaged"),
        ({"surprise": 1}, "damaged"),
        ({"cells": 5}, "damaged: result.cells: got 5"),
        ({"contenders": [{"name": "a"}]}, r"damaged: result.contenders\[0\]: absent is missing"),
        ({"contenders": 5}, "damaged: result.contenders: got 5"),
        ({"ceilings": {"before": 5}}, "damaged: result.ceilings.before: got 5"),
        ({"date": None}, "damaged: result.date: got None"),
    ],
)
def test_a_file_that_is_not_ours_is_refused_in_one_line(path, changes, words):
    with pytest.raises(ResultError, match=words) as caught:
        results.read(damaged(path, **changes))
    assert "\n" not in str(caught.value) and path.name in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ms", "fast"),
        ("ms", 0),
        ("ms", -1.0),
        ("tflops", float("inf")),
        ("tflops", 1e300),
        ("spread", [1]),
        ("status", "fine"),
        ("contender", None),
    ],
)
def test_a_measurement_that_is_none_is_refused_in_one_line(path, name, value):
    """Each of them was read, and ended plot or --compare in a traceback."""
    data = json.loads(path.read_text())
    data["cells"][0]["measurements"][0][name] = value
    path.write_text(json.dumps(data))
    with pytest.raises(ResultError, match=f"damaged: .*{name}") as caught:
        results.read(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "no json", "[1, 2]", "\udcff", "[" * 100_000])
def test_rubbish_is_refused_in_one_line(path, text):
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ResultError):
        results.read(path)


def test_a_missing_file_is_refused_in_one_line(tmp_path):
    with pytest.raises(ResultError, match="cannot read"):
        results.read(tmp_path / "none.json")


def test_the_ceiling_is_the_best_that_was_reached():
    run = made_up.run()
    run.ceilings = {
        "before": {"matmul_flops_per_second": 6e14},
        "after": {"matmul_flops_per_second": None},
    }
    assert run.ceiling_tflops == 600.0
    run.ceilings = {}
    assert run.ceiling_tflops is None


def test_the_table_marks_the_best_of_each_row():
    forward, backward = summary.tables(made_up.run())
    assert forward.head[1:] == list(made_up.NAMES) and set(forward.best) == {1}
    assert "fa3" not in backward.head
    assert forward.rows[0][:2] == ["D=64, full, S=512", "600 ±1%"]


def test_ratios_are_of_times():
    rows = {
        (ours, peer): mean for ours, peer, mean, *_ in summary.against_peers(made_up.run(), "forward")
    }
    assert rows["triton/fa2", "fa2"] == "1.21"  # two places further down, 1.1 each
    assert ("triton/fa2", "triton/fa1") not in rows


def test_the_same_complaint_is_made_once():
    run = made_up.run("paper", names=("a",))
    bad = results.Measurement("a", "failed", "out of GPU memory")
    run.cells = [results.Cell(c.problem, c.direction, c.flops, (bad,)) for c in run.cells]
    (line,) = summary.complaints(run)
    assert line == "a did not run at D=64, full, S=512, forward and 71 more: out of GPU memory"


def test_what_is_no_file_is_not_replaced(tmp_path):
    """As root, writing to a device put an ordinary file in its place; so did a link lose its target."""
    pipe, link, target = (tmp_path / name for name in ("pipe", "link", "target"))
    os.mkfifo(pipe)
    link.symlink_to(target)
    reader = threading.Thread(target=pipe.read_bytes)
    reader.start()
    for path in (pipe, link):
        results.write(made_up.run(), path)
    reader.join()
    assert pipe.is_fifo() and link.is_symlink() and target.is_file()
