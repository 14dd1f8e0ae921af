"""Attention problems for the tests: what one is, how to draw one, its tensors, and its results.

A ``Problem`` is a small frozen description, printed by a failing test and enough to repeat it. Its
tensors follow from it alone (``tensors``), its results come from the reference (``reference_results``)
or, through the public functions, from a kernel (``run``); ``check`` sets the two against each other with
the rule of ``accuracy``. ``draw`` makes random ones, for hypothesis and ``random.Random`` alike.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import accuracy
import torch
from hypothesis import strategies as st
from torch import Tensor

from tilewise import attention, attention_varlen, philox, reference
from tilewise.spec import DTYPES, AttentionSpec, Inputs, make_spec, sequences

DTYPE = {name: dtype for dtype, name in DTYPES.items()}
GRADIENTS = {"dq": "q", "dk": "k", "dv": "v", "dbias": "bias", "dsink": "sink"}
LAYOUTS = ("plain", "heads first", "sliced", "offset", "columns", "expanded keys")


@dataclass(frozen=True)
class Problem:
    """One attention problem, forward and backward. The defaults are the plainest one."""

    lengths: tuple[tuple[int, int], ...] = ((5, 5),)  # (queries, keys) of each sequence
    heads_kv: int = 1
    group: int = 1  # query heads per key head
    head_dim: int = 16
    head_dim_v: int = 16
    dtype: str = "fp32"
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    scale: float | None = None
    softcap: float | None = None
    bias: tuple[bool, bool, bool, bool] | None = None  # which of (B, H, Sq, Sk) are not 1
    bias_dtype: str = "fp32"
    bias_holes: bool = False  # a third of the bias is -inf
    alibi: str | None = None  # "heads" or "batch"
    sink: str | None = None  # its dtype
    sink_off: bool = False  # the first head's sink is -inf: none
    dropout_p: float = 0.0
    varlen: bool = False
    tail: tuple[int, int] = (0, 0)  # varlen: (query, key) rows past cu_seqlens[-1]
    slack: int = 0  # varlen: by how much max_seqlen exceeds the longest sequence
    used_q: tuple[int, ...] | None = None
    used_k: tuple[int, ...] | None = None
    deterministic: bool = False
    layout: str = "plain"  # how q, k and v lie in memory
    dout_layout: str = "plain"  # or "expanded": one number, strides 0; "heads first"; "columns"
    loss: str = "both"  # which of out and lse the loss sees: "out", "lse", "both"; "none": no gradients
    values: float = 1.0  # standard deviation of q, k and v
    shift: float = 0.0  # added to every scaled score, through one component of q and k
    equal_keys: bool = False  # every key the same: all scores of a row tie for the maximum
    fp8: str | None = None  # how q, k and v are quantised
    descale: bool = False  # dtype fp8: each sequence and key head has its scales
    poison: bool = True  # whatever the definition says has no effect is NaN or inf
    seed: int = 0

    @property
    def heads_q(self) -> int:
        return self.heads_kv * self.group

    @property
    def longest(self) -> tuple[int, int]:
        sides = zip(*self.lengths, strict=True) if self.lengths else ((), ())
        q, k = (max(side, default=0) + self.slack for side in sides)
        return q, k


class Tensors(NamedTuple):
    """Everything a problem consists of, on one device."""

    spec: AttentionSpec
    x: Inputs
    dout: Tensor
    dlse: Tensor


def features(p: Problem) -> frozenset[str]:
    """The rows of ``dispatch.FEATURES`` that a kernel needs for the problem, forward and backward."""
    return tensors(p).spec.features | ({"lse_grad"} if p.loss in ("lse", "both") else set())


def tensors(p: Problem, device: torch.device | str = "cpu") -> Tensors:
    """The tensors of a problem; the same values on every device."""
    if p.shift and p.head_dim < 2:
        raise ValueError("a shift needs a component of its own")
    random_numbers = torch.Generator().manual_seed(p.seed)
    rows_q, rows_k, cu_q, cu_k = _rows(p)
    q = _normal(random_numbers, *rows_q, p.heads_q, p.head_dim) * p.values
    k = _normal(random_numbers, *rows_k, p.heads_kv, p.head_dim) * p.values
    v = _normal(random_numbers, *rows_k, p.heads_kv, p.head_dim_v) * p.values
    dout = _normal(random_numbers, *rows_q, p.heads_q, p.head_dim_v)
    dlse = _normal(random_numbers, *rows_q[:-1], p.heads_q, rows_q[-1])
    if p.shift:
        scale = p.head_dim**-0.5 if p.scale is None else p.scale
        q[..., 0] = (abs(p.shift) / scale) ** 0.5
        k[..., 0] = math.copysign((abs(p.shift) / scale) ** 0.5, p.shift)
    if p.equal_keys and k.shape[-3]:
        k = k[..., :1, :, :].expand(k.shape).clone()

    def lengths(values: Sequence[int] | None) -> Tensor | None:
        return None if values is None else torch.tensor(values, dtype=torch.int32, device=device)

    dtype = DTYPE[p.dtype]
    x = Inputs(
        q=_laid_out(q.to(dtype), p.layout, p.varlen, device),
        k=_laid_out(k.to(dtype), p.layout, p.varlen, device, key=True),
        v=_laid_out(v.to(dtype), p.layout, p.varlen, device, key=True),
        cu_seqlens_q=lengths(cu_q),
        cu_seqlens_k=lengths(cu_k),
        seqused_q=lengths(p.used_q),
        seqused_k=lengths(p.used_k),
        **_parameters(p, random_numbers, device),
    )
    if p.descale:
        scales = _normal(random_numbers, 3, len(p.lengths), p.heads_kv).abs().to(device, torch.float32)
        x = x._replace(**dict(zip(("q_descale", "k_descale", "v_descale"), scales, strict=True)))
    if p.dropout_p > 0:
        x = x._replace(dropout_key=philox.fold(torch.tensor([p.seed], device=device)))
    out_dtype = torch.bfloat16 if p.dtype == "fp8" else dtype
    if p.dout_layout == "expanded":
        dout = torch.ones((), dtype=out_dtype, device=device).expand(dout.shape)
    else:
        dout = _laid_out(dout.to(out_dtype), p.dout_layout, p.varlen, device)
    dlse = dlse.to(device, torch.float64 if dtype == torch.float64 else torch.float32)
    spec = make_spec(x, **_spec_options(p))
    if p.poison:
        _poison(p, spec, x, dout, dlse)
    return Tensors(spec, x, dout, dlse)


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _rows(p: Problem) -> tuple[tuple[int, ...], tuple[int, ...], list[int] | None, list[int] | None]:
    """Leading dimensions of q and of k, and cu_seqlens of both if the problem is packed."""
    if not p.varlen:
        assert len(set(p.lengths)) <= 1, "a dense problem has one length"
        return *((len(p.lengths), n) for n in p.longest), None, None
    cu_q, cu_k = (list(accumulate((n[side] for n in p.lengths), initial=0)) for side in (0, 1))
    return (cu_q[-1] + p.tail[0],), (cu_k[-1] + p.tail[1],), cu_q, cu_k


def _parameters(
    p: Problem, generator: torch.Generator, device: torch.device | str
) -> dict[str, Tensor | None]:
    """bias, alibi_slopes and sink."""

    def placed(x: Tensor, dtype: str) -> Tensor:
        return x.to(device, DTYPE[p.dtype if dtype == "input" else dtype])

    batch, bias, slopes, sink = len(p.lengths), None, None, None
    if p.bias is not None:
        full = (batch, p.heads_q, *p.longest)
        bias = _normal(generator, *(n if kept else 1 for n, kept in zip(full, p.bias, strict=True)))
        if p.bias_holes:
            holes = torch.rand(bias.shape, generator=generator) < 1 / 3
            bias = bias.masked_fill(holes, -torch.inf)
        bias = placed(bias, p.bias_dtype)
    if p.alibi is not None:
        shape = (p.heads_q,) if p.alibi == "heads" else (batch, p.heads_q)
        slopes = placed(torch.rand(shape, generator=generator), "fp32")
    if p.sink is not None:
        sink = placed(_normal(generator, p.heads_q), p.sink)
        if p.sink_off:
            sink[0] = -torch.inf
    return {"bias": bias, "alibi_slopes": slopes, "sink": sink}


def _spec_options(p: Problem) -> dict[str, Any]:
    longest = {"max_seqlen_q": p.longest[0], "max_seqlen_k": p.longest[1]} if p.varlen else {}
    return {
        "causal": p.causal,
        "window_left": p.window[0],
        "window_right": p.window[1],
        "scale": p.scale,
        "softcap": p.softcap,
        "dropout_p": p.dropout_p,
        "deterministic": p.deterministic,
        "fp8": p.fp8,
        **longest,
    }


def _laid_out(
    x: Tensor, layout: str, varlen: bool, device: torch.device | str, key: bool = False
) -> Tensor:
    """The same values with other strides."""
    x = x.to(device)
    if layout == "heads first":
        return x.transpose(-3, -2).contiguous().transpose(-3, -2)
    if layout == "sliced":  # a part of a wider buffer: odd offset, odd strides, but adjacent columns
        wide = x.new_zeros(*x.shape[:-2], x.shape[-2] + 1, x.shape[-1] + 3)
        wide[..., 1:, 3:] = x
        return wide[..., 1:, 3:]
    if layout == "offset":
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    if layout == "columns":  # the last dimension is not contiguous
        return x.mT.contiguous().mT
    if layout == "expanded keys" and key:
        one = x[..., :1, :] if varlen else x[:1, :, :1]
        return one.expand(x.shape)
    return x.clone()


def _poison(p: Problem, spec: AttentionSpec, x: Inputs, dout: Tensor, dlse: Tensor) -> None:
    """NaN and inf, in turn, in rows that belong to no sequence and in keys that no query may see."""
    outsiders = {
        name: torch.ones(t.shape[: 1 if spec.varlen else 2], dtype=torch.bool, device=t.device)
        for name, t in (("q", x.q), ("k", x.k))
    }
    for seq in sequences(spec, x):
        seq.queries(outsiders["q"]).fill_(False)
        i = torch.arange(seq.length_q, device=x.q.device)[:, None]
        j = torch.arange(seq.length_k, device=x.q.device)[None, :]
        seen = reference.mask.visible(i, j, seq.length_q, seq.length_k, *spec.window)
        seq.keys(outsiders["k"]).copy_(~seen.any(0))
    marks = [("q", x.q)]
    if p.dout_layout != "expanded":
        marks.append(("q", dout))
    if p.layout != "expanded keys":
        marks += [("k", x.k), ("k", x.v)]
    for side, t in marks:
        bad = torch.full((t.shape[-1],), torch.nan, dtype=t.dtype, device=t.device)
        bad[1::2] = torch.inf
        if p.dtype == "fp8" and t.dtype != dout.dtype:  # has no inf, and few operations
            t.view(torch.uint8)[outsiders[side]] = 0x7F
        else:
            t[outsiders[side]] = bad
    rows = outsiders["q"] if spec.varlen else outsiders["q"][:, None, :]
    dlse.masked_fill_(rows.expand(dlse.shape), torch.nan)
    if x.bias is not None and spec.ragged and x.bias.shape[0] == spec.batch:
        for seq in sequences(spec, x):
            if x.bias.shape[2] > 1:
                x.bias[seq.number, :, seq.length_q :] = torch.nan
            if x.bias.shape[3] > 1:
                x.bias[seq.number, :, :, seq.length_k :] = torch.nan


Results = dict[str, Tensor]  # out, lse, dq, dk, dv and, where there are some, dbias and dsink


def reference_results(t: Tensors, loss: str, dtype: torch.dtype) -> Results:
    """What the reference makes of the problem, computing in ``dtype``."""
    leaves = {
        name: getattr(t.x, name).to(dtype).detach().requires_grad_()
        for name in GRADIENTS.values()
        if getattr(t.x, name) is not None
    }
    out, lse = reference.attention(t.spec, t.x._replace(**leaves), dtype)
    if not out.requires_grad and loss != "none":  # no sequence, no graph
        return {
            "out": out,
            "lse": lse,
            **_by_result({n: torch.zeros_like(t) for n, t in leaves.items()}),
        }
    return _with_gradients(out, lse, leaves, t, loss)


def run(p: Problem, t: Tensors, **how: Any) -> Results:
    """What a kernel makes of it, through the public functions. how: ``backend``, ``algorithm``."""
    leaves = {
        name: getattr(t.x, name).detach().requires_grad_(p.loss != "none")
        for name in GRADIENTS.values()
        if getattr(t.x, name) is not None
    }
    given = {name: getattr(t.x, name) for name in Inputs._fields if name != "dropout_key"} | leaves
    if not p.varlen:
        del given["cu_seqlens_q"], given["cu_seqlens_k"]
    longest = {"max_seqlen_q": p.longest[0], "max_seqlen_k": p.longest[1]} if p.varlen else {}
    with torch.set_grad_enabled(p.loss != "none"):
        out, lse = (attention_varlen if p.varlen else attention)(
            **given,
            **longest,
            causal=p.causal,
            window=p.window,
            scale=p.scale,
            softcap=p.softcap,
            dropout_p=p.dropout_p,
            seed=p.seed,
            deterministic=p.deterministic,
            fp8=p.fp8,
            return_lse=True,
            **how,
        )
    return _with_gradients(out, lse, leaves, t, p.loss)


def _with_gradients(
    out: Tensor, lse: Tensor, leaves: dict[str, Tensor], t: Tensors, loss: str
) -> Results:
    if loss == "none":
        return {"out": out.detach(), "lse": lse.detach()}
    losses = {"out": [(out, t.dout)], "lse": [(lse, t.dlse)], "both": [(out, t.dout), (lse, t.dlse)]}[
        loss
    ]
    results, seeds = zip(*((r, g.to(r.dtype)) for r, g in losses), strict=True)
    gradients = torch.autograd.grad(results, list(leaves.values()), seeds, materialize_grads=True)
    found = _by_result(dict(zip(leaves, gradients, strict=True)))
    return {"out": out.detach(), "lse": lse.detach(), **found}


def _by_result(gradients: dict[str, Tensor]) -> Results:
    return {grad: gradients[name] for grad, name in GRADIENTS.items() if name in gradients}


def how(kernel: str) -> dict[str, str]:
    """A kernel's name, "cpu/fa2", as the arguments that ask for it."""
    backend, algorithm = kernel.split("/")
    return {"backend": backend, "algorithm": algorithm}


