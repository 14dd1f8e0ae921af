"""``torch.nn.functional.scaled_dot_product_attention``, and Tilewise in PyTorch's own."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias

from tilewise.api import attention
from tilewise.compat.arguments import autocast
from tilewise.compat.aten import Registration, activate
from tilewise.spec import check_tensor, check_type, require, require_type


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(scale * query key^T + attn_mask) value, as PyTorch's function of this name.

    Args:
        query: (..., H, L, E); fp16, bf16, fp32 or, on the CPU, fp64.
        key: (..., H, S, E); value: (..., H, S, Ev). Leading dimensions broadcast; E, Ev from 1 to 256.
        attn_mask: broadcasts to (..., H, L, S). Bool: True takes part. fp32 or query's dtype: added to
            the scores, differentiable.
        dropout_p: probability in [0, 1) of dropping a weight. Bits come from torch's generator, but are
            not those that PyTorch would draw.
        is_causal: query i sees keys j <= i, aligned to the top left, unlike elsewhere in Tilewise.
        scale: 1 / sqrt(E) if None; positive.
        enable_gqa: key and value may have fewer heads, a divisor of H.

    Returns:
        (..., H, L, Ev) in query's dtype, or in autocast's, which is obeyed. A row that sees no key is 0
        with gradient 0, where PyTorch's differ among themselves (0 or NaN).

    Raises:
        ValueError, TypeError: naming the argument; also for attn_mask together with is_causal.
        UnsupportedError: no kernel on this machine does it.
    """
    for name, t in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, t)
        require(t.dim() >= 2, f"{name}.shape", tuple(t.shape), "(..., length, head_dim)")
    check_type("is_causal", is_causal, bool, "a bool")
    check_type("enable_gqa", enable_gqa, bool, "a bool")
    if attn_mask is not None:
        _check_mask(attn_mask, is_causal)
    query, key, value, attn_mask = autocast(query, key, value, attn_mask)

    form, (q, k, v) = _four_dims([query, key, value], enable_gqa)
    queries, keys = q.shape[2], k.shape[2]
    out = attention(
        q,
        k,
        v,
        # Right of the bottom-right diagonal by this much lies the one from the top left.
        window=(None, queries - keys if is_causal else None),
        scale=scale,
        bias=None if attn_mask is None else _bias(attn_mask, q, (*form, queries, keys)),
        dropout_p=dropout_p,
        layout="bhsd",
    )
    assert isinstance(out, Tensor)
    if max(t.dim() for t in (query, key, value)) == 2:
        return out[0, 0]
    return out if len(form) == 2 else out.reshape(*form, *out.shape[2:])


def register() -> Registration:
    """Make Tilewise the FLASH implementation of PyTorch's own function, on GPUs.

    From then on ``torch.nn.functional.scaled_dot_product_attention`` runs Tilewise's kernels wherever
    PyTorch picks its flash backend (fp16 or bf16, no attn_mask), and so does
    ``torch.nn.attention.varlen``. ``torch.nn.attention.current_flash_attention_impl()`` says "TILEWISE".

    Returns:
        What undoes it: call ``.remove()``, or use it as a context manager.

    Raises:
        UnsupportedError: this PyTorch does not let its flash implementation be replaced.
    """
    return activate()


def _check_mask(mask: Tensor, is_causal: bool) -> None:
    # It holds no values: PyTorch's function reads what it means from its class.
    plain = not isinstance(mask, CausalBias)
    require_type(plain, "attn_mask", "a CausalBias", "a plain tensor, or is_causal=True")
    check_tensor("attn_mask", mask)
    require(not is_causal, "attn_mask", mask, "None with is_causal=True")


def _four_dims(tensors: list[Tensor], enable_gqa: bool) -> tuple[tuple[int, ...], list[Tensor]]:
    """The leading dimensions of the result, and the tensors as (batch, heads, length, head_dim)."""
    tensors = [t[None] if t.dim() == 2 else t for t in tensors]
    upto = -3 if enable_gqa else -2  # which dimensions broadcast: all leading ones, or all but heads
    shapes = [tuple(t.shape[:upto]) for t in tensors]
    try:
        common = tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        allowed = "ones that broadcast"
        names = "query, key, value: leading dimensions"
        require(False, names, tuple(shapes), allowed + ("" if enable_gqa else ", or enable_gqa=True"))
        raise
    form = (*common, tensors[0].shape[-3]) if enable_gqa else common
    batch = math.prod(form[:-1])
    expanded = [t.expand(*common, *t.shape[upto:]) for t in tensors]
    return form, [t.reshape(batch, *t.shape[-3:]) for t in expanded]


def _bias(mask: Tensor, q: Tensor, full: tuple[int, ...]) -> Tensor:
    """The mask as the core's bias: four dimensions, those of length 1 kept."""
    try:
        fits = tuple(torch.broadcast_shapes(mask.shape, full)) == full
    except RuntimeError:
        fits = False
    require(fits, "attn_mask.shape", tuple(mask.shape), f"one that broadcasts to {full}")
    if mask.dtype == torch.bool:
        mask = mask.new_zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, -math.inf)
    allowed = f"torch.bool, torch.float32 or query's, {q.dtype}"
    require_type(mask.dtype in (torch.float32, q.dtype), "attn_mask.dtype", mask.dtype, allowed)
    mask = mask[(None,) * (len(full) - mask.dim())]
    if all(n == 1 for n in mask.shape[:-3]):
        return mask.reshape(1, *mask.shape[-3:])
    return mask.expand(*full[:-3], *mask.shape[-3:]).reshape(q.shape[0], *mask.shape[-3:])
