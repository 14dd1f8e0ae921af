"""What parts of a query tile's keys gave, put together: the attention over all of them.

Each part has its own softmax, so its output counts by exp of its log-sum-exp (Dao et al.,
"FlashAttention", 2022, section 3.1). Parts are added in the same order, whoever computed them when: the
result is the same every time.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from tilewise.backends.hopper.agenda import Agenda
from tilewise.backends.relaunch import Relaunch
from tilewise.backends.triton.tile import finite
from tilewise.spec import AttentionSpec

ROWS = 8  # of a program
AT_ONCE = 4  # parts whose loads are under way together
INF = tl.constexpr(float("inf"))


@triton.jit(do_not_specialize=["o_batch", "o_row", "o_head", "lse_batch", "lse_head", "heads", "max_q"])
def join_kernel(
    o_parts,  # fp32 (parts, TILE_Q, BLOCK_DV)
    lse_parts,  # fp32 (parts, TILE_Q)
    broken,  # see ``Agenda``
    out_ptr,
    o_batch,  # strides
    o_row,
    o_head,
    lse_ptr,
    lse_batch,
    lse_head,
    sink_ptr,  # (Hq,), or None
    heads,
    max_q,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    TILE_Q: tl.constexpr,
    ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """ROWS rows of one broken query tile."""
    BLOCKS: tl.constexpr = TILE_Q // ROWS
    entry = broken + tl.program_id(0) // BLOCKS * 3
    t = tl.load(entry)
    begin = tl.load(entry + 1)
    stop = begin + tl.load(entry + 2)
    rows = tl.program_id(0) % BLOCKS * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_DV)
    top = tl.full([ROWS], -INF, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    for first in range(begin, stop, AT_ONCE):
        for n in tl.static_range(AT_ONCE):
            part = first + n
            there = part + 0 * rows < stop
            lse = tl.load(lse_parts + part * TILE_Q + rows, mask=there, other=-INF)
            at = ((part * TILE_Q + rows) * BLOCK_DV)[:, None] + columns[None, :]
            o = tl.load(o_parts + at, mask=there[:, None], other=0.0)
            new_top = tl.maximum(top, lse)
            shrink, weight = tl.exp(top - finite(new_top)), tl.exp(lse - finite(new_top))
            o = tl.where((lse == -INF)[:, None], 0.0, weight[:, None] * o)
            out = out * shrink[:, None] + o
            total = total * shrink + weight
            top = new_top
    tiles = tl.cdiv(max_q, TILE_Q)
    b = (t // tiles // heads).to(tl.int64)
    head = (t // tiles % heads).to(tl.int64)
    if sink_ptr is not None:
        sink = tl.load(sink_ptr + head).to(tl.float32)
        new_top = tl.maximum(top, sink)
        shrink = tl.exp(top - finite(new_top))
        out *= shrink[:, None]
        total = total * shrink + tl.exp(sink - finite(new_top))
        top = new_top
    dead = total == 0  # saw no key in any part
    total = tl.where(dead, 1.0, total)
    lse = tl.where(dead, -INF, finite(top) + tl.log(total))
    out /= total[:, None]

    i = t % tiles * TILE_Q + rows
    tl.store(lse_ptr + b * lse_batch + head * lse_head + i, lse, mask=i < max_q)
    base = out_ptr + b * o_batch + head * o_head
    at = i.to(tl.int64)[:, None] * o_row + columns[None, :]
    inside = (i < max_q)[:, None] & (columns < DV)[None, :]
    tl.store(base + at, out.to(out_ptr.dtype.element_ty), mask=inside)


def plan_join(
    spec: AttentionSpec, agenda: Agenda | None, tile_q: int, block_dv: int, forward: dict[str, Any]
) -> Relaunch | None:
    """How to join what an agenda breaks; None if that is nothing. forward: arguments of the forward,
    which has the same output."""
    if agenda is None or agenda.broken is None:
        return None
    strides = ("o_batch", "o_row", "o_head", "lse_batch", "lse_head")
    arguments = {
        **{name: forward[name] for name in strides},
        "heads": spec.heads_q,
        "max_q": spec.max_seqlen_q,
        "DV": spec.head_dim_v,
        "BLOCK_DV": block_dv,
        "TILE_Q": tile_q,
        "ROWS": ROWS,
        "AT_ONCE": AT_ONCE,
    }
    return Relaunch(len(agenda.broken) * (tile_q // ROWS), arguments, {"num_warps": 4})


def room_for_parts(agenda: Agenda, tile_q: int, block_dv: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Where the outputs of parts and their log-sum-exps go, fp32."""
    assert agenda.parts is not None
    rows = len(agenda.parts) * tile_q
    return like.new_empty(rows * block_dv), like.new_empty(rows)
