"""Triton FA2 against the FlashAttention-2 inside PyTorch, forward and backward, on one GPU.

    python benchmarks/triton_fa2.py [--out FILE] [--commit HASH]

16k tokens, 2048 / D heads, bf16. Both run alternately in one run, so that heat and power hit them
alike, with the L2 cache flushed before each; outputs are compared first, so that a wrong kernel gets no
number. FLOPs = 4 B H S^2 D, halved for causal, times 2.5 for the backward.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilewise

TOKENS = 16384
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
HEAD_DIMS = (64, 128, 256)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default=_output("git", "rev-parse", "HEAD"))
    parser.add_argument("--rounds", type=int, default=12)
    arguments = parser.parse_args()
    before = gpu_state()
    cells = []
    for head_dim in HEAD_DIMS:
        for causal in (False, True):
            for seqlen in SEQLENS:
                cells += measure(head_dim, seqlen, causal, arguments.rounds)
    report = {
        "what": "triton/fa2 against PyTorch's FlashAttention-2",
        "date": time.strftime("%Y-%m-%d"),
        "commit": arguments.commit,
        "gpu": torch.cuda.get_device_name(),
        "state_before": before,
        "state_after": gpu_state(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "triton": triton.__version__,
            "tilewise": tilewise.__version__,
        },
        "method": f"median of {arguments.rounds} alternating rounds, L2 flushed",
        "cells": cells,
    }
    for direction in ("forward", "backward"):
        ratios = [c["ratio"] for c in cells if c["direction"] == direction]
        report[f"{direction}_geomean"] = statistics.geometric_mean(ratios)
        print(
            f"{direction}: geometric mean {report[f'{direction}_geomean']:.3f}, least {min(ratios):.3f}"
        )
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def measure(head_dim: int, seqlen: int, causal: bool, rounds: int) -> list[dict[str, object]]:
    batch, heads = TOKENS // seqlen, 2048 // head_dim
    shape = (batch, seqlen, heads, head_dim)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    dout = torch.randn_like(q)
    ours = Contender(
        lambda a, b, c: tilewise.attention(a, b, c, causal=causal, backend="triton"), q, k, v, dout
    )
    theirs = Contender(lambda a, b, c: sdpa_fa2(a, b, c, causal), q, k, v, dout)
    for mine, other in zip(ours.results(), theirs.results(), strict=True):
        error = (mine - other).float().norm() / other.float().norm()
        if not error < 1e-2:
            raise SystemExit(f"results differ by {error:.1e} at D={head_dim} S={seqlen} causal={causal}")
    flops = 4 * batch * heads * seqlen**2 * head_dim / (2 if causal else 1)
    rows = []
    for direction, factor in (("forward", 1.0), ("backward", 2.5)):
        times = alternate(getattr(ours, direction), getattr(theirs, direction), rounds)
        mine, other = (statistics.median(t) for t in times)
        row = {
            "direction": direction,
            "head_dim": head_dim,
            "seqlen": seqlen,
            "causal": causal,
            "ms": mine,
            "ms_fa2": other,
            "spread": [(max(t) - min(t)) / statistics.median(t) for t in times],
            "tflops": flops * factor / mine / 1e9,
            "tflops_fa2": flops * factor / other / 1e9,
            "ratio": other / mine,
        }
        rows.append(row)
        print(
            f"{direction:8} D={head_dim:<3} S={seqlen:<5} {'causal' if causal else 'full':6} "
            f"{row['tflops']:5.0f} TFLOP/s, FA2 {row['tflops_fa2']:5.0f}, ratio {row['ratio']:.3f}",
            flush=True,
        )
    return rows


class Contender:
    """One implementation on one problem, with its graph kept for repeated backwards."""

    def __init__(
        self, function: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, dout: Tensor
    ) -> None:
        self.inputs = [t.detach().clone().requires_grad_() for t in (q, k, v)]
        self.function, self.dout = function, dout
        self.out = function(*self.inputs)

    def forward(self) -> object:
        with torch.no_grad():
            return self.function(*self.inputs)

    def backward(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.out, self.inputs, self.dout, retain_graph=True)

    def results(self) -> tuple[Tensor, ...]:
        return (self.out.detach(), *self.backward())


def sdpa_fa2(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        heads_first = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(*heads_first, is_causal=causal).transpose(1, 2)


def alternate(
    first: Callable[[], object], second: Callable[[], object], rounds: int
) -> tuple[list[float], list[float]]:
    """Milliseconds of each call, in turns."""
    flush = torch.empty(2**30, dtype=torch.int8, device="cuda")  # clearing it also hides host time
    times: tuple[list[float], list[float]] = ([], [])
    for round_ in range(rounds + 2):
        for function, kept in ((first, times[0]), (second, times[1])):
            flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            function()
            end.record()
            torch.cuda.synchronize()
            if round_ >= 2:  # the first rounds warm up
                kept.append(begin.elapsed_time(end))
    return times


def gpu_state() -> str:
    fields = "driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu"
    return _output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader")


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


if __name__ == "__main__":
    sys.exit(main())
