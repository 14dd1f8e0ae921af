"""Blackwell: tcgen05 products on one and two CTAs, commits, copies, packed arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewise.sim import engine, numerics
from tilewise.sim.asynchronous import Pending, Queue
from tilewise.sim.barriers import Barriers
from tilewise.sim.cost import MmaShape
from tilewise.sim.memory import View
from tilewise.sim.tensor_memory import TensorView, allocate_tensor_memory, register_layout
from tilewise.sim.values import F32, Tensor, charge, operate, raw

# ---- the tensor core


class TensorQueue(Queue):
    what = "tcgen05 operation(s)"

    def leftover(self) -> None:
        return None  # nobody waits for these but through barriers


def _leads(p: Any, two_ctas: bool) -> bool:
    """Of a pair, the even CTA issues."""
    return not two_ctas or p.cta.rank % 2 == 0


def _group(p: Any, two_ctas: bool) -> list[int]:
    return [p.cta.rank, p.cta.rank + 1] if two_ctas else [p.cta.rank]


def _operand(view: View, ranks: list[int]) -> list[View]:
    """The parts of an operand in the memories of the CTAs that work together."""
    if not view.divided:
        return [view.on(ranks[0])]
    return [view.on(r).narrow(view.on(r).own_box()) for r in ranks]


def _assemble(view: View, ranks: list[int], who: Any) -> Any:
    """Read an operand whole, part by part, as the tensor core does."""
    whole = np.empty(view.np_shape, view.np_dtype)
    for rank, part in zip(ranks, _operand(view, ranks), strict=False):
        part.access(False, "async", *who)
        box = view.on(rank).own_box()
        whole[tuple(slice(*b) for b in box) if box is not None else ...] = part.get("async")
    return whole


def _scatter(view: View, ranks: list[int], value: Any, who: Any) -> None:
    for rank, part in zip(ranks, _operand(view, ranks), strict=False):
        box = view.on(rank).own_box()
        part.access(True, "async", *who)
        part.put("async", value[tuple(slice(*b) for b in box) if box is not None else ...])


def _spoil(parts: list[View]) -> None:
    for part in parts:
        part.spoil()


def tcgen05_mma(
    a: View,
    b: View,
    acc: TensorView,
    *,
    use_acc: Any = True,
    pred: Any = True,
    multicast: bool = False,
    mbarriers: Any = None,
    mbarrier_preds: Any = None,
) -> None:
    p = engine.current()
    site = p.point()
    two = bool(getattr(acc.layout, "two_ctas", False))
    if not pred or not _leads(p, two):
        _synchronous_peer(p, pred, mbarriers)
        return
    e = p.engine
    (m, k), n = a.shape, b.shape[1]
    if b.shape[0] != k or acc.shape != [m, n]:
        raise TypeError(f"tcgen05_mma of {a.shape} and {b.shape} into {acc.shape}")
    queue = p.queue(TensorQueue)
    agent = queue.agent_of(p, "tcgen05")
    known, tells, tick = p.fork(agent, in_order=True)
    ranks, use = _group(p, two), bool(use_acc)
    bits = 8 * b.np_dtype.itemsize
    spaces = ("tensor" if isinstance(a, TensorView) else "shared", "shared")
    shape = MmaShape(m, n, k, bits, *spaces, (4, 1), "tcgen05", 2 if two else 1)
    begins, when = max(e.now, queue.last), e.cost.mma(p, shape, queue.last)
    queue.last = when
    op = Pending(site, tells, "the tcgen05 MMA")
    if (
        not use
    ):  # the old contents are gone once this product begins, which is when the one before it ends
        e.at(begins, lambda: _spoil(_operand(acc, ranks)))

    def complete() -> None:
        who = (agent, tick, known, site)
        product = numerics.dot(_assemble(a, ranks, who), _assemble(b, ranks, who))
        if use:
            with np.errstate(all="ignore"):
                product = product + _assemble(acc, ranks, who)
        _scatter(acc, ranks, product.astype(acc.np_dtype), who)
        op.finish()

    e.at(when, complete)
    if mbarriers is None:
        op.wait(p, site)
        if two:
            p.cta.cluster.meet(p)
        return
    preds = mbarrier_preds if mbarrier_preds is not None else [True] * len(mbarriers)
    for bar, on in zip(mbarriers, preds, strict=True):
        if on:
            _commit(p, bar, _group(p, two), site)


def _synchronous_peer(p: Any, pred: Any, mbarriers: Any) -> None:
    """The odd CTA of a pair waits for a product without barriers, too."""
    if pred and mbarriers is None:
        p.cta.cluster.meet(p)


def _commit(p: Any, barrier: Barriers, ranks: list[int], site: Any) -> None:
    """Arrive on the barrier of each CTA once everything issued so far is complete."""
    e, queue = p.engine, p.queue(TensorQueue)
    _, tells, _ = p.fork(queue.agent_of(p, "tcgen05"), in_order=True)
    bars = {id(bar): bar for bar in (barrier.on(r) for r in ranks)}

    def arrive() -> None:
        for bar in bars.values():
            bar.arrive(tells, 1, e, site)

    e.at(max(e.now, queue.last), arrive)


def tcgen05_commit(barrier: Barriers, pred: Any = True, descs: Any = (), two_ctas: Any = None) -> None:
    p = engine.current()
    site = p.point()
    if not pred:
        return
    two = p.cta.cluster.size > 1 and _pair_kernel(p)
    if _leads(p, two):
        _commit(p, barrier, _group(p, two), site)


def _pair_kernel(p: Any) -> bool:
    """Does this cluster use products on pairs? All of a kernel's products do or none."""
    return any(a.two_ctas for a in p.cta.memories)


