"""Cycles of a call's kernels, counted by Nsight Compute in a process of their own.

Times move with the clock, which moves with power and heat; cycles do not. Utilisation is the share of
the tensor cores' cycles that useful FLOPs fill:

    FLOPs / (cycles x SMs x FLOP per cycle and SM)

    ncu ... python -m tilewise.perf.cycles '{"problem": ..., "contender": ..., "direction": ...}'

is what ``Nsight`` runs; only the one call between the profiler's start and stop is counted.
"""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from tilewise.dispatch import Direction
from tilewise.perf import gpus, peers
from tilewise.perf.problem import Problem, make
from tilewise.perf.results import Measurement

METRIC = "sm__cycles_elapsed.max"
_USUAL_PLACES = ("/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute/ncu")
_SECONDS = 300


class CycleError(RuntimeError):
    """Nothing was counted; the message is one line."""


@dataclass(frozen=True)
class KernelCycles:
    """One kernel launch and its cycles."""

    kernel: str
    cycles: float


def missing(device: torch.device) -> str | None:
    """Why cycles cannot be counted here, None if they can."""
    if device.type != "cuda":
        return "they are counted on an NVIDIA GPU"
    return None if _ncu() else "ncu (Nsight Compute) is not installed"


def _ncu() -> str | None:
    found = shutil.which("ncu")
    return found or next((place for place in _USUAL_PLACES if Path(place).exists()), None)


class Nsight:
    """Counts with Nsight Compute; what fails is said in the measurement's reason."""

    def count(
        self, problem: Problem, direction: Direction, flops: float, found: Measurement
    ) -> Measurement:
        try:
            kernels = profile(problem, found.contender, direction)
            peak = _flops_per_cycle(problem.dtype)
        except CycleError as error:
            return replace(found, reason=f"no cycles: {error}")
        total = sum(kernel.cycles for kernel in kernels)
        longest = max(kernel.cycles for kernel in kernels)
        return replace(
            found,
            cycles=total,
            main_cycles=longest,
            utilisation=peak and flops / (total * peak),
            main_utilisation=peak and flops / (longest * peak),
        )


def profile(problem: Problem, contender: str, direction: Direction) -> list[KernelCycles]:
    """The kernels of one call. Raises CycleError."""
    task = json.dumps({"problem": asdict(problem), "contender": contender, "direction": direction})
    command = [_ncu() or "ncu", "--clock-control", "none", "--profile-from-start", "off"]
    command += [
        "--target-processes",
        "application-only",
        "--metrics",
        METRIC,
        "--print-units",
        "base",
        "--csv",
    ]
    command += [sys.executable, "-m", "tilewise.perf.cycles", task]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        raise CycleError(peers.one_line(error)) from None
    output = done.stdout.splitlines()
    kernels = parse(output)
    if not kernels:
        said = [line for line in output if line.startswith("==ERROR==")]
        last = (said or done.stderr.strip().splitlines()[-1:] or ["ncu printed no kernel"])[0]
        raise CycleError(peers.one_line(last))
    return kernels


def parse(lines: Iterable[str]) -> list[KernelCycles]:
    """The kernels in the output of ``ncu --csv``, whatever else was printed around the table.

    Takes both of ncu's tables, the one with a row per metric and the one with a column per metric.
    """
    found: list[KernelCycles] = []
    header: list[str] = []
    for row in csv.reader(line for line in lines if line.startswith('"')):
        if "Kernel Name" in row:
            header = row
            continue
        if not header or len(row) != len(header):
            continue
        cells = dict(zip(header, row, strict=True))
        if "Metric Name" in cells:
            text = cells.get("Metric Value", "") if cells["Metric Name"] == METRIC else ""
        else:
            text = cells.get(METRIC, "")
        cycles = _number(text)
        if cycles:
            found.append(KernelCycles(cells["Kernel Name"], cycles))
    return found


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:  # the row of units
        return None


def _flops_per_cycle(dtype: str) -> float | None:
    """Of the whole GPU; None for a GPU or data type that has no entry in the table."""
    try:
        gpu = gpus.find(torch.cuda.get_device_name())
    except ValueError:
        return None
    per_sm = gpu.tensor_flops_per_cycle.get(dtype)
    return per_sm and per_sm * torch.cuda.get_device_properties().multi_processor_count


def _child(task: str) -> None:
    """Runs one call under the profiler: everything is compiled and warm before it counts."""
    asked = json.loads(task)
    sizes = asked["problem"]
    sizes["window"] = tuple(sizes["window"])
    sizes["lengths"] = sizes["lengths"] and tuple(sizes["lengths"])
    data = make(Problem(**sizes), torch.device("cuda", torch.cuda.current_device()))
    attend = peers.everyone()[asked["contender"]].prepare(data)
    if asked["direction"] == "forward":

        def call() -> object:
            return peers.forward(attend, data)

    else:
        call = peers.Graph(attend, data).backward
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    _child(sys.argv[1])
