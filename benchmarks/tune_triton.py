"""Find the tiles of tilewise/schedule.py: time a Triton kernel over many tiles on the GPU at hand.

    python benchmarks/tune_triton.py fa2_forward --head-dim 128 --seqlen 512,2048,8192

Prints the best tiles of each cell in TFLOP/s. Compiles in parallel first; a tile that does not fit is
left out. 16k tokens, 2048 / D heads, bf16; a backward is timed whole, with the kernels around it.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
from collections.abc import Callable, Iterator

import torch
from triton.testing import do_bench

from tilewise import ops, schedule
from tilewise.backends.triton import fa2, launch
from tilewise.schedule import Tile
from tilewise.spec import Inputs, make_spec

TOKENS = 16384
KERNELS = ("fa2_forward", "fa2_backward", "fa2_dq")
SIDES = (32, 64, 128)

Cell = tuple[str, int, int, bool]  # kernel, head dim, sequence length, causal


def candidates(head_dim: int) -> Iterator[Tile]:
    """Tiles worth compiling: between 1K and 16K scores, a warp for 256 to 4096 of them."""
    for q, k, warps, stages in itertools.product(SIDES, SIDES, (4, 8), (1, 2, 3, 4)):
        if 1024 <= q * k <= 16384 and 256 <= q * k // warps <= 4096 and (head_dim < 256 or stages < 4):
            yield Tile(q, k, warps, stages)


def prepare(cell: Cell, tile: Tile, seqlen: int | None = None) -> Callable[[], None]:
    """The call to time, with ``tile`` in the table."""
    kernel, head_dim, full, causal = cell
    seqlen = seqlen or full
    for table in schedule._FAMILIES.values():
        table.update({(kernel, dim): tile for dim in (64, 128, 256)})
    launch.plan_launch.cache_clear()  # it keeps what the table said
    shape = (max(TOKENS // full, 1), seqlen, 2048 // head_dim, head_dim)
    q, k, v, dout = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    x = Inputs(q, k, v)
    spec = make_spec(x, causal=causal, deterministic=kernel == "fa2_dq")
    out = torch.empty_like(q)
    lse, saved = ops._empty_statistics(spec, x)
    fa2.forward(spec, x, out, lse, saved)
    if kernel == "fa2_forward":
        return lambda: fa2.forward(spec, x, out, lse, saved)
    grads = ops.Gradients(spec, x)
    return lambda: fa2.backward(spec, x, out, lse, saved, dout, None, grads)


def compiles(task: tuple[Cell, Tile]) -> bool:
    """Compile into the disk cache by running a problem of one short sequence."""
    (kernel, head_dim, _, causal), tile = task
    try:
        prepare((kernel, head_dim, TOKENS, causal), tile, seqlen=256)()
        torch.cuda.synchronize()
    except Exception:  # does not fit, or does not compile: not a candidate
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kernel", choices=KERNELS)
    parser.add_argument("--head-dim", default="64,128,256")
    parser.add_argument("--seqlen", default="512,2048,8192")
    parser.add_argument("--causal", choices=("no", "yes", "both"), default="both")
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--best", type=int, default=4, help="how many to print of each cell")
    arguments = parser.parse_args()
    dims, seqlens = (
        [int(n) for n in text.split(",")] for text in (arguments.head_dim, arguments.seqlen)
    )
    masks = {"no": (False,), "yes": (True,), "both": (False, True)}[arguments.causal]
    with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
        for head_dim, causal in itertools.product(dims, masks):
            tiles = list(candidates(head_dim))
            cell = (arguments.kernel, head_dim, TOKENS, causal)
            fits = pool.map(compiles, [(cell, tile) for tile in tiles], chunksize=1)
            for seqlen in seqlens:
                time_cell(
                    (arguments.kernel, head_dim, seqlen, causal),
                    [tile for tile, ok in zip(tiles, fits, strict=True) if ok],
                    arguments.best,
                )
    return 0


def time_cell(cell: Cell, tiles: list[Tile], best: int) -> None:
    kernel, head_dim, seqlen, causal = cell
    passes = 1 if kernel == "fa2_forward" else 2.5
    flops = 4 * TOKENS * 2048 * seqlen * passes / (2 if causal else 1)
    rates = []
    for tile in tiles:
        milliseconds = do_bench(prepare(cell, tile), warmup=5, rep=30, return_mode="median")
        rates.append((flops / milliseconds / 1e9, tile))
    for rate, tile in sorted(rates, reverse=True)[:best]:
        mask = "causal" if causal else "full"
        print(f"{kernel} D={head_dim} S={seqlen} {mask}: {rate:.0f} TFLOP/s {tile}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
