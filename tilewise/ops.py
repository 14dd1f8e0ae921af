"""The operators of ``torch.library``: schema, fake, autograd.

``tilewise::forward`` and ``tilewise::backward`` allocate the results, let ``dispatch`` choose a kernel
and let it fill them. ``torch.compile`` sees one opaque node each. They are registered on a ``Library``
rather than through ``custom_op``, which costs several times the host time of a call; and where nobody
looks on, eager code calls what they call (``shortcut``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tilewise import dispatch, shortcut, unused
from tilewise.errors import UnsupportedError
from tilewise.registration import recorded, register_autograd
from tilewise.spec import AttentionSpec, Inputs, check_values, make_spec

_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? alibi_slopes, Tensor? sink, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, "
    "Tensor? dropout_key, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale"
)
_OPTIONS = (
    "SymInt? max_seqlen_q, SymInt? max_seqlen_k, bool causal, SymInt? window_left, "
    "SymInt? window_right, float? scale, float? softcap, float dropout_p, bool deterministic, "
    "str algorithm, str backend, str? fp8"
)
OPTION_NAMES = tuple(option.split()[-1] for option in _OPTIONS.split(","))
_TENSOR_COUNT = len(Inputs._fields)

# The overload's name, which is part of every compiled graph. A new one when the number, the shapes or
# the meaning of results change: then no cache gives out what was compiled for the old ones.
_CONTRACT = "v3"

_library = torch.library.Library("tilewise", "DEF")
_library.define(f"forward.{_CONTRACT}({_TENSORS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor)")
_library.define(f"forward_out.{_CONTRACT}(Tensor(a!) out, {_TENSORS}, {_OPTIONS}) -> Tensor")
_library.define(
    f"backward.{_CONTRACT}(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, Tensor saved, "
    f"bool bias_grad, bool sink_grad, {_TENSORS}, {_OPTIONS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def call(name: str, *args: Any) -> Any:
    """``torch.ops.tilewise.<name>``, also where a transform of ``torch.func`` is at work."""
    if torch._C._are_functorch_transforms_active():
        from tilewise import transforms  # only now: see there

        return transforms.call(name, *args)
    if name == "forward" and shortcut.is_free(args[:_TENSOR_COUNT]):
        return free_forward(None, *args)
    return getattr(torch.ops.tilewise, name)(*args)


NO_FORWARD_MODE = "forward-mode derivatives of attention (jvp, jacfwd) are not implemented: use backward"


def refuse_tangents(*tensors: Tensor | None) -> None:
    """Forward-mode derivatives would pass an operator by and come out as zero, without a word."""
    if forward_ad._current_level < 0:
        return
    if any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise UnsupportedError(NO_FORWARD_MODE)


_specs: dict[Any, AttentionSpec] = {}  # of calls that were checked before; a training step repeats a few
_SPECS_KEPT = 1024


def prepare(args: tuple[Any, ...]) -> tuple[AttentionSpec, Inputs]:
    """The operators' flat arguments as a checked spec and the tensors, ready for kernels."""
    x = Inputs(*args[:_TENSOR_COUNT])
    options = args[_TENSOR_COUNT:]
    # All that make_spec reads of a call. Looking this up costs a tenth of checking it.
    key = (*[None if t is None else _described(t) for t in x], options)
    spec = _specs.get(key)
    if spec is None:
        spec = _make_spec(x, options)
        if len(_specs) >= _SPECS_KEPT:
            _specs.clear()
        _specs[key] = spec
    return spec, replace_rows(x)


def _described(t: Tensor) -> tuple[Any, ...]:
    return t.shape, t.dtype, t.device, t.is_contiguous(), t.requires_grad


def _make_spec(x: Inputs, options: tuple[Any, ...]) -> AttentionSpec:
    return make_spec(x, **dict(zip(OPTION_NAMES, options, strict=True)))


def _prepare_fake(args: tuple[Any, ...]) -> tuple[AttentionSpec, Inputs]:
    """``prepare`` for tensors that hold nothing and whose sizes may be symbols."""
    x = Inputs(*args[:_TENSOR_COUNT])
    return _make_spec(x, args[_TENSOR_COUNT:]), x


def _rows(x: Tensor) -> Tensor:
    """Kernels read rows of adjacent elements; any other stride is theirs to follow."""
    return x if x.stride(-1) == 1 else x.contiguous()


def replace_rows(x: Inputs) -> Inputs:
    """Kernels read slopes and sinks as they would lie in memory if nobody had cut or expanded them."""
    q, k, v = _rows(x.q), _rows(x.k), _rows(x.v)
    if q is not x.q or k is not x.k or v is not x.v:
        x = x._replace(q=q, k=k, v=v)
    if x.alibi_slopes is not None or x.sink is not None:
        slopes, sink = (None if t is None else t.contiguous() for t in (x.alibi_slopes, x.sink))
        x = x._replace(alibi_slopes=slopes, sink=sink)
    return x


