"""The public functions: arguments in, operator call out."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise import again, dispatch, ops, philox
from tilewise.mask import Window
from tilewise.spec import (
    Inputs,
    brief,
    check_options,
    check_tensor,
    check_tensors,
    check_type,
    check_values,
    heads_first,
    make_spec,
    require,
    require_type,
)

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
    fp8: str | None = None,
    layout: str = "bshd",
    deterministic: bool = False,
    algorithm: str = "auto",
    backend: str = "auto",
    out: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * q k^T + ...) v, exact, without ever holding the Sq x Sk scores.

    Args:
        q: (B, Sq, Hq, D); fp16, bf16, fp32 or, on the CPU, fp64 or fp8 e4m3, which has no
            gradient. D from 1 to 256.
        k: (B, Sk, Hkv, D), Hkv dividing Hq: query head h reads key head h // (Hq / Hkv).
        v: (B, Sk, Hkv, Dv), Dv from 1 to 256. Any strides; a last dimension that is not contiguous
            is copied.
        causal: query i sees keys j <= i + Sk - Sq (bottom-right aligned).
        window: (left, right), in keys: query i sees i + Sk - Sq - left <= j <= i + Sk - Sq + right.
            None is no bound; negative values move the band.
        scale: factor of the scores, from 2**-60 to 2**60; 1 / sqrt(D) if None.
        softcap: c, from 2**-60 to 2**60: scaled scores s become c * tanh(s / c), before bias and masks.
        bias: added to the scores, (B|1, Hq|1, Sq|1, Sk|1), fp32 or q's dtype. Differentiable.
        alibi_slopes: (Hq,) or (B, Hq) fp32, adds -slope * |i + Sk - Sq - j|. Not differentiable.
        sink: (Hq,), fp32, bf16 or q's dtype: one more logit per head that takes weight and gives
            no value. Differentiable; -inf is none.
        dropout_p: probability in [0, 1) of dropping a weight, in steps of 2**-16.
        seed: of dropout: an int, a pair (seed, offset), an int64 tensor with one or both, or None
            to draw from torch's generator. The same seed gives the same mask on every backend.
        seqused_q, seqused_k: (B,) int32, how many rows of each sequence count; masks align to them.
        q_descale, k_descale, v_descale: (B, Hkv) fp32, what the numbers of q, k and v that are fp8
            (torch.float8_e4m3fn) are multiplied with; None is 1. Not differentiable.
        fp8: how to quantise q, k and v in bf16 or fp16 to e4m3 first, and weights after the softmax:
            "tensor" with one scale for each of q, k, v, sequence and key head; "block" with one for
            each tile of 128 rows and head; "rotated" as "block", q and k after a random rotation that
            leaves scores as they are and spreads outliers over all components. A scale sees its whole
            tile: how a result is rounded depends on later keys, too, under a causal mask.
            Gradients are those without ``fp8``, for which the backward runs that forward as well.
        layout: "bshd" as above, or "bhsd" with heads before length, for q, k, v and the output.
        deterministic: bitwise equal gradients run to run; also when
            ``torch.use_deterministic_algorithms`` asks for it.
        algorithm: "fa1", "fa2", "fa3", "fa4" or "auto".
        backend: "cpu", "triton", "hopper", "blackwell" or "auto".
        out: where to write the result, shaped like it; only without gradients.
        return_lse: also return the log-sum-exp of each row's logits.

    Returns:
        (B, Sq, Hq, Dv) in q's dtype, bf16 for fp8; with ``return_lse`` also (B, Hq, Sq) fp32 (fp64
        for fp64 inputs), natural log, differentiable. A row that sees no key: output 0, lse -inf (with a
        sink: its value), gradients 0.

    Raises:
        ValueError, TypeError: naming the argument, its value and what is allowed.
        UnsupportedError: no kernel on this machine does it; lists each kernel's reason.

    Under ``torch.func``: grad, vjp, jacrev and vmap, which makes one call for each sample; compiled,
    they run outside the graph. Second and forward-mode derivatives are errors.

    Source: Dao et al., FlashAttention (NeurIPS 2022), section 3.1, and its successors; fp8: Shah et
    al., FlashAttention-3 (NeurIPS 2024), section 3.3.
    """
    call = None
    if out is seed is q_descale is k_descale is v_descale is None:
        given = q, k, v, bias, alibi_slopes, sink, None, None, seqused_q, seqused_k
        options = (
            causal,
            scale,
            softcap,
            dropout_p,
            deterministic,
            algorithm,
            backend,
            layout,
            return_lse,
            fp8,
        )
        call = again.signature(given, options, window)
        known = again.find(call)
        if known is not None:
            result, lse = known(given)
            return (result, lse) if return_lse else result
    asked = _understand(
        q,
        k,
        v,
        causal=causal,
        window=window,
        scale=scale,
        softcap=softcap,
        bias=bias,
        alibi_slopes=alibi_slopes,
        sink=sink,
        dropout_p=dropout_p,
        seed=seed,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        fp8=fp8,
        deterministic=deterministic,
        algorithm=algorithm,
        backend=backend,
        out=out,
        return_lse=return_lse,
        layout=layout,
    )
    result, lse = _call(asked, seed, call, layout)
    if out is not None:
        result = out
    elif layout == "bhsd":
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
    fp8: str | None = None,
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
        max_seqlen_q, max_seqlen_k: at least the longest sequence; an int or a 0-d integer tensor
            (reading one from a GPU waits for it; while compiling or capturing, the bias's length or
            else the total is used instead). More than the total is as good as the total.
        seqused_q, seqused_k: (B,) int32, how many of each sequence's rows count.
        Others: as in ``attention``; bias is (B|1, Hq|1, max_seqlen_q|1, max_seqlen_k|1), with
            positions local to each sequence.

    Returns:
        (total_q, Hq, Dv); with ``return_lse`` also (Hq, total_q). Rows past cu_seqlens_q[-1]: output
        0, lse -inf, gradient 0.

    Raises:
        As ``attention``.
    """
    call = None
    if out is seed is q_descale is k_descale is v_descale is None and not (
        isinstance(max_seqlen_q, Tensor) or isinstance(max_seqlen_k, Tensor)
    ):
        lengths = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
        given = q, k, v, bias, alibi_slopes, sink, *lengths
        longest = max_seqlen_q, max_seqlen_k
        options = causal, scale, softcap, dropout_p, deterministic, algorithm, backend, return_lse, fp8
        call = again.signature(given, (*longest, *options), window)
        known = again.find(call)
        if known is not None:
            result, lse = known(given)
            return (result, lse) if return_lse else result
    _check_packed(cu_seqlens_q, cu_seqlens_k)
    asked = _understand(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        causal=causal,
        window=window,
        scale=scale,
        softcap=softcap,
        bias=bias,
        alibi_slopes=alibi_slopes,
        sink=sink,
        dropout_p=dropout_p,
        seed=seed,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        fp8=fp8,
        deterministic=deterministic,
        algorithm=algorithm,
        backend=backend,
        out=out,
        return_lse=return_lse,
    )
    result, lse = _call(asked, seed, call)
    return (result, lse) if return_lse else result


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

    Raises:
        ValueError, TypeError: naming the argument, its value and what is allowed.
    """
    sizes = {"batch": batch, "heads": heads, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    for name, size in sizes.items():
        check_type(name, size, int, "an integer")
        require(0 <= size < 2**32, name, size, "0 to 2**32 - 1")
    check_type("dropout_p", dropout_p, (int, float), "a number")
    require(0 <= dropout_p < 1, "dropout_p", dropout_p, "in [0, 1)")
    require(seed is not None, "seed", None, _SEEDS)
    _check_seed(seed)
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device: got {brief(device)}; allowed is a device of torch") from None
    key = _dropout_key(seed, device)
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
        ValueError, TypeError, UnsupportedError: as the call itself would, but for the want of a kernel.
    """
    only_packed = {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"}
    packed = not only_packed.isdisjoint(keywords)
    asked = inspect.signature(attention_varlen if packed else attention).bind(q, k, v, **keywords)
    asked.apply_defaults()
    if packed:
        _check_packed(asked.arguments["cu_seqlens_q"], asked.arguments["cu_seqlens_k"])
    x, options, out = _understand(**asked.arguments)
    spec = make_spec(x, **options)
    check_values(spec, x)
    if out is not None:
        ops.check_out(spec, x, out)
    data: dict[str, Any] = {"features": sorted(spec.features)}
    directions: tuple[dispatch.Direction, ...] = ("forward", "backward")
    for direction in directions:
        asked_for = spec if direction == "forward" else spec.unquantized
        kernel, passed_over = dispatch.survey(asked_for, direction)
        data[direction] = {
            "kernel": None if kernel is None else kernel.name,
            "passed_over": dict(passed_over),
        }
    return Explanation(data)


class _Asked(NamedTuple):
    """A call's arguments, checked as far as they can be without a spec. out: length before heads."""

    x: Inputs
    options: dict[str, Any]
    out: Tensor | None


def _understand(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    window: Window,
    scale: float | None,
    softcap: float | None,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    sink: Tensor | None,
    dropout_p: float,
    seed: Seed,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    fp8: str | None,
    deterministic: bool,
    algorithm: str,
    backend: str,
    out: Tensor | None,
    return_lse: bool,
    layout: str = "bshd",
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
) -> _Asked:
    """What ``attention`` and ``attention_varlen`` do before they run anything, and ``explain`` too."""
    tensors = bias, alibi_slopes, sink, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
    x = Inputs(q, k, v, *tensors, None, q_descale, k_descale, v_descale)
    check_tensors(x)
    if out is not None:
        check_tensor("out", out, "a tensor or None")
        _check_out_can_be_written(x, out)
    if heads_first(layout):
        if out is not None:
            out = _swap_out(x, out)
        x = x._replace(q=_swap_heads("q", q), k=_swap_heads("k", k), v=_swap_heads("v", v))
    left, right = _pair(window)
    options: dict[str, Any] = {
        "max_seqlen_q": _longest("max_seqlen_q", max_seqlen_q, q, bias, 2),
        "max_seqlen_k": _longest("max_seqlen_k", max_seqlen_k, k, bias, 3),
        "causal": causal,
        "window_left": left,
        "window_right": right,
        "scale": scale,
        "softcap": softcap,
        "dropout_p": dropout_p,
        "deterministic": deterministic,
        "algorithm": algorithm,
        "backend": backend,
        "fp8": fp8,
    }
    check_options(options)
    check_type("return_lse", return_lse, bool, "a bool")
    _check_seed(seed)
    options["deterministic"] |= torch.are_deterministic_algorithms_enabled()
    ops.refuse_tangents(*x)
    return _Asked(x, options, out)


def _call(
    asked: _Asked, seed: Seed, call: again.Signature | None, layout: str = "bshd"
) -> tuple[Tensor, Tensor]:
    """Run it, and remember the call if it has a signature."""
    x, options, out = asked
    if options["dropout_p"] > 0:
        x = x._replace(dropout_key=_dropout_key(seed, x.q.device))
    values = [options[name] for name in ops.OPTION_NAMES]
    if out is None:
        result, lse, _ = ops.call("forward", *x, *values)
        again.keep(call, x, values, heads_first=layout == "bhsd")
        return result, lse
    return out, torch.ops.tilewise.forward_out(out, *x, *values)


def _check_packed(cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> None:
    """Without lengths it would be a dense call, whatever the caller meant."""
    for name, t in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        require(t is not None, name, None, "an int32 tensor (B + 1,): varlen needs both")


def _check_out_can_be_written(x: Inputs, out: Tensor) -> None:
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*x, out)):
        raise ValueError("out: got a tensor while gradients are recorded; allowed is None, or no_grad")
    if torch._C._are_functorch_transforms_active():
        raise ValueError("out: got a tensor under a transform of torch.func; allowed is None")


