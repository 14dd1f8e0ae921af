"""``flash_attn.bert_padding``: from padded batches to packed sequences and back, differentiable.

Reading how long sequences are waits for the device, as there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.spec import check_tensor, require


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows ``indices`` (n,) of input (rows, ...): (n, ...). A row may be taken more than once."""
    check_tensor("input", input)
    require(input.dim() >= 1, "input.shape", tuple(input.shape), "(rows, ...)")
    return input.index_select(0, indices)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Pack the tokens that a mask marks.

    Args:
        hidden_states: (B, S, ...).
        attention_mask: (B, S), nonzero where a token counts.
        unused_mask: (B, S), nonzero where room is kept for a token that does not count yet.

    Returns:
        The marked tokens (total, ...); their places (total,) int64 among the B * S; cu_seqlens
        (B + 1,) int32; the longest length; how many tokens of each sequence count, (B,) int32, which
        is what ``seqused`` arguments take.

    Raises:
        ValueError: shapes that do not fit.
    """
    _check_mask("attention_mask", attention_mask, hidden_states)
    used = attention_mask.bool()
    marked = used
    if unused_mask is not None:
        _check_mask("unused_mask", unused_mask, hidden_states)
        marked = used | unused_mask.bool()
    packed = _pack(hidden_states, marked, marked.sum(-1))
    return *packed, used.sum(-1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Pack rows that each hold several sequences one after another.

    Args:
        hidden_states: (B, S, ...).
        attention_mask_in_length: (B, S) integers: the lengths of a row's sequences in order; zeros,
            which fill up the row, are none. Their sum is the number of tokens used, from the left.

    Returns:
        As ``unpad_input`` without its last, with one entry of cu_seqlens for each sequence.

    Raises:
        ValueError: shapes that do not fit.
    """
    lengths = attention_mask_in_length
    _check_mask("attention_mask_in_length", lengths, hidden_states)
    used = torch.arange(lengths.shape[1], device=lengths.device) < lengths.sum(-1, keepdim=True)
    return _pack(hidden_states, used, lengths[lengths != 0])


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse: (total, ...) at places ``indices`` of zeros (batch, seqlen, ...)."""
    check_tensor("hidden_states", hidden_states)
    padded = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return padded.index_copy(0, indices, hidden_states).unflatten(0, (batch, seqlen))


def _check_mask(name: str, mask: Tensor, hidden_states: Tensor) -> None:
    check_tensor("hidden_states", hidden_states)
    check_tensor(name, mask)
    require(hidden_states.dim() >= 2, "hidden_states.shape", tuple(hidden_states.shape), "(B, S, ...)")
    want = tuple(hidden_states.shape[:2])
    require(tuple(mask.shape) == want, f"{name}.shape", tuple(mask.shape), f"{want}")


def _pack(hidden_states: Tensor, marked: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    indices = marked.flatten().nonzero().flatten()
    cu_seqlens = lengths.new_zeros(lengths.numel() + 1, dtype=torch.int32)
    cu_seqlens[1:] = lengths.cumsum(0)
    longest = int(lengths.max()) if lengths.numel() else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest
