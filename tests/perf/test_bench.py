"""A run: who is wrong or broken costs its own numbers only, and nothing is lost on the way out."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from tilewise.perf import __main__ as plain
from tilewise.perf import bench, machine, peers, results
from tilewise.perf.bench import Plan
from tilewise.perf.grid import BadRequest
from tilewise.perf.problem import Problem
from tilewise.perf.request import Request

CPU = torch.device("cpu")
PROBLEM = Problem(1, 16, 2, 2, 8, 8, "fp32", False)
RIGHT = peers.peers()["naive"]


class FakeClock:
    """Each measured call takes 2 ms, whoever makes it."""

    flushed_bytes = 0

    def measure(self, call):
        call()
        return 2.0


@pytest.fixture(autouse=True)
def small_ceilings(monkeypatch):
    monkeypatch.setattr(machine, "ceilings", lambda *_: {"matmul_flops_per_second": 1e12})


def contender(name, change=lambda q, k, v, out: out, **more):
    """The materialised attention under another name, with its output changed."""

    def prepare(data):
        attend = RIGHT.prepare(data)
        return lambda q, k, v: change(q, k, v, attend(q, k, v))

    return replace(RIGHT, name=name, prepare=more.pop("prepare", prepare), **more)


def plan(*contenders, problems=(PROBLEM,), directions=("forward", "backward"), **more):
    return Plan(list(problems), directions, list(contenders), CPU, rounds=4, **more)


def found(run, name, direction):
    (cell,) = run.of(direction)
    return next(m for m in cell.measurements if m.contender == name)


def test_everyone_who_is_right_gets_a_number():
    run = bench.execute(plan(contender("a"), contender("b")), FakeClock())
    assert run.status == 0 and run.complete
    for name in "ab":
        for direction in ("forward", "backward"):
            m = found(run, name, direction)
            assert (m.status, m.ms, m.rounds) == ("ok", 2.0, 4)
            assert m.tflops == PROBLEM.flops(direction) / 2e-3 / 1e12
            assert m.error is not None and m.error < 1e-5


def test_a_wrong_kernel_gets_no_number_and_the_others_keep_theirs():
    wrong = contender("wrong", lambda q, k, v, out: out * 1.1)
    run = bench.execute(plan(wrong, contender("right")), FakeClock())
    m = found(run, "wrong", "forward")
    assert (m.status, m.ms) == ("wrong", None) and "out is off by 1.0e-01" in (m.reason or "")
    assert found(run, "right", "forward").status == "ok"
    assert run.status == 1


def test_a_wrong_backward_leaves_the_forward_its_number():
    wrong = contender("wrong", lambda q, k, v, out: out.detach() + 2 * (out - out.detach()))
    run = bench.execute(plan(wrong), FakeClock())
    assert found(run, "wrong", "forward").status == "ok"
    assert found(run, "wrong", "backward").status == "wrong"


def test_a_wrong_forward_takes_the_backward_with_it():
    wrong = contender("wrong", lambda q, k, v, out: out + 1)  # its gradients are right
    run = bench.execute(plan(wrong), FakeClock())
    assert found(run, "wrong", "backward").status == "wrong"


def test_a_contender_that_fails_is_one_line():
    def fail(q, k, v, out):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.\nTried to allocate 1 GiB")

    run = bench.execute(plan(contender("bad", fail), contender("good")), FakeClock())
    assert found(run, "bad", "backward").reason == "out of GPU memory"
    assert found(run, "good", "backward").status == "ok"
    assert run.status == 1


def test_one_that_cannot_be_prepared_is_one_line():
    run = bench.execute(
        plan(contender("bad", prepare=lambda data: 1 / 0), contender("good")), FakeClock()
    )
    assert found(run, "bad", "forward").reason == "ZeroDivisionError: division by zero"


def test_a_backward_that_fails_leaves_the_forward_its_number():
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, out):
            return out.clone()

        @staticmethod
        def backward(ctx, dout):
            raise RuntimeError("not implemented on this GPU")

    bad = contender("bad", lambda q, k, v, out: Broken.apply(out))
    run = bench.execute(plan(bad), FakeClock())
    assert found(run, "bad", "forward").status == "ok"
    assert found(run, "bad", "backward").reason == "RuntimeError: not implemented on this GPU"


def test_one_that_fails_only_later_gets_no_number():
    calls = []

    def tired(q, k, v, out):
        calls.append(1)
        if len(calls) > 4:
            raise RuntimeError("tired")
        return out

    run = bench.execute(plan(contender("tired", tired), contender("good")), FakeClock())
    assert found(run, "tired", "forward").status == "failed"
    assert found(run, "good", "forward").status == "ok"


def test_what_is_not_supported_is_no_failure():
    forward_only = contender(
        "fwd", refusal=lambda data, way: None if way == "forward" else "no backward"
    )
    run = bench.execute(plan(forward_only), FakeClock())
    assert found(run, "fwd", "forward").status == "ok"
    assert (found(run, "fwd", "backward").status, run.status) == ("unsupported", 0)


def test_a_problem_that_does_not_fit_does_not_end_the_run(monkeypatch):
    make = bench.make

    def too_small(problem, device):
        if problem.seqlen == 32:
            raise torch.cuda.OutOfMemoryError("too large")
        return make(problem, device)

    monkeypatch.setattr(bench, "make", too_small)
    run = bench.execute(
        plan(contender("a"), problems=[replace(PROBLEM, seqlen=32), PROBLEM]), FakeClock()
    )
    assert [c.measurements[0].status for c in run.of("forward")] == ["failed", "ok"]


def test_one_graph_is_measured_with_its_graph():
    modes = []

    def note(q, k, v, out):
        modes.append(torch.is_grad_enabled())
        return out

    bench.execute(plan(contender("compiled", note, one_graph=True)), FakeClock())
    assert all(modes)
    modes.clear()
    bench.execute(
        plan(contender("compiled", note, one_graph=True), directions=("forward",)), FakeClock()
    )
    assert not any(modes)


def test_everything_is_kept_after_each_problem(tmp_path):
    """A run that is killed leaves what it had."""
    path, seen = tmp_path / "run.json", []

    def keep(run):
        results.write(run, path)
        seen.append((len(results.read(path).cells), results.read(path).complete))

    problems = [PROBLEM, replace(PROBLEM, causal=True)]
    bench.execute(plan(contender("a"), problems=problems), FakeClock(), keep=keep)
    assert seen == [(0, False), (2, False), (4, False), (4, True)]


def test_time_runs_out_between_problems_and_the_rest_is_named():
    times = iter([0.0, 1.0, 11.0])
    problems = [PROBLEM, replace(PROBLEM, seqlen=32), replace(PROBLEM, seqlen=64)]
    run = bench.execute(
        plan(contender("a"), problems=problems, time_limit=10), FakeClock(), now=lambda: next(times)
    )
    assert len(run.cells) == 2 and run.complete and run.status == 1
    assert run.left_out == ["D=8, full, S=32", "D=8, full, S=64"]
    assert set(run.ceilings) == {"before", "after"}


def test_an_interrupted_run_returns_what_it_has():
    def interrupt(q, k, v, out):
        raise KeyboardInterrupt

    run = bench.execute(plan(contender("a", interrupt)), FakeClock())
    assert run.complete and run.notes == ["interrupted"] and run.left_out


def test_a_lost_gpu_ends_the_run_and_names_who_was_running(monkeypatch):
    def wait(device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(bench, "_wait", wait)
    run = bench.execute(plan(contender("bad"), contender("good")), FakeClock())
    assert "lost to this process after bad" in run.notes[0] and run.status == 1
    assert run.left_out == [str(PROBLEM)]


def test_ceilings_that_cannot_be_measured_are_a_note(monkeypatch):
    monkeypatch.setattr(machine, "ceilings", lambda *_: 1 / 0)
    run = bench.execute(plan(contender("a")), FakeClock())
    assert run.notes[0].startswith("ceilings: ZeroDivisionError") and found(run, "a", "forward").ms


def test_a_counter_of_cycles_adds_to_the_numbers():
    class Counter:
        def count(self, problem, direction, flops, found):
            return replace(found, cycles=1e6, utilisation=0.5)

    bad = contender("bad", prepare=lambda data: 1 / 0)
    run = bench.execute(plan(contender("a"), bad, counter=Counter()), FakeClock())
    assert found(run, "a", "forward").utilisation == 0.5
    assert found(run, "bad", "forward").utilisation is None


# --- from words to a plan ---


def test_auto_takes_everyone_who_is_here_and_is_silent_about_the_rest():
    made = Request(device="cpu").plan()
    assert [c.name for c in made.contenders] == ["cpu/fa2", "cpu/fa1", "sdpa", "naive"]
    assert {c.name for c, _ in made.absent} >= {"triton/fa2", "fa3", "fa4"}
    assert made.notes == []


def test_a_peer_asked_for_that_is_not_here_is_a_note():
    made = Request(device="cpu", peers="naive,fa3").plan()
    assert made.notes == ["fa3 takes no part: runs on cuda, not on cpu"]
    assert [c.name for c in made.contenders] == ["cpu/fa2", "cpu/fa1", "naive"]


def test_options_replace_what_the_preset_says():
    made = Request(
        device="cpu",
        preset="gqa",
        head_dim="64",
        seqlen="256,1k",
        causal="no",
        dtype="fp32",
        kv_heads="4",
    ).plan()
    assert {p.head_dim for p in made.problems} == {64}
    assert [p.seqlen for p in made.problems] == [256, 1024]
    assert {(p.heads, p.kv_heads, p.dtype, p.causal) for p in made.problems} == {(64, 4, "fp32", False)}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("preset", "fast"),
        ("direction", "sideways"),
        ("head_dim", "512"),
        ("seqlen", ""),
        ("causal", "maybe"),
        ("dtype", "int8"),
        ("tokens", "many"),
        ("kv_heads", "3"),
        ("algorithms", "triton/fa9"),
        ("peers", "fa5"),
        ("peers", ","),
        ("rounds", "0"),
        ("time_limit", "soon"),
        ("time_limit", "nan"),
        ("device", "tpu"),
    ],
)
def test_bad_input_is_one_line_that_names_the_option(option, value):
    with pytest.raises(BadRequest, match="--" + option.replace("_", "-")) as caught:
        Request(**{"device": "cpu", option: value}).plan()
    assert "\n" not in str(caught.value) and "allowed" in str(caught.value)


def test_nobody_to_measure_is_refused():
    with pytest.raises(BadRequest, match="nobody"):
        Request(device="cpu", algorithms="none", peers="fa3").plan()


def test_an_unwritable_file_is_refused_before_the_work(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(BadRequest, match="--out: cannot write"):
        Request(device="cpu", out=str(tmp_path / "file" / "run.json")).plan()


def test_looking_whether_a_file_can_be_written_leaves_none(tmp_path):
    Request(device="cpu", out=str(tmp_path / "new" / "run.json")).plan()
    assert list((tmp_path / "new").iterdir()) == []


# --- without typer and rich ---

TINY = ["--device", "cpu", "--seqlen", "32", "--tokens", "32", "--rounds", "3", "--causal", "yes"]


def test_the_plain_front_end_measures(tmp_path, capsys):
    path = tmp_path / "run.json"
    assert plain.main([*TINY, "--out", str(path)]) == 0
    assert results.read(path).names == ["cpu/fa2", "cpu/fa1", "sdpa", "naive"]
    shown = capsys.readouterr().out
    assert "[1/1" in shown and "cpu/fa2 as sdpa" in shown


def test_the_plain_front_end_refuses_in_one_line(capsys):
    assert plain.main(["--preset", "fast"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tilewise bench: --preset: got 'fast'")


def test_the_file_says_where_its_numbers_come_from(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_output", lambda *command, folder=None: None)
    monkeypatch.setenv("TILEWISE_COMMIT", "abc123")
    path = tmp_path / "run.json"
    assert plain.main([*TINY, "--out", str(path)]) == 0
    data = json.loads(path.read_text())
    assert data["commit"] == "abc123" and data["machine"]["name"] and data["versions"]["torch"]
    assert data["request"]["seqlen"] == "32" and "out" not in data["request"]
    assert set(data["state"]) == set(data["ceilings"]) == {"before", "after"}


def test_without_git_and_environment_the_commit_is_unknown(monkeypatch):
    monkeypatch.setattr(machine, "_output", lambda *command, folder=None: None)
    monkeypatch.delenv("TILEWISE_COMMIT", raising=False)
    assert machine.commit() == "unknown"


def test_changed_code_has_a_plus(monkeypatch):
    answers = {"ls-files": "__init__.py", "rev-parse": "abc", "status": " M file"}
    monkeypatch.setattr(machine, "_output", lambda *command, folder=None: answers[command[1]])
    assert machine.commit() == "abc+"


def test_a_gpus_state_survives_what_nvidia_smi_cannot_tell(monkeypatch):
    monkeypatch.setattr(machine, "_nvidia_smi", lambda device, query: "1980, 3201, [N/A], 700.00, 41")
    state = machine.state(torch.device("cuda"))
    assert state == {
        "sm_mhz": 1980.0,
        "memory_mhz": 3201.0,
        "watts": None,
        "watts_limit": 700.0,
        "celsius": 41.0,
    }
    monkeypatch.setattr(machine, "_nvidia_smi", lambda device, query: None)
    assert set(machine.state(torch.device("cuda")).values()) == {None}
