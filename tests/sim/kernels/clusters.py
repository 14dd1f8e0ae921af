"""What CTAs of a cluster do to each other: multicast loads, arrivals at another's barrier, takeovers.

Triton expresses these from 3.9 on.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import async_store, clc, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

COPIES = [[0, 0]]  # both CTAs have the whole tile
HALVES = [[1, 0]]  # each has half of the rows


@gluon.jit
def multicast_kernel(x_desc, y_ptr, tiles, ROWS: gl.constexpr, COLS: gl.constexpr):
    """y = 2 x: a tile is loaded once for both CTAs, and each stores half of it."""
    smem = gl.allocate_shared_memory(x_desc.dtype, [ROWS, COLS], x_desc.layout)
    full = mbarrier.allocate_mbarrier()  # one in each CTA
    empty = mbarrier.allocate_mbarrier(two_ctas=True)  # of the first, on which both arrive
    mbarrier.init(full, count=1)
    mbarrier.init(empty, count=1)
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0], cga_layout=[[1, 0]])
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    cols = gl.arange(0, COLS, gl.SliceLayout(0, layout))[None, :]
    for i in range(tiles):
        mbarrier.wait(empty, (i & 1) ^ 1)
        mbarrier.expect(full, x_desc.nbytes_per_cta)
        tma.async_load(x_desc, [i * ROWS, 0], full, smem, multicast=True)
        mbarrier.wait(full, i & 1)
        x = smem.load(layout)
        gl.store(y_ptr + (i * ROWS + rows) * COLS + cols, x * 2.0)
        mbarrier.arrive(empty, count=1)


def multicast(x):
    """x [a multiple of 64, 32] fp32."""
    ROWS, COLS = 64, x.shape[1]
    layout = gl.NVMMASharedLayout.get_default_for([ROWS, COLS], gl.float32, cga_layout=COPIES)
    x_desc = TensorDescriptor(x, list(x.shape), [COLS, 1], [ROWS, COLS], layout)
    y = torch.empty_like(x)
    args = (x_desc, y, x.shape[0] // ROWS, ROWS, COLS)
    multicast_kernel[(1,)](*args, num_warps=4, num_ctas=2)
    return y


@gluon.jit
def announce(word_ptr, go):
    """What the first CTA has written, both may read once it has arrived at both barriers."""
    gl.store(word_ptr, 7)
    mbarrier.arrive(go, count=1, from_cta=0)


@gluon.jit
def follow(word_ptr, y_ptr, go, BLOCK: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0], cga_layout=[[1]])
    at = gl.arange(0, BLOCK, layout)
    mbarrier.wait(go, 0)
    gl.store(y_ptr + at, at + gl.load(word_ptr))


@gluon.jit
def remote_kernel(word_ptr, y_ptr, BLOCK: gl.constexpr):
    go = mbarrier.allocate_mbarrier()
    mbarrier.init(go, count=1)
    gl.warp_specialize([(follow, (word_ptr, y_ptr, go, BLOCK)), (announce, (word_ptr, go))], [1], [24])


def remote():
    word, y = torch.zeros(1, dtype=torch.int32), torch.zeros(256, dtype=torch.int32)
    remote_kernel[(1,)](word, y, 256, num_warps=4, num_ctas=2)
    return y


@gluon.jit
def exchange_kernel(x_ptr, y_ptr, ROWS: gl.constexpr, COLS: gl.constexpr):
    """y = x, read by halves of the rows and written by halves of the columns, which cross on the way."""
    by_rows: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0], cga_layout=[[1, 0]])
    by_cols: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0], cga_layout=[[0, 1]])
    smem: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0], cga_layout=[[0, 1]])
    x_s = gl.allocate_shared_memory(gl.float32, [ROWS, COLS], smem)
    full = mbarrier.allocate_mbarrier()
    mbarrier.init(full, count=1)
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, by_rows))[:, None]
    cols = gl.arange(0, COLS, gl.SliceLayout(0, by_rows))[None, :]
    mbarrier.expect(full, x_s.nbytes_per_cta)  # half of them from each CTA
    async_store(x_s, gl.load(x_ptr + rows * COLS + cols), full)
    mbarrier.wait(full, 0)
    x = x_s.load(by_cols)
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, by_cols))[:, None]
    cols = gl.arange(0, COLS, gl.SliceLayout(0, by_cols))[None, :]
    gl.store(y_ptr + rows * COLS + cols, x)


def exchange(x):
    """x [rows, columns] fp32, powers of two."""
    y = torch.empty_like(x)
    exchange_kernel[(1,)](x, y, *x.shape, num_warps=4, num_ctas=2)
    return y


@gluon.jit
def ask(answers, full, empty):
    """Asks for one program after another until none is left."""
    more = gl.to_tensor(True)
    i = 0
    while more:
        mbarrier.wait(empty.index(i % 2), ((i // 2) & 1) ^ 1)
        mbarrier.expect(full.index(i % 2), 16, from_cta=0)
        clc.try_cancel(answers.index(i % 2), full.index(i % 2))
        mbarrier.wait(full.index(i % 2), (i // 2) & 1)
        more = clc.load_result(answers.index(i % 2)).is_canceled()
        mbarrier.arrive(empty.index(i % 2), count=1)
        i += 1


@gluon.jit
def work(y_ptr, answers, full, empty, BLOCK: gl.constexpr, CGA: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0], cga_layout=CGA)
    tile = gl.program_id(0) + gl.num_programs(0) * gl.program_id(1)
    more = gl.to_tensor(True)
    i = 0
    while more:
        at = y_ptr + tile * BLOCK + gl.arange(0, BLOCK, layout)
        gl.store(at, gl.load(at) + tile + 1)
        mbarrier.wait(full.index(i % 2), (i // 2) & 1)
        answer = clc.load_result(answers.index(i % 2))
        more = answer.is_canceled()
        if more:
            tile = answer.program_id(0) + gl.num_programs(0) * answer.program_id(1)
        mbarrier.arrive(empty.index(i % 2), count=1)
        i += 1


@gluon.jit
def takeover_kernel(y_ptr, BLOCK: gl.constexpr, CGA: gl.constexpr, ALL: gl.constexpr):
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0], cga_layout=ALL)
    answers = gl.allocate_shared_memory(gl.int64, [2, 2], line)
    full = mbarrier.allocate_mbarrier(batch=2)
    empty = mbarrier.allocate_mbarrier(batch=2, two_ctas=gl.num_ctas() == 2)
    for j in gl.static_range(2):
        mbarrier.init(full.index(j), count=1)
        mbarrier.init(
            empty.index(j), count=2
        )  # of each CTA, who works and who asks have read the answer
    gl.warp_specialize(
        [(work, (y_ptr, answers, full, empty, BLOCK, CGA)), (ask, (answers, full, empty))],
        [1],
        [24],
    )


def takeover(num_ctas=1, grid=(3, 2)):
    """Every program adds its number to its row, whoever runs it: [1, 2, ...] in rows of 256."""
    y = torch.zeros(grid[0] * grid[1], 256, dtype=torch.int32)
    cga, everywhere = ([[1]], [[0]]) if num_ctas == 2 else ([], [])
    options = {"num_warps": 4, "num_ctas": num_ctas, "maxnreg": 128}
    takeover_kernel[grid](y, 256, cga, everywhere, **options)
    return y
