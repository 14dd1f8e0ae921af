"""One long causal sequence, forward and backward: memory, time, and the error of sampled rows.

Runs as a program of its own, because a fresh process is the only place where peak memory means
something:

    python -m tilewise.demo.longseq --length 32768 --device cpu
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from tilewise.demo.memory import measured
from tilewise.demo.model import chosen_kernels, tiled

_DIM = 64
_SAMPLED_ROWS = 64


@dataclass(frozen=True)
class LongSequence:
    """What was measured. Bytes and seconds; errors are relative, in the Frobenius norm, against fp64.

    score_bytes: what the length x length scores alone would take, in `dtype`.
    result_bytes: the output and the gradients of q, k and v.
    extra_bytes: peak during forward and backward above the inputs, results included. None where the
        system cannot tell.
    """

    length: int
    dim: int
    device: str
    dtype: str
    kernels: str
    score_bytes: int
    score_bytes_fp16: int
    result_bytes: int
    extra_bytes: int | None
    forward_seconds: float
    backward_seconds: float
    sampled_rows: int
    output_error: float
    dq_error: float


def in_fresh_process(length: int, device: torch.device) -> LongSequence:
    """Runs `measure` in a new Python and brings its result back.

    Raises RuntimeError with the new process's last words if it fails.
    """
    arguments = ["--length", str(length), "--device", str(device)]
    done = subprocess.run(
        [sys.executable, "-m", __spec__.name, *arguments], capture_output=True, text=True
    )
    if done.returncode != 0:
        last_words = (done.stderr.strip() or "no message").splitlines()[-1]
        raise RuntimeError(f"the long sequence failed (exit {done.returncode}): {last_words}")
    return LongSequence(**json.loads(done.stdout))


def measure(length: int, device: torch.device) -> LongSequence:
    """Attention over `length` random tokens, one head of dimension 64; fp32 on a CPU, bf16 on a GPU."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    q, k, v, dout = _tokens(length, dtype, device)
    for tensor in (q, k, v):
        tensor.requires_grad_()
    _warm_up(dtype, device)

    with measured(device) as memory:
        start = _now(device)
        out = tiled(q, k, v)
        middle = _now(device)
        out.backward(dout)
        end = _now(device)

    rows = _sample(length).to(device)
    true_out, true_dq = exact_rows(q, k, v, dout, rows)
    assert q.grad is not None
    return LongSequence(
        length=length,
        dim=_DIM,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        kernels=chosen_kernels(q, k, v),
        score_bytes=length * length * dtype.itemsize,
        score_bytes_fp16=length * length * torch.float16.itemsize,
        result_bytes=4 * q.nbytes,
        extra_bytes=memory.extra_bytes,
        forward_seconds=middle - start,
        backward_seconds=end - middle,
        sampled_rows=len(rows),
        output_error=_relative(out[0, rows, 0], true_out),
        dq_error=_relative(q.grad[0, rows, 0], true_dq),
    )


def exact_rows(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Some rows of the output and of q's gradient, in fp64 with materialised scores.

    Shapes: q, k, v, dout (1, S, 1, D); rows int64 (R,); both results fp64 (R, D). A row of the
    gradient of q depends on its own row of scores alone, so sampling loses nothing.
    """
    q64, dout64 = (t.detach()[0, rows, 0].double() for t in (q, dout))
    k64, v64 = (t.detach()[0, :, 0].double() for t in (k, v))
    q64.requires_grad_()
    future = torch.arange(len(k64), device=q.device) > rows[:, None]
    scores = (q64 @ k64.T / math.sqrt(q64.shape[1])).masked_fill(future, -math.inf)
    out = scores.softmax(-1) @ v64
    (dq,) = torch.autograd.grad(out, q64, dout64)
    return out.detach(), dq


def _tokens(length: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (1, length, 1, _DIM)
    return [torch.randn(shape, generator=generator).to(device, dtype) for _ in range(4)]


def _warm_up(dtype: torch.dtype, device: torch.device) -> None:
    """Loads or compiles the kernels, so that neither clock nor memory counts that."""
    q, k, v, dout = _tokens(256, dtype, device)
    tiled(q.requires_grad_(), k.requires_grad_(), v.requires_grad_()).backward(dout)


def _sample(length: int) -> Tensor:
    """Row numbers in order: the first, the last and others at random."""
    drawn = torch.randperm(length, generator=torch.Generator().manual_seed(1))[:_SAMPLED_ROWS]
    drawn[0], drawn[-1] = 0, length - 1
    return drawn.unique()


def _relative(x: Tensor, truth: Tensor) -> float:
    return ((x.double() - truth).norm() / truth.norm()).item()


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure one long causal sequence, as JSON.")
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    arguments = parser.parse_args()
    print(json.dumps(asdict(measure(arguments.length, arguments.device))))


if __name__ == "__main__":
    main()
