"""Who is right, before anyone gets a number.

Two questions, because either alone would pass a kernel that is wrong:

- **Against the truth, in slices.** For two pairs of a sequence and a key head (the longest sequence and
  the last one), ``reference.attention`` gives the exact output and gradients of all query heads that
  read that key head, some query rows at a time, so that no S x S matrix exists at any length.
- **Against each other, as a whole.** The slices are a small share of a large problem. A contender that
  passes them has to agree in every element, in the Frobenius norm, with at least half of the others.

The limit on relative errors is a few times what rounding explains in the data type, and well below what
a mistake costs: one key tile of 128 forgotten among 16k keys changes an output by about 9e-2.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

import torch
from torch import Tensor

from tilewise import reference
from tilewise.dispatch import Direction
from tilewise.perf.problem import DTYPE, Data, Problem
from tilewise.spec import Inputs, make_spec

Results = Mapping[str, Tensor]  # "out", and for a backward "dq", "dk", "dv"

OUTPUTS: dict[Direction, tuple[str, ...]] = {"forward": ("out",), "backward": ("dq", "dk", "dv")}
LIMITS = {"bf16": 2e-2, "fp16": 4e-3, "fp32": 1e-4, "fp64": 1e-9}

_SCORES_AT_ONCE = 2**23


def slices(problem: Problem) -> list[tuple[int, int]]:
    """The (sequence, key head) pairs that are compared with the truth."""
    lengths = problem.lengths or (problem.seqlen,) * problem.batch
    longest = lengths.index(max(lengths))
    return list(dict.fromkeys([(longest, 0), (len(lengths) - 1, problem.kv_heads - 1)]))


def cut(data: Data, name: str, tensor: Tensor, pair: tuple[int, int]) -> Tensor:
    """The slice's part of a tensor like q, k, v or their gradients: (S, heads, D)."""
    p, (sequence, head) = data.problem, pair
    if p.lengths is None:
        rows = tensor[sequence]
    else:
        start = sum(p.lengths[:sequence])
        rows = tensor[start : start + p.lengths[sequence]]
    group = p.heads // p.kv_heads
    if name in ("k", "v", "dk", "dv"):
        return rows[:, head : head + 1]
    return rows[:, head * group : (head + 1) * group]


def exact(data: Data, pair: tuple[int, int], with_gradients: bool) -> dict[str, Tensor]:
    """The right results of one slice, as (S, heads, D); fp64, or fp32 where inputs have 16 bits."""
    p = data.problem
    dtype = torch.float32 if DTYPE[p.dtype].itemsize == 2 else torch.float64
    q, k, v, dout = (cut(data, name, getattr(data, name), pair).to(dtype) for name in _INPUTS)
    k, v = (t.detach().requires_grad_(with_gradients) for t in (k, v))
    length, heads = q.shape[:2]
    rows = max(1, _SCORES_AT_ONCE // (length * heads))
    parts: dict[str, list[Tensor]] = {"out": [], "dq": []}
    for first in range(0, length, rows):
        last = min(first + rows, length)
        part = q[first:last].detach().requires_grad_(with_gradients)
        out = _rows(data, pair[1], part, k, v, first)
        if with_gradients:
            out.backward(dout[first:last])
            assert part.grad is not None
            parts["dq"].append(part.grad)
        parts["out"].append(out.detach())
    found = {name: torch.cat(tensors) for name, tensors in parts.items() if tensors}
    if with_gradients:
        assert k.grad is not None and v.grad is not None
        found |= {"dk": k.grad, "dv": v.grad}
    return found


_INPUTS = ("q", "k", "v", "dout")


def _rows(data: Data, kv_head: int, q: Tensor, k: Tensor, v: Tensor, first: int) -> Tensor:
    """Output of some query rows, from row ``first`` on."""
    p, dtype = data.problem, q.dtype
    last, length = first + len(q), len(k)
    heads = slice(kv_head * q.shape[1], (kv_head + 1) * q.shape[1])
    # Masks are aligned to the last row. These rows end earlier, so their band moves by as much.
    left, right = p.window
    right = 0 if p.causal and right is None else right
    left = None if left is None else left + (length - last)
    right = None if right is None else right - (length - last)
    bias = None if data.bias is None else data.bias[:, :, first:last].to(dtype)
    if data.alibi_slopes is not None:
        # Written out, since the reference would count distances from these rows' own end.
        i, j = (torch.arange(*span, device=q.device) for span in ((first, last), (0, length)))
        distance = (i[:, None] - j).abs().to(dtype)
        slopes = data.alibi_slopes[heads].to(dtype)[None, :, None, None]
        bias = -slopes * distance if bias is None else bias - slopes * distance
    sink = None if data.sink is None else data.sink[heads].to(dtype)
    x = Inputs(q[None], k[None], v[None], bias=bias, sink=sink)
    spec = make_spec(x, window_left=left, window_right=right, softcap=p.softcap)
    return reference.attention(spec, x, dtype)[0][0]


Errors = dict[str, float]  # by tensor
Faults = dict[str, str]  # by tensor


def judge(data: Data, found: Mapping[str, Results]) -> tuple[dict[str, Errors], dict[str, Faults]]:
    """The relative errors of each contender, and for the tensors that are wrong the reason.

    found: the results of each contender, in the data's own shapes.
    """
    errors: dict[str, Errors] = {name: dict.fromkeys(results, 0.0) for name, results in found.items()}
    for pair in slices(data.problem) if found else []:
        truth = exact(data, pair, any("dq" in results for results in found.values()))
        for name, results in found.items():
            for tensor, value in results.items():
                error = relative(cut(data, tensor, value, pair), truth[tensor])
                errors[name][tensor] = max(errors[name][tensor], error)
    limit = LIMITS[data.problem.dtype]
    faults: dict[str, Faults] = {name: {} for name in found}
    for tensor in ("out", "dq", "dk", "dv"):
        passed = {}
        for name, results in found.items():
            if tensor not in results:
                continue
            if errors[name][tensor] <= limit:
                passed[name] = results[tensor]
            else:
                faults[name][tensor] = (
                    f"{tensor} is off by {errors[name][tensor]:.1e}, allowed is {limit:.0e}"
                )
        for name, others in _outvoted(passed, 2 * limit).items():
            faults[name][tensor] = (
                f"{tensor} is right where it was sampled, but elsewhere not that of {others}"
            )
    return errors, faults


def _outvoted(passed: Mapping[str, Tensor], limit: float) -> dict[str, str]:
    """Those that differ from more than half of the others, and from whom."""
    apart: dict[str, list[str]] = {name: [] for name in passed}
    for one, other in combinations(passed, 2):
        if not relative(passed[one], passed[other]) <= limit:
            apart[one].append(other)
            apart[other].append(one)
    return {name: ", ".join(names) for name, names in apart.items() if 2 * len(names) > len(passed) - 1}


def relative(x: Tensor, truth: Tensor) -> float:
    """The Frobenius norm of the error, relative to the truth's; infinite if x is not finite."""
    wide = torch.float64 if truth.dtype == torch.float64 else torch.float32
    error, size = ((t.to(wide)).norm().item() for t in (x.to(wide) - truth.to(wide), truth))
    if error != error or size != size:
        return float("inf")
    return error / size if size else (0.0 if error == 0 else float("inf"))
