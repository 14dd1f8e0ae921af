# ruff: noqa: E741 (m and l are the names of the paper)
"""FlashAttention as tile loops in PyTorch (Dao et al., NeurIPS 2022).

Keys in the outer loop of the forward: O, m and l of all rows stay in memory, every tile updates its
rows of them, and O is normalised at each step.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilewise.backends.cpu.threads import run
from tilewise.backends.cpu.tile import Part, Sums, exp_, parts
from tilewise.ops import Gradients
from tilewise.spec import AttentionSpec, Inputs


def forward(spec: AttentionSpec, x: Inputs, out: Tensor, lse: Tensor, saved: Tensor) -> None:
    """Algorithm 2 of the paper (with algorithm 1's order of the loops).

    Fills out, shaped like q with Dv for D; lse, (B, Hq, Sq) or varlen (Hq, total) in fp32 (fp64 for
    fp64 inputs); and saved, (2, *lse.shape): m, the maximum of each row, and l, the sum of
    exp(s - m).
    """
    run(lambda part: _forward(part, out, lse, saved), parts(spec, x))


def _forward(part: Part, out: Tensor, lse: Tensor, saved: Tensor) -> None:
    q_all, k_all, v_all = part.queries(part.x.q), part.keys(part.x.k), part.keys(part.x.v)
    least, tiny = torch.finfo(lse.dtype).min, torch.finfo(lse.dtype).tiny
    m, l = part.start(part.all_queries)
    o = part.zeros(m.shape[1], part.spec.head_dim_v)
    for j in part.key_blocks():
        k, v = part.load(k_all, j), part.load(v_all, j)
        for i, masked in part.query_tiles(j):
            rows = part.packed(i)
            o_i, m_i, l_i = o[:, rows], m[:, rows], l[:, rows]
            s = part.scores(part.scaled(part.load(q_all, i)), k, i, j, masked)
            m_tile = s.amax(dim=-1, keepdim=True).clamp_min_(least)
            p = exp_(s.sub_(m_tile))
            l_tile = p.sum(dim=-1, keepdim=True)
            m_new = torch.maximum(m_i, m_tile)
            old, new = exp_(m_i - m_new).mul_(l_i), exp_(m_tile - m_new)
            l_new = old + new * l_tile
            pv = torch.bmm(part.dropped(p, part.kept(i, j)), v)
            # l_new = 0 in a row that saw nothing yet, and so are both terms of its o.
            o_i.mul_(old).add_(pv.mul_(new)).div_(l_new.clamp_min(tiny))
            m_i.copy_(m_new)
            l_i.copy_(l_new)
    part.store(part.queries(out), part.all_queries, o)
    part.store(part.rows(lse), part.all_queries, m + l.log())
    part.store(part.rows(saved[0]), part.all_queries, m)
    part.store(part.rows(saved[1]), part.all_queries, l)


def backward(
    spec: AttentionSpec,
    x: Inputs,
    out: Tensor,
    lse: Tensor,
    saved: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    grads: Gradients,
) -> None:
    """Algorithm 4 of the paper: keys in the outer loop, P recomputed from m and l.

    dout is shaped like out, dlse like lse. Fills the gradients of q, k and v, and those of bias and
    sink where there are any.
    """
    sums = Sums(spec, grads)
    run(
        lambda part: _backward(part, out, lse, saved, dout, dlse, grads, sums),
        parts(spec, x),
        in_order=sums.shared,
    )
    sums.finish()


def _backward(
    part: Part,
    out: Tensor,
    lse: Tensor,
    saved: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    grads: Gradients,
    sums: Sums,
) -> None:
    q_all, k_all, v_all = part.queries(part.x.q), part.keys(part.x.k), part.keys(part.x.v)
    o_all, do_all, lse_all = part.queries(out), part.queries(dout), part.rows(lse)
    dlse_all = None if dlse is None else part.rows(dlse)
    m, l = (part.load(part.rows(statistic), part.all_queries) for statistic in saved)
    l = l.masked_fill(l == 0, math.inf)  # p / l = 0 in a row that saw nothing
    dq = part.zeros(m.shape[1], part.spec.head_dim)
    for j in part.key_blocks():
        k, v = part.load(k_all, j), part.load(v_all, j)
        dk, dv = part.zeros(len(j), part.spec.head_dim), part.zeros(len(j), part.spec.head_dim_v)
        for i, masked in part.query_tiles(j):
            rows = part.packed(i)
            q, do = part.scaled(part.load(q_all, i)), part.load(do_all, i)
            slope = part.new_slope(q.shape[1], len(j))
            s = part.scores(q, k, i, j, masked, slope)
            p = exp_(s.sub_(m[:, rows])).div_(l[:, rows])
            keep = part.kept(i, j)
            dv.baddbmm_(part.dropped(p, keep).mT, do)
            delta = part.delta(o_all, lse_all, do_all, dlse_all, i)
            ds = part.weight_gradient(do, v, keep).sub_(delta).mul_(p)
            sums.add_bias(part, ds, i, j)
            ds = ds if slope is None else ds.mul_(slope)
            dk.baddbmm_(ds.mT, q)
            dq[:, rows] += torch.bmm(ds, k)
        part.store(part.keys(grads.k), j, dk)
        part.store(part.keys(grads.v), j, dv)
    part.store(part.queries(grads.q), part.all_queries, dq.mul_(part.factor))
    for i in part.query_blocks():
        weight = exp_(part.sink_logits(i) - m[:, part.packed(i)]).div_(l[:, part.packed(i)])
        sums.add_sink(part, weight, part.delta(o_all, lse_all, do_all, dlse_all, i))