def _empty_out(spec: AttentionSpec, x: Inputs) -> Tensor:
    return x.q.new_empty(*x.q.shape[:-1], spec.head_dim_v, dtype=spec.out_dtype)


def _empty_statistics(spec: AttentionSpec, x: Inputs) -> tuple[Tensor, Tensor]:
    rows = (spec.heads_q, x.q.shape[0]) if spec.varlen else (spec.batch, spec.heads_q, x.q.shape[1])
    lse = x.q.new_empty(rows, dtype=spec.lse_dtype)
    if spec.ragged:
        lse.fill_(-math.inf)
    count = dispatch.saved_statistics(spec)
    return lse, lse.new_zeros(count, *rows) if count else lse.new_empty(0, *rows)


def run_forward(
    kernel: dispatch.Kernel, spec: AttentionSpec, x: Inputs, out: Tensor
) -> tuple[Tensor, Tensor]:
    """Fill out with a kernel. Returns lse and saved."""
    lse, saved = _empty_statistics(spec, x)
    unused.clear(spec, x, "q", out)
    kernel.load().forward(spec, x, out, lse, saved)
    return lse, saved


def _forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    spec, x = prepare(args)
    check_values(spec, x)
    out = _empty_out(spec, x)
    lse, saved = run_forward(dispatch.choose(spec, "forward"), spec, x, out)
    return out, lse, saved


def _forward_out(out: Tensor, *args: Any) -> Tensor:
    spec, x = prepare(args)
    check_values(spec, x)
    check_out(spec, x, out)
    # Kernels store rows while others still read inputs.
    target = torch.empty_like(out) if any(_may_overlap(out, t) for t in x) else out
    lse, _ = run_forward(dispatch.choose(spec, "forward"), spec, x, target)
    if target is not out:
        out.copy_(target)
    return lse


def _may_overlap(a: Tensor, b: Tensor | None) -> bool:
    """Whether the memory from the first to the last element of one reaches into that of the other."""
    if b is None or a.device != b.device:  # storages of one memory may be several
        return False
    (low_a, high_a), (low_b, high_b) = _span(a), _span(b)
    return low_a < high_b and low_b < high_a


def _span(t: Tensor) -> tuple[int, int]:
    if t.numel() == 0:
        return 0, 0
    reach = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (reach + 1) * t.element_size()


def _overlaps_itself(t: Tensor) -> bool:
    """Whether two elements may share memory: if not, each dimension steps over all smaller ones."""
    reach = 0
    for stride, n in sorted((s, n) for s, n in zip(t.stride(), t.shape, strict=True) if n > 1):
        if stride <= reach:
            return True
        reach += (n - 1) * stride
    return False


def check_out(spec: AttentionSpec, x: Inputs, out: Tensor) -> None:
    want = (*x.q.shape[:-1], spec.head_dim_v)
    if tuple(out.shape) != want:
        raise ValueError(f"out.shape: got {tuple(out.shape)}; allowed is {want}")
    if out.dtype != spec.out_dtype or out.device != spec.device:
        whose = "q's" if spec.out_dtype == spec.dtype else "that of fp8 inputs"
        allowed = f"{whose}, {spec.out_dtype} on {spec.device}"
        raise TypeError(f"out: got {out.dtype} on {out.device}; allowed is {allowed}")
    if out.stride(-1) != 1 and out.shape[-1] != 1:
        raise ValueError(f"out.stride(-1): got {out.stride(-1)}; allowed is 1, adjacent elements")
    if _overlaps_itself(out):
        raise ValueError("out: got elements that share memory; allowed is one place for each element")


class Gradients:
    """What a backward kernel fills: gradients in the inputs' dtypes, ``None`` where not asked for. That
    of a bias may be as large as all scores, and that of a mask nobody asks for."""

    __slots__ = ("bias", "k", "q", "sink", "v")

    def __init__(self, spec: AttentionSpec, x: Inputs, bias: bool = True, sink: bool = True) -> None:
        self.q, self.k, self.v = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in x[:3])
        self.bias = x.bias.new_zeros(x.bias.shape) if bias and x.bias is not None else None
        self.sink = x.sink.new_zeros(x.sink.shape) if sink and x.sink is not None else None

    def clear_unused(self, spec: AttentionSpec, x: Inputs) -> None:
        """What a kernel does not fill."""
        unused.clear(spec, x, "q", self.q)
        unused.clear(spec, x, "k", self.k)
        unused.clear(spec, x, "k", self.v)


def run_backward(
    kernel: dispatch.Kernel,
    spec: AttentionSpec,
    x: Inputs,
    out: Tensor,
    lse: Tensor,
    saved: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    grads: Gradients,
) -> None:
    """Fill grads with a kernel."""
    grads.clear_unused(spec, x)
    kernel.load().backward(spec, x, out, lse, saved, dout, dlse, grads)


