"""Who takes part: each kernel of this library and each other implementation, as rows of one table.

A row says what it needs to be installed, what it supports, and how it is called; what it lacks is a
reason in words, never an exception in the middle of a run. Backwards come from autograd.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilewise
from tilewise import dispatch, mask
from tilewise.dispatch import FEATURES, Direction
from tilewise.perf.problem import Data

#: q, k, v in, output out, all (B, S, H, D) or packed (total, H, D).
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Absence:
    """Why a contender cannot take part on this machine. ``broken``: it is installed, but fails."""

    reason: str
    broken: bool = False


@dataclass(frozen=True)
class Contender:
    """One implementation.

    absent: of a device; why it cannot run there at all, None if it can.
    refusal: of a problem's data and a direction; why it does not do that one, None if it does.
    prepare: of a problem's data; the function to measure. Everything that is done once, such as building
        a mask, happens here and is not measured.
    one_graph: time the forward with its graph recorded if there is a backward too, because its code is
        compiled anew for either, for seconds.
    """

    name: str
    title: str
    ours: bool
    absent: Callable[[torch.device], Absence | None]
    refusal: Callable[[Data, Direction], str | None]
    prepare: Callable[[Data], Attend]
    one_graph: bool = False


# --- this library ---


def _own(kernel: dispatch.Kernel) -> Contender:
    def absent(device: torch.device) -> Absence | None:
        reason = kernel.unavailable(device)
        return None if reason is None else Absence(reason)

    def refusal(data: Data, direction: Direction) -> str | None:
        asked = _tilewise_call(data, tilewise.explain, kernel)(data.q, data.k, data.v)
        choice = asked.data[direction]
        reasons = choice["passed_over"]
        return None if choice["kernel"] == kernel.name else str(reasons.get(kernel.name, "not chosen"))

    def prepare(data: Data) -> Attend:
        packed = data.cu_seqlens is not None
        function = tilewise.attention_varlen if packed else tilewise.attention
        return _tilewise_call(data, function, kernel)

    return Contender(kernel.name, f"Tilewise {kernel.name}", True, absent, refusal, prepare)


def _tilewise_call(
    data: Data, function: Callable[..., Any], kernel: dispatch.Kernel
) -> Callable[..., Any]:
    p = data.problem
    keywords: dict[str, Any] = {
        "causal": p.causal,
        "window": p.window,
        "softcap": p.softcap,
        "bias": data.bias,
        "alibi_slopes": data.alibi_slopes,
        "sink": data.sink,
        "deterministic": p.deterministic,
        "algorithm": kernel.algorithm,
        "backend": kernel.backend,
    }
    if data.cu_seqlens is not None:
        for side in "qk":
            keywords |= {f"cu_seqlens_{side}": data.cu_seqlens, f"max_seqlen_{side}": p.seqlen}
    return lambda q, k, v: function(q, k, v, **keywords)


def own() -> dict[str, Contender]:
    """Every kernel of this library that takes more than fp8, by name."""
    kernels = [k for k in dispatch.KERNELS if not k.forward.isdisjoint(("fp16", "bf16", "fp32"))]
    return {kernel.name: _own(kernel) for kernel in kernels}


# --- others ---


def _peer(
    name: str,
    title: str,
    prepare: Callable[[Data], Attend],
    absent: Callable[[torch.device], Absence | None],
    forward: str,
    backward: str,
    **more: bool,
) -> Contender:
    """A row; forward and backward are the names in ``dispatch.FEATURES`` that it supports."""
    supported = {"forward": set(forward.split()), "backward": set(backward.split())}

    def refusal(data: Data, direction: Direction) -> str | None:
        if not supported[direction]:
            return f"no {direction}"
        missing = data.problem.needs - supported[direction]
        lacks = ", ".join(text for feature, text in FEATURES.items() if feature in missing)
        return f"no {direction} with {lacks}" if missing else None

    return Contender(name, title, False, absent, refusal, prepare, **more)


def _on(device_type: str, *modules: str) -> Callable[[torch.device], Absence | None]:
    """Absent where the device is of another type or a module is missing or does not import."""

    def absent(device: torch.device) -> Absence | None:
        if device.type != device_type:
            return Absence(f"runs on {device_type}, not on {device.type}")
        for module in modules:
            if not _installed(module):
                return Absence(f"{module} is not installed")
            try:
                importlib.import_module(module)
            except Exception as error:  # a broken wheel raises anything
                return Absence(f"import {module}: {one_line(error)}", broken=True)
        return None

    return absent


def _anywhere(device: torch.device) -> Absence | None:
    return None


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package it would be in
        return False


def _heads_first(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(B, H, S, D), which PyTorch's functions take; nothing is copied."""
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _sdpa(*backends: SDPBackend) -> Callable[[Data], Attend]:
    def prepare(data: Data) -> Attend:
        p = data.problem

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = _heads_first(q, k, v)
            with sdpa_kernel(list(backends)):
                out = F.scaled_dot_product_attention(
                    q, k, v, is_causal=p.causal, enable_gqa=p.heads != p.kv_heads
                )
            return out.transpose(1, 2)

        return attend

    return prepare


