"""Rows that belong to no sequence: between packed sequences' used rows, after the last, and past the
used length of a dense batch's entry. Results hold 0 there, whatever inputs do."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

from torch import Tensor

from tilewise.spec import AttentionSpec, Inputs


def clear(spec: AttentionSpec, x: Inputs, side: Literal["q", "k"], t: Tensor) -> None:
    """Write 0 to the rows of t that no sequence uses."""
    if side == "q":
        cu_seqlens, seqused, longest = x.cu_seqlens_q, x.seqused_q, spec.max_seqlen_q
    else:
        cu_seqlens, seqused, longest = x.cu_seqlens_k, x.seqused_k, spec.max_seqlen_k
    if cu_seqlens is None and seqused is None:
        return
    if t.device.type == "cpu":
        _clear_some(t, cu_seqlens, seqused, longest)
    elif t.is_contiguous():
        from tilewise.backends.triton import clear as gpu  # not everybody who imports this has Triton

        gpu.clear(t, cu_seqlens, seqused, longest)
    else:
        t.zero_()


def _clear_some(t: Tensor, cu_seqlens: Tensor | None, seqused: Tensor | None, longest: int) -> None:
    used = None if seqused is None else seqused.tolist()
    if cu_seqlens is None:
        for entry, length in zip(t, used or (), strict=True):
            entry[length:] = 0
        return
    begins = cu_seqlens.tolist()
    for b, (begin, stop) in enumerate(pairwise(begins)):
        t[begin + (longest if used is None else used[b]) : stop] = 0
    t[begins[-1] :] = 0
