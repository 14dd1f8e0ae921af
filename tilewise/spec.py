"""What was asked, checked once and put in one form.

``Inputs`` are the tensors of a call, ``AttentionSpec`` everything about it that is not tensor data.
Whoever holds a spec (dispatch, backends) may trust it; nobody checks again.
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.masked import MaskedTensor

from tilewise.mask import normalize_window

MAX_HEAD_DIM = 256
ALGORITHMS = ("auto", "fa1", "fa2", "fa3", "fa4")
BACKENDS = ("auto", "cpu", "triton", "hopper", "blackwell")
LAYOUTS = ("bshd", "bhsd")
FP8 = ("tensor", "block", "rotated")  # None is none
DTYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8",
}


class Inputs(NamedTuple):
    """The tensors of one call. Dense: q (B, Sq, Hq, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv);
    varlen: the same without B, sequences one after another along dimension 0."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None  # (B|1, Hq|1, Sq|1, Sk|1), fp32 or the dtype of q
    alibi_slopes: Tensor | None = None  # (Hq,) or (B, Hq), fp32
    sink: Tensor | None = None  # (Hq,), fp32 or bf16 or the dtype of q
    cu_seqlens_q: Tensor | None = None  # (B + 1,), int32
    cu_seqlens_k: Tensor | None = None
    seqused_q: Tensor | None = None  # (B,), int32
    seqused_k: Tensor | None = None
    dropout_key: Tensor | None = None  # (1,), int64, philox.fold(seed, offset)
    q_descale: Tensor | None = None  # (B, Hkv), fp32, of fp8 tensors: what their numbers are times
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None


