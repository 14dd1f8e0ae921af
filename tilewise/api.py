"""The public functions: arguments in, operator call out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tilewise import dispatch, ops, philox
from tilewise.errors import UnsupportedError
from tilewise.mask import Window
from tilewise.spec import LAYOUTS, Inputs, check_types, check_values, make_spec

Seed = int | tuple[int, int] | Tensor | None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window = (None, None),
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Seed = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    layout: str = "bshd",
    deterministic: bool = False,
    algorithm: str = "auto",
    backend: str = "auto",
    out: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * q k^T + ...) v, exact, without ever holding the Sq x Sk scores.

    Args:
        q: (B, Sq, Hq, D); fp16, bf16, fp32 or, on the CPU, fp64. D from 1 to 256.
        k: (B, Sk, Hkv, D), Hkv dividing Hq: query head h reads key head h // (Hq / Hkv).
        v: (B, Sk, Hkv, Dv), Dv from 1 to 256. Any strides; a last dimension that is not contiguous
            is copied.
        causal: query i sees keys j <= i + Sk - Sq (bottom-right aligned).
        window: (left, right), in keys: query i sees i + Sk - Sq - left <= j <= i + Sk - Sq + right.
            None is no bound; negative values move the band.
        scale: factor of the scores, positive; 1 / sqrt(D) if None.
        softcap: c > 0: scaled scores s become c * tanh(s / c), before bias and masks.
        bias: added to the scores, (B|1, Hq|1, Sq|1, Sk|1), fp32 or q's dtype. Differentiable.
        alibi_slopes: (Hq,) or (B, Hq) fp32, adds -slope * |i + Sk - Sq - j|. Not differentiable.
        sink: (Hq,), fp32, bf16 or q's dtype: one more logit per head that takes weight and gives
            no value. Differentiable; -inf is none.
        dropout_p: probability in [0, 1) of dropping a weight, in steps of 2**-16.
        seed: of dropout: an int, a pair (seed, offset), an int64 tensor with one or both, or None
            to draw from torch's generator. The same seed gives the same mask on every backend.
        seqused_q, seqused_k: (B,) int32, how many rows of each sequence count; masks align to them.
        q_descale, k_descale, v_descale: scales of fp8 inputs.
        layout: "bshd" as above, or "bhsd" with heads before length, for q, k, v and the output.
        deterministic: bitwise equal gradients run to run; also when
            ``torch.use_deterministic_algorithms`` asks for it.
        algorithm: "fa1", "fa2", "fa3", "fa4" or "auto".
        backend: "cpu", "triton", "hopper", "blackwell" or "auto".
        out: where to write the result, shaped like it; only without gradients.
        return_lse: also return the log-sum-exp of each row's logits.

    Returns:
        (B, Sq, Hq, Dv) in q's dtype; with ``return_lse`` also (B, Hq, Sq) fp32 (fp64 for fp64
        inputs), natural log, differentiable. A row that sees no key: output 0, lse -inf (with a
        sink: its value), gradients 0.

    Raises:
        ValueError, TypeError: naming the argument, its value and what is allowed.
        UnsupportedError: no kernel on this machine does it; lists each kernel's reason.

    Source: Dao et al., FlashAttention (NeurIPS 2022), section 3.1, and its successors.
    """
    _no_descales(q_descale, k_descale, v_descale)
    swapped = _swapped(layout)
    if swapped:
        q, k, v = (_swap_heads(name, t) for name, t in (("q", q), ("k", k), ("v", v)))
    target = _swap_heads("out", out) if swapped and out is not None else out
    left, right = _pair(window)
    result, lse = _call(
        Inputs(q, k, v, bias, alibi_slopes, sink, None, None, seqused_q, seqused_k),
        {
            "max_seqlen_q": None,
            "max_seqlen_k": None,
            "causal": causal,
            "window_left": left,
            "window_right": right,
            "scale": scale,
            "softcap": softcap,
            "dropout_p": dropout_p,
            "deterministic": deterministic,
            "algorithm": algorithm,
            "backend": backend,
        },
        seed,
        target,
    )
    if out is not None:
        result = out
    elif swapped:
        result = result.transpose(1, 2)
    return (result, lse) if return_lse else result


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    causal: bool = False,
    window: Window = (None, None),
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Seed = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    deterministic: bool = False,
    algorithm: str = "auto",
    backend: str = "auto",
    out: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """``attention`` over sequences of different lengths, packed one after another without padding.

    Args:
        q: (total_q, Hq, D); k: (total_k, Hkv, D); v: (total_k, Hkv, Dv).
        cu_seqlens_q, cu_seqlens_k: (B + 1,) int32, contiguous: sequence b is rows cu[b] to cu[b + 1].
            Zero-length sequences are ordinary. Values are checked on a CPU, and on other devices
            if the environment says ``TILEWISE_CHECK=1`` (that waits for the device).
        max_seqlen_q, max_seqlen_k: at least the longest sequence; an int or a 0-d tensor (reading one
            from a GPU waits for it; while compiling or capturing, the total is used instead).
        seqused_q, seqused_k: (B,) int32, how many of each sequence's rows count.
        Others: as in ``attention``; bias is (B|1, Hq|1, max_seqlen_q|1, max_seqlen_k|1), with
            positions local to each sequence.

    Returns:
        (total_q, Hq, Dv); with ``return_lse`` also (Hq, total_q). Rows past cu_seqlens_q[-1]: output
        0, lse -inf, gradient 0.

    Raises:
        As ``attention``.
    """
    _no_descales(q_descale, k_descale, v_descale)
    left, right = _pair(window)
    result, lse = _call(
        Inputs(q, k, v, bias, alibi_slopes, sink, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k),
        {
            "max_seqlen_q": _longest("max_seqlen_q", max_seqlen_q, q),
            "max_seqlen_k": _longest("max_seqlen_k", max_seqlen_k, k),
            "causal": causal,
            "window_left": left,
            "window_right": right,
            "scale": scale,
            "softcap": softcap,
            "dropout_p": dropout_p,
            "deterministic": deterministic,
            "algorithm": algorithm,
            "backend": backend,
        },
        seed,
        out,
    )
    return (result, lse) if return_lse else result


