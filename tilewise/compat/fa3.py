"""The functions of FlashAttention-3's ``flash_attn_interface``, same parameters in the same order.

Common to all of them:

- softmax_scale: 1 / sqrt(D) if None.
- causal: bottom-right aligned, query i sees keys j <= i + Sk - Sq.
- window_size: (left, right); -1, like any negative number, is no bound. With causal the right one is 0.
- softcap: 0.0 is none.
- q_descale, k_descale, v_descale: (B, Hkv) fp32, what the numbers of fp8 inputs are multiplied with;
  the output is bf16 then. With other inputs: ValueError.
- qv, attention_chunk: UnsupportedError unless None and 0; they would change the result.
- num_splits, pack_gqa, sm_margin: how that package schedules its kernels; they change no result and
  Tilewise schedules its own, so any value is fine.
- deterministic: bitwise equal gradients run to run.
- return_attn_probs: return (out, softmax_lse); it is fp32 (fp64 of fp64 inputs), natural log,
  differentiable, and for a row without keys -inf.

Other errors are those of ``tilewise.attention``: ValueError, TypeError, UnsupportedError.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.api import attention, attention_varlen
from tilewise.compat.arguments import refuse, softcap_or_none, window_below_zero
from tilewise.compat.combining import combine
from tilewise.spec import check_tensor, check_type, require

_Result = Tensor | tuple[Tensor, Tensor]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> _Result:
    """q (B, Sq, H, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv), Hkv dividing H.

    Returns:
        (B, Sq, H, Dv); with return_attn_probs (out, softmax_lse (B, H, Sq)).
    """
    refuse(qv=qv, attention_chunk=attention_chunk)
    return attention(
        q,
        k,
        v,
        causal=causal,
        window=window_below_zero(window_size),
        scale=softmax_scale,
        softcap=softcap_or_none(softcap),
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        deterministic=deterministic,
        return_lse=return_attn_probs,
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> _Result:
    """qkv (B, S, 3, H, D), or (B, S, H + 2 Hkv, D) with num_heads_q = H.

    Returns:
        As ``flash_attn_func`` of its three parts.
    """
    q, k, v = _parts(qkv, num_heads_q)
    return flash_attn_func(
        q,
        k,
        v,
        softmax_scale,
        causal,
        None,
        q_descale,
        k_descale,
        v_descale,
        window_size,
        attention_chunk,
        softcap,
        deterministic=deterministic,
        sm_margin=sm_margin,
        return_attn_probs=return_attn_probs,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> _Result:
    """q (total_q, H, D), k (total_k, Hkv, D), v (total_k, Hkv, Dv); cu_seqlens (B + 1,) int32,
    max_seqlen an int each; seqused (B,) int32, how many rows of each sequence count: the others give 0.

    Returns:
        (total_q, H, Dv); with return_attn_probs (out, softmax_lse (H, total_q)).
    """
    refuse(qv=qv, attention_chunk=attention_chunk)
    return attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        causal=causal,
        window=window_below_zero(window_size),
        scale=softmax_scale,
        softcap=softcap_or_none(softcap),
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        deterministic=deterministic,
        return_lse=return_attn_probs,
    )


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over all keys from the results over parts of them.

    Args:
        out_partial: (parts, B, S, H, Dv) or (parts, total, H, Dv).
        lse_partial: (parts, B, S, H) or (parts, total, H), fp32 (fp64 of fp64 outputs): heads last, as
            that package keeps it here alone.
        out: where to write the result.
        out_dtype: of the result; out's, or else out_partial's, if None.

    Returns:
        (B, S, H, Dv) and its lse (B, S, H), or those of packed sequences; differentiable.

    Raises:
        ValueError, TypeError: shapes or dtypes that do not fit.
    """
    return combine(out_partial, lse_partial, out, out_dtype)


def _parts(qkv: Tensor, num_heads_q: int | None) -> tuple[Tensor, ...]:
    check_tensor("qkv", qkv)
    shape = tuple(qkv.shape)
    check_type("num_heads_q", num_heads_q, (int, type(None)), "an integer or None")
    if len(shape) == 5:
        require(shape[2] == 3, "qkv.shape", shape, "(B, S, 3, H, D)")
        require(num_heads_q in (None, shape[3]), "num_heads_q", num_heads_q, f"None or {shape[3]}")
        return qkv.unbind(2)
    require(len(shape) == 4, "qkv.shape", shape, "(B, S, 3, H, D) or (B, S, H + 2 Hkv, D)")
    heads = num_heads_q or 0
    fits = 0 < heads < shape[2] and (shape[2] - heads) % 2 == 0
    require(fits, "num_heads_q", num_heads_q, f"H of the {shape[2]} = H + 2 Hkv heads of qkv")
    heads_kv = (shape[2] - heads) // 2
    return qkv.split([heads, heads_kv, heads_kv], 2)
