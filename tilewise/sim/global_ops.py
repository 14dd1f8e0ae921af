"""Loads, stores and atomics of global memory by a partition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilewise.sim import engine
from tilewise.sim.dtypes import poison
from tilewise.sim.engine import Partition
from tilewise.sim.findings import Site
from tilewise.sim.global_memory import Descriptor, log
from tilewise.sim.ownership import register_box
from tilewise.sim.values import Pointer, Tensor, from_array, raw, scalar


def _addresses(ptr: Pointer, mask: Any, p: Partition, site: Site) -> tuple[Any, Any]:
    """Offsets and which of them are really accessed; those outside the tensor are a finding."""
    off = np.asarray(ptr.offset)
    on = np.ones(off.shape, bool) if mask is None else np.asarray(raw(mask), bool)
    off, on = np.broadcast_arrays(off, on)
    bad = on & ((off < 0) | (off >= ptr.memory.array.size))
    if bad.any():
        text = f"{int(bad.sum())} of {off.size} addresses lie outside {ptr.memory.name}, at {site}"
        p.engine.report("bounds", text, site, key=site[:3])
    return off, on & ~bad


def _own(ptr: Pointer, on: Any, p: Partition, alike: bool) -> Any:
    """In a cluster each CTA accesses its own part. What all hold alike, each loads for itself (`alike`),
    but only the first one stores.
    """
    if p.cta.cluster.size == 1:
        return on
    box = register_box(ptr.layout, ptr.shape, p.cta.rank)
    if box is None:
        return on & (alike or p.cta.rank == 0)
    mine = np.zeros(on.shape, bool)
    mine[tuple(slice(*b) for b in box)] = True
    return on & mine


def load(
    pointer: Pointer,
    mask: Any = None,
    other: Any = None,
    *,
    cache_modifier: Any = None,
    eviction_policy: Any = None,
    volatile: bool = False,
    cache_policy: Any = None,
) -> Any:
    p = engine.current()
    site = p.point()
    memory = pointer.memory
    off, on = _addresses(pointer, mask, p, site)
    mine = _own(pointer, np.ones(off.shape, bool), p, alike=True)
    on = on & mine
    p.engine.cost.global_(p, int(mine.sum()) * memory.dtype.itemsize, "load")
    kind = "atomic" if volatile else "read"
    log().access(p.engine, memory, off[on], kind, p.agent, p.clock[p.agent], p.clock, site)
    fill = poison(memory.dtype) if other is None else np.asarray(raw(other)).astype(memory.dtype)
    values = np.where(on, memory.array[np.where(on, off, 0)], np.where(mine, fill, poison(memory.dtype)))
    return from_array(values.astype(memory.dtype), pointer.layout)


def store(
    pointer: Pointer,
    value: Any,
    mask: Any = None,
    *,
    cache_modifier: Any = None,
    eviction_policy: Any = None,
    cache_policy: Any = None,
) -> None:
    p = engine.current()
    site = p.point()
    memory = pointer.memory
    off, on = _addresses(pointer, mask, p, site)
    on = _own(pointer, on, p, alike=False)
    p.engine.cost.global_(p, int(on.sum()) * memory.dtype.itemsize, "store")
    log().access(p.engine, memory, off[on], "write", p.agent, p.clock[p.agent], p.clock, site)
    with np.errstate(all="ignore"):
        values = np.broadcast_to(np.asarray(raw(value)).astype(memory.dtype), off.shape)
    memory.array[off[on]] = values[on]
    log().changed(p.engine, memory, off[on] if log().watchers else ())


def _fields(sem: Any, scope: Any) -> tuple[bool, bool, str]:
    """Does it acquire, does it release, and among whom; Triton's defaults are acq_rel and gpu."""
    sem = str(getattr(sem, "value", sem) or "acq_rel")
    scope = str(getattr(scope, "value", scope) or "gpu")
    if sem not in ("relaxed", "acquire", "release", "acq_rel"):
        raise ValueError(f"memory semantics {sem!r}")
    return sem in ("acquire", "acq_rel"), sem in ("release", "acq_rel"), scope


def _lock_key(pointer: Pointer, off: int, scope: str, p: Partition) -> Any:
    """Atomics of scope "cta" order nothing between CTAs."""
    address = pointer.memory.first_byte + off * pointer.memory.dtype.itemsize
    return (pointer.memory.storage, address, p.cta if scope == "cta" else None)


def _read_modify_write(
    pointer: Pointer, fn: Callable[[Any], Any], mask: Any, sem: Any, scope: Any, reads_only: bool = False
) -> Any:
    """`fn` maps old values to new ones, for the addresses that are on."""
    p = engine.current()
    site = p.point()
    memory, e = pointer.memory, p.engine
    off, on = _addresses(pointer, mask, p, site)
    acquire, release, scope = _fields(sem, scope)
    e.cost.global_(p, off.size * memory.dtype.itemsize, "atomic")
    if off.ndim:  # a tile of atomics accumulates; it is not used to synchronise
        on = _own(pointer, on, p, alike=False)
        log().access(e, memory, off[on], "atomic", p.agent, p.clock[p.agent], p.clock, site)
        old = memory.array[np.where(on, off, 0)]
        _apply(memory.array, off[on], fn, on)
        log().changed(e, memory, off[on] if log().watchers else ())
        return Tensor(old, pointer.layout)
    cluster = p.cta.cluster
    cluster.meet(p)  # a scalar atomic runs once per cluster, and every CTA gets the result
    if p.cta.rank == 0:
        if on:
            _doze_if_in_vain(p, memory, int(off), fn, site)
            key = _lock_key(pointer, int(off), scope, p)
            if acquire:
                log().synchronise(p, key, True, False)
            log().access(e, memory, off.reshape(1), "atomic", p.agent, p.clock[p.agent], p.clock, site)
            old = memory.array[int(off)]
            new = fn(old)
            if release and not reads_only:
                log().synchronise(p, key, False, True)
            if not reads_only and new != old:
                memory.array[int(off)] = new
                log().changed(e, memory, off)
        else:
            old = poison(memory.dtype)
        cluster.results[p.name] = old
    cluster.meet(p)
    return scalar(np.asarray(cluster.results[p.name]).item(), memory.dtype)


