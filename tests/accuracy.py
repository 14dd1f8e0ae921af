"""The accuracy rule: when a kernel's result counts as right. All tolerances of the tests are here.

For every result x (out, lse and each gradient), against the reference in fp64:

1. max|x - ref| <= 2 max|plain - ref| + 2 ulp. ``plain`` is the same mathematics by plain PyTorch in
   the input dtype: a kernel may be twice as wrong as that. With softcap 3 times (its slope is a
   difference of nearly equal numbers), and 3e-4 more for gradients.
2. Beside it, since a ratio passes when both are bad: ||x - ref|| <= tolerance * ||ref|| (Frobenius),
   with 5e-3 for bf16, 8e-4 for fp16, 1e-5 for fp32.
3. Exactly: lse is -inf where the reference says so, and nothing else is NaN or infinite; where every
   term of a sum is zero (rows without keys, keys without queries, rows of no sequence), so is the sum.

What needs interpretation, and why each answer is no looser than rounding makes it:

- *Relative to what.* With one key, P = 1 and dS = dP - delta is exactly 0, but delta is made from an
  output that was rounded: any kernel's dq is noise around 0, and no number is small relative to 0. So
  the size of a result is taken as the larger of ||ref|| and the norm of its ``terms``: for each
  element, the root of the sum of squares of the products that are added up to it, which is what the
  sum would come to if its signs were random. For random data the two agree within a small factor;
  where terms cancel, only the second says what rounding one of them costs. A bug (a lost delta, a
  wrong sign) is as large as the terms and is caught either way. Both rules use this size, rule 1 for
  its ulp.
- *Which ulp.* That of the coarser of the input dtype, in which the kernel holds P, dS and out, and the
  result's own, at the largest element.
- *Tiny results.* The tolerances describe many independent roundings. With n elements the mean square
  scatters, and one element can meet its worst case, so a tolerance is multiplied by 1 + 2 / sqrt(n).
- *Underflow.* Below its smallest number a dtype has only 0: both rules grant each element that much.
- *Large scores.* A score s is fp32 at best, off by |s| 2**-24 for any kernel, and exp turns that into a
  relative error of the weight. The product, its scaling, the log-sum-exp and its change to base 2 are
  each rounded so: both rules grant 4 |s| 2**-24 of the result's size, with |s| the largest score that
  matters. That is 1e-6 in ordinary problems, and less than bf16 can see even for |s| = 1000.
  On a GPU's tensor cores a 16-bit score is a chain of D / 16 additions that truncate, each off by up to
  2**-23 of what has been summed so far: there both rules grant (1 + D / 128) times as much.
- *Softcap.* Its slope 1 - tanh^2 is a difference of numbers near 1, off by 2**-22 for any kernel in
  fp32; where it is so small that this is more than the tolerance, its terms count as if it were not.
- *lse* is fp32 whatever the inputs (no step to it is rounded to their dtype) and is held to fp32. Its
  terms are its largest score, itself, and 1: a relative error of the sum is an absolute one of its log.
- *fp64* has no reference more exact than itself: rule 1 is void and the tolerance 1e-12.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tilewise import reference
from tilewise.spec import sequences

if TYPE_CHECKING:
    from problems import Results, Tensors

TOLERANCE = {
    torch.bfloat16: 5e-3,
    torch.float16: 8e-4,
    torch.float32: 1e-5,
    torch.float64: 1e-12,
}


def check(t: Tensors, loss: str, got: Results, want: Results, plain: Results) -> None:
    """Assert that each result of ``got`` is right. want: in fp64; plain: in the input dtype."""
    assert got.keys() == want.keys()
    sizes = terms(t, loss, want)
    top_score = float(sizes["lse"].max()) if sizes["lse"].numel() else 0.0
    step = 2 * torch.finfo(t.spec.lse_dtype).eps  # four roundings of a score, relative to it
    if t.spec.device.type == "cuda" and t.spec.dtype in (torch.float16, torch.bfloat16):
        step *= 1 + t.spec.head_dim / 128
    problems = []
    for name, x in got.items():
        like = {
            "out": t.x.q,
            "dq": t.x.q,
            "dk": t.x.k,
            "dv": t.x.v,
            "dbias": t.x.bias,
            "dsink": t.x.sink,
        }
        dtype = t.spec.lse_dtype if name == "lse" else like[name].dtype
        if x.dtype != dtype or x.shape != want[name].shape:
            problems.append(
                f"{name} is {x.dtype} {tuple(x.shape)}, not {dtype} {tuple(want[name].shape)}"
            )
            continue
        dtypes = (dtype,) if name == "lse" else (dtype, t.spec.dtype)
        score_error = step if name == "lse" else step * top_score
        found = compare(
            x.double(),
            want[name],
            plain[name].double(),
            sizes[name],
            dtypes,
            score_error,
            factor=2 if t.spec.softcap is None else 3,
            extra=3e-4 if t.spec.softcap is not None and name.startswith("d") else 0.0,
        )
        if found is not None:
            problems.append(f"{name}: {found}")
    assert not problems, "; ".join(problems)


def compare(
    x: Tensor,
    ref: Tensor,
    plain: Tensor,
    terms: Tensor,
    dtypes: tuple[torch.dtype, ...],
    score_error: float = 0.0,
    factor: float = 2,
    extra: float = 0.0,
) -> str | None:
    """What is wrong with x by the rules above; None if nothing is."""
    if x.numel() == 0:
        return None
    nowhere = ref == -math.inf
    if not torch.equal(x == -math.inf, nowhere):
        return f"-inf or not, wrongly, at {_places((x == -math.inf) != nowhere)}"
    x, ref, plain, terms = (a.masked_fill(nowhere, 0) for a in (x, ref, plain, terms))
    if not x.isfinite().all():
        return f"not finite at {_places(~x.isfinite())}"
    assert ref.isfinite().all() and plain.isfinite().all(), "the problem itself is not finite"
    empty = (terms == 0) & ~nowhere
    if (x[empty] != 0).any():
        return f"not exactly 0 at {_places(empty & (x != 0))}"

    dtype = max(dtypes, key=lambda d: torch.finfo(d).eps)  # the coarser one
    least = max(map(smallest, dtypes))
    error = x - ref
    size = max(float(ref.abs().max()), float(terms.max()))
    if dtype != torch.float64:
        bound = factor * float((plain - ref).abs().max()) + 2 * ulp(dtype, size) + extra
        bound += score_error * size + least
        worst = float(error.abs().max())
        if worst > bound:
            return f"max error {worst:.3g} > {bound:.3g} at {_places(error.abs() > bound)}"

    n = x.numel()
    tolerance = TOLERANCE[dtype] * (1 + 2 / math.sqrt(n)) + score_error
    norm = max(float(ref.norm()), float(terms.norm()))
    bound = tolerance * norm + math.sqrt(n) * least
    if float(error.norm()) > bound:
        return f"relative error {float(error.norm()) / norm:.3g} > {tolerance:.3g}"
    return None


def smallest(dtype: torch.dtype) -> float:
    """What may be lost where numbers end: fp16 has subnormal ones everywhere, the others are flushed."""
    info = torch.finfo(dtype)
    return info.tiny * (info.eps if dtype == torch.float16 else 1)


def ulp(dtype: torch.dtype, size: float) -> float:
    """The step between neighbouring numbers of a dtype at ``size``."""
    info = torch.finfo(dtype)
    return 2.0 ** math.floor(math.log2(max(size, info.tiny))) * info.eps


def _places(wrong: Tensor) -> str:
    where = wrong.nonzero().tolist()
    return f"{', '.join(map(str, where[:3]))} ({len(where)} of {wrong.numel()})"


@torch.no_grad()
def terms(t: Tensors, loss: str, want: Results) -> Results:
    """For every element of a result: the root of the sum of squares of the terms that are added to it.

    With P the weights, r a row's delta and dlse, g = dO V^T:  dS = P (g - r);  dV = P^T dO;
    dQ = scale dS K;  dK = scale dS^T Q;  dbias = dS;  dsink = -P_sink r. One r serves a whole row, so
    its error does not average out over the row's keys: where a row is summed, it enters as one term.
    """
    spec, x = t.spec, t.x
    found = {name: torch.zeros_like(value) for name, value in want.items()}
    for name, like in (("dq", x.q), ("dk", x.k), ("dv", x.v)):  # of no use where nobody wants them
        found.setdefault(name, torch.zeros_like(like, dtype=torch.float64))
    weights, kept = _weights(t)
    least_slope = 2 * torch.finfo(spec.lse_dtype).eps / TOLERANCE[spec.dtype]
    for seq in sequences(spec, x):
        b = seq.number
        q, out, dout = (_squares(seq.queries(a)) for a in (x.q, want["out"], t.dout))
        keys, values = (_known(seq.keys(a).repeat_interleave(spec.group, 1)) for a in (x.k, x.v))
        k, v = keys.square(), values.square()
        p, pd = (seq.queries(w).transpose(0, 1)[..., : seq.length_k] for w in (weights, kept))
        p, pd = (w.clamp_min(1e-100).where(w > 0, 0) for w in (p, pd))  # whose squares are not 0
        if loss == "lse":
            dout = torch.zeros_like(dout)
        dlse = seq.rows(t.dlse).double().square() * (loss != "out")

        scores = torch.einsum("ihd,jhd->hij", q, k) * spec.scale**2
        slope = torch.ones_like(scores)
        if spec.softcap is not None:
            exact = torch.einsum("ihd,jhd->hij", _known(seq.queries(x.q)), keys) * spec.scale
            slope = (1 - torch.tanh(exact / spec.softcap).square()).clamp_min(least_slope)
        delta = torch.einsum("ihd,ihd->hi", out, dout)
        ds = pd.square() * torch.einsum("ihd,jhd->hij", dout, v) + p.square() * (delta + dlse)[..., None]

        largest = scores.masked_fill(p == 0, 0).amax(-1) if seq.length_k else 0
        seq.rows(found["lse"]).copy_((1 + _squares(seq.rows(want["lse"])) + largest).sqrt())
        seq.queries(found["out"]).copy_(torch.einsum("hij,jhd->ihd", pd.square(), v).sqrt())
        row = torch.einsum("hij,jhd->ihd", p * slope, keys)
        ds_capped = ds * slope.square()
        dq = torch.einsum("hij,jhd->ihd", ds_capped, k) + delta.T[..., None] * row.square()
        seq.queries(found["dq"]).copy_(dq.sqrt() * spec.scale)
        dk = torch.einsum("hij,ihd->jhd", ds_capped, q)
        seq.keys(found["dk"]).copy_(_over_group(dk, spec.group).sqrt() * spec.scale)
        dv = torch.einsum("hij,ihd->jhd", pd.square(), dout)
        seq.keys(found["dv"]).copy_(_over_group(dv, spec.group).sqrt())
        if "dbias" in found:
            bias = found["dbias"][b if x.bias.shape[0] > 1 else 0]
            if x.bias.shape[3] == 1:
                ds = ds.sum(-1, keepdim=True) + delta[..., None] * p.sum(-1, keepdim=True).square()
            for dim in (0, 1):
                if bias.shape[dim] == 1:
                    ds = ds.sum(dim, keepdim=True)
            bias[:, : ds.shape[1], : ds.shape[2]] += (
                ds  # summed over the batch as squares, the root below
            )
        if "dsink" in found:
            lse = seq.rows(want["lse"])
            p_sink = torch.exp(x.sink.double()[:, None] - lse).masked_fill(lse == -math.inf, 0)
            found["dsink"] += (p_sink.square() * (delta + dlse)).sum(-1)
    for name in ("dbias", "dsink"):
        if name in found:
            found[name].sqrt_()
    return found


def _weights(t: Tensors) -> tuple[Tensor, Tensor]:
    """P before and after dropout, (rows, Hq, longest Sk): outputs for values that are unit vectors."""
    spec, x = t.spec, t.x
    n = spec.max_seqlen_k
    unit = x.v.new_zeros(*x.v.shape[:-1], n, dtype=torch.float64)
    for seq in sequences(spec, x):
        seq.keys(unit).copy_(torch.eye(seq.length_k, n, dtype=unit.dtype, device=unit.device)[:, None])
    wide = replace(spec, head_dim_v=n)
    x = x._replace(v=unit, v_descale=None)
    plain = reference.attention(replace(wide, dropout_p=0.0), x)[0]
    return plain, reference.attention(wide, x)[0] if spec.dropout_p > 0 else plain


def _known(x: Tensor) -> Tensor:
    """fp64, with 0 where the problem planted something that must have no effect."""
    return x.double().nan_to_num(0, 0, 0)


def _squares(x: Tensor) -> Tensor:
    return _known(x).square()


def _over_group(x: Tensor, group: int) -> Tensor:
    return x.unflatten(1, (-1, group)).sum(2)