@dataclass(frozen=True)
class AttentionSpec:
    """One attention problem. Lengths are counts of rows; ``max_seqlen_*`` bound every sequence's."""

    batch: int
    max_seqlen_q: int
    max_seqlen_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    device: torch.device
    varlen: bool
    seqused: bool
    causal: bool
    window_left: int | None  # normalized by mask.normalize_window, causal folded in
    window_right: int | None
    scale: float
    softcap: float | None
    bias: bool
    alibi: bool
    sink: bool
    dropout_p: float
    deterministic: bool
    algorithm: str
    backend: str
    fp8: str | None = None  # how q, k and v of another dtype are quantised

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Plans are looked up by specs, several in every call."""
        return hash(tuple([getattr(self, name) for name in self.__dataclass_fields__]))

    @cached_property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads_q // self.heads_kv

    @cached_property
    def window(self) -> tuple[int | None, int | None]:
        return self.window_left, self.window_right

    @cached_property
    def ragged(self) -> bool:
        """Whether the tensors may hold rows that belong to no sequence."""
        return self.varlen or self.seqused

    @cached_property
    def lse_dtype(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @cached_property
    def out_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype == torch.float8_e4m3fn else self.dtype

    @cached_property
    def unquantized(self) -> AttentionSpec:
        """The same without ``fp8``, by whichever kernel runs that: what gradients are of.

        The algorithm that was asked for by name may be one that has nothing but fp8 here.
        """
        return self if self.fp8 is None else replace(self, fp8=None, algorithm="auto")

    @cached_property
    def features(self) -> frozenset[str]:
        """The rows of dispatch.FEATURES that a kernel must support to run this."""
        asked = {
            DTYPES[self.dtype] if self.fp8 is None else "fp8": True,
            "gqa": self.group > 1,
            "unequal_dims": self.head_dim != self.head_dim_v,
            "causal": self.causal or self.window_right == 0,
            "window": self.window_left is not None or self.window_right not in (None, 0),
            "softcap": self.softcap is not None,
            "bias": self.bias,
            "alibi": self.alibi,
            "sink": self.sink,
            "dropout": self.dropout_p > 0,
            "varlen": self.varlen,
            "seqused": self.seqused,
            "deterministic": self.deterministic,
        }
        return frozenset(name for name, used in asked.items() if used)


def make_spec(
    x: Inputs,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    window_left: int | None = None,
    window_right: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    deterministic: bool = False,
    algorithm: str = "auto",
    backend: str = "auto",
    fp8: str | None = None,
) -> AttentionSpec:
    """Check the arguments of a call and build its spec; what tensors hold is left to ``check_values``.

    Raises:
        ValueError, TypeError: naming the argument, its value and what is allowed.
    """
    varlen = x.cu_seqlens_q is not None or x.cu_seqlens_k is not None
    _check_qkv(x, varlen)
    if varlen:
        batch = _check_cu_seqlens(x)
        for name, value in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
            require(value is not None and value >= 0, name, value, "a length >= 0")
        assert max_seqlen_q is not None and max_seqlen_k is not None
        max_q, max_k = max_seqlen_q, max_seqlen_k
    else:
        batch, max_q, max_k = x.q.shape[0], x.q.shape[1], x.k.shape[1]
    heads_q, heads_kv = x.q.shape[-2], x.k.shape[-2]

    for name, value in (("window[0]", window_left), ("window[1]", window_right)):
        require(value is None or abs(value) < 2**31, name, value, "None or a 32-bit integer")
    scale = x.q.shape[-1] ** -0.5 if scale is None else float(scale)
    # Far inside fp32's range, so that no kernel's product or quotient of the two leaves it.
    for name, factor in (("scale", scale), ("softcap", softcap)):
        fits = factor is None or 2.0**-60 <= factor <= 2.0**60
        require(fits, name, factor, "None or a number from 2**-60 to 2**60")
    require(0 <= dropout_p < 1, "dropout_p", dropout_p, "in [0, 1)")
    require(algorithm in ALGORITHMS, "algorithm", algorithm, f"one of {', '.join(ALGORITHMS)}")
    require(backend in BACKENDS, "backend", backend, f"one of {', '.join(BACKENDS)}")

    _check_bias(x, varlen, batch, heads_q, max_q, max_k)
    _check_alibi(x, batch, heads_q)
    _check_sink(x, heads_q)
    _check_fp8(x, fp8, batch, heads_kv)
    for name in ("seqused_q", "seqused_k"):
        _check_lengths(name, getattr(x, name), batch, x.q.device)
    if varlen:  # no sequence is longer than all together, and grids grow with these
        max_q, max_k = min(max_q, x.q.shape[0]), min(max_k, x.k.shape[0])
    left, right = normalize_window(causal, (window_left, window_right), max_q, max_k)
    return AttentionSpec(
        batch=batch,
        max_seqlen_q=max_q,
        max_seqlen_k=max_k,
        heads_q=heads_q,
        heads_kv=heads_kv,
        head_dim=x.q.shape[-1],
        head_dim_v=x.v.shape[-1],
        dtype=x.q.dtype,
        device=x.q.device,
        varlen=varlen,
        seqused=x.seqused_q is not None or x.seqused_k is not None,
        causal=causal,
        window_left=left,
        window_right=right,
        scale=scale,
        softcap=softcap,
        bias=x.bias is not None,
        alibi=x.alibi_slopes is not None,
        sink=x.sink is not None,
        dropout_p=dropout_p,
        deterministic=deterministic,
        algorithm=algorithm,
        backend=backend,
        fp8=fp8,
    )


def check_tensors(x: Inputs) -> None:
    """TypeError unless the tensors of a call are tensors, of the plain kind that has strides."""
    for name, t in zip(x._fields, x, strict=True):
        if t is not None or name in ("q", "k", "v"):
            check_tensor(name, t, "a tensor" if name in ("q", "k", "v") else "a tensor or None")


def check_options(options: dict[str, object]) -> None:
    """Check the Python types of an operator's options, before its schema would refuse them."""
    if torch.compiler.is_compiling():
        _check_options(options)
        return
    values = tuple(options.values())
    try:  # a training step repeats a few; 1 and True are equal, their types are not
        if (values, tuple(map(type, values))) in _checked_options:
            return
    except TypeError:  # something without a hash, which is no option
        pass
    _check_options(options)
    if len(_checked_options) >= _OPTIONS_KEPT:
        _checked_options.clear()
    _checked_options.add((values, tuple(map(type, values))))


_checked_options: set[tuple[tuple[object, ...], tuple[type, ...]]] = set()
_OPTIONS_KEPT = 1024


def _check_options(options: dict[str, object]) -> None:
    for name, value in options.items():
        types, allowed = _OPTION_TYPES[name]
        check_type(_SHOWN.get(name, name), value, types, allowed)


def heads_first(layout: str) -> bool:
    """Whether heads come before length. ValueError if there is no such layout."""
    require(layout in LAYOUTS, "layout", layout, f"one of {', '.join(LAYOUTS)}")
    return layout == "bhsd"


