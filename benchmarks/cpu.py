"""The CPU backend against PyTorch's own attention on the CPU: time in pairs, and memory.

    python benchmarks/cpu.py                    all of it, prints tables, writes results/cpu-<date>.json
    python benchmarks/cpu.py --extra-memory fa2 forward
                                                one measurement in this process, as one line of JSON

Time: fp32, B=1 H=8 S=4096 D=64. Each pair runs ours and PyTorch's ``scaled_dot_product_attention`` one
after the other, so that whatever else the machine does hits both; the ratio is the median over pairs.

Memory: S=16384, what the process's peak rises by during the call, less what the call returns.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import tilewise

Attention = Callable[[Tensor, Tensor, Tensor, bool], Tensor]

RESULTS = Path(__file__).parent / "results"
BATCH, HEADS, HEAD_DIM = 1, 8, 64
SEQLEN = 4096
SEQLEN_MEMORY = 16384
PASSES = ("forward", "forward+backward")
WANTED = {"forward": 1.5, "forward+backward": 2.0}  # times PyTorch's time, for fa2


def ours(algorithm: str) -> Attention:
    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        out = tilewise.attention(q, k, v, causal=causal, algorithm=algorithm, backend="cpu")
        assert isinstance(out, Tensor)
        return out

    return attend


def torchs(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


ATTENTION: dict[str, Attention] = {"fa2": ours("fa2"), "fa1": ours("fa1"), "torch": torchs}


def problem(seqlen: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """q, k, v and the gradient of the output."""
    torch.manual_seed(0)
    shape = (BATCH, seqlen, HEADS, HEAD_DIM)
    q, k, v, dout = (torch.randn(shape, dtype=dtype) for _ in range(4))
    return *(t.requires_grad_() for t in (q, k, v)), dout


def call(attend: Attention, tensors: tuple[Tensor, ...], which: str, causal: bool) -> list[Tensor]:
    """One pass; what it returns."""
    q, k, v, dout = tensors
    if which == "forward":
        with torch.no_grad():
            return [attend(q, k, v, causal)]
    out = attend(q, k, v, causal)
    return [out, *torch.autograd.grad(out, (q, k, v), dout)]


def seconds(attend: Attention, tensors: tuple[Tensor, ...], which: str, causal: bool) -> float:
    start = time.perf_counter()
    call(attend, tensors, which, causal)
    return time.perf_counter() - start


def summary(values: list[float]) -> dict[str, float]:
    quarter, half, three_quarters = statistics.quantiles(values, n=4)
    return {
        "median": round(half, 4),
        "quartile_1": round(quarter, 4),
        "quartile_3": round(three_quarters, 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
    }


def measure_time(algorithm: str, which: str, causal: bool, pairs: int) -> dict[str, object]:
    tensors = problem(SEQLEN)
    results = [call(ATTENTION[name], tensors, which, causal) for name in (algorithm, "torch")]
    for mine, theirs in zip(*results, strict=True):  # also the warm-up
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)
    times: dict[str, list[float]] = {algorithm: [], "torch": []}
    for n in range(pairs):
        for name in (algorithm, "torch") if n % 2 else ("torch", algorithm):
            times[name].append(seconds(ATTENTION[name], tensors, which, causal) * 1e3)
    ratios = [a / b for a, b in zip(times[algorithm], times["torch"], strict=True)]
    return {
        "algorithm": algorithm,
        "pass": which,
        "causal": causal,
        "pairs": pairs,
        "tilewise_ms": summary(times[algorithm]),
        "torch_ms": summary(times["torch"]),
        "ratio": summary(ratios),
    }


def extra_memory(name: str, which: str, seqlen: int = SEQLEN_MEMORY) -> dict[str, object]:
    """What one call adds to the peak of this process besides its results, in MB (10**6 bytes).

    Meant for a process that has done nothing else: a peak never falls.
    """
    tensors = problem(seqlen)
    call(ATTENTION[name], problem(64), which, True)  # what libraries allocate once
    before = _peak()
    results = call(ATTENTION[name], tensors, which, True)
    returned = sum(t.numel() * t.element_size() for t in results)
    return {
        "algorithm": name,
        "pass": which,
        "causal": True,
        "seqlen": seqlen,
        "extra_mb": round((_peak() - before - returned) / 1e6, 1),
        "scores_mb": round(BATCH * HEADS * seqlen**2 * 4 / 1e6, 1),
    }


def _peak() -> int:
    """The largest resident size of this process so far, in bytes."""
    # Not getrusage where there is a choice: on Linux it begins with the peak of the parent process.
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = (text for text in status.read_text().splitlines() if text.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def in_new_process(name: str, which: str) -> dict[str, object]:
    command = [sys.executable, __file__, "--extra-memory", name, which]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, object] = json.loads(done.stdout)
    return found


def machine() -> dict[str, object]:
    info = Path("/proc/cpuinfo")
    models = [
        line.partition(":")[2].strip()
        for line in (info.read_text().splitlines() if info.exists() else [])
        if line.startswith("model name")
    ]
    return {
        "cpu": models[0] if models else platform.processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "load_before": [round(n, 2) for n in os.getloadavg()],
    }


def commit() -> str:
    """The commit that was measured, with a + if the package has changed since."""
    changed = _output("git", "status", "--porcelain", "../tilewise")
    return _output("git", "rev-parse", "HEAD") + ("+" if changed else "")


def _output(*command: str) -> str:
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    return done.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=11)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS / f"cpu-{time.strftime('%Y-%m-%d')}.json")
    parser.add_argument("--extra-memory", nargs=2, metavar=("WHO", "PASS"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.extra_memory:
        print(json.dumps(extra_memory(*arguments.extra_memory)))
        return 0

    report: dict[str, object] = {
        "what": "cpu/fa2 and cpu/fa1 against PyTorch's scaled_dot_product_attention on the CPU, fp32",
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "machine": machine(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "tilewise": tilewise.__version__,
        },
        "problem": {"batch": BATCH, "heads": HEADS, "seqlen": SEQLEN, "head_dim": HEAD_DIM},
    }
    print(f"{'':32}{'tilewise ms':>12}{'torch ms':>12}{'ratio':>8}{'quartiles':>14}  wanted")
    times = []
    for algorithm in ("fa2", "fa1"):
        for causal in (False, True):
            for which in PASSES:
                cell = measure_time(algorithm, which, causal, arguments.pairs)
                times.append(cell)
                _print_time(cell)
    memory = []
    print(f"\n{'':32}{'extra MB':>12}{'scores MB':>12}")
    for name in ATTENTION:
        for which in PASSES:
            row = in_new_process(name, which)
            memory.append(row)
            print(f"{name + ' ' + which:32}{row['extra_mb']:>12}{row['scores_mb']:>12}")
    report["load_after"] = [round(n, 2) for n in os.getloadavg()]
    arguments.out.parent.mkdir(exist_ok=True)
    arguments.out.write_text(json.dumps(report | {"time": times, "memory": memory}, indent=1) + "\n")
    return 0


def _print_time(cell: dict[str, object]) -> None:
    mine, theirs, ratio = (cell[name] for name in ("tilewise_ms", "torch_ms", "ratio"))
    assert isinstance(mine, dict) and isinstance(theirs, dict) and isinstance(ratio, dict)
    name = f"{cell['algorithm']} {'causal' if cell['causal'] else 'full'} {cell['pass']}"
    spread = f"{ratio['quartile_1']:.2f}-{ratio['quartile_3']:.2f}"
    wanted = f"<= {WANTED[str(cell['pass'])]}" if cell["algorithm"] == "fa2" else ""
    both = f"{mine['median']:12.0f}{theirs['median']:12.0f}"
    print(f"{name:32}{both}{ratio['median']:8.2f}{spread:>14}  {wanted}")


if __name__ == "__main__":
    sys.exit(main())