def tcgen05_copy(src: View, dst: TensorView) -> None:
    p = engine.current()
    site = p.point()
    e, queue = p.engine, p.queue(TensorQueue)
    if src.shape != dst.shape:
        raise NotImplementedError("tcgen05_copy between different shapes (scales) is not simulated")
    agent = queue.agent_of(p, "tcgen05")
    known, _, tick = p.fork(agent, in_order=True)
    e.at(max(e.now, queue.last), dst.spoil)
    when = max(queue.last, e.cost.copy(p, 1, src.nbytes, "tcgen05.cp")[0][2])
    queue.last = when

    def complete() -> None:
        ranks, who = [p.cta.rank], (agent, tick, known, site)
        _scatter(dst, ranks, _assemble(src, ranks, who).astype(dst.np_dtype), who)

    e.at(when, complete)


def tcgen05_mma_barrier_count(smems: Any, multicast: Any, two_ctas: Any) -> int:
    if not smems or not multicast:
        return 1
    raise NotImplementedError("tcgen05_mma_barrier_count with multicast is not simulated")


def get_tmem_reg_layout(
    dtype: Any,
    shape: Any,
    layout: Any,
    num_warps: int,
    instr_variant: str = "32x32b",
    cga_layout: Any = (),
) -> Any:
    """Triton 3.6's function of this name, and tilewise.gluon.compat's tmem_register_layout."""
    return register_layout(dtype, tuple(int(n) for n in shape), layout, int(num_warps), instr_variant)


# ---- packed arithmetic: two fp32 operations in one instruction, numerically ordinary


def _packed(name: str) -> Any:
    def op(lhs: Any, rhs: Any, dtype: Any = None) -> Any:
        return operate(name, lhs, rhs)

    return op


add2, sub2, mul2 = _packed("add"), _packed("sub"), _packed("mul")


def fma2(lhs: Any, rhs: Any, acc: Any, dtype: Any = None) -> Any:
    like = next(v for v in (lhs, rhs, acc) if isinstance(v, Tensor))
    result = numerics.fma(raw(lhs), raw(rhs), raw(acc))
    charge("fma", result.size, F32)
    layouts = [v for v in (lhs, rhs, acc) if isinstance(v, Tensor) and v.shape == list(result.shape)]
    return Tensor(result, layouts[0].layout if layouts else like.layout)


__all__ = ["TensorView", "allocate_tensor_memory", "tcgen05_commit", "tcgen05_mma"]
