"""Taking turns, with a clock that goes as the test says."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tilewise.perf.timing import LEAST_ROUNDS, GpuClock, Times, alternate


class FakeClock:
    """A call's time is what it returns, in ms."""

    def measure(self, call):
        return call()


def recorder(log: list[str], name: str, ms: float = 1.0):
    def call() -> float:
        log.append(name)
        return ms

    return call


def test_everyone_has_a_turn_each_round_and_changing_neighbours():
    """Rotated orders keep them: whoever came after the one that moves most memory was slow for it."""
    log: list[str] = []
    alternate({name: recorder(log, name) for name in "ABCDEFGH"}, FakeClock(), rounds=12, warmup=0)
    rounds = ["".join(log[n : n + 8]) for n in range(0, len(log), 8)]
    assert len(rounds) == 12 and all(sorted(order) == list("ABCDEFGH") for order in rounds)
    for name in "ABCDEFGH":
        before = [log[n - 1] for n in range(1, len(log)) if log[n] == name]
        assert max(map(before.count, before)) <= len(before) / 2


def test_warm_up_does_not_count():
    times = iter([900.0, 800.0, 1.0, 2.0, 3.0])
    found = alternate({"A": lambda: next(times)}, FakeClock(), rounds=3, warmup=2)["A"]
    assert isinstance(found, Times) and found.ms == (1.0, 2.0, 3.0)


def test_one_that_raises_is_out_and_the_rest_go_on():
    calls = {"good": lambda: 1.0, "bad": lambda: 1 / 0}
    found = alternate(calls, FakeClock(), rounds=5)
    assert isinstance(found["bad"], ZeroDivisionError)
    assert isinstance(found["good"], Times) and len(found["good"].ms) == 5


def test_one_that_raises_late_gets_no_number_from_its_good_rounds():
    results = iter([1.0] * 4)
    found = alternate({"tired": lambda: next(results)}, FakeClock(), rounds=5)
    assert isinstance(found["tired"], StopIteration)


def test_a_failure_keeps_no_frames_alive():
    found = alternate({"bad": lambda: 1 / 0}, FakeClock(), rounds=2)["bad"]
    assert isinstance(found, Exception) and found.__traceback__ is None


def test_nobody_is_no_endless_loop():
    assert alternate({}, FakeClock(), rounds=3) == {}


@pytest.mark.parametrize(("ms", "rounds"), [(1.0, 50), (1000.0, 20), (60e3, LEAST_ROUNDS)])
def test_slow_rounds_are_fewer(ms, rounds):
    found = alternate({"A": lambda: ms}, FakeClock(), rounds=50, seconds=20)["A"]
    assert isinstance(found, Times) and len(found.ms) == rounds


def test_an_odd_round_moves_neither_median_nor_spread():
    calm = Times((1.0, 1.0, 1.02, 1.02, 1.04, 1.04, 1.06))
    odd = Times((*calm.ms[:-1], 50.0))
    assert odd.median == calm.median == 1.02
    assert odd.spread == pytest.approx(calm.spread, rel=0.01)


def test_one_round_has_no_spread():
    assert Times((2.0,)).spread == 0.0


def test_the_gpus_clock_clears_the_cache_before_it_starts(monkeypatch):
    """On a stand-in GPU: nothing but the call lies between the two events."""
    log: list[str] = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("event")

        def elapsed_time(self, other):
            return 3.0

    card = SimpleNamespace(total_memory=16 * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append("wait"))
    clock = GpuClock(torch.device("cpu"))
    clock._memory = SimpleNamespace(zero_=lambda: log.append("clear"))
    assert clock.flushed_bytes == 1024
    assert clock.measure(lambda: log.append("call")) == 3.0
    assert log == ["clear"] * GpuClock.CLEARS + ["event", "call", "event", "wait"]