def _swap_heads(name: str, x: Tensor) -> Tensor:
    require(x.dim() == 4, f"{name}.shape", tuple(x.shape), "(B, heads, S, head_dim)")
    return x.transpose(1, 2)


def _swap_out(x: Inputs, out: Tensor) -> Tensor:
    """Its shape is checked before, so that a message has the shapes that the caller knows."""
    if x.q.dim() == x.v.dim() == 4:
        want = (*x.q.shape[:-1], x.v.shape[-1])
        require(tuple(out.shape) == want, "out.shape", tuple(out.shape), f"{want}")
    return _swap_heads("out", out)


def _pair(window: Window) -> Window:
    try:
        left, right = window
    except (TypeError, ValueError):
        raise ValueError(f"window: got {brief(window)}; allowed is a pair (left, right)") from None
    return left, right


def _longest(
    name: str, value: int | Tensor | None, rows: Tensor, bias: Tensor | None, dim: int
) -> int | None:
    """max_seqlen as an int.

    Where a tensor cannot be read, something else says it: the bias, which is as long unless it
    broadcasts, or the total, which bounds every sequence.
    """
    if not isinstance(value, Tensor):
        return value
    require(value.numel() == 1, f"{name}.shape", tuple(value.shape), "a 0-d tensor or an int")
    integer = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
    require_type(integer, f"{name}.dtype", value.dtype, "one of the integer types")
    if (
        torch.compiler.is_compiling()
        or value.is_meta
        or (value.is_cuda and torch.cuda.is_current_stream_capturing())
    ):
        if bias is not None and bias.dim() == 4 and bias.shape[dim] > 1:
            return bias.shape[dim]
        return rows.shape[0]
    return int(value)


