"""What surrounds the Hopper backward, on its own: in Triton's interpreter, and as compiled for a GPU."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import problems
import pytest
import torch
from problems import Problem, Tensors
from torch import Tensor

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from tilewise import mask, reference
from tilewise.backends.hopper import around
from tilewise.spec import Sequence, sequences

SCRIPTS = Path(__file__).parents[2] / "scripts"
LENGTHS = ((5, 200), (200, 5), (0, 30), (140, 300), (64, 0), (63, 65), (65, 1))
PACKED = {"lengths": LENGTHS, "varlen": True, "tail": (3, 2)}
PROBLEMS = {
    "dense": Problem(((200, 130),) * 2, 2, 2, 64, 64),
    "64 queries at a time": Problem(((200, 130),) * 2, 2, 2, 128, 40),
    "wide": Problem(((130, 70),), 1, 2, 256, 64),
    "columns left over": Problem(((70, 70),), 1, 2, 40, 17),
    "causal, the first see nothing": Problem(((300, 70),), 1, 2, 64, 64, causal=True),
    "window, the last see nothing": Problem(((300, 200),), 1, 2, 64, 64, window=(None, -170)),
    "window, some in the middle see something": Problem(((300, 90),), 1, 2, 64, 64, window=(-20, 50)),
    "window past the last query": Problem(((70, 70),), 1, 2, 64, 64, window=(None, -300)),
    "window before the first query": Problem(((70, 70),), 1, 2, 64, 64, window=(-300, None)),
    "packed": Problem(heads_kv=2, head_dim=64, head_dim_v=64, **PACKED),
    "packed, causal": Problem(heads_kv=2, head_dim=128, causal=True, **PACKED),
    "packed, window": Problem(heads_kv=2, head_dim=64, window=(30, -20), **PACKED),
    "used": Problem(((150, 280),) * 3, 2, 1, 64, 64, used_q=(150, 0, 33), used_k=(1, 70, 280)),
    "used, causal": Problem(((150, 90),) * 3, 2, 1, 64, causal=True, used_q=(150, 9, 130)),
    "no keys": Problem(((70, 0),), 1, 1, 64, 64),
    "no queries": Problem(((0, 70),), 1, 1, 64, 64),
    "no sequences": Problem((), 1, 1, 64, 64),
}


def made_up(p: Problem) -> tuple[Tensors, Tensor, Tensor]:
    """The problem's tensors in bf16, and an output and a log-sum-exp for them."""
    t = problems.tensors(replace(p, dtype="bf16"))
    exact = t.x._replace(**{name: getattr(t.x, name).double() for name in "qkv"})
    out, lse = reference.attention(t.spec, exact, torch.float64)
    return t, out.to(t.spec.dtype), lse.float()


def seen_queries(t: Tensors, seq: Sequence) -> tuple[int, int]:
    """The first query that sees a key, and how many do."""
    i, j = torch.arange(seq.length_q)[:, None], torch.arange(seq.length_k)[None, :]
    lengths = seq.length_q, seq.length_k
    seen = mask.visible(i, j, *lengths, *t.spec.window).expand(lengths).any(1).nonzero().flatten()
    return (int(seen[0]), len(seen)) if len(seen) else (0, 0)