def merge(
    out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor, *, layout: str = "bshd"
) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys, from the results over each.

    Args:
        out1, out2: (B, S, H, Dv), (B, H, S, Dv) with ``layout="bhsd"``, or varlen (total, H, Dv).
        lse1, lse2: their log-sum-exps, (B, H, S) or (H, total). -inf: that part saw no key.

    Returns:
        The merged output in out1's dtype and its lse. Differentiable in all four.

    Source: Dao et al., FlashAttention (NeurIPS 2022), section 3.1 (softmax by blocks).
    """
    swap = not _swapped(layout)
    if out1.shape != out2.shape:
        raise ValueError(f"out2.shape: got {tuple(out2.shape)}; allowed is {tuple(out1.shape)}")
    rows = out1.transpose(-3, -2).shape[:-1] if swap else out1.shape[:-1]
    for name, lse in (("lse1", lse1), ("lse2", lse2)):
        if lse.shape != rows:
            raise ValueError(f"{name}.shape: got {tuple(lse.shape)}; allowed is {tuple(rows)}")
    top = torch.maximum(lse1, lse2).detach()
    top = top.masked_fill(top == float("-inf"), 0)
    weight1, weight2 = torch.exp(lse1 - top), torch.exp(lse2 - top)
    total = weight1 + weight2
    dead = total == 0
    total = total.masked_fill(dead, 1)
    lse = (top + torch.log(total)).masked_fill(dead, float("-inf"))

    def share(weight: Tensor) -> Tensor:
        return ((weight / total).transpose(-2, -1) if swap else weight / total).unsqueeze(-1)

    out = share(weight1) * out1 + share(weight2) * out2
    return out.to(out1.dtype), lse


def dropout_mask(
    batch: int,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
    *,
    dropout_p: float,
    seed: int | tuple[int, int] | Tensor,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Which weights dropout keeps: bool (batch, heads, seqlen_q, seqlen_k).

    The very mask that ``attention`` uses with this ``dropout_p`` and ``seed`` (for packed sequences:
    entry b is sequence b's). A kept weight is multiplied by 65536 / (65536 - round(65536 p)).
    """
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p: got {dropout_p!r}; allowed is in [0, 1)")
    key = _dropout_key(seed, torch.device(device))
    axes = range(heads), range(seqlen_q), range(seqlen_k)
    masks = [philox.keep_mask(key, b, *axes, dropout_p) for b in range(batch)]
    empty = torch.empty(0, heads, seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    return torch.stack(masks) if masks else empty


@dataclass(frozen=True)
class Explanation:
    """Which kernel a call would run and why: ``str(...)`` for people, ``data`` for programs."""

    data: dict[str, Any]

    def __str__(self) -> str:
        lines = []
        for direction in ("forward", "backward"):
            part = self.data[direction]
            lines.append(f"{direction}: {part['kernel'] or 'no kernel'}")
            lines += [f"  not {name}: {reason}" for name, reason in part["passed_over"].items()]
        return "\n".join(lines)


def explain(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Explanation:
    """Which kernel ``attention`` (or, given cu_seqlens_q, ``attention_varlen``) would choose for
    these arguments, and why it passes over the others. Runs nothing.

    Returns:
        ``Explanation``: data = {"forward": {"kernel": "cpu/fa2" or None, "passed_over": {name:
        reason}}, "backward": {...}, "features": [...]}.

    Raises:
        ValueError, TypeError: as the call itself would.
    """
    _no_descales(*(keywords.pop(f"{name}_descale", None) for name in "qkv"))
    for name in ("out", "return_lse", "seed"):  # no kernel is chosen by these
        keywords.pop(name, None)
    if _swapped(keywords.pop("layout", "bshd")):
        q, k, v = (_swap_heads(name, t) for name, t in (("q", q), ("k", k), ("v", v)))
    left, right = _pair(keywords.pop("window", (None, None)))
    for name, t in (("max_seqlen_q", q), ("max_seqlen_k", k)):
        if name in keywords:
            keywords[name] = _longest(name, keywords[name], t)
    tensors = {name: keywords.pop(name) for name in Inputs._fields if name in keywords}
    x = Inputs(q, k, v, **tensors)
    check_types(x, keywords)
    if torch.are_deterministic_algorithms_enabled():
        keywords["deterministic"] = True
    spec = make_spec(x, window_left=left, window_right=right, **keywords)
    check_values(spec, x)
    data: dict[str, Any] = {"features": sorted(spec.features)}
    directions: tuple[dispatch.Direction, ...] = ("forward", "backward")
    for direction in directions:
        kernel, passed_over = dispatch.survey(spec, direction)
        data[direction] = {
            "kernel": None if kernel is None else kernel.name,
            "passed_over": dict(passed_over),
        }
    return Explanation(data)


def _call(x: Inputs, options: dict[str, Any], seed: Seed, out: Tensor | None) -> tuple[Tensor, Tensor]:
    check_types(x, options)
    _refuse_tangents(x)
    options["deterministic"] |= torch.are_deterministic_algorithms_enabled()
    if options["dropout_p"] > 0:
        x = x._replace(dropout_key=_dropout_key(seed, x.q.device))
    values = [options[name] for name in ops.OPTION_NAMES]
    if out is None:
        result, lse, _ = torch.ops.tilewise.forward(*x, *values)
        return result, lse
    if not isinstance(out, Tensor):
        raise TypeError(f"out: got {type(out).__name__}; allowed is a tensor or None")
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*x, out)):
        raise ValueError("out: got a tensor while gradients are recorded; allowed is None, or no_grad")
    return out, torch.ops.tilewise.forward_out(out, *x, *values)