def _torch_fa2(data: Data) -> Attend:
    """Through ``scaled_dot_product_attention``; what that cannot say, through the operator behind it."""
    p = data.problem
    if p.lengths is None and p.window == (None, None):
        return _sdpa(SDPBackend.FLASH_ATTENTION)(data)
    left, right = (-1 if bound is None else bound for bound in p.window)
    cu = data.cu_seqlens
    return lambda q, k, v: torch.ops.aten._flash_attention_forward(
        q, k, v, cu, cu, p.seqlen, p.seqlen, 0.0, p.causal, False,
        window_size_left=left, window_size_right=0 if p.causal else right,
    )[0]  # fmt: skip


def _flex(data: Data) -> Attend:
    import torch._functorch.config as functorch
    from torch.nn.attention import flex_attention as flex

    p = data.problem
    left, right = mask.normalize_window(p.causal, p.window, p.seqlen, p.seqlen)
    # Plain numbers, which torch.compile makes constants of.
    before = p.seqlen if left is None else left
    after = p.seqlen if right is None else right
    softcap, slopes = p.softcap, data.alibi_slopes

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i + after) & (j >= i - before)

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if softcap is not None:
            s = softcap * torch.tanh(s / softcap)
        return s if slopes is None else s - slopes[h] * (i - j).abs()

    masked = (left, right) != (None, None)
    blocks = (
        flex.create_block_mask(seen, None, None, p.seqlen, p.seqlen, device=data.q.device)
        if masked
        else None
    )
    # Each problem gets code of its own, as whoever wants speed would do; the old ones would otherwise
    # count towards the limit after which torch.compile gives up without a word.
    torch.compiler.reset()
    functorch.donated_buffer = False  # a compiled backward otherwise works once for each forward
    compiled = torch.compile(flex.flex_attention, dynamic=False, fullgraph=True)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = _heads_first(q, k, v)
        out: Tensor = compiled(
            q,
            k,
            v,
            score_mod=score if softcap is not None or slopes is not None else None,
            block_mask=blocks,
            enable_gqa=p.heads != p.kv_heads,
        )
        return out.transpose(1, 2)

    return attend


@cache
def _module(name: str) -> ModuleType:
    return importlib.import_module(name)


def _fa3(data: Data) -> Attend:
    p, module = data.problem, _module("fa3_fwd_interface")
    cu, options = data.cu_seqlens, {"causal": p.causal, "softcap": p.softcap or 0.0}
    if cu is None:
        return lambda q, k, v: module.flash_attn_func(q, k, v, **options)
    return lambda q, k, v: module.flash_attn_varlen_func(q, k, v, cu, cu, p.seqlen, p.seqlen, **options)


def _fa4(data: Data) -> Attend:
    p, module = data.problem, _module("flash_attn.cute")
    cu = data.cu_seqlens
    options = {
        "causal": p.causal,
        "window_size": p.window,
        "softcap": p.softcap or 0.0,
        "learnable_sink": data.sink,
        "deterministic": p.deterministic,
    }
    if cu is not None:
        options |= {f"cu_seqlens_{side}": cu for side in "qk"}
        options |= {f"max_seqlen_{side}": p.seqlen for side in "qk"}
    function = module.flash_attn_func if cu is None else module.flash_attn_varlen_func
    return lambda q, k, v: function(q, k, v, **options)[0]


def _naive(data: Data) -> Attend:
    """Attention as a textbook writes it, in the input's data type, all scores at once."""
    p = data.problem
    n, group = p.seqlen, p.heads // p.kv_heads
    bounds = mask.normalize_window(p.causal, p.window, n, n)
    i, j = torch.arange(n, device=data.q.device)[:, None], torch.arange(n, device=data.q.device)
    hidden = None if bounds == (None, None) else ~mask.visible(i, j, n, n, *bounds)
    addend = None if data.bias is None else data.bias[:, :, None]
    if data.alibi_slopes is not None:
        alibi = -data.alibi_slopes.view(1, p.kv_heads, group, 1, 1) * (i - j).abs()
        addend = alibi if addend is None else addend + alibi

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q.transpose(1, 2).unflatten(1, (p.kv_heads, group))  # (B, Hkv, group, S, D)
        k, v = k.transpose(1, 2).unsqueeze(2), v.transpose(1, 2).unsqueeze(2)
        scores = (q @ k.mT) / math.sqrt(p.head_dim)
        if p.softcap is not None:
            scores = p.softcap * torch.tanh(scores / p.softcap)
        if addend is not None:
            scores = scores + addend
        if hidden is not None:
            scores = scores.masked_fill(hidden, -math.inf)
        if data.sink is not None:
            sink = data.sink.to(scores.dtype).view(1, p.kv_heads, group, 1, 1)
            scores = torch.cat([scores, sink.expand(*scores.shape[:-1], 1)], dim=-1)
        weights = scores.softmax(-1)[..., :n].to(v.dtype)
        return (weights @ v).flatten(1, 2).transpose(1, 2)

    return attend


