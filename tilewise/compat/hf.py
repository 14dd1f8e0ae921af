"""Tilewise as an attention implementation of ``transformers``: ``attn_implementation="tilewise"``.

Padded and packed batches, caches, sliding windows, softcap, sinks, grouped heads, dropout, encoders and
cross-attention. Packed is a batch whose position_ids restart, without padding, or a call with
cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k. Rows of padding hold something else than
with "eager". What no kernel does (output_attentions, head_mask, paged caches, any argument unknown here)
is an ``UnsupportedError`` that names the argument.

Reading from the device waits for it. It is done once per forward, not in each layer, and only for what
must be known before a launch: whether a given attention_mask hides anything (if not, and padding behind
a causal sequence does not, kernels without bias will do); where packed sequences begin, and whether
position_ids are of packed ones; how far a static cache is filled, before a prefill. Steps of one token
read nothing. A max_length that is a tensor is read in each layer: pass an int.

torch.compile breaks its graph where masks are made, so fullgraph=True needs masks made before, as
``generate`` does. While a CUDA graph is captured nothing is read. In neither do layers look at
position_ids: a model that makes its masks without them, as gpt-oss does, needs cu_seq_lens.
"""

from __future__ import annotations

import importlib
import math
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.api import attention, attention_varlen
from tilewise.compat.arguments import autocast, refuse
from tilewise.errors import UnsupportedError
from tilewise.mask import Window
from tilewise.spec import check_tensor, require, require_type

try:
    import transformers
except ImportError as error:
    raise ImportError("tilewise.compat.hf needs transformers: pip install 'tilewise[hf]'") from error

NAME = "tilewise"

#: What models hand down to every layer though attention has no part in it.
_NOT_OURS = {
    "cache_position",
    "logits_to_keep",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    "use_cache",
}


class Registration:
    """Undoes ``register``: by ``remove()``, or at the end of a ``with``."""

    def __init__(self, entries: list[tuple[dict[str, Any], Any, Any]]) -> None:
        self._entries = entries

    def remove(self) -> None:
        """Put back what was there before. Nothing where another has taken over meanwhile."""
        for registry, ours, before in self._entries:
            if registry.get(NAME) is not ours:
                continue
            if before is None:
                del registry[NAME]
            else:
                registry[NAME] = before
        self._entries = []

    def __enter__(self) -> Registration:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def register() -> Registration:
    """Let models be loaded, or ``set_attn_implementation`` be called, with "tilewise".

    Returns:
        What undoes it: call ``.remove()``, or use it as a context manager.

    Raises:
        UnsupportedError: this transformers has no registries for attention and its masks.
    """
    functions = {
        _from_transformers("modeling_utils", "AttentionInterface"): attention_forward,
        _from_transformers("masking_utils", "AttentionMaskInterface"): attention_mask,
    }
    entries = []
    for interface, function in functions.items():
        registry = interface._global_mapping
        entries.append((registry, function, registry.get(NAME)))
        interface.register(NAME, function)
    return Registration(entries)


