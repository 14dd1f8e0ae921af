"""The demo notices what it promises to notice, on a model small enough for a test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import PLAN

from tilewise.demo import corpus, longseq, model, picture, run, train
from tilewise.demo.corpus import Corpus, TextError
from tilewise.demo.report import Check

CPU = torch.device("cpu")


def a_text() -> Corpus:
    return corpus.from_paths([Path(__file__)])


class Diary:
    """A watcher that remembers."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.steps = 0

    def begin(self, stage: str, steps: int | None) -> None:
        self.stages.append(stage)

    def advance(self, note: str) -> None:
        self.steps += 1


@pytest.fixture(scope="module")
def told():
    diary = Diary()
    return run.demonstrate(a_text(), PLAN, length=600, device=CPU, watcher=diary), diary


# --- text ---------------------------------------------------------------------------------------


def test_the_standard_library_is_text_without_installed_packages():
    text = corpus.standard_library()
    assert text.files > 100 and len(text.data) > 1_000_000 and "Python" in text.source


def test_a_python_without_sources_asks_for_a_text(monkeypatch, tmp_path):
    monkeypatch.setattr(corpus.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(TextError, match="--text PATH"):
        corpus.standard_library()


def test_a_folder_stands_for_the_text_files_in_it(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "b.txt").write_bytes(b"second")
    (tmp_path / "a.md").write_bytes(b"first")
    (tmp_path / "inner" / "c.py").write_bytes(b"third")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    text = corpus.from_paths([tmp_path])
    assert bytes(text.data.tolist()) == b"first\nsecond\nthird" and text.files == 3


@pytest.mark.parametrize("content", [b"", b" \n\t\n"])
def test_empty_text_is_refused(tmp_path, content):
    (tmp_path / "empty.txt").write_bytes(content)
    with pytest.raises(TextError, match=r"no text in .*empty\.txt"):
        corpus.from_paths([tmp_path / "empty.txt"])


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(TextError, match=r"cannot read .*nowhere\.txt: No such file"):
        corpus.from_paths([tmp_path / "nowhere.txt"])


def test_too_short_a_text_is_refused_before_training():
    short = Corpus(torch.zeros(979, dtype=torch.uint8), "zeros", 1)
    with pytest.raises(TextError, match="zeros is too short: 979 bytes, and training needs 980"):
        run.demonstrate(short, PLAN, length=600, device=CPU)


def test_the_parts_of_a_text_are_the_text():
    text = Corpus(torch.arange(100, dtype=torch.uint8), "numbers", 1)
    training, held_out = text.split(window=5)
    assert len(held_out) == 5 and torch.equal(torch.cat([training, held_out]), text.data)


# --- training -----------------------------------------------------------------------------------


def test_both_attentions_agree():
    q, k, v = (torch.randn(2, 40, 3, 16) for _ in range(3))
    torch.testing.assert_close(model.tiled(q, k, v), model.materialised(q, k, v))


def test_the_same_seed_trains_the_same_model():
    first, second = (
        train.train(PLAN, model.materialised, a_text().split(PLAN.window), CPU) for _ in range(2)
    )
    assert first.losses == second.losses and first.held_out_loss == second.held_out_loss


def test_rotary_scores_depend_on_distance_alone():
    rotary = model.Rotary(dim=8, context=20)
    q, k = torch.randn(2, 8, dtype=torch.float64).expand(1, 20, 1, 2, 8).unbind(3)
    scores = (rotary(q)[0, :, 0] @ rotary(k)[0, :, 0].T).double()
    for distance in (0, 3, 7):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))


def test_everything_passes(told):
    report, _ = told
    assert report.passed, report.checks


def test_the_watcher_sees_every_stage_and_step(told):
    _, diary = told
    assert diary.steps == 2 * PLAN.steps and len(diary.stages) == 4


def test_the_sample_is_printable(told):
    report, _ = told
    assert report.sample and all(c.isprintable() or c == "\n" for c in report.sample)


def test_terminal_codes_in_a_sample_are_defused():
    assert run._readable(b"a\x1b[31mb\xffc\n") == "a·[31mb\N{REPLACEMENT CHARACTER}c\n"


@pytest.mark.parametrize("wrong", ["output", "gradient"])
def test_a_wrong_kernel_is_noticed(monkeypatch, told, wrong):
    """Output wrong by 1e-3, or no gradient for the first key."""
    report, _ = told

    def wrong_attention(q, k, v):
        if wrong == "output":
            return 1.001 * model.materialised(q, k, v)
        return model.materialised(q, torch.cat([k[:, :1].detach(), k[:, 1:]], dim=1), v)

    monkeypatch.setattr(model, "tiled", wrong_attention)
    monkeypatch.setattr(longseq, "in_fresh_process", lambda length, device: report.long_sequence)
    spoiled = run.demonstrate(a_text(), PLAN, length=600, device=CPU)
    failed = [check.claim for check in spoiled.checks if not check.passed]
    assert failed and all("losses coincide" in claim for claim in failed)


def test_a_nan_fails_a_check():
    assert not Check("anything", float("nan"), 1.0).passed


# --- the long sequence --------------------------------------------------------------------------


def test_exact_rows_are_rows_of_the_whole():
    q, k, v, dout = (torch.randn(1, 30, 1, 8, dtype=torch.float64) for _ in range(4))
    rows = torch.tensor([0, 7, 29])
    q.requires_grad_()
    whole = model.materialised(q, k, v)
    whole.backward(dout)
    out, dq = longseq.exact_rows(q, k, v, dout, rows)
    torch.testing.assert_close(out, whole[0, rows, 0], check_dtype=False)
    torch.testing.assert_close(dq, q.grad[0, rows, 0], check_dtype=False)


def test_the_long_sequence_is_measured(told):
    long = told[0].long_sequence
    assert long.length == 600 and long.score_bytes_fp16 == 2 * 600 * 600
    assert long.output_error < 1e-5 and long.dq_error < 1e-5
    assert long.forward_seconds > 0 and long.backward_seconds > 0
    assert "cpu/fa2" in long.kernels


def test_a_long_sequence_that_dies_says_why():
    with pytest.raises(RuntimeError, match="long sequence failed"):
        longseq.in_fresh_process(0, torch.device("meta"))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems only know the peak since the start")
def test_a_passing_allocation_is_measured():
    """In a process of its own: this one may keep enough freed memory to need no more."""
    code = """
import torch
from tilewise.demo import memory
with memory.measured(torch.device("cpu")) as peak:
    torch.zeros(40 * 2**20 // 4).add_(1)
print(peak.extra_bytes)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 39 * 2**20 < int(done.stdout) < 60 * 2**20


# --- what is written ----------------------------------------------------------------------------


def test_the_report_is_json(told, tmp_path):
    report, _ = told
    data = json.loads(report.write(tmp_path).read_text())
    assert data["passed"] is True and data["plan"]["steps"] == PLAN.steps
    assert len(data["curves"][0]["losses"]) == PLAN.steps
    assert all(check["passed"] for check in data["checks"])


def test_the_picture_is_drawn(told, tmp_path):
    pytest.importorskip("matplotlib")
    assert picture.draw(told[0], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_there_is_no_picture(told, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not picture.draw(told[0], tmp_path / "curves.png")
    assert not (tmp_path / "curves.png").exists()