def check_type(name: str, value: object, types: Any, allowed: str) -> None:
    """TypeError if the value is of none of the types, ValueError if no 64-bit integer can hold it."""
    # bool is an int to Python, but a length or a scale that is True is a mistake.
    ok = isinstance(value, types) and (types is bool or not isinstance(value, bool))
    if not ok:  # only now to text, which torch.compile cannot make of a symbolic length
        require_type(False, name, f"{brief(value)} ({type(value).__name__})", allowed)
    if type(value) is int and not -(2**63) <= value < 2**63:
        require(False, name, value, f"{allowed}, of 64 bits")


def check_tensor(name: str, t: object, allowed: str = "a tensor") -> None:
    """TypeError unless it is a tensor whose elements lie in memory by strides."""
    if not isinstance(t, Tensor):
        require_type(False, name, type(t).__name__, allowed)
        return
    require_type(
        not t.is_nested, name, "a nested tensor", "a plain one; attention_varlen packs sequences"
    )
    require_type(t.layout == torch.strided, f"{name}.layout", t.layout, "torch.strided")
    if type(t) is not Tensor:
        require_type(not isinstance(t, MaskedTensor), name, "a MaskedTensor", "a plain one")


_SHOWN = {"window_left": "window[0]", "window_right": "window[1]"}  # what the caller calls them
_INTEGER = ((int, torch.SymInt, type(None)), "an integer or None")
_NUMBER = ((int, float, torch.SymInt, torch.SymFloat, type(None)), "a number or None")
_OPTION_TYPES: dict[str, tuple[Any, str]] = {
    "max_seqlen_q": _INTEGER,
    "max_seqlen_k": _INTEGER,
    "causal": (bool, "a bool"),
    "window_left": _INTEGER,
    "window_right": _INTEGER,
    "scale": _NUMBER,
    "softcap": _NUMBER,
    "dropout_p": ((int, float), "a number"),
    "deterministic": (bool, "a bool"),
    "algorithm": (str, "a string"),
    "backend": (str, "a string"),
    "fp8": ((str, type(None)), "a string or None"),
}


class Sequence(NamedTuple):
    """Where one sequence lies: ``length`` used rows from ``start`` on, on the query and key side."""

    number: int
    start_q: int
    length_q: int
    start_k: int
    length_k: int
    varlen: bool

    def queries(self, x: Tensor) -> Tensor:
        """This sequence's rows of a query-side tensor (q, out, dq): (Sq, Hq, ...)."""
        if self.varlen:
            return x[self.start_q : self.start_q + self.length_q]
        return x[self.number, : self.length_q]

    def keys(self, x: Tensor) -> Tensor:
        """This sequence's rows of a key-side tensor (k, v, dk, dv): (Sk, Hkv, ...)."""
        if self.varlen:
            return x[self.start_k : self.start_k + self.length_k]
        return x[self.number, : self.length_k]

    def rows(self, x: Tensor) -> Tensor:
        """This sequence's part of a per-row statistic (lse, delta): (Hq, Sq)."""
        if self.varlen:
            return x[..., self.start_q : self.start_q + self.length_q]
        return x[..., self.number, :, : self.length_q]


def sequences(spec: AttentionSpec, x: Inputs) -> Iterator[Sequence]:
    """The sequences of a batch with their lengths as Python integers (reads them from the device)."""
    starts_q, lengths_q = _starts_and_lengths(spec, x.cu_seqlens_q, x.seqused_q, spec.max_seqlen_q)
    starts_k, lengths_k = _starts_and_lengths(spec, x.cu_seqlens_k, x.seqused_k, spec.max_seqlen_k)
    for b in range(spec.batch):
        yield Sequence(b, starts_q[b], lengths_q[b], starts_k[b], lengths_k[b], spec.varlen)


def _starts_and_lengths(
    spec: AttentionSpec, cu_seqlens: Tensor | None, used: Tensor | None, full: int
) -> tuple[list[int], list[int]]:
    if cu_seqlens is None:
        starts, lengths = [0] * spec.batch, [full] * spec.batch
    else:
        cu = cu_seqlens.tolist()
        starts, lengths = cu[:-1], [b - a for a, b in pairwise(cu)]
    return starts, lengths if used is None else used.tolist()