def _from_transformers(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(f"transformers.{module}"), name)
    except (ImportError, AttributeError):
        raise UnsupportedError(
            f"register: this transformers, {transformers.__version__}, has no {module}.{name}; "
            "version 4.53 and later ones have"
        ) from None


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | Tensor | None = None,
    max_length_k: int | Tensor | None = None,
    seq_idx: Tensor | None = None,
    deterministic: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What an attention layer calls.

    Args:
        query: (B, H, Sq, D); key: (B, Hkv, Sk, D), Hkv dividing H; value: (B, Hkv, Sk, Dv).
        attention_mask: of ``attention_mask``; or what broadcasts to (B, H, Sq, Sk), bool (True takes
            part) or floating (added to the scores), to which is_causal and sliding_window add nothing.
        dropout: probability of dropping a weight; like "eager" only while ``module.training``.
        scaling: factor of the scores, 1 / sqrt(D) if None.
        is_causal: if None the module's, or else True. Bottom-right aligned.
        sliding_window: how many keys a query sees, itself the last; if not causal, on either side.
        s_aux: (H,), attention sinks. position_bias: (B|1, H|1, Sq|1, Sk|1), added to the scores.
        position_ids: (B|1, Sq): a sequence begins where they do not grow.
        cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: packed sequences, all four or none.
        seq_idx: refused where nothing else tells of packed sequences.

    Returns:
        (B, Sq, H, Dv), and None for the weights, which are never formed.

    Raises:
        ValueError, TypeError: naming the argument. UnsupportedError: any of ``others`` that is not idle.
    """
    refuse(**{name: other for name, other in others.items() if name not in _NOT_OURS})
    refuse(output_attentions=getattr(getattr(module, "config", None), "output_attentions", None))
    query, key, value, position_bias = autocast(query, key, value, position_bias)
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    options: dict[str, Any] = {
        "scale": scaling,
        "softcap": softcap,
        "sink": s_aux,
        "dropout_p": dropout if module.training else 0.0,
        "deterministic": bool(deterministic),
    }

    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    shown = _Shown(window=_window(is_causal, sliding_window))
    if attention_mask is not None:
        shown = _shown(attention_mask, q)
    bias, packing = shown.bias, shown.packing
    if shown.keys is not None:
        k, v = k[:, : shown.keys], v[:, : shown.keys]

    lengths = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    if any(length is not None for length in lengths):
        packing = _explicit(*lengths)
    elif packing is None and bias is None:
        packing = _restarts(position_ids, q, k)

    if packing is None:
        refuse(seq_idx=seq_idx)
        if position_bias is not None:
            position_bias = position_bias[..., : k.shape[1]]
            bias = position_bias if bias is None else position_bias + bias
        out = attention(q, k, v, window=shown.window, bias=bias, **options)
    else:
        refuse(attention_mask=bias, position_bias=position_bias)
        form = q.shape[:2]
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        options.update(packing._asdict())
        out = attention_varlen(q, k, v, window=shown.window, **options)
        assert isinstance(out, Tensor)
        out = out.unflatten(0, form)
    assert isinstance(out, Tensor)
    return out, None


def _window(causal: bool, sliding_window: int | None) -> Window:
    left = None if sliding_window is None else sliding_window - 1
    return left, 0 if causal else left


class _Packing(NamedTuple):
    """Where sequences lie, in the words of ``attention_varlen``."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int | Tensor
    max_seqlen_k: int | Tensor


def _explicit(
    cu_seq_lens_q: Tensor | None,
    cu_seq_lens_k: Tensor | None,
    max_length_q: int | Tensor | None,
    max_length_k: int | Tensor | None,
) -> _Packing:
    check_tensor("cu_seq_lens_q", cu_seq_lens_q)
    check_tensor("cu_seq_lens_k", cu_seq_lens_k)
    assert cu_seq_lens_q is not None and cu_seq_lens_k is not None
    for name, longest in (("max_length_q", max_length_q), ("max_length_k", max_length_k)):
        require(longest is not None, name, None, "a length, as for cu_seq_lens")
    assert max_length_q is not None and max_length_k is not None
    cu_q, cu_k = (cu.to(torch.int32).contiguous() for cu in (cu_seq_lens_q, cu_seq_lens_k))
    return _Packing(cu_q, cu_k, max_length_q, max_length_k)


def _packing(starts: Tensor) -> _Packing | None:
    """starts: (B, S), True where a sequence begins, as each row does. None if no other does."""
    first = starts.flatten().nonzero().flatten()
    if first.numel() == starts.shape[0]:
        return None
    cu = torch.cat([first, first.new_full((1,), starts.numel())]).to(torch.int32)
    longest = int(cu.diff().max())
    return _Packing(cu, cu, longest, longest)


#: The position_ids last looked at, their version, and what they said: a forward's layers share them.
_looked_at: tuple[weakref.ref[Tensor], int, _Packing | None] | None = None


