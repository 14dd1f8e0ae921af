"""Nsight Compute's output, in both of its forms and among other text."""

from __future__ import annotations

import subprocess

import pytest
import torch

from tilewise.perf import cycles
from tilewise.perf.cycles import CycleError, KernelCycles
from tilewise.perf.problem import Problem
from tilewise.perf.results import Measurement

PROBLEM = Problem(1, 8192, 16, 16, 128, 128, "bf16", False)
LONG = """==PROF== Connected to process 123 (python3.12)
==PROF== Profiling "attend": 0%....50%....100% - 1 pass
a line of the program, "quoted"
"quoted at the start"
==PROF== Disconnected from process 123
"ID","Process Name","Kernel Name","Block Size","CC","Metric Name","Metric Unit","Metric Value"
"0","python","attend(int, float)","(384, 1, 1)","9.0","sm__cycles_elapsed.max","cycle","1,250,000"
"0","python","attend(int, float)","(384, 1, 1)","9.0","other.metric","cycle","7"
"1","python","delta","(128, 1, 1)","9.0","sm__cycles_elapsed.max","cycle","50,000"
"""
WIDE = """==PROF== Connected to process 123
"ID","Kernel Name","Device","sm__cycles_elapsed.max"
"","","","cycle"
"0","attend(int, float)","0","1250000"
"1","delta","0","50000"
"""
FOUND = [KernelCycles("attend(int, float)", 1_250_000), KernelCycles("delta", 50_000)]


@pytest.mark.parametrize("text", [LONG, WIDE], ids=["row per metric", "column per metric"])
def test_both_tables_are_read_among_other_text(text):
    assert cycles.parse(text.splitlines()) == FOUND


@pytest.mark.parametrize("text", ["", "no table", '"ID","Kernel Name","Metric Name","Metric Value"'])
def test_no_table_is_no_kernel(text):
    assert cycles.parse(text.splitlines()) == []


def run_of(output, error=""):
    return lambda *a, **k: subprocess.CompletedProcess(a, 0, output, error)


def test_utilisation_is_flops_over_the_tensor_cores_cycles(monkeypatch):
    monkeypatch.setattr(subprocess, "run", run_of(LONG))
    monkeypatch.setattr(cycles, "_flops_per_cycle", lambda dtype: 132 * 4096)
    flops = PROBLEM.flops("forward")
    m = cycles.Nsight().count(PROBLEM, "forward", flops, Measurement("triton/fa2", "ok", ms=1.0))
    assert m.cycles == 1_300_000 and m.main_cycles == 1_250_000
    assert m.main_utilisation == pytest.approx(0.813, abs=1e-3)  # what FlashAttention-3 reaches
    assert m.utilisation == pytest.approx(flops / (1.3e6 * 132 * 4096))


@pytest.mark.parametrize(
    ("output", "error", "words"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - no permission\nmore", "", "ERR_NVGPUCTRPERM"),
        ("", "Traceback\nValueError: boom", "ValueError: boom"),
        ("", "", "printed no kernel"),
    ],
)
def test_no_cycles_keep_the_time_and_say_why(monkeypatch, output, error, words):
    monkeypatch.setattr(subprocess, "run", run_of(output, error))
    m = cycles.Nsight().count(PROBLEM, "forward", 1.0, Measurement("fa2", "ok", ms=1.0))
    assert (m.status, m.ms, m.cycles) == ("ok", 1.0, None) and words in (m.reason or "")


def test_a_profiler_that_does_not_end_is_one_line(monkeypatch):
    def hang(*_, **__):
        raise subprocess.TimeoutExpired("ncu", 300)

    monkeypatch.setattr(subprocess, "run", hang)
    with pytest.raises(CycleError, match="timed out"):
        cycles.profile(PROBLEM, "fa2", "forward")


def test_what_is_missing_is_said(monkeypatch):
    assert cycles.missing(torch.device("cpu")) == "they are counted on an NVIDIA GPU"
    monkeypatch.setattr(cycles, "_ncu", lambda: None)
    assert "ncu" in (cycles.missing(torch.device("cuda")) or "")