_HALF = "bf16 fp16"
_DENSE = "gqa causal window softcap bias alibi sink unequal_dims deterministic"

PEERS: tuple[Contender, ...] = (
    _peer(
        "fa2",
        "FlashAttention-2 (PyTorch)",
        _torch_fa2,
        _on("cuda"),
        f"{_HALF} gqa causal window varlen",
        f"{_HALF} gqa causal window varlen",
    ),
    _peer(
        "cudnn",
        "cuDNN (PyTorch)",
        _sdpa(SDPBackend.CUDNN_ATTENTION),
        _on("cuda"),
        f"{_HALF} gqa causal",
        f"{_HALF} gqa causal",
    ),
    _peer(
        "flex",
        "FlexAttention (PyTorch)",
        _flex,
        _on("cuda", "triton"),
        f"{_HALF} fp32 gqa causal window softcap alibi unequal_dims",
        f"{_HALF} fp32 gqa causal window softcap alibi unequal_dims",
        one_graph=True,
    ),
    _peer(  # the wheel is built for bf16 and without windows and backward
        "fa3",
        "FlashAttention-3",
        _fa3,
        _on("cuda", "fa3_fwd_interface"),
        "bf16 gqa causal varlen softcap",
        "",
    ),
    _peer(
        "fa4",
        "FlashAttention-4",
        _fa4,
        _on("cuda", "flash_attn.cute"),
        f"{_HALF} gqa causal window varlen softcap sink unequal_dims deterministic",
        f"{_HALF} gqa causal window varlen softcap sink unequal_dims deterministic",
    ),
    _peer(
        "sdpa",
        "PyTorch SDPA",
        _sdpa(SDPBackend.FLASH_ATTENTION, SDPBackend.MATH),
        _on("cpu"),
        f"{_HALF} fp32 fp64 gqa causal",
        f"{_HALF} fp32 fp64 gqa causal",
    ),
    _peer(
        "naive",
        "materialised",
        _naive,
        _anywhere,
        f"{_HALF} fp32 fp64 {_DENSE}",
        f"{_HALF} fp32 fp64 {_DENSE}",
    ),
)


def peers() -> dict[str, Contender]:
    """Every other implementation that is known, by name."""
    return {peer.name: peer for peer in PEERS}


def everyone() -> dict[str, Contender]:
    return own() | peers()


def title(name: str) -> str:
    """What a person calls the contender; a name that this version does not know stays as it is."""
    return everyone()[name].title if name in everyone() else name


@contextmanager
def spoken_reasons() -> Iterator[None]:
    """PyTorch says why a backend refuses in warnings, and then raises an error that holds no reason.
    This one puts what was said into the error."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            yield
        except RuntimeError as error:
            said = [one_line(str(w.message)) for w in heard if "not used because" not in str(w.message)]
            if "No available kernel" in str(error) and said:
                raise RuntimeError("; ".join(dict.fromkeys(said))) from None
            raise


def forward(attend: Attend, data: Data) -> Tensor:
    with torch.no_grad():
        return attend(data.q, data.k, data.v)


class Graph:
    """A forward whose graph is kept, for one backward after another."""

    def __init__(self, attend: Attend, data: Data) -> None:
        self._inputs = tuple(t.detach().requires_grad_() for t in (data.q, data.k, data.v))
        self._attend, self._dout = attend, data.dout
        self._out = attend(*self._inputs)

    def forward(self) -> Tensor:
        """Another forward, with gradients recorded."""
        return self._attend(*self._inputs)

    def backward(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self._out, self._inputs, self._dout, retain_graph=True)


def one_line(error: Exception | str, limit: int = 160) -> str:
    """An exception or a text as one short line."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return "out of GPU memory"
    text = " ".join(str(error).split()) or "no message"
    text = text if len(text) <= limit else text[: limit - 1] + "…"
    return f"{type(error).__name__}: {text}" if isinstance(error, Exception) else text
