"""PyTorch's flash attention operators, computed by Tilewise.

PyTorch's own ``scaled_dot_product_attention`` and varlen attention end in these operators of ``aten``
when they choose their flash backend. Their derivatives are PyTorch's: a forward leaves an output, a
log-sum-exp and the dropout key, and the backward gets them.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
import torch.nn.attention
from torch import Tensor
from torch.library import Library

from tilewise import ops
from tilewise.api import attention, attention_varlen
from tilewise.compat.arguments import refuse
from tilewise.errors import UnsupportedError
from tilewise.spec import Inputs

NAME = "TILEWISE"
_NEEDED = (
    "register_flash_attention_impl",
    "activate_flash_attention_impl",
    "current_flash_attention_impl",
    "restore_flash_attention_impl",
)


class Registration:
    """Undoes ``activate``: by ``remove()``, or at the end of a ``with``."""

    def remove(self) -> None:
        """Give PyTorch its own implementation back. Nothing if another has taken over meanwhile."""
        if torch.nn.attention.current_flash_attention_impl() == NAME:
            torch.nn.attention.restore_flash_attention_impl()

    def __enter__(self) -> Registration:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def activate() -> Registration:
    """Put Tilewise in the place of PyTorch's flash attention. UnsupportedError if there is none."""
    missing = [name for name in _NEEDED if not hasattr(torch.nn.attention, name)]
    if missing:
        raise UnsupportedError(
            f"register: this PyTorch, {torch.__version__}, has no torch.nn.attention.{missing[0]}; "
            "call tilewise.compat.sdpa.scaled_dot_product_attention instead"
        )
    torch.nn.attention.register_flash_attention_impl(NAME, register_fn=implement)
    torch.nn.attention.activate_flash_attention_impl(NAME)
    return Registration()


class _Handle:
    """What PyTorch's registry keeps and removes: operators stay replaced while the library lives."""

    def __init__(self, library: Library) -> None:
        self.library: Library | None = library

    def remove(self) -> None:
        self.library = None


def implement(dispatch_key: str = "CUDA") -> _Handle:
    """Register the operators below for tensors of one kind of device."""
    library = Library("aten", "IMPL")
    for name, function in (
        ("_flash_attention_forward", flash_forward),
        ("_flash_attention_forward_no_dropout_inplace", flash_forward_inplace),
        ("_flash_attention_backward", flash_backward),
        ("_scaled_dot_product_flash_attention", sdpa_forward),
        ("_scaled_dot_product_flash_attention_backward", sdpa_backward),
    ):
        if hasattr(torch.ops.aten, name):  # the second came later than the others
            library.impl(name, function, dispatch_key)
    return _Handle(library)


def flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, ...]:
    """aten::_flash_attention_forward: (B, S, H, D), or packed with cum_seq; causal is bottom-right."""
    out = torch.empty_like(query)  # the strides that compiled code counts on
    dropout_key = torch.zeros(1, dtype=torch.int64, device=query.device)
    if dropout_p > 0:
        dropout_key.random_(-(2**63), 2**63 - 1)
    lse = flash_forward_inplace(
        out,
        query,
        key,
        value,
        cum_seq_q,
        cum_seq_k,
        max_q,
        max_k,
        dropout_p,
        is_causal,
        return_debug_mask,
        scale=scale,
        window_size_left=window_size_left,
        window_size_right=window_size_right,
        seqused_k=seqused_k,
        alibi_slopes=alibi_slopes,
        block_table=block_table,
        num_splits=num_splits,
        dropout_key=dropout_key,
    )
    rng_state = torch.cat([dropout_key, torch.zeros_like(dropout_key)]).view(torch.uint64)
    unused = torch.zeros((), dtype=torch.uint64, device=query.device)
    return out, lse, rng_state, unused, query.new_empty(0)


def flash_forward_inplace(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    dropout_key: Tensor | None = None,
) -> Tensor:
    """aten::_flash_attention_forward_no_dropout_inplace: writes out, returns the log-sum-exp."""
    # The backward operator has no alibi_slopes: gradients would be those of attention without.
    refuse(return_debug_mask=return_debug_mask, alibi_slopes=alibi_slopes, block_table=block_table)
    recorded = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    if seqused_k is not None and recorded:
        raise UnsupportedError("seqused_k: with gradients; PyTorch's backward is not told of it")
    options: dict[str, Any] = {
        "causal": is_causal,
        "window": (_bound(window_size_left), _bound(window_size_right)),
        "scale": scale,
        "dropout_p": dropout_p,
        "seed": dropout_key,
        "seqused_k": seqused_k,
        "out": out,
        "return_lse": True,
    }
    with torch.no_grad():  # PyTorch records what is needed of the operator as a whole
        if cum_seq_q is None and cum_seq_k is None:
            return attention(query, key, value, **options)[1]
        assert cum_seq_q is not None and cum_seq_k is not None
        lengths: dict[str, Any] = {
            "cu_seqlens_q": cum_seq_q,
            "cu_seqlens_k": cum_seq_k,
            "max_seqlen_q": max_q,
            "max_seqlen_k": max_k,
        }
        return attention_varlen(query, key, value, **lengths, **options)[1]


def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    """aten::_flash_attention_backward: the gradients of query, key and value."""
    packed = cum_seq_q is not None
    dropout_key = rng_state.view(torch.int64)[:1] if dropout_p > 0 else None
    x = Inputs(
        query, key, value, cu_seqlens_q=cum_seq_q, cu_seqlens_k=cum_seq_k, dropout_key=dropout_key
    )
    options = {
        "max_seqlen_q": max_q if packed else None,
        "max_seqlen_k": max_k if packed else None,
        "causal": is_causal,
        "window_left": _bound(window_size_left),
        "window_right": _bound(window_size_right),
        "scale": scale,
        "softcap": None,
        "dropout_p": dropout_p,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "algorithm": "auto",
        "backend": "auto",
        "fp8": None,
    }
    # What rounding took from the log-sum-exp, which a CPU's kernels would keep: it is lost here.
    saved = logsumexp.new_zeros(1 if logsumexp.is_cpu else 0, *logsumexp.shape)
    values = [options[name] for name in ops.OPTION_NAMES]
    given = (grad_out, None, out, logsumexp, saved, False, False, *x, *values)
    return torch.ops.tilewise.backward(*given)[:3]


def sdpa_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """aten::_scaled_dot_product_flash_attention: (B, H, S, D)."""
    max_q, max_k = query.shape[2], key.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    out, lse, rng_state, unused, debug = flash_forward(
        q, k, v, None, None, max_q, max_k, dropout_p, is_causal, return_debug_mask, scale=scale
    )
    return out.transpose(1, 2), lse, None, None, max_q, max_k, rng_state, unused, debug


def sdpa_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """aten::_scaled_dot_product_flash_attention_backward: the gradients of query, key and value."""
    dout, q, k, v, o = (t.transpose(1, 2) for t in (grad_out, query, key, value, out))
    found = flash_backward(
        dout,
        q,
        k,
        v,
        o,
        logsumexp,
        None,
        None,
        max_q,
        max_k,
        dropout_p,
        is_causal,
        philox_seed,
        philox_offset,
        scale=scale,
    )
    return tuple(t.transpose(1, 2) for t in found)


def _bound(size: int | None) -> int | None:
    """A negative number is no bound."""
    return None if size is None or size < 0 else size
