"""Find a race in a Gluon kernel without a GPU.

    python examples/find_a_race.py

A copy kernel with a ring of two stages, run three times: as it should be; with a consumer that frees
a stage before it has read it; with a barrier that waits for one arrival too many. On a GPU the second
would be right most of the time, and the third would hang.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilewise import sim
from tilewise.gluon.ring import make_ring


@gluon.jit
def load(x_desc, ring, tiles, ROWS: gl.constexpr):
    for i in range(tiles):
        ring.acquire(i, x_desc.block_type.nbytes)
        ring.load(i, x_desc, [i * ROWS, 0])


@gluon.jit
def store(y_ptr, ring, tiles, ROWS: gl.constexpr, COLS: gl.constexpr, EARLY: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    cols = gl.arange(0, COLS, gl.SliceLayout(0, layout))[None, :]
    for i in range(tiles):
        tile = ring.wait_full(i)
        if EARLY:  # the defect: the producer may overwrite what is read below
            ring.release(i)
        gl.store(y_ptr + (i * ROWS + rows) * COLS + cols, tile.load(layout))
        if not EARLY:
            ring.release(i)


@gluon.jit
def copy(
    x_desc,
    y_ptr,
    tiles,
    ROWS: gl.constexpr,
    COLS: gl.constexpr,
    EARLY: gl.constexpr,
    USERS: gl.constexpr,
):
    smem: gl.constexpr = x_desc.layout
    ring = make_ring("X", gl.float32, [ROWS, COLS], smem, 2, USERS)
    gl.warp_specialize(
        [(store, (y_ptr, ring, tiles, ROWS, COLS, EARLY)), (load, (x_desc, ring, tiles, ROWS))],
        [1],
        [24],
    )


def run(early: bool, users: int, seed: int) -> sim.Report:
    rows, cols, tiles = 32, 32, 6
    x = torch.randn(rows * tiles, cols)
    y = torch.empty_like(x)
    layout = gl.NVMMASharedLayout.get_default_for([rows, cols], gl.float32)
    x_desc = TensorDescriptor(x, list(x.shape), [cols, 1], [rows, cols], layout)
    return sim.launch(copy, (1,), (x_desc, y, tiles, rows, cols, early, users), seed=seed, arch="hopper")


def main() -> None:
    for title, early, users in (
        ("as it should be", False, 1),
        ("frees a stage before reading it", True, 1),
        ("waits for two consumers, but there is one", False, 2),
    ):
        print(f"{title}:")
        print(f"  {run(early, users, seed=0)}\n")


if __name__ == "__main__":
    main()
