"""Inline assembly by twins: what a block of PTX computes, as a NumPy function looked up by its text."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tilewise.sim import engine, hopper
from tilewise.sim.barriers import Meeting
from tilewise.sim.dtypes import to_numpy
from tilewise.sim.values import Tensor, from_array, raw

Twin = Callable[..., Any]
_TWINS: dict[str, Twin] = {}


def _normal(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def register_asm(text: str, twin: Twin) -> None:
    """Say what a block of inline assembly computes.

    text: the string that the kernel passes; white space does not matter. twin: takes the operands as
    NumPy arrays that are broadcast to one shape, returns an array or a tuple of arrays.
    """
    _TWINS[_normal(text)] = twin


def inline_asm_elementwise(
    asm: Any, constraints: Any, args: Any, dtype: Any, is_pure: bool = True, pack: int = 1
) -> Any:
    text = _normal(str(getattr(asm, "value", asm)))
    barrier = re.fullmatch(
        r"(?:bar|barrier)(?:\.cta)?\.(sync|arrive)(?:\.aligned)? ([^,;]+), (\d+) ?;.*", text
    )
    arrays = [np.asarray(raw(a)) for a in args]
    shaped = np.broadcast_arrays(*arrays) if arrays else []
    if barrier is not None:
        _named_barrier(barrier, arrays, constraints)
        results: Any = np.zeros(shaped[0].shape if shaped else (), np.int32)
    elif text.startswith("cp.async.bulk.wait_group 0;"):
        hopper.store_wait(0, read_only=False)
        results = shaped[0]
    elif text in _TWINS:
        results = _TWINS[text](*shaped)
    else:
        raise NotImplementedError(
            f"inline assembly without a twin; see tilewise.sim.register_asm: {text!r}"
        )
    layout = next((a.layout for a in args if isinstance(a, Tensor)), None)
    dtypes = dtype if isinstance(dtype, list | tuple) else (dtype,)
    results = results if isinstance(results, tuple) else (results,)
    out = []
    for result, kind in zip(results, dtypes, strict=True):
        with np.errstate(all="ignore"):
            out.append(from_array(np.asarray(result).astype(to_numpy(kind)), layout))
    return tuple(out) if isinstance(dtype, list | tuple) else out[0]


class NamedBarriers:
    """The sixteen hardware barriers of each CTA."""

    def __init__(self) -> None:
        self.table: dict[Any, Meeting] = {}


def _named_barrier(match: re.Match[str], operands: list[Any], constraints: Any) -> None:
    p = engine.current()
    site = p.point()
    number = match[2].strip()
    if number.startswith("$"):
        outputs = str(constraints).count("=")
        number = str(int(operands[int(number[1:]) - outputs].flat[0]))
    table = p.engine.service(NamedBarriers).table
    meeting = table.setdefault((p.cta, number), Meeting(f"named barrier {number}"))
    meeting.arrive(p, 32 * p.warps, int(match[3]), match[1] == "sync", site)


def inline_asm(
    asm: Any, constraints: Any = "", args: Any = (), result_types: Any = (), is_pure: bool = False
) -> Any:
    if callable(asm):
        raise NotImplementedError("inline_asm with a function is not simulated")
    types = result_types if isinstance(result_types, list | tuple) else (result_types,)
    dtypes = [getattr(t, "element_ty", t) for t in types]
    out = inline_asm_elementwise(asm, constraints, args, dtypes or ["int32"], is_pure)
    return out if isinstance(result_types, list | tuple) else out[0]


register_asm("mov.b32 $0, 0;", lambda: np.zeros((), np.int32))
register_asm(
    "{ .reg .b32 n; shl.b32 n, $2, 23; add.s32 $0, n, $1; }",
    lambda p, t: ((t.view(np.int32) << 23) + p.view(np.int32)).view(np.float32),
)
