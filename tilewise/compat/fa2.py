"""The functions of ``flash_attn`` 2.8, same parameters in the same order.

Common to all of them:

- dropout_p in [0, 1): bits come from torch's generator, so ``torch.manual_seed`` repeats them, but they
  are not the bits that flash_attn would draw.
- softmax_scale: 1 / sqrt(D) if None.
- causal: bottom-right aligned, query i sees keys j <= i + Sk - Sq.
- window_size: (left, right); -1, like any negative number, is no bound. With causal the right one is 0.
- softcap: 0.0 is none.
- alibi_slopes: (H,) or (B, H) fp32, adds -slope * |i + Sk - Sq - j|.
- deterministic: bitwise equal gradients run to run.
- return_attn_probs: return (out, softmax_lse, S_dmask). softmax_lse is fp32 (fp64 of fp64 inputs),
  natural log, and has a gradient; for a row without keys it is -inf (there: +inf).
  S_dmask is None, as in flash_attn without dropout: with dropout it would be a matrix of all
  probabilities, which is never formed.

More than flash_attn takes is fine: fp32 and on a CPU fp64, any head dim up to 256, values of another
head dim than keys, softcap together with dropout.

Errors are those of ``tilewise.attention``: ValueError, TypeError, UnsupportedError.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tilewise.api import attention, attention_varlen
from tilewise.compat.arguments import refuse, softcap_or_none, window_below_zero
from tilewise.spec import check_tensor, require

_Probs = tuple[Tensor, Tensor, None]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | _Probs:
    """q (B, Sq, H, D), k and v (B, Sk, Hkv, D), Hkv dividing H.

    Returns:
        (B, Sq, H, D); with return_attn_probs (out, softmax_lse (B, H, Sq), None).
    """
    options = _options(
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )
    return _returned(attention(q, k, v, **options))


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor | _Probs:
    """q (total_q, H, D), k and v (total_k, Hkv, D); cu_seqlens (B + 1,) int32, max_seqlen an int each.

    block_table (paged keys and values) is an UnsupportedError.

    Returns:
        (total_q, H, D); with return_attn_probs (out, softmax_lse (H, total_q), None).
    """
    refuse(block_table=block_table)
    options = _options(
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )
    result = attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        **options,
    )
    return _returned(result)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | _Probs:
    """qkv (B, S, 3, H, D). Returns as ``flash_attn_func`` of its three parts."""
    q, k, v = _parts("qkv", qkv, "(B, S, 3, H, D)")
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | _Probs:
    """q (B, Sq, H, D), kv (B, Sk, 2, Hkv, D). Returns as ``flash_attn_func`` of q and its two parts."""
    k, v = _parts("kv", kv, "(B, Sk, 2, Hkv, D)")
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | _Probs:
    """qkv (total, 3, H, D), cu_seqlens (B + 1,) int32. Returns as ``flash_attn_varlen_func``."""
    q, k, v = _parts("qkv", qkv, "(total, 3, H, D)")
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | _Probs:
    """q (total_q, H, D), kv (total_k, 2, Hkv, D). Returns as ``flash_attn_varlen_func``."""
    k, v = _parts("kv", kv, "(total_k, 2, Hkv, D)")
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def _options(
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    return_attn_probs: bool,
) -> dict[str, Any]:
    return {
        "dropout_p": dropout_p,
        "scale": softmax_scale,
        "causal": causal,
        "window": window_below_zero(window_size),
        "softcap": softcap_or_none(softcap),
        "alibi_slopes": alibi_slopes,
        "deterministic": deterministic,
        "return_lse": return_attn_probs,
    }


def _returned(result: Tensor | tuple[Tensor, Tensor]) -> Tensor | _Probs:
    return result if isinstance(result, Tensor) else (*result, None)


def _parts(name: str, packed: Tensor, form: str) -> tuple[Tensor, ...]:
    """The 2 or 3 tensors packed along dimension -3, as views."""
    check_tensor(name, packed)
    wanted = form.count(",") + 1, int(form.split(", ")[-3])
    got = packed.dim(), packed.shape[-3] if packed.dim() >= 3 else None
    require(got == wanted, f"{name}.shape", tuple(packed.shape), form)
    return packed.unbind(-3)