def _restarts(position_ids: Tensor | None, q: Tensor, k: Tensor) -> _Packing | None:
    """The packed sequences that position_ids tell of."""
    global _looked_at
    batch, length = q.shape[:2]
    if not isinstance(position_ids, Tensor) or length < 2 or length != k.shape[1]:
        return None
    if tuple(position_ids.shape) not in ((batch, length), (1, length)) or not _readable(position_ids):
        return None
    version = -1 if position_ids.is_inference() else position_ids._version
    if _looked_at is not None and version >= 0:
        seen, seen_version, packing = _looked_at
        if seen() is position_ids and seen_version == version:
            return packing
    starts = torch.ones(batch, length, dtype=torch.bool, device=position_ids.device)
    starts[:, 1:] = position_ids.diff() < 1
    packing = _packing(starts)
    _looked_at = weakref.ref(position_ids), version, packing
    return packing


def _readable(t: Tensor) -> bool:
    capturing = t.is_cuda and torch.cuda.is_current_stream_capturing()
    return not (torch.compiler.is_compiling() or capturing)


# Masks. transformers hands one tensor from where masks are made down to the layers, and leaves it alone
# if it has four dimensions. Three kinds go through, told apart by their data type:
#
#   int8   (B or 0, sides, reach, keys)  a band and which keys count; 0 rows: all of them
#   int32  (bits, sides, reach, N + 1)   a band within packed sequences, cu_seqlens in the last dimension
#   bool   (B, H|1, Sq|1, Sk)            everything written out; so are a user's own
#
# What must be known before a launch is in the shape, which is read without waiting for the device. The
# dimensions that carry it are expanded and take no memory. sides: 1 if a query sees keys before it, 2 if
# those after it too. reach: how many it sees on a side, itself included; 1 is no bound. keys: how many
# there are, the rest of a static cache is empty. No sequence is longer than 2**bits - 1.


class _Shown(NamedTuple):
    """What a mask lets be seen, in the core's words."""

    window: Window
    keys: int | None = None
    bias: Tensor | None = None
    packing: _Packing | None = None


def _shown(mask: Tensor, q: Tensor) -> _Shown:
    check_tensor("attention_mask", mask)
    require(mask.dim() == 4, "attention_mask.shape", tuple(mask.shape), "(B|1, H|1, Sq|1, Sk|1)")
    count, sides, reach, last = mask.shape
    left = None if reach == 1 else reach - 1
    band = left, 0 if sides == 1 else left
    if mask.dtype == torch.int32:
        cu, longest = mask[0, 0, 0].contiguous(), 2**count - 1
        return _Shown(band, packing=_Packing(cu, cu, longest, longest))
    if mask.dtype == torch.int8:
        counted = _bias(mask[:, :1, :1].bool(), q) if count else None
        return _Shown(band, keys=last, bias=counted)
    return _Shown((None, None), bias=_bias(mask, q))


def _bias(mask: Tensor, q: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return mask.new_zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, -math.inf)
    require_type(mask.is_floating_point(), "attention_mask.dtype", mask.dtype, "bool or floating")
    return mask if mask.dtype == q.dtype else mask.float()


