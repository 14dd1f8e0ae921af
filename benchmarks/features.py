"""What a feature costs: the same call with it and without, in turns, on the GPU at hand.

    python benchmarks/features.py [--backend auto triton] [--out FILE.json]

D=128, S=8192, 16k tokens, 16 heads, bf16; windows at S=16384. Times are medians over alternating rounds
with cold caches (see docs/benchmarks.md). A window's share is that of its pairs of all tiles' pairs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tilewise import attention, mask
from tilewise.perf import machine
from tilewise.perf.timing import GpuClock, Times, alternate

HEAD_DIM, HEADS, TOKENS, LENGTH = 128, 16, 16384, 8192
TILE = 128  # queries and keys of a tile, by which a window's share is counted
DEVICE = torch.device("cuda")


def sized(length: int, **options: Any) -> dict[str, Any]:
    return {"length": length, **options}


def bias(dtype: torch.dtype, heads: int = 1) -> dict[str, Any]:
    return {"bias": (dtype, heads)}


# name -> (what it is compared with, options)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full", {}),
    "causal": ("causal", {"causal": True}),
    "full, softcap": ("full", {"softcap": 30.0}),
    "causal, softcap": ("causal", {"softcap": 30.0, "causal": True}),
    "full, ALiBi": ("full", {"alibi": True}),
    "causal, ALiBi": ("causal", {"alibi": True, "causal": True}),
    "full, sink": ("full", {"sink": True}),
    "causal, sink": ("causal", {"sink": True, "causal": True}),
    "full, dropout": ("full", {"dropout_p": 0.1}),
    "causal, dropout": ("causal", {"dropout_p": 0.1, "causal": True}),
    "full, bias bf16 (S, S)": ("full", bias(torch.bfloat16)),
    "full, bias fp32 (S, S)": ("full", bias(torch.float32)),
    "full, bias bf16 (heads, S, S)": ("full", bias(torch.bfloat16, HEADS)),
    "causal, bias bf16 (S, S)": ("causal", {**bias(torch.bfloat16), "causal": True}),
    "full, 16k": ("full, 16k", sized(16384)),
    "window 1024, 16k": ("full, 16k", sized(16384, window=(1024, 0))),
}


def call(options: dict[str, Any], backend: str, backward: bool) -> Callable[[], object]:
    """The call to be timed."""
    options = dict(options)
    length = options.pop("length", LENGTH)
    shape = (TOKENS // length, length, HEADS, HEAD_DIM)
    q, k, v, dout = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(4))
    if options.pop("alibi", False):
        options["alibi_slopes"] = 2.0 ** -torch.linspace(0.5, 8, HEADS, device=DEVICE)
    if options.pop("sink", False):
        options["sink"] = torch.zeros(HEADS, device=DEVICE)
    if "bias" in options:
        dtype, heads = options["bias"]
        options["bias"] = torch.randn(1, heads, length, length, device=DEVICE).to(dtype)
    if options.get("dropout_p"):
        options["seed"] = 0
    options["backend"] = backend
    if not backward:
        return lambda: attention(q, k, v, **options)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = attention(*leaves, **options)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def share(options: dict[str, Any]) -> float:
    """The part of all tiles that a window visits."""
    length = options.get("length", LENGTH)
    window = options.get("window", (None, None))
    tiles = length // TILE
    visited = 0
    for row in range(tiles):
        first, _, _, stop = mask.key_tiles(row * TILE, (row + 1) * TILE, length, length, *window, TILE)
        visited += stop - first
    return visited / tiles**2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", nargs="*", default=["auto"])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--only", help="cases whose names contain this")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    clock = GpuClock(DEVICE)
    rows = []
    print(f"{'':8} {'':9} {'case':32} {'ms':>8} {'ratio':>7} {'spread':>7}", flush=True)
    for backend in arguments.backend:
        for backward in (False, True):
            for name, (base, options) in CASES.items():
                if name == base or (arguments.only and arguments.only not in name):
                    continue
                found = alternate(
                    {
                        "with": call(options, backend, backward),
                        "without": call(CASES[base][1], backend, backward),
                    },
                    clock,
                    arguments.rounds,
                )
                direction = "backward" if backward else "forward"
                row = {"backend": backend, "direction": direction, "case": name, "share": share(options)}
                times = [found[key] for key in ("with", "without")]
                if all(isinstance(t, Times) for t in times):
                    ms, plain = (t.median for t in times)  # type: ignore[union-attr]
                    spread = max(t.spread for t in times)  # type: ignore[union-attr]
                    ratio = ms / plain / (row["share"] if "window" in options else 1)
                    row |= {"ms": ms, "without_ms": plain, "ratio": ratio, "spread": spread}
                    print(
                        f"{backend:8} {direction:9} {name:32} {ms:8.3f} {ratio:7.3f} {spread:7.1%}",
                        flush=True,
                    )
                else:
                    row["failed"] = str(next(t for t in times if isinstance(t, Exception)))[:300]
                    print(backend, direction, name, row["failed"], flush=True)
                rows.append(row)
                torch.cuda.empty_cache()
    if arguments.out is not None:
        report = {
            "date": time.strftime("%Y-%m-%d"),
            "commit": machine.commit(),
            "machine": machine.describe(DEVICE),
            "state": machine.state(DEVICE),
            "versions": machine.versions(),
            "method": "medians over alternating rounds, cold caches; ratio: to the same call without "
            "the feature, of a window over its share of all tiles",
            "shape": {"head_dim": HEAD_DIM, "heads": HEADS, "tokens": TOKENS, "length": LENGTH},
            "rows": rows,
        }
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
