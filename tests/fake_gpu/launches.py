"""Launches of calls to attention as they reach the driver: written down, and by Triton itself.

    python launches.py FOLDER

Runs on its own: a process has one driver. Prints a line for each thing that was looked at.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import problems
import torch
from problems import Problem
from triton import knobs

import fake_gpu
from fake_gpu import Launch
from tilewise import attention, dispatch, schedule
from tilewise.backends.relaunch import Relaunch

LENGTHS = ((70, 200), (0, 30), (140, 140))
PROBLEMS = {
    "causal": Problem(((130, 130),) * 2, 2, 2, 64, 64, "bf16", causal=True),
    "packed, used lengths, ALiBi, sink, dropout": Problem(
        LENGTHS, 2, 2, 64, 64, "fp16", causal=True, varlen=True, used_q=(70, 0, 99), used_k=(9, 30, 140),
        alibi="heads", sink="fp32", dropout_p=0.1,
    ),
    "bias, deterministic": Problem(
        ((130, 70),) * 2, 2, 1, 64, 64, "fp16", bias=(True, True, True, True), deterministic=True,
    ),
    "broken query tiles": Problem(((130, 9000),), 1, 1, 64, 64, "bf16", loss="none"),
}  # fmt: skip
ROUNDS = 3

launch = Relaunch.__call__
compared: Counter[tuple[str, bool]] = Counter()


def twice(self: Relaunch, kernel: Any, **tensors: torch.Tensor | None) -> None:
    """As written down, if it is, and by Triton."""
    known = len(self._variants)
    with gpu.recording() as first:
        launch(self, kernel, **tensors)
    written_down = len(self._variants) == known
    kept, self._variants = self._variants, {}
    with gpu.recording() as by_triton:
        launch(self, kernel, **tensors)
    self._variants = kept
    assert len(by_triton) == 1
    assert first == by_triton, (kernel, first, by_triton)
    compared[by_triton[0].name, written_down] += 1


def the_same_bytes_arrive() -> None:
    """Whatever there is, and with tensors elsewhere in every round."""
    held = []
    for name, p in PROBLEMS.items():
        compared.clear()
        for n in range(ROUNDS):
            t = problems.tensors(replace(p, seed=n, poison=False))
            held.append(t)
            problems.run(p, t, backend="hopper")
        kernels = {kernel for kernel, _ in compared}
        print(name, *sorted(kernels))
        assert all(compared[kernel, True] >= ROUNDS - 1 for kernel in kernels), compared


def who_looks_on_sees_every_launch() -> None:
    q = torch.randn(1, 130, 2, 64, dtype=torch.bfloat16)
    seen: list[Any] = []
    for enter in (True, False):
        hook = knobs.runtime.launch_enter_hook if enter else knobs.runtime.launch_exit_hook
        attention(q, q, q, backend="hopper")
        seen.clear()
        hook.add(seen.append)
        with gpu.recording() as launches:
            attention(q, q, q, backend="hopper")
        hook.remove(seen.append)
        assert len(seen) == len(launches) == 1


def nothing_keeps_tensors_alive() -> None:
    q = torch.randn(1, 130, 2, 64, dtype=torch.bfloat16)
    attention(q, q, q, backend="hopper")
    there = weakref.ref(q.untyped_storage())
    del q
    gc.collect()
    assert there() is None


def what_is_not_aligned_is_another_variant() -> None:
    """As Triton has it: an output that the copy engine cannot write, wherever it begins."""
    q = torch.randn(1, 130, 2, 64, dtype=torch.bfloat16)
    for start in (1, 8, 1, 8, 3):
        out = torch.empty(130 * 2 * 65 + 8, dtype=q.dtype)[start : start + 130 * 2 * 65]
        attention(q, q, q, backend="hopper", out=out.view(1, 130, 2, 65)[..., :64])


def another_stream_is_another_stream() -> None:
    q = torch.randn(1, 130, 2, 64, dtype=torch.bfloat16)
    found: list[Launch] = []
    for stream in (7, 7, 8):
        gpu.stream = stream
        with gpu.recording() as launches:
            attention(q, q, q, backend="hopper")
        found += launches
    assert [launch.stream for launch in found] == [7, 7, 8]


if __name__ == "__main__":
    gpu = fake_gpu.install(Path(sys.argv[1]))
    rows = [k for k in dispatch.KERNELS if k.name == "hopper/fa3"]
    dispatch.KERNELS = tuple(replace(row, unavailable=lambda device: None) for row in rows)
    dispatch.lasts = lambda device: True
    schedule.multiprocessors = lambda device: 5
    Relaunch.__call__ = twice  # type: ignore[method-assign]
    the_same_bytes_arrive()
    what_is_not_aligned_is_another_variant()
    Relaunch.__call__ = launch  # type: ignore[method-assign]
    who_looks_on_sees_every_launch()
    another_stream_is_another_stream()
    nothing_keeps_tensors_alive()
    print("all the same")