def check(p: Problem, device: torch.device | str = "cpu", **how: Any) -> Results:
    """Run a problem and hold every result to the accuracy rule. how: as for ``run``."""
    t = tensors(p, device)
    got = run(p, t, **how)
    check_results(p, t, got)
    return got


def check_results(p: Problem, t: Tensors, got: Results) -> None:
    """Hold the results of a kernel to the accuracy rule; see ``accuracy`` for what that is."""
    want = reference_results(t, p.loss, torch.float64)
    plain = reference_results(t, p.loss, t.spec.dtype)
    if t.spec.dtype in (torch.float16, torch.bfloat16):
        # lse is fp32 whatever the inputs: nothing on the way to it is rounded to their dtype.
        plain["lse"] = reference_results(t, p.loss, torch.float32)["lse"]
    accuracy.check(t, p.loss, got, want, plain)


# --- drawing at random ------------------------------------------------------------------------------

Pick = Callable[[Sequence[Any]], Any]  # picks one; the first is the plainest


class Size(NamedTuple):
    """What random problems are made of, plainest first."""

    lengths: Sequence[int]
    head_dims: Sequence[int]
    sequences: Sequence[int] = (1, 2, 3, 0, 4)
    heads_kv: Sequence[int] = (1, 2, 3)
    groups: Sequence[int] = (1, 2, 3, 4, 8)
    dtypes: Sequence[str] = ("fp32", "fp16", "bf16", "fp64")


