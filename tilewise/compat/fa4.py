"""The functions of FlashAttention-4's ``flash_attn.cute.interface``, same parameters in the same order.

Common to the first two:

- They always return (out, lse), whatever return_lse says. lse is fp32 (fp64 of fp64 inputs),
  natural log, differentiable; for a row without keys -inf, or with a sink its value.
- softmax_scale: 1 / sqrt(D) if None.
- causal: bottom-right aligned, query i sees keys j <= i + Sk - Sq.
- window_size: (left, right); None is no bound, and so are two negative numbers. A single one
  moves the band. With causal the right one is 0.
- learnable_sink: (H,), fp32, bf16 or q's dtype, differentiable.
- softcap: 0.0 is none.
- deterministic: bitwise equal gradients run to run.
- num_splits, pack_gqa, min_seqlen_k, scheduler_metadata, disable_scheduler_metadata: how that package
  schedules its kernels; they change no result and Tilewise schedules its own, so any value is fine.
- UnsupportedError if given: score_mod, score_mod_bwd, mask_mod, aux_tensors, aux_scalars, block
  sparsity, qv, gather_kv_indices and what belongs to it, page_table, and seqlen_k_per_split, which
  promises the same bits for any batch.

Other errors are those of ``tilewise.attention``: ValueError, TypeError, UnsupportedError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilewise.api import attention, attention_varlen
from tilewise.compat.arguments import pair, refuse, softcap_or_none
from tilewise.compat.combining import combine
from tilewise.mask import Window
from tilewise.spec import check_tensor, require

_WindowSize = tuple[int | None, int | None]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: _WindowSize = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable | None = None,
    score_mod_bwd: Callable | None = None,
    mask_mod: Callable | None = None,
    aux_tensors: list | None = None,
    aux_scalars: tuple | None = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """q (B, Sq, H, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv), Hkv dividing H.

    Returns:
        out (B, Sq, H, Dv), lse (B, H, Sq).
    """
    refuse(
        qv=qv,
        gather_kv_indices=gather_kv_indices,
        score_mod=score_mod,
        score_mod_bwd=score_mod_bwd,
        mask_mod=mask_mod,
        aux_tensors=aux_tensors,
        aux_scalars=aux_scalars,
        block_sparse_tensors=block_sparse_tensors,
        block_sparse_tensors_bwd=block_sparse_tensors_bwd,
        gather_bwd_recompute_p=gather_bwd_recompute_p,
        gather_bwd_token_chunk=gather_bwd_token_chunk,
    )
    options = _options(softmax_scale, causal, window_size, learnable_sink, softcap, deterministic)
    out, lse = attention(q, k, v, **options)
    return out, lse


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: _WindowSize = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable | None = None,
    score_mod_bwd: Callable | None = None,
    mask_mod: Callable | None = None,
    block_sparse_tensors: Any = None,
    aux_tensors: list | None = None,
    aux_scalars: tuple | None = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Queries, keys or both packed, whichever has cu_seqlens.

    Args:
        q: (total_q, H, D) with cu_seqlens_q (B + 1,) int32; else (B, Sq, H, D).
        k, v: (total_k, Hkv, D) and (total_k, Hkv, Dv) with cu_seqlens_k; else (B, Sk, Hkv, ...).
        max_seqlen_q, max_seqlen_k: at least the longest sequence. If None the total is used, which
            is right but starts more of the GPU than there is work for: pass it where it is known.
        seqused_q, seqused_k: (B,) int32, how many rows of each sequence count: the others give 0.

    Returns:
        out in q's form, with Dv; lse (H, total_q) or (B, H, Sq).
    """
    refuse(
        qv=qv,
        gather_kv_indices=gather_kv_indices,
        page_table=page_table,
        score_mod=score_mod,
        score_mod_bwd=score_mod_bwd,
        mask_mod=mask_mod,
        block_sparse_tensors=block_sparse_tensors,
        aux_tensors=aux_tensors,
        aux_scalars=aux_scalars,
        seqlen_k_per_split=seqlen_k_per_split,
        gather_bwd_recompute_p=gather_bwd_recompute_p,
        gather_bwd_token_chunk=gather_bwd_token_chunk,
    )
    options = _options(softmax_scale, causal, window_size, learnable_sink, softcap, deterministic)
    options.update(seqused_q=seqused_q, seqused_k=seqused_k)
    if cu_seqlens_q is None and cu_seqlens_k is None:
        out, lse = attention(q, k, v, **options)
        return out, lse

    form = None if cu_seqlens_q is not None else tuple(q.shape[:2])
    if cu_seqlens_q is None:
        cu_seqlens_q, max_seqlen_q, (q,) = _packed("q", q)
    if cu_seqlens_k is None:
        cu_seqlens_k, max_seqlen_k, (k, v) = _packed("k", k, v)
    out, lse = attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=q.shape[0] if max_seqlen_q is None else max_seqlen_q,
        max_seqlen_k=k.shape[0] if max_seqlen_k is None else max_seqlen_k,
        **options,
    )
    if form is not None:
        out, lse = out.unflatten(0, form), lse.unflatten(1, form).transpose(0, 1)
    return out, lse


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    cu_seqlens: Tensor | None = None,
    seqused: Tensor | None = None,
    virtual_batch_idx: Tensor | None = None,
    return_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Attention over all keys from the results over parts of them.

    Args:
        out_partial: (parts, B, S, H, Dv) or (parts, total, H, Dv).
        lse_partial: (parts, B, S, H) or (parts, total, H), fp32 (fp64 of fp64 outputs): heads last, as
            that package keeps it here alone.
        out: where to write the result.
        out_dtype: of the result; out's, or else out_partial's, if None.
        cu_seqlens, seqused, virtual_batch_idx: which rows to leave as they are; UnsupportedError.
        return_lse: False: None in place of the lse.

    Returns:
        (B, S, H, Dv) and its lse (B, S, H), or those of packed sequences; differentiable.

    Raises:
        ValueError, TypeError: shapes or dtypes that do not fit. UnsupportedError: see above.
    """
    refuse(cu_seqlens=cu_seqlens, seqused=seqused, virtual_batch_idx=virtual_batch_idx)
    merged, lse = combine(out_partial, lse_partial, out, out_dtype)
    return merged, lse if return_lse else None


def _options(
    softmax_scale: float | None,
    causal: bool,
    window_size: _WindowSize,
    learnable_sink: Tensor | None,
    softcap: float,
    deterministic: bool,
) -> dict[str, Any]:
    return {
        "scale": softmax_scale,
        "causal": causal,
        "window": _window(window_size, causal),
        "sink": learnable_sink,
        "softcap": softcap_or_none(softcap),
        "deterministic": deterministic,
        "return_lse": True,
    }


def _window(window_size: _WindowSize, causal: bool) -> Window:
    left, right = pair(window_size, "an integer or None")
    if left is not None and right is not None and left < 0 and right < 0:
        return None, None
    return left, None if causal else right


def _packed(name: str, *tensors: Tensor) -> tuple[Tensor, int, list[Tensor]]:
    """Tensors (B, S, ...) as B packed sequences of length S: cu_seqlens, S and the tensors."""
    for t in tensors:
        check_tensor(name, t)
        form = f"(B, S, heads, head_dim), since there is no cu_seqlens_{name}"
        require(t.dim() == 4, f"{name}.shape", tuple(t.shape), form)
    batch, length = tensors[0].shape[:2]
    cu = torch.arange(batch + 1, dtype=torch.int32, device=tensors[0].device) * length
    return cu, length, [t.flatten(0, 1) for t in tensors]