def _doze_if_in_vain(p: Any, memory: Any, off: int, fn: Callable[[Any], Any], site: Any) -> None:
    """Puts off a look at what the partition saw in its last step as well, if it would change nothing."""
    address = (memory.storage, memory.first_byte + off * memory.dtype.itemsize)
    value = memory.array[off]
    in_vain = fn(value) == value
    if in_vain and p.looked == (address, value, p.steps - 1):
        p.doze(lambda wake: log().watch(address, wake), f"{memory.name}[{off}]", site)
    p.looked = (address, value, p.steps) if in_vain else None


def _apply(array: Any, off: Any, fn: Any, on: Any) -> None:
    ufunc, values = fn.args
    values = np.broadcast_to(values, on.shape)[on]
    if ufunc is None:
        array[off] = values
    else:
        ufunc.at(array, off, values)


class _Change:
    """old -> ufunc(old, value); also usable for many addresses at once, some of them equal."""

    def __init__(self, ufunc: Any, value: Any, dtype: Any) -> None:
        with np.errstate(all="ignore"):
            self.args = (ufunc, np.asarray(raw(value)).astype(dtype))

    def __call__(self, old: Any) -> Any:
        ufunc, value = self.args
        with np.errstate(all="ignore"):
            return value if ufunc is None else ufunc(old, value)


def _atomic(ufunc: Any) -> Callable[..., Any]:
    def op(pointer: Pointer, val: Any, mask: Any = None, sem: Any = None, scope: Any = None) -> Any:
        change = _Change(ufunc, val, pointer.memory.dtype)
        return _read_modify_write(pointer, change, mask, sem, scope)

    return op


atomic_add = _atomic(np.add)
atomic_max = _atomic(np.maximum)
atomic_min = _atomic(np.minimum)
atomic_and = _atomic(np.bitwise_and)
atomic_or = _atomic(np.bitwise_or)
atomic_xor = _atomic(np.bitwise_xor)
atomic_xchg = _atomic(None)


def atomic_cas(pointer: Pointer, cmp: Any, val: Any, sem: Any = None, scope: Any = None) -> Any:
    if pointer.shape:
        raise NotImplementedError("atomic_cas of a tile is not simulated")
    return _read_modify_write(pointer, lambda old: val if old == cmp else old, None, sem, scope)


def atomic_load(
    pointer: Pointer, mask: Any = None, other: Any = None, sem: Any = "acquire", scope: Any = None
) -> Any:
    if pointer.shape:
        raise NotImplementedError("atomic_load of a tile is not simulated")
    return _read_modify_write(pointer, lambda old: old, mask, sem, scope, reads_only=True)


def atomic_store(
    pointer: Pointer, val: Any, mask: Any = None, sem: Any = "release", scope: Any = None
) -> None:
    if pointer.shape:
        raise NotImplementedError("atomic_store of a tile is not simulated")
    change = _Change(None, val, pointer.memory.dtype)
    _read_modify_write(pointer, change, mask, sem, scope)


def atomic_poll(pointer: Pointer, val: Any, sem: Any = "acquire", scope: Any = None, **__: Any) -> Any:
    """Wait until the address holds a value."""
    p = engine.current()
    site = p.point()
    memory = pointer.memory
    off, _on = _addresses(pointer, None, p, site)
    acquire, _, scope = _fields(sem, scope)
    p.cta.cluster.meet(p)
    if p.cta.rank == 0:
        address = (memory.storage, memory.first_byte + int(off) * memory.dtype.itemsize)

        def state() -> str:
            return "; ".join(filter(None, [f"it is {memory.array[int(off)]}", p.engine.apart]))

        while memory.array[int(off)] != raw(val):
            log().watch(address, p.resume)
            what = f"{memory.name}[{int(off)}] to become {int(val)}"
            p.block(memory.name, lambda: (what, state()), site)  # noqa: B023
        log().synchronise(p, _lock_key(pointer, int(off), scope, p), acquire, False)
        at = off.reshape(1)
        log().access(p.engine, memory, at, "atomic", p.agent, p.clock[p.agent], p.clock, site)
    p.cta.cluster.meet(p)
    return val


def make_tensor_descriptor(
    base: Pointer, shape: Any, strides: Any, block_shape: Any, layout: Any, padding_option: str = "zero"
) -> Descriptor:
    from tilewise.sim.global_memory import GlobalTensor

    memory: Any = base.memory
    if int(base.offset):
        moved = GlobalTensor.__new__(GlobalTensor)
        moved.__dict__.update(memory.__dict__)
        moved.array = memory.array[int(base.offset) :]
        moved.first_byte = memory.first_byte + int(base.offset) * memory.dtype.itemsize
        memory = moved
    return Descriptor(memory, shape, strides, block_shape, layout, padding_option)