def draw(pick: Pick, features: frozenset[str], size: Size, every: bool = False) -> Problem:
    """A random problem that a kernel with these features (rows of ``dispatch.FEATURES``) must solve.

    pick: chooses one of a sequence; all randomness comes from here. every: it has all the features.
    """

    def maybe(feature: str, odds: int = 3) -> bool:
        """One in ``odds``, if the kernel can."""
        return feature in features and (every or pick([False] * (odds - 1) + [True]))

    dtype = pick([name for name in size.dtypes if name in features])
    head_dim = pick(size.head_dims)
    varlen = maybe("varlen")
    count = pick(size.sequences)
    one_length = pick(size.lengths), pick(size.lengths)
    lengths = tuple(
        (pick([0, *size.lengths]), pick([0, *size.lengths])) if varlen else one_length
        for _ in range(count)
    )
    if maybe("seqused", 4) and lengths:
        used_q = tuple(pick(range(q + 1)) for q, _ in lengths) if pick([True, False]) else None
        used_k = tuple(pick(range(k + 1)) for _, k in lengths)
    else:
        used_q = used_k = None
    most = max((k for _, k in lengths), default=0)
    bounds = [None, None, 0, 1, 2, most // 3, most // 2, most, -1, -2, 2**31 - 1]
    dtypes_of_parameters = ["fp32", "input"] if dtype != "fp64" else ["input", "fp32"]
    bias = maybe("bias")
    return Problem(
        lengths=lengths,
        heads_kv=pick(size.heads_kv),
        group=pick(size.groups) if maybe("gqa", 2) else 1,
        head_dim=head_dim,
        head_dim_v=pick(size.head_dims) if maybe("unequal_dims") else head_dim,
        dtype=dtype,
        causal=maybe("causal", 2),
        window=(pick(bounds), pick(bounds)) if maybe("window") else (None, None),
        scale=pick([None, None, 0.3, 1]),
        softcap=pick([5.0, 50.0, 1]) if maybe("softcap", 4) else None,
        bias=tuple(pick([True, False]) for _ in range(4)) if bias else None,
        bias_dtype=pick(dtypes_of_parameters),
        bias_holes=bias and pick([False, True]),
        alibi=pick(["heads", "batch"]) if maybe("alibi", 4) else None,
        sink=pick([*dtypes_of_parameters, "bf16"]) if maybe("sink", 4) else None,
        sink_off=pick([False, False, True]),
        dropout_p=pick([0.1, 0.5, 0.9]) if maybe("dropout", 4) else 0.0,
        varlen=varlen,
        tail=pick([(0, 0), (3, 0), (0, 2), (1, 5)]) if varlen else (0, 0),
        slack=pick([0, 0, 1, 40]) if varlen else 0,
        used_q=used_q,
        used_k=used_k,
        deterministic=maybe("deterministic"),
        layout=pick(["plain", *LAYOUTS]),
        dout_layout=pick(["plain", "plain", "expanded", "heads first", "columns"]),
        loss=pick(["out", "both", "lse"] if "lse_grad" in features else ["out"]),
        values=pick([1.0, 1.0, 3.0]),
        seed=pick(range(1000)),
    )


def random_problem(seed: int, features: frozenset[str], size: Size) -> Problem:
    """Problem number ``seed``."""
    return draw(random.Random(seed).choice, features, size)


def alike(kind: Problem, seed: int, size: Size) -> Problem:
    """Another random problem for which the same kernels are compiled, which takes most of the time:
    with other lengths, heads, windows, values and strides."""
    of_kind = size._replace(head_dims=(kind.head_dim,))
    p = draw(random.Random(seed).choice, features(kind), of_kind, every=True)
    window = tuple(None if k is None else w or 0 for k, w in zip(kind.window, p.window, strict=True))
    used_q = None if kind.used_q is None else p.used_q or tuple(q for q, _ in p.lengths)
    same = {
        name: getattr(kind, name) for name in ("head_dim_v", "softcap", "loss", "bias_dtype", "sink")
    }
    return replace(p, window=window, used_q=used_q, **same)


@st.composite
def problems(draw_from: Any, features: frozenset[str], size: Size) -> Problem:
    """The same problems as a hypothesis strategy, which also finds the plainest one that fails."""
    return draw(lambda options: draw_from(st.sampled_from(options)), features, size)
