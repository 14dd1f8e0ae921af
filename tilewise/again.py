"""Calls like earlier ones.

A call that agrees with an earlier one in everything but where its tensors lie needs no check and no
choice a second time; in plain eager code it goes straight to the launch. Everything a check or a choice
reads is in a call's signature, or the call is not kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tilewise import dispatch, ops, shortcut, unused
from tilewise.spec import AttentionSpec, Inputs, check_values

KEPT = 1024

Signature = tuple[Any, ...]


def signature(tensors: tuple[Any, ...], options: tuple[Any, ...], window: Any) -> Signature | None:
    """All of a call but addresses. None: it is not for us, for somebody looks on, or it may be wrong."""
    if torch.compiler.is_compiling() or forward_ad._current_level >= 0:
        return None
    if type(window) not in (tuple, list):  # to look into an iterator would be to use it up
        return None
    try:
        if not shortcut.is_free(tensors):
            return None
        left, right = window
        lie = [
            None
            if t is None
            else (t.shape, t.stride(), t.dtype, t.device, t.requires_grad, t.data_ptr() % 16)
            for t in tensors
        ]
        # 1 and True are equal, but only one of them is a length.
        kinds = [*map(type, options), type(left), type(right)]
        found = (*lie, *options, left, right, *kinds, torch.are_deterministic_algorithms_enabled())
        hash(found)
    except (TypeError, ValueError, AttributeError):  # which is said with more words later
        return None
    return found


class Known:
    """A call that was made before."""

    __slots__ = ("_heads_first", "_launch", "_options", "_spec", "_wants_gradients")

    def __init__(self, spec: AttentionSpec, x: Inputs, options: list[Any], heads_first: bool) -> None:
        self._spec, self._options, self._heads_first = spec, options, heads_first
        self._wants_gradients = any(t is not None and t.requires_grad for t in x)
        self._launch: Callable[..., None] | None = None

    def __call__(self, tensors: tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor]:
        """The output and the log-sum-exp for tensors of the same signature."""
        q, k, v, *others = tensors
        assert q is not None and k is not None and v is not None
        if self._heads_first:
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if self._wants_gradients and torch.is_grad_enabled():
            out, lse, _ = ops.free_forward(self, *Inputs(q, k, v, *others), *self._options)
        else:
            out, lse, _ = self.run(Inputs(q, k, v, *others))
        return out.transpose(1, 2) if self._heads_first else out, lse

    def run(self, x: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """Output, log-sum-exp and what else the backward wants, without a record of it."""
        spec = self._spec
        check_values(spec, x)
        x = ops.replace_rows(x)
        out = ops._empty_out(spec, x)
        lse, saved = ops._empty_statistics(spec, x)
        unused.clear(spec, x, "q", out)
        if self._launch is None:
            self._launch = dispatch.choose(spec, "forward").bind(spec, x, out, lse)
        self._launch(x, out, lse, saved)
        return out, lse, saved


_known: dict[Signature, Known] = {}
_rows = dispatch.KERNELS


def find(call: Signature | None) -> Known | None:
    """The earlier call with this signature."""
    if call is None:
        return None
    if dispatch.KERNELS is not _rows:
        forget()
    return _known.get(call)


def keep(call: Signature | None, x: Inputs, options: list[Any], heads_first: bool) -> None:
    """Remember a call that went well. x: with lengths before heads."""
    if call is None or not dispatch.lasts(x.q.device) or x.dropout_key is not None:
        return
    if len(_known) >= KEPT:
        forget()
    spec, _ = ops.prepare((*x, *options))
    _known[call] = Known(spec, x, options, heads_first)


def forget() -> None:
    global _rows
    _rows = dispatch.KERNELS
    _known.clear()