_SEEDS = "an int, (seed, offset) or an int64 tensor"


def _check_seed(seed: Seed) -> None:
    if seed is None:
        return
    if isinstance(seed, Tensor):
        fits = seed.dtype == torch.int64 and seed.numel() in (1, 2)
        if not fits:
            got = f"{seed.dtype} of shape {tuple(seed.shape)}"
            raise ValueError(f"seed: got {got}; allowed is int64, 1 or 2 elements")
        return
    pair = seed if isinstance(seed, tuple) else (seed, 0)
    fits = len(pair) == 2 and all(type(n) is not bool and isinstance(n, int) for n in pair)
    if not (fits and all(-(2**63) <= n < 2**63 for n in pair)):
        raise ValueError(f"seed: got {brief(seed)}; allowed is {_SEEDS}")


def _dropout_key(seed: Seed, device: torch.device) -> Tensor:
    """The (1,) int64 key of ``philox.fold``; stays on the device, so that graphs can replay it."""
    if seed is None:
        return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)
    if isinstance(seed, Tensor):
        flat = seed.to(device).reshape(-1)
        return philox.fold(flat[:1], flat[1:2] if flat.numel() == 2 else 0)
    pair = seed if isinstance(seed, tuple) else (seed, 0)
    first, offset = (torch.full((1,), n, dtype=torch.int64, device=device) for n in pair)
    return philox.fold(first, offset)
