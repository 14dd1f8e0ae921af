"""What a call costs the host: microseconds of Python until all is enqueued, beside others.

    python benchmarks/host.py [--out FILE.json]

B=1, S=128, H=8, D=64, bf16: kernels so short that the GPU is never behind. 2,000 calls, the median of
five such runs, in turns. A forward alone needs no gradient; the other is a forward and its backward.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

import tilewise
from tilewise.perf import machine

CALLS, RUNS = 2000, 5
SHAPE = (1, 128, 8, 64)
DEVICE = torch.device("cuda")

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    out = tilewise.attention(q, k, v, causal=True)
    assert isinstance(out, torch.Tensor)
    return out


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    first = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(*first, is_causal=True).transpose(1, 2)


def contenders() -> dict[str, Attend]:
    found: dict[str, Attend] = {"tilewise": ours, "torch sdpa": sdpa}
    try:
        from flash_attn_interface import flash_attn_func

        found["fa3 wheel"] = lambda q, k, v: flash_attn_func(q, k, v, causal=True)
    except ImportError:
        pass
    return found


def forward(attend: Attend) -> Callable[[], None]:
    q, k, v = (torch.randn(SHAPE, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))

    def run() -> None:
        attend(q, k, v)

    return run


def both(attend: Attend) -> Callable[[], None]:
    leaves = [torch.randn(SHAPE, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in "qkv"]
    dout = torch.randn(SHAPE, device=DEVICE, dtype=torch.bfloat16)

    def run() -> None:
        torch.autograd.grad(attend(*leaves), leaves, dout)

    return run


def microseconds(run: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        run()
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return spent / CALLS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    began = time.perf_counter()
    ours(*(torch.randn(SHAPE, device=DEVICE, dtype=torch.bfloat16) for _ in range(3)))
    torch.cuda.synchronize()
    first = time.perf_counter() - began
    rows = []
    for kind, make in (("forward", forward), ("forward and backward", both)):
        calls = {name: make(attend) for name, attend in contenders().items()}
        for run in calls.values():
            for _ in range(20):
                run()
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(RUNS):
            for name, run in calls.items():
                times[name].append(microseconds(run))
        for name, found in times.items():
            rows.append({"call": kind, "contender": name, "us": statistics.median(found), "runs": found})
            print(f"{kind:22} {name:12} {statistics.median(found):7.1f} us", flush=True)
    print(f"the first call of this process took {first:.2f} s")
    if arguments.out is not None:
        report = {
            "date": time.strftime("%Y-%m-%d"),
            "commit": machine.commit(),
            "machine": machine.describe(DEVICE),
            "versions": machine.versions(),
            "shape": SHAPE,
            "calls": CALLS,
            "first_call_s": first,
            "rows": rows,
        }
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