def brief(value: object) -> str:
    """``repr`` in one line of bearable length, for messages."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return " ".join(_BRIEF.repr(value).split())


_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = 80


def require(ok: bool, name: str, value: object, allowed: str) -> None:
    if not ok:
        raise ValueError(f"{name}: got {brief(value)}; allowed is {allowed}")


def require_type(ok: bool, name: str, value: object, allowed: str) -> None:
    if not ok:
        raise TypeError(f"{name}: got {value}; allowed is {allowed}")


def _check_qkv(x: Inputs, varlen: bool) -> None:
    rank, form = (3, "(total, heads, head_dim)") if varlen else (4, "(B, S, heads, head_dim)")
    q, k, v = x.q, x.k, x.v
    for name, t in (("q", q), ("k", k), ("v", v)):
        require(t.dim() == rank, f"{name}.shape", tuple(t.shape), f"rank {rank}, {form}")
        supported = ", ".join(DTYPES.values())
        require_type(t.dtype in DTYPES, f"{name}.dtype", t.dtype, supported)
        require_type(t.dtype == q.dtype, f"{name}.dtype", t.dtype, f"q's, {q.dtype}")
        require(1 <= t.shape[-1] <= MAX_HEAD_DIM, f"{name} head dim", t.shape[-1], "1 to 256")
    for name, t in x._asdict().items():
        if t is not None:
            require(t.device == q.device, f"{name}.device", t.device, f"q's, {q.device}")
    if not varlen:
        require(k.shape[0] == q.shape[0], "k batch size", k.shape[0], f"q's, {q.shape[0]}")
    require(k.shape[-1] == q.shape[-1], "k head dim", k.shape[-1], f"q's, {q.shape[-1]}")
    # One size at a time: the order of dimensions is the caller's, who may have put heads first.
    if not varlen:
        require(v.shape[0] == k.shape[0], "v batch size", v.shape[0], f"k's, {k.shape[0]}")
    require(v.shape[-3] == k.shape[-3], "v length", v.shape[-3], f"k's, {k.shape[-3]}")
    require(v.shape[-2] == k.shape[-2], "v heads", v.shape[-2], f"k's, {k.shape[-2]}")
    heads_q, heads_kv = q.shape[-2], k.shape[-2]
    require(
        heads_kv > 0 and heads_q % heads_kv == 0 and heads_q > 0,
        "q heads",
        heads_q,
        f"a multiple of k's heads, {heads_kv}, both at least 1",
    )


def _check_lengths(name: str, t: Tensor | None, count: int, device: torch.device) -> None:
    if t is None:
        return
    require_type(t.dtype == torch.int32, f"{name}.dtype", t.dtype, "torch.int32")
    require(tuple(t.shape) == (count,), f"{name}.shape", tuple(t.shape), f"({count},)")
    require(t.is_contiguous(), f"{name}.stride()", t.stride(), "contiguous")


def _check_cu_seqlens(x: Inputs) -> int:
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        t = getattr(x, name)
        require(t is not None, name, None, "an int32 tensor (B + 1,): varlen needs both")
        require(t.dim() == 1 and t.shape[0] >= 1, f"{name}.shape", tuple(t.shape), "(B + 1,)")
    assert x.cu_seqlens_q is not None and x.cu_seqlens_k is not None
    count = x.cu_seqlens_q.shape[0]
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        _check_lengths(name, getattr(x, name), count, x.q.device)
    return count - 1


def _check_bias(x: Inputs, varlen: bool, batch: int, heads: int, max_q: int, max_k: int) -> None:
    if x.bias is None:
        return
    shape = tuple(x.bias.shape)
    full = (batch, heads, max_q, max_k)
    allowed = f"({batch}|1, {heads}|1, {max_q}|1, {max_k}|1)"
    if varlen:
        allowed += ", positions local to each sequence"
    fits = len(shape) == 4 and all(n in (1, m) for n, m in zip(shape, full, strict=True))
    require(fits, "bias.shape", shape, allowed)
    require_type(
        x.bias.dtype in (torch.float32, x.q.dtype) and x.bias.dtype != torch.float8_e4m3fn,
        "bias.dtype",
        x.bias.dtype,
        "torch.float32" if x.q.dtype == torch.float8_e4m3fn else f"torch.float32 or q's, {x.q.dtype}",
    )


def _check_alibi(x: Inputs, batch: int, heads: int) -> None:
    slopes = x.alibi_slopes
    if slopes is None:
        return
    shape = tuple(slopes.shape)
    allowed = f"({heads},) or ({batch}, {heads})"
    require(shape in ((heads,), (batch, heads)), "alibi_slopes.shape", shape, allowed)
    require_type(slopes.dtype == torch.float32, "alibi_slopes.dtype", slopes.dtype, "torch.float32")
    require(not slopes.requires_grad, "alibi_slopes.requires_grad", True, "False: they have no gradient")


def _check_sink(x: Inputs, heads: int) -> None:
    if x.sink is None:
        return
    require(tuple(x.sink.shape) == (heads,), "sink.shape", tuple(x.sink.shape), f"({heads},)")
    allowed = {torch.float32, torch.bfloat16, x.q.dtype} - {torch.float8_e4m3fn}
    require_type(
        x.sink.dtype in allowed, "sink.dtype", x.sink.dtype, f"one of {sorted(map(str, allowed))}"
    )


def _check_fp8(x: Inputs, fp8: str | None, batch: int, heads: int) -> None:
    require(fp8 is None or fp8 in FP8, "fp8", fp8, f"None or one of {', '.join(FP8)}")
    given = x.q.dtype == torch.float8_e4m3fn
    if fp8 is not None:
        require(not given, "fp8", fp8, "None with q, k and v that are fp8 already")
        fits = x.q.dtype in (torch.bfloat16, torch.float16)
        require(fits, "fp8", fp8, f"None with q of {x.q.dtype}; bf16 and fp16 can be quantised")
    for name in ("q_descale", "k_descale", "v_descale"):
        t = getattr(x, name)
        if t is not None:
            require(given, name, t, f"None with q of {x.q.dtype}: only fp8 tensors have scales")
            require(t.shape == (batch, heads), f"{name}.shape", tuple(t.shape), f"({batch}, {heads})")
            require_type(t.dtype == torch.float32, f"{name}.dtype", t.dtype, "torch.float32")
            require(not t.requires_grad, f"{name}.requires_grad", True, "False: it has no gradient")
    if given:  # of bias and sink, which may be a model's parameters, the backward says it
        for name, t in (("q", x.q), ("k", x.k), ("v", x.v)):
            reason = "False: fp8 tensors have no gradient; bf16 ones with fp8= have"
            require(not t.requires_grad, f"{name}.requires_grad", True, reason)


def check_values(spec: AttentionSpec, x: Inputs) -> None:
    """Check what the length tensors hold: always on a CPU, elsewhere only when ``TILEWISE_CHECK=1``,
    because reading them waits for the device.

    Raises:
        ValueError: naming the argument, its value and what is allowed.
    """
    if not spec.ragged:
        return
    if x.q.device.type != "cpu" and os.environ.get("TILEWISE_CHECK") != "1":
        return
    sides = (
        ("q", x.q, x.cu_seqlens_q, x.seqused_q, spec.max_seqlen_q),
        ("k", x.k, x.cu_seqlens_k, x.seqused_k, spec.max_seqlen_k),
    )
    for side, t, cu_seqlens, seqused, longest in sides:
        lengths = [longest] * (seqused.shape[0] if seqused is not None else 0)
        if cu_seqlens is not None:
            cu = cu_seqlens.tolist()
            lengths = [b - a for a, b in pairwise(cu)]
            name = f"cu_seqlens_{side}"
            require(cu[0] == 0, f"{name}[0]", cu[0], "0")
            if min(lengths, default=0) < 0:
                n = 1 + next(n for n, length in enumerate(lengths) if length < 0)
                require(False, f"{name}[{n}]", cu[n], f"at least {cu[n - 1]}, the one before it")
            require(cu[-1] <= t.shape[0], f"{name}[-1]", cu[-1], f"at most {t.shape[0]}, rows of {side}")
            require(
                max(lengths, default=0) <= longest,
                f"max_seqlen_{side}",
                longest,
                f"at least the longest sequence, {max(lengths, default=0)}",
            )
        if seqused is not None:
            for n, (used, length) in enumerate(zip(seqused.tolist(), lengths, strict=True)):
                if not 0 <= used <= length:
                    require(False, f"seqused_{side}[{n}]", used, f"0 to {length}, its sequence's length")