def parts(t: Tensors, space: around.Space) -> Iterator[tuple[Sequence, int, int]]:
    """Each sequence and head with its first row in the space."""
    for seq in sequences(t.spec, t.x):
        for head in range(t.spec.heads_q):
            first = seq.number * space.of_entry + head * space.of_head
            if t.spec.varlen:
                first += (seq.start_q // space.tile + seq.number) * space.tile
            yield seq, head, first


def in_fragments(rows: Tensor) -> Tensor:
    """``backward_parts.in_fragments`` of every 64 rows."""
    of_64 = rows.reshape(-1, 4, 2, 8, rows.shape[1] // 8, 4, 2)
    return of_64.permute(0, 4, 1, 3, 5, 2, 6).reshape(rows.shape)


@pytest.mark.parametrize("name", PROBLEMS)
def test_what_is_added_to_the_accumulator_comes_out_as_dq(name: str):
    """It is fresh memory, NaN here: of every tile that is added to, all must be 0 before."""
    t, out, lse = made_up(PROBLEMS[name])
    rows = around.prepare_rows(t.spec, t.x, out, lse, None, t.dout, t.dlse)
    assert rows.taken.item() == 0 or t.spec.max_seqlen_q == 0
    dq = torch.zeros_like(t.x.q) if t.spec.ragged else torch.empty_like(t.x.q)
    want = torch.zeros_like(t.x.q)
    for seq, head, first in parts(t, rows.space):
        low, count = seen_queries(t, seq)
        added = torch.randn(-(-count // rows.space.tile) * rows.space.tile, rows.space.columns)
        tiles = rows.dq[first : first + len(added)]
        assert (tiles == 0).all()
        tiles += in_fragments(added)
        of_seen = seq.queries(want)[low : low + count, head]
        of_seen.copy_(added[:count, : t.spec.head_dim] * t.spec.scale)
    around.finish_dq(t.spec, t.x, rows, dq)
    torch.testing.assert_close(dq, want)


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("with_dlse", [True, False])
def test_row_statistics(name: str, with_dlse: bool):
    t, out, lse = made_up(PROBLEMS[name])
    dlse = t.dlse if with_dlse else None
    rows = around.prepare_rows(t.spec, t.x, out, lse, None, t.dout, dlse)
    for seq, head, first in parts(t, rows.space):
        low, count = seen_queries(t, seq)
        seen = slice(low, low + count)
        minus_delta = -(seq.queries(out)[seen, head].float() * seq.queries(t.dout)[seen, head]).sum(-1)
        if with_dlse:
            minus_delta += seq.rows(t.dlse)[head, seen]
        got = rows.lse[first : first + count], rows.minus_delta[first : first + count]
        want = seq.rows(lse)[head, seen] * math.log2(math.e), minus_delta
        torch.testing.assert_close(got, want)
        tile_end = first + -(-count // rows.space.tile) * rows.space.tile
        assert (rows.lse[first + count : tile_end] == torch.inf).all()


def widened(x: Tensor, columns: int) -> Tensor:
    """The same values in rows of so many columns."""
    wide = x.new_empty(*x.shape[:-1], columns)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


@pytest.mark.parametrize(("columns", "unit"), [(64, 8), (72, 8), (68, 4), (66, 2), (65, 1)])
def test_strides_of_any_alignment(columns: int, unit: int):
    """A kernel gets strides in units that divide them all, which is how it knows their alignment."""
    t, out, lse = made_up(Problem(((70, 90),) * 2, 2, 2, 64, 64))
    given = t.spec, t.x, out, lse, None, t.dout, t.dlse
    want = around.prepare_rows(*given)
    for wide_out, wide_dout in ((columns, 64), (64, columns)):
        laid_out = widened(out, wide_out), lse, None, widened(t.dout, wide_dout), t.dlse
        got = around.prepare_rows(t.spec, t.x, *laid_out)
        assert all(a[:70].equal(b[:70]) for a, b in zip(got[:3], want[:3], strict=True))
    dq, wide_dq = torch.empty_like(t.x.q), widened(torch.empty_like(t.x.q), columns)
    assert around.unit_of(*wide_dq.stride()[:-1]) == unit
    rows = want._replace(dq=torch.randn(want.dq.shape))
    around.finish_dq(t.spec, t.x, rows, dq)
    around.finish_dq(t.spec, t.x, rows, wide_dq)
    assert wide_dq.equal(dq)


def test_dout_that_is_one_row_for_all():
    t, out, lse = made_up(Problem(((70, 90),) * 2, 2, 2, 64, 64))
    dout = t.dout[:1, :1, :1].expand(t.dout.shape)
    got = around.prepare_rows(t.spec, t.x, out, lse, None, dout, t.dlse)
    want = around.prepare_rows(t.spec, t.x, out, lse, None, dout.contiguous(), t.dlse)
    assert got.minus_delta[:70].equal(want.minus_delta[:70])


# Compiling and the tests' interpreter exclude each other, so this runs on its own.
WIDTHS = """
import re, sys
import compile_offline as c
arch = c.ARCHES["sm_90"]
family = next(k for k in c.dispatch.KERNELS if k.name == "hopper/fa3")
for launch in c.launches(c.ALL_CASES[sys.argv[1]], family, arch):
    name = launch.kernel.fn.__name__
    if name in ("prepare_kernel", "finish_kernel"):
        ptx = c.compile_launch(launch, arch)[0].asm["ptx"]
        wide = [len(re.findall(rf"\\b{way}\\.global\\S*\\.v4\\.b32", ptx)) for way in ("ld", "st")]
        print(name, *wide)
"""


@pytest.mark.parametrize("case", ["d64-full", "d128-full", "d128-varlen-gqa"])
def test_rows_are_read_and_written_16_bytes_a_thread(case: str):
    """A tile is 8192 numbers and has 128 threads: O and dO are bf16, and so is dQ in the end."""
    pytest.importorskip("triton.backends.nvidia.compiler")
    paths = (str(SCRIPTS), str(SCRIPTS.parent), os.environ.get("PYTHONPATH", ""))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(
        [sys.executable, "-c", WIDTHS, case],
        capture_output=True, text=True, env=environment, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["prepare_kernel 16 16", "finish_kernel 16 8"]