@torch.compiler.disable(reason="which kernels will do depends on what the mask holds")
def attention_mask(**asked: Any) -> Tensor | None:
    """What transformers calls to make a mask, with the arguments of its ``sdpa_mask``.

    Returns:
        None where is_causal, the layer's, says it all; else one of the three kinds above.
    """
    given = asked.get("attention_mask")
    keys, key_offset = asked["kv_length"], asked.get("kv_offset", 0)
    if "cache_position" in asked:  # before transformers 5
        queries, offset = asked["cache_position"].shape[0], asked["cache_position"][0]
    else:
        queries, offset = asked["q_length"], asked.get("q_offset", 0)

    pattern = _recognise(asked["mask_function"])
    if pattern is None:
        return _written_out(asked)
    skip = asked.get("allow_is_causal_skip", True) or asked.get("allow_is_bidirectional_skip", False)
    if not skip and pattern.segments is None:  # it goes on to change the mask, or is compiled
        return _written_out(asked)
    if queries == 1 and (given is not None or isinstance(offset, Tensor)):
        return _written_out(asked)  # one row: as cheap as anything, and nothing is read
    if isinstance(offset, Tensor) and not _readable(offset):
        return _written_out(asked)

    # The last query's own key is the last that a band aligned to the bottom right may know of.
    filled = int(offset) + queries - key_offset
    if not pattern.causal and pattern.reach == 1:
        filled = keys
    if not 0 <= filled <= keys or (not pattern.causal and filled != keys):
        return _written_out(asked)
    sides = 1 if pattern.causal else 2
    reach = pattern.reach if pattern.reach < max(filled, queries) else 1

    if pattern.segments is not None:
        square = queries == keys == pattern.segments.shape[1]
        if given is not None or not square or not _readable(pattern.segments):
            return _written_out(asked)
        starts = torch.ones_like(pattern.segments, dtype=torch.bool)
        starts[:, 1:] = pattern.segments.diff() != 0
        packing = _packing(starts)
        if packing is not None:
            bits = int(packing.max_seqlen_q).bit_length()
            return packing.cu_seqlens_q.view(1, 1, 1, -1).expand(bits, sides, reach, -1)

    if given is not None:
        require(given.dim() == 2, "attention_mask.shape", tuple(given.shape), "(B, Sk)")
        counted = given[:, key_offset : key_offset + filled].bool()
        counted = torch.nn.functional.pad(counted, (0, filled - counted.shape[1]))
        if not _readable(counted) or _hides(counted, pattern.causal):
            return counted.to(torch.int8)[:, None, None].expand(-1, sides, reach, -1)
    if reach == 1 and filled == keys:
        return None
    return torch.empty(0, sides, reach, filled, dtype=torch.int8, device=asked.get("device"))


def _hides(counted: Tensor, causal: bool) -> bool:
    """Whether a token that counts could see one that does not."""
    if causal:
        return bool((counted[:, 1:] & ~counted[:, :-1]).any())
    return not bool(counted.all())


def _written_out(asked: dict[str, Any]) -> Tensor:
    sdpa_mask = _from_transformers("masking_utils", "sdpa_mask")
    return sdpa_mask(**{**asked, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})


class _Pattern(NamedTuple):
    """A mask function that is a band; segments: (B, S), equal numbers for tokens of one sequence."""

    causal: bool
    reach: int  # as above
    segments: Tensor | None


def _recognise(function: Any) -> _Pattern | None:
    """None for anything else than transformers' own bands: its mask is right if it is written out."""
    listed = list(_parts(function))
    parts = dict(listed)
    causal = "causal_mask_function" in parts
    band = "causal_mask_function" if causal else "bidirectional_mask_function"
    window = "sliding_window_overlay" if causal else "sliding_window_bidirectional_overlay"
    packed = {"packed_sequence_mask_function", "remap_positions_for_packed_sequence"}
    if len(parts) < len(listed) or not parts.keys() <= {band, window} | packed:
        return None
    segments = parts.get("packed_sequence_mask_function", {}).get("packed_sequence_mask")
    if segments is None and parts.keys() & packed:
        return None
    reach = 1
    if window in parts:
        reach = parts[window]["sliding_window"] + (0 if causal else 1)
        if reach <= 1:
            return None
    return _Pattern(causal, reach, segments)


def _parts(function: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The functions whose conjunction it is: the names of those that made them, and with what."""
    maker = function.__qualname__.split(".")[0]
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    made_with = dict(zip(function.__code__.co_freevars, cells, strict=True))
    if function.__module__ != "transformers.masking_utils":
        yield "somebody else", {}
    elif maker == "and_masks":
        for part in made_with["mask_functions"]:
            yield from _parts(part)
    else:
        yield maker, made_with
        if maker == "remap_positions_for_packed_sequence":
            # Positions for indices: the same band within each of the sequences, where alone it acts.
            yield from _parts(made_with["mask_function"])