def _refuse_tangents(x: Inputs) -> None:
    """Forward-mode derivatives would pass an operator by and come out as zero, without a word."""
    if forward_ad._current_level < 0:
        return
    if any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in x):
        raise UnsupportedError(
            "forward-mode derivatives of attention (jvp, jacfwd) are not implemented: use backward"
        )


def _swapped(layout: str) -> bool:
    if layout not in LAYOUTS:
        raise ValueError(f"layout: got {layout!r}; allowed is one of {', '.join(LAYOUTS)}")
    return layout == "bhsd"


def _swap_heads(name: str, x: Tensor) -> Tensor:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}; allowed is a tensor")
    if x.dim() != 4:
        raise ValueError(f"{name}.shape: got {tuple(x.shape)}; allowed is (B, heads, S, head_dim)")
    return x.transpose(1, 2)


def _pair(window: Window) -> Window:
    try:
        left, right = window
    except (TypeError, ValueError):
        raise ValueError(f"window: got {window!r}; allowed is a pair (left, right)") from None
    return left, right


def _longest(name: str, value: int | Tensor, x: Tensor) -> int:
    """max_seqlen as an int. The total bounds every sequence, where reading a tensor is not possible."""
    if not isinstance(value, Tensor):
        return value
    if value.numel() != 1:
        raise ValueError(f"{name}.shape: got {tuple(value.shape)}; allowed is a 0-d tensor or an int")
    if torch.compiler.is_compiling() or (value.is_cuda and torch.cuda.is_current_stream_capturing()):
        return x.shape[0]
    return int(value)


def _no_descales(*descales: Tensor | None) -> None:
    if any(t is not None for t in descales):
        raise UnsupportedError("q_descale, k_descale, v_descale: no kernel takes fp8 in this version")


def _dropout_key(seed: Seed, device: torch.device) -> Tensor:
    """The (1,) int64 key of ``philox.fold``; stays on the device, so that graphs can replay it."""
    if seed is None:
        return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.numel() not in (1, 2):
            raise ValueError(
                f"seed: got {seed.dtype} of shape {tuple(seed.shape)}; allowed is int64, 1 or 2 elements"
            )
        flat = seed.to(device).reshape(-1)
        return philox.fold(flat[:1], flat[1:2] if flat.numel() == 2 else 0)
    pair = seed if isinstance(seed, tuple) else (seed, 0)
    if len(pair) != 2 or not all(isinstance(n, int) and -(2**63) <= n < 2**63 for n in pair):
        raise ValueError(f"seed: got {seed!r}; allowed is an int, (seed, offset) or an int64 tensor")
    first, offset = (torch.full((1,), n, dtype=torch.int64, device=device) for n in pair)
    return philox.fold(first, offset)