def _backward(
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    saved: Tensor,
    bias_grad: bool,
    sink_grad: bool,
    *args: Any,
) -> tuple[Tensor, ...]:
    spec, x = prepare(args)
    if spec.fp8 is not None:
        spec = spec.unquantized
        out, lse, saved = _unquantized_forward(spec, x)
    extra = frozenset() if dlse is None else frozenset({"lse_grad"})
    kernel = dispatch.choose(spec, "backward", extra)
    grads = Gradients(spec, x, bias_grad, sink_grad)
    run_backward(kernel, spec, x, out, lse, saved, _rows(dout), dlse, grads)
    return _as_returned(grads)


def _unquantized_forward(spec: AttentionSpec, x: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """What the backward of an fp8 forward reads, as a forward without fp8 leaves it.

    Gradients pass straight through the quantisation: they are those of attention of q, k and v as they
    are given, and its scores are what the backward computes again. Together with the log-sum-exp of
    quantised scores, weights would not add up to 1; together with the quantised output, delta would not
    be their mean of dP. Then a row of dS has a sum other than 0, and whatever all keys have in common,
    which attention does not feel, reaches dQ times that sum: four tenths of dQ where one channel of all
    keys has 30 added. Only a pass over all scores tells both numbers, and that is a forward.
    """
    out = _empty_out(spec, x)
    return out, *run_forward(dispatch.choose(spec, "forward"), spec, x, out)


def _as_returned(grads: Gradients) -> tuple[Tensor, ...]:
    """An operator cannot return None: a gradient that does not exist is an empty tensor."""
    nothing = [grads.q.new_empty(0) if g is None else g for g in (grads.bias, grads.sink)]
    return grads.q, grads.k, grads.v, *nothing


def _fake_forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    spec, x = _prepare_fake(args)
    return _empty_out(spec, x), *_empty_statistics(spec, x)


def _fake_forward_out(out: Tensor, *args: Any) -> Tensor:
    spec, x = _prepare_fake(args)
    check_out(spec, x, out)
    return _empty_statistics(spec, x)[0]


def _fake_backward(
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    saved: Tensor,
    bias_grad: bool,
    sink_grad: bool,
    *args: Any,
) -> tuple[Tensor, ...]:
    return _as_returned(Gradients(*_prepare_fake(args), bias_grad, sink_grad))


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(*output, *inputs[:_TENSOR_COUNT])
    ctx.options = inputs[_TENSOR_COUNT:]


def gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    return _differentiate(ctx, dout, dlse, ctx.saved_tensors, partial(call, "backward"))


def _free_gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Tensor | None) -> Any:
    """The same after a forward that nobody looked on."""
    kept = ctx.saved_tensors  # once: users' hooks unpack them, and may return anything
    free = shortcut.is_free((dout, dlse, *kept))
    backward = partial(_free_backward, None) if free else partial(call, "backward")
    return _differentiate(ctx, dout, dlse, kept, backward)


def _differentiate(
    ctx: Any,
    dout: Tensor | None,
    dlse: Tensor | None,
    kept: tuple[Any, ...],
    backward: Callable[..., Any],
) -> tuple[Any, ...]:
    refuse_tangents(dout, dlse)
    out, lse, saved, *tensors = kept
    inputs = _TENSOR_COUNT + len(OPTION_NAMES)
    # One for the dispatch keys may come before them: see ``registration``.
    wanted = ctx.needs_input_grad[-inputs:]
    bias_grad, sink_grad = (tensors[n] is not None and wanted[n] for n in (3, 5))
    if dout is None:
        dout = out.new_zeros(()).expand(out.shape)
    given = (dout, dlse, out, lse, saved, bias_grad, sink_grad, *tensors, *ctx.options)
    dq, dk, dv, dbias, dsink = backward(*given)
    found = {0: dq, 1: dk, 2: dv, 3: dbias if bias_grad else None, 5: dsink if sink_grad else None}
    return tuple(found.get(i) for i in range(inputs))


def keep_nothing(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """There is no second derivative to keep anything for."""


def no_double_backward(ctx: Any, *grads: Tensor | None) -> NoReturn:
    raise UnsupportedError(
        "second derivatives of attention are not implemented: call backward without create_graph"
    )


for _name, _function, _fake in (
    (f"forward.{_CONTRACT}", _forward, _fake_forward),
    (f"forward_out.{_CONTRACT}", _forward_out, _fake_forward_out),
    (f"backward.{_CONTRACT}", _backward, _fake_backward),
):
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tilewise::{_name}", _fake, lib=_library)
for _operator, _derivative, _setup in (
    (torch.ops.tilewise.forward, gradients, setup_context),
    (torch.ops.tilewise.backward, no_double_backward, keep_nothing),
):
    register_autograd(_library, getattr(_operator, _CONTRACT), _derivative, _setup)


def _forward_again(known: Any, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """known: the call of ``again`` that this is like, or None."""
    return _forward(*args) if known is None else known.run(Inputs(*args[:_TENSOR_COUNT]))


free_forward = recorded(_forward_again, _free_gradients, setup_context, _TENSOR_COUNT - 1)
_free_backward = recorded(
    lambda _, *args: _backward(*args), no_double_backward, keep_nothing, _TENSOR_COUNT + 6
)
