# ruff: noqa: E741 (m and l are the names of the paper)
"""FlashAttention-2 as tile loops in PyTorch (Dao, 2023).

Queries in the outer loop of the forward: a tile of the output stays where it is, unnormalised, until
all its keys are seen; it is divided once, and leaves one number per row, the log-sum-exp.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tilewise.backends.cpu.threads import run
from tilewise.backends.cpu.tile import Part, Sums, exp_, parts
from tilewise.ops import Gradients
from tilewise.spec import AttentionSpec, Inputs


def forward(spec: AttentionSpec, x: Inputs, out: Tensor, lse: Tensor, saved: Tensor) -> None:
    """Algorithm 1 of the paper.

    Fills out, shaped like q with Dv for D, and lse, (B, Hq, Sq) or varlen (Hq, total) in fp32 (fp64
    for fp64 inputs). And saved, (1, *lse.shape): what rounding took from lse.
    """
    run(lambda part: _forward(part, out, lse, saved), parts(spec, x))


def _forward(part: Part, out: Tensor, lse: Tensor, saved: Tensor) -> None:
    q, k, v = part.queries(part.x.q), part.keys(part.x.k), part.keys(part.x.v)
    attend(part, q, k, v, out, lse, saved)


def attend(
    part: Part,
    q_all: Tensor,
    k_all: Tensor,
    v_all: Tensor,
    out: Tensor,
    lse: Tensor,
    saved: Tensor,
    round_weights_: Callable[[Tensor], Tensor] = lambda p: p,
) -> None:
    """The loop over the tiles of a part. q_all, k_all, v_all: its views of queries, keys and values.
    round_weights_: what becomes of weights, in [0, 1], before their product with values; in place."""
    for i in part.query_blocks():
        q = part.scaled(part.load(q_all, i))
        m, l = part.start_without_sink(i)
        o = part.zeros(q.shape[1], part.spec.head_dim_v)
        for j, masked in part.key_tiles(i):
            k, v = part.load(k_all, j), part.load(v_all, j)
            s = part.scores(q, k, i, j, masked)
            m_new = torch.maximum(m, s.amax(dim=-1, keepdim=True))
            p = exp_(s.sub_(m_new))
            rescale = exp_(m.sub_(m_new))
            l.mul_(rescale).add_(p.sum(dim=-1, keepdim=True))
            o.mul_(rescale).baddbmm_(part.dropped(round_weights_(p), part.kept(i, j)), v)
            m = m_new
        m = part.join_sink(i, m, l, o)
        # l = 0 in a row that saw nothing, and so is o; in any other l >= 1.
        part.store(part.queries(out), i, o.div_(l.clamp_min(torch.finfo(l.dtype).tiny)))
        log_l = l.log()
        norm = m + log_l
        part.store(part.rows(lse), i, norm)
        for statistic in saved:
            part.store(part.rows(statistic), i, log_l.sub_(norm - m).nan_to_num_(0))


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
    """Algorithm 2 of the paper: keys in the outer loop, P recomputed from the log-sum-exp.

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
    # exp(s - lse) = 0 in a row that saw nothing, whose lse is -inf.
    norm = part.load(lse_all, part.all_queries)
    norm = norm.masked_fill(norm == -math.inf, math.inf)
    shrink = _rounded_away(part, saved)
    delta = torch.empty_like(norm)
    for i in part.query_blocks():
        delta[:, part.packed(i)] = part.delta(o_all, lse_all, do_all, dlse_all, i)
    dq = part.zeros(norm.shape[1], part.spec.head_dim)
    for j in part.key_blocks():
        k, v = part.load(k_all, j), part.load(v_all, j)
        dk, dv = part.zeros(len(j), part.spec.head_dim), part.zeros(len(j), part.spec.head_dim_v)
        for i, masked in part.query_tiles(j):
            rows = part.packed(i)
            q, do = part.scaled(part.load(q_all, i)), part.load(do_all, i)
            slope = part.new_slope(q.shape[1], len(j))
            p = exp_(part.scores(q, k, i, j, masked, slope).sub_(norm[:, rows]))
            p = p if shrink is None else p.mul_(shrink[:, rows])
            keep = part.kept(i, j)
            dv.baddbmm_(part.dropped(p, keep).mT, do)
            ds = part.weight_gradient(do, v, keep).sub_(delta[:, rows]).mul_(p)
            sums.add_bias(part, ds, i, j)
            ds = ds if slope is None else ds.mul_(slope)
            dk.baddbmm_(ds.mT, q)
            dq[:, rows] += torch.bmm(ds, k)
        part.store(part.keys(grads.k), j, dk)
        part.store(part.keys(grads.v), j, dv)
    part.store(part.queries(grads.q), part.all_queries, dq.mul_(part.factor))
    weight = exp_(part.sink_logits(part.all_queries) - norm)
    sums.add_sink(part, weight if shrink is None else weight.mul_(shrink), delta)


def _rounded_away(part: Part, saved: Tensor) -> Tensor | None:
    """The factor that exp(s - lse) still lacks in each row, (H, Sq G, 1); None if it is 1 in all.

    A row whose every key carries a bias of -1e9 (the usual additive mask) has lse = -1e9 + log l, from
    which rounding takes all of log l: its weights would add up to the number of its keys.
    """
    for statistic in saved:
        rest = part.load(part.rows(statistic), part.all_queries)
        if bool((rest.abs() > 4 * torch.finfo(rest.dtype).eps).any()):
            return exp_(-rest)
    return None
