"""How wrong attention in fp8 may be: a bound that follows from the format, with no number tuned.

e4m3 has 3 bits of mantissa: rounding moves x by at most b = max(|x| / 16, scale / 1024), half a step of
normal and of subnormal numbers. To first order an output is off by a sum over all that is rounded, each
error times a derivative (w the weights, o the output, z what dropout does, s = scale q k):

    d o / d s_j = w_j (z_j v_j - o)        d o / d p_j = z_j v_j        d o / d v_j = w_j z_j
    d lse / d s_j = w_j

and a weight p_j, before the division and with the row's largest 1, is off by max(p_j / 16, 2**-18).
Roundings of different numbers are independent and uniform in a step, so the mean square of one is at
most b**2 / 3, and that of the sum at most the sum of these times derivatives squared: ``first``
squared.
``second`` is what curvature adds: exp's is w_j e_j**2 with e_j**2 the mean square of an error in s_j,
softcap's the slope of its slope. The rule, for out and lse:

    ||x - ref||  <=  (1 + 2 / sqrt(n)) ||first||  +  ||second||        (Frobenius, n elements)

Half a step is all of b only for numbers at the start of an octave: an honest implementation comes to two
thirds of this. Where scores are so large that none of this holds, what is left: an output lies between
the least and the largest value.
"""

from __future__ import annotations

import math

import accuracy
import torch
from problems import Problem, Results, Tensors, reference_results
from torch import Tensor

from tilewise import fp8
from tilewise.spec import Sequence, sequences

TILE = 128


def check(p: Problem, t: Tensors, got: Results) -> float:
    """Assert that out and lse are right. Returns the largest share of a bound that is made use of."""
    want = reference_results(t, "none", torch.float64)
    first, second = bounds(p, t, want)
    out_dtype = torch.bfloat16 if p.dtype == "fp8" else t.spec.dtype
    shares = [0.0]
    for name, dtype in (("out", out_dtype), ("lse", torch.float32)):
        x, ref = got[name], want[name]
        assert x.dtype == dtype and x.shape == ref.shape, name
        nowhere = ref == -math.inf
        assert torch.equal(x == -math.inf, nowhere), f"{name}: -inf or not, wrongly"
        x, ref = (a.double().masked_fill(nowhere, 0) for a in (x, ref))
        assert x.isfinite().all(), f"{name} is not finite"
        exact = (first[name] == 0) & (second[name] == 0)
        assert torch.equal(x[exact], ref[exact]), f"{name}: not exact where nothing is rounded"
        if x.numel():
            norm = (1 + 2 / math.sqrt(x.numel())) * float(first[name].norm()) + float(
                second[name].norm()
            )
            error = float((x - ref).norm())
            assert error <= norm, f"{name}: error {error:.3g} > {norm:.3g}"
            shares.append(error / norm if norm else 0.0)
    return max(shares)


def bounds(p: Problem, t: Tensors, want: Results) -> tuple[Results, Results]:
    """``first`` and ``second`` of out and lse, element by element."""
    first, second = ({n: torch.zeros_like(want[n]) for n in ("out", "lse")} for _ in range(2))
    weights, kept = accuracy._weights(t)
    for seq in sequences(t.spec, t.x):
        q, k, v = _operands(t, seq)
        for head in range(p.heads_q if seq.length_q and seq.length_k else 0):
            w, wz = (seq.queries(a)[:, head, : seq.length_k] for a in (weights, kept))
            o, lse = seq.queries(want["out"])[:, head], seq.rows(want["lse"])[head]
            kv = head // p.group
            of_head = (q[0][:, head], q[1][:, head], k[0][:, kv], k[1][:, kv], v[0][:, kv], v[1][:, kv])
            found = _head(p, t.spec.scale, w, wz, o, *of_head)
            cap = 2 * 1.0625 * v[0][:, kv].abs().amax(0) * (1 / (1 - p.dropout_p))
            step = 2.0**-12 if t.spec.dtype == torch.float16 else 2.0**-9
            rounded = 2 * step * o.abs() + accuracy.smallest(torch.float16) * (o != 0)
            seq.queries(first["out"])[:, head] = (found[0] / 3 + rounded.square()).sqrt().minimum(cap)
            seq.queries(second["out"])[:, head] = (found[1] / 3).minimum(cap)
            fp32 = 2.0**-21 * (1 + lse.abs() + _largest_score(t.spec.scale, *of_head[:4]))
            fp32 = fp32.masked_fill(lse == -math.inf, 0)
            seq.rows(first["lse"])[head] = (found[2] / 3 + fp32.square()).sqrt()
            seq.rows(second["lse"])[head] = found[3] / 3
    return first, second


