"""Control of a program: its id, partitions, barriers of threads, assertions, and names for findings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilewise.sim import engine
from tilewise.sim.clocks import join
from tilewise.sim.engine import Partition
from tilewise.sim.values import I32, raw, scalar


def program_id(axis: int) -> Any:
    return scalar(engine.current().cta.program_id[int(axis)], I32)


def num_programs(axis: int) -> Any:
    return scalar(engine.current().cta.grid[int(axis)], I32)


def num_warps() -> int:
    return engine.current().warps


def num_ctas() -> int:
    return int(engine.current().cta.cluster.size)


def barrier(*, cluster: bool = False) -> None:
    """A barrier of the partition's own threads, which here are one; or of the whole cluster."""
    p = engine.current()
    p.point()
    if cluster:
        p.cta.cluster.meet(p)


def thread_barrier() -> None:
    barrier()


def static_assert(cond: Any, msg: Any = "") -> None:
    if not cond:
        raise AssertionError(f"static_assert: {msg}")


def device_assert(cond: Any, msg: str = "", mask: Any = None) -> None:
    import numpy as np

    bad = ~np.asarray(raw(cond), bool)
    if mask is not None:
        bad = bad & np.asarray(raw(mask), bool)
    if bad.any():
        site = engine.current().site()
        engine.report("assert", f"device_assert at {site}: {msg}", site)


def device_print(prefix: Any, *args: Any, hex: bool = False) -> None:
    print(engine.current().full_name, prefix, *(raw(a) for a in args))


def static_print(*values: Any, **_: Any) -> None:
    print(*values)


def assume(cond: Any) -> None:
    device_assert(cond, "assume")


def runtime_range(*args: Any, **_: Any) -> Any:
    """`range` in a kernel: the loop variable is a run-time integer, whatever the bounds are."""
    dtype = I32
    for a in args:
        wide = getattr(a, "np_dtype", I32)
        if wide.itemsize > dtype.itemsize:
            dtype = wide
    return (scalar(i, dtype) for i in range(*(int(a) for a in args)))


def warp_specialize(functions_and_args: Any, worker_num_warps: Any, worker_num_regs: Any = None) -> Any:
    """Run every function in a partition of its own; the first in the calling warps."""
    p = engine.current()
    e, cta = p.engine, p.cta
    if len(functions_and_args) - 1 != len(worker_num_warps):
        raise TypeError("warp_specialize needs a number of warps for every worker partition")
    if worker_num_regs is not None and len(worker_num_regs) != len(worker_num_warps):
        raise TypeError("warp_specialize needs a number of registers for every worker partition")
    site = p.point()
    names = [f"{i}:{f.__name__}" for i, (f, _) in enumerate(functions_and_args)]
    (first, first_args), workers = functions_and_args[0], functions_and_args[1:]
    left, sleeping = [len(workers)], [False]

    def ended() -> None:
        left[0] -= 1
        if left[0] == 0 and sleeping[0]:
            e.at(e.now, p.resume)

    kids = []
    for (function, args), warps, name in zip(workers, worker_num_warps, names[1:], strict=True):
        kids.append(Partition(cta, name, function, args, p.clock, int(warps)))
    p.release()
    for kid in kids:
        kid.joiners.append(ended)
        kid.start()
    outer, outer_name = p.name, p.agent.name
    p.rename(names[0])
    result = call(first, first_args)
    p.ended()
    p.tile = ""
    p.point()
    if left[0]:
        sleeping[0] = True
        p.block("the other partitions", lambda: ("the other partitions to return", ""), site)
    p.name, p.agent.name = outer, outer_name
    for kid in kids:
        join(p.clock, kid.clock)
    return result


def call(function: Callable[..., Any], args: Any) -> Any:
    return function(*args)


class Label:
    """`tilewise.gluon` names what it makes, and says which tile it is at; findings repeat that."""

    @staticmethod
    def label(value: Any, name: Any) -> None:
        name = str(getattr(name, "value", name))
        if hasattr(value, "table"):
            value.rename(name)
            value.label = name
        else:
            value.allocation.name = value.label = name
            for buffer in value.allocation.buffers:
                buffer.name = name

    @staticmethod
    def stages(value: Any, name: Any) -> None:
        """A buffer of stages: number i of it is called "stage i of `name`"."""
        Label.label(value, name)
        value.allocation.stages = value.label

    @staticmethod
    def at_tile(tile: Any) -> None:
        engine.current().tile = f"tile {int(tile)}"