def _head(
    p: Problem, scale: float, w: Tensor, wz: Tensor, o: Tensor, q: Tensor, bq: Tensor, k: Tensor,
    bk: Tensor, v: Tensor, bv: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The square of ``first``, and ``second``, of out (Sq, Dv) and of lse (Sq,), each three times."""
    slope, bend = torch.ones_like(w), 0.0
    if p.softcap is not None:
        slope = 1 - torch.tanh(q @ k.T * scale / p.softcap).square()
        bend = 0.385 / p.softcap  # half the largest second derivative
    of_keys = (q.square() @ bk.T.square() + bq.square() @ bk.T.square()) * scale**2
    of_scores = bq.square() @ k.T.square() * scale**2 + of_keys
    moved = wz[..., None] * v - w[..., None] * o[:, None]  # d o / d s: (Sq, Sk, Dv)
    capped = moved * slope[..., None]

    shared = torch.einsum("ijc,jd->icd", capped, k)  # one rounded query for all keys of its row
    out = torch.einsum("icd,id->ic", shared.square(), bq.square()) * scale**2
    out += torch.einsum("ijc,ij->ic", capped.square(), of_keys)
    bp = torch.maximum(w / 16, w.amax(1, keepdim=True) * 2.0**-18) * (wz / w.clamp_min(1e-300))
    out += bp.square() @ (v.abs() + bv).square() + wz.square() @ bv.square()
    curved = slope.square() + bend
    out_second = torch.einsum("ijc,ij->ic", moved.abs(), curved * of_scores)

    mean = ((w * slope) @ k).square()
    lse = (mean * bq.square()).sum(1) * scale**2 + ((w * slope).square() * of_keys).sum(1)
    return out, out_second, lse, (w * curved * of_scores).sum(1)


def _largest_score(scale: float, q: Tensor, bq: Tensor, k: Tensor, bk: Tensor) -> Tensor:
    return (q @ k.T * scale).abs().amax(1)


Rounded = tuple[Tensor, Tensor]  # exact numbers (rows, heads, width), and how far each may be moved


def _operands(t: Tensors, seq: Sequence) -> tuple[Rounded, Rounded, Rounded]:
    """Queries, keys and values of a sequence in fp64, where they are rounded: maybe rotated."""
    spec, x = t.spec, t.x
    q, k, v = (accuracy._known(a) for a in (seq.queries(x.q), seq.keys(x.k), seq.keys(x.v)))
    if spec.dtype == fp8.E4M3:
        for a, descale, group in (
            (q, x.q_descale, spec.group),
            (k, x.k_descale, 1),
            (v, x.v_descale, 1),
        ):
            if descale is not None:
                a *= descale[seq.number].double().repeat_interleave(group)[:, None]
        return tuple((a, torch.zeros_like(a)) for a in (q, k, v))  # type: ignore[return-value]
    if spec.fp8 == "rotated":
        q, k = _rotated(q, spec.group), _rotated(k, 1)
    return _rounded(q, spec.fp8, spec.group), _rounded(k, spec.fp8, 1), _rounded(v, spec.fp8, 1)


def _rounded(x: Tensor, how: str | None, group: int) -> Rounded:
    bound = torch.zeros_like(x)
    tile, heads = (max(len(x), 1), group) if how == "tensor" else (TILE, 1)
    for row in range(0, len(x), tile):
        for head in range(0, x.shape[1], heads):
            where = slice(row, row + tile), slice(head, head + heads)
            part = x[where]
            bound[where] = torch.maximum(part.abs() / 16, part.abs().max() / 448 / 1024)
    return x, bound


def _rotated(x: Tensor, group: int) -> Tensor:
    """By the matrix; signs are those of the key head."""
    width = fp8.padded(x.shape[-1])
    one = torch.ones(1, 1, dtype=torch.float64)
    while len(one) < width:
        one = torch.cat([torch.cat([one, one], 1), torch.cat([one, -one], 1)])
    sign = fp8.signs(range(x.shape[1] // group), width).double().repeat_interleave(group, 0)
    return torch.nn.functional.pad(x, (0, width - x.shape[-1])) * sign @ one / width**0.5
