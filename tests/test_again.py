"""tilewise.again: a call like an earlier one gives what it would give alone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tilewise import again, attention, attention_varlen, dispatch, ops, shortcut

Call = Callable[[], Any]


@pytest.fixture(autouse=True)
def calls_are_kept(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As for tensors on a GPU."""
    monkeypatch.setattr(dispatch, "lasts", lambda device: True)
    again.forget()
    yield
    again.forget()


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> list[again.Known]:
    """Calls that were taken for earlier ones."""
    found: list[again.Known] = []
    run = again.Known.__call__

    def note(self: again.Known, tensors: Any) -> Any:
        found.append(self)
        return run(self, tensors)

    monkeypatch.setattr(again.Known, "__call__", note)
    return found


def some(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


Q, K, V = (some(2, 6, 2, 8, seed=n) for n in range(3))
CU = torch.tensor([0, 2, 6], dtype=torch.int32)
PACKED: dict[str, Any] = {"cu_seqlens_q": CU, "cu_seqlens_k": CU, "max_seqlen_q": 4, "max_seqlen_k": 4}


def test_a_second_call_is_like_the_first(repeated: list[again.Known]):
    calls: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
        "plain": attention,
        "causal": lambda q, k, v: attention(q, k, v, causal=True, return_lse=True),
        "heads first": lambda q, k, v: attention(
            *(t.transpose(1, 2) for t in (q, k, v)), layout="bhsd", window=(2, 1)
        ),
        "packed": lambda q, k, v: attention_varlen(q[0], k[0], v[0], **PACKED, return_lse=True),
        "terms": lambda q, k, v: attention(
            q, k, v, bias=some(1, 2, 6, 6), sink=some(2), alibi_slopes=some(2), softcap=2.0
        ),
        "used": lambda q, k, v: attention(q, k, v, seqused_k=torch.tensor([6, 3], dtype=torch.int32)),
    }
    for name, call in calls.items():
        call(Q, K, V)
        repeated.clear()
        other = [some(2, 6, 2, 8, seed=n) for n in (7, 8, 9)]
        got = call(*other)
        assert len(repeated) == 1, name
        again.forget()
        torch.testing.assert_close(got, call(*other), rtol=0, atol=0)


def differing() -> dict[str, Call]:
    """Calls each of which differs in one thing from another one here."""
    wide = some(2, 6, 2, 16)[..., :8]
    grown, bias = some(2, 7, 2, 8), some(1, 1, 6, 6)
    return {
        "plain": lambda: attention(Q, K, V),
        "causal": lambda: attention(Q, K, V, causal=True),
        "left": lambda: attention(Q, K, V, window=(1, None)),
        "right": lambda: attention(Q, K, V, window=(None, 1)),
        "scale": lambda: attention(Q, K, V, scale=1.0),
        "softcap": lambda: attention(Q, K, V, softcap=1.0),
        "bias": lambda: attention(Q, K, V, bias=bias),
        "another bias": lambda: attention(Q, K, V, bias=bias[:, :, :1]),
        "sink": lambda: attention(Q, K, V, sink=some(2)),
        "lse": lambda: attention(Q, K, V, return_lse=True),
        "fa1": lambda: attention(Q, K, V, algorithm="fa1"),
        "heads first": lambda: attention(Q, K, V, layout="bhsd"),
        "keys": lambda: attention(Q, grown, grown),
        "values": lambda: attention(Q, K, V[..., :5]),
        "strides": lambda: attention(wide, K, V),
        "dtype": lambda: attention(Q.half(), K.half(), V.half()),
        "bf16": lambda: attention(Q.bfloat16(), K.bfloat16(), V.bfloat16()),
        "fp8 block": lambda: attention(Q.bfloat16(), K.bfloat16(), V.bfloat16(), fp8="block"),
        "fp8 rotated": lambda: attention(Q.bfloat16(), K.bfloat16(), V.bfloat16(), fp8="rotated"),
        "given in fp8": lambda: attention(*(t.to(torch.float8_e4m3fn) for t in (Q, K, V))),
        "with a scale": lambda: attention(
            *(t.to(torch.float8_e4m3fn) for t in (Q, K, V)), v_descale=torch.full((2, 2), 2.0)
        ),
        "fewer heads": lambda: attention(Q, K[:, :, :1], V[:, :, :1]),
        "used": lambda: attention(Q, K, V, seqused_k=torch.tensor([6, 3], dtype=torch.int32)),
        "used queries": lambda: attention(Q, K, V, seqused_q=torch.tensor([6, 3], dtype=torch.int32)),
        "dropout": lambda: attention(Q, K, V, dropout_p=0.5, seed=3),
        "seed": lambda: attention(Q, K, V, dropout_p=0.5, seed=4),
        "packed": lambda: attention_varlen(Q[0], K[0], V[0], **PACKED),
        "longest": lambda: attention_varlen(Q[0], K[0], V[0], **{**PACKED, "max_seqlen_q": 5}),
        "gradients": lambda: attention(Q.clone().requires_grad_(), K, V),
    }


@pytest.mark.parametrize("name", differing())
def test_no_call_is_taken_for_another_one(name: str):
    calls = differing()
    want = calls[name]()
    again.forget()
    for other in calls.values():
        for _ in range(2):
            other()
    got = calls[name]()
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    if isinstance(got, Tensor):
        assert got.requires_grad == want.requires_grad
        assert got.stride() == want.stride()


def test_gradients(repeated: list[again.Known]):
    def gradients(seed: int) -> tuple[Tensor, ...]:
        leaves = [some(2, 6, 2, 8, seed=seed + n).requires_grad_() for n in range(3)]
        out, lse = attention(*leaves, causal=True, return_lse=True)
        return torch.autograd.grad(out.square().sum() + lse.sum(), leaves)

    gradients(0)
    got = gradients(5)
    assert len(repeated) == 1
    again.forget()
    torch.testing.assert_close(got, gradients(5), rtol=0, atol=0)


def test_without_recording_nothing_is_recorded(repeated: list[again.Known]):
    q = Q.clone().requires_grad_()
    for _ in range(2):
        assert attention(q, K, V).requires_grad
        with torch.no_grad():
            assert not attention(q, K, V).requires_grad
        with torch.inference_mode():
            assert not attention(q, K, V).requires_grad
    assert len(repeated) == 5


def test_second_derivatives_are_refused_again():
    q = Q.clone().requires_grad_()
    for _ in range(2):
        (grad,) = torch.autograd.grad(attention(q, K, V).square().sum(), q, create_graph=True)
        with pytest.raises(NotImplementedError, match="second derivatives"):
            grad.sum().backward()


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"causal": 1}, TypeError),
        ({"window": (True, None)}, TypeError),
        ({"window": (1, None, None)}, ValueError),
        ({"window": None}, ValueError),
        ({"scale": True}, TypeError),
        ({"return_lse": 0}, TypeError),
        ({"deterministic": 0}, TypeError),
        ({"algorithm": ["auto"]}, TypeError),
    ],
)
def test_what_is_wrong_is_so_after_its_equal_was_right(changes: dict[str, Any], error: type[Exception]):
    """1 == True == 1.0, and so are their hashes."""
    for right in ({}, {"causal": True}, {"window": (1, None)}, {"scale": 1.0}, {"return_lse": False}):
        for _ in range(2):
            attention(Q, K, V, **right)
    with pytest.raises(error):
        attention(Q, K, V, **changes)


def test_lengths_are_checked_every_time():
    wrong = torch.tensor([0, 4, 2], dtype=torch.int32)
    for _ in range(2):
        attention_varlen(Q[0], K[0], V[0], **PACKED)
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        attention_varlen(Q[0], K[0], V[0], **{**PACKED, "cu_seqlens_q": wrong})


def test_a_length_in_a_tensor_is_read_every_time():
    longest = torch.tensor(4)
    for value in (4, 4, 1):
        longest.fill_(value)
        call = {**PACKED, "max_seqlen_q": longest}
        if value == 4:
            attention_varlen(Q[0], K[0], V[0], **call)
        else:
            with pytest.raises(ValueError, match="max_seqlen_q"):
                attention_varlen(Q[0], K[0], V[0], **call)


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_who_looks_on_sees_every_call(repeated: list[again.Known]):
    """Modes, the profiler, tensors that are more than memory."""
    attention(Q, K, V)
    name = f"tilewise::forward.{ops._CONTRACT}"
    with Seen() as seen:
        attention(Q, K, V)
    assert name in seen.names
    with torch.profiler.profile() as profile:
        attention(Q, K, V)
    assert any("tilewise::forward" in event.key for event in profile.key_averages())
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert type(attention(mode.from_tensor(Q), K, V)) is torch._subclasses.FakeTensor
    got = torch.vmap(lambda q: attention(q, K, V))(torch.stack((Q, Q)))
    torch.testing.assert_close(got[0], attention(Q, K, V))
    assert len(repeated) == 1  # the last one


class Logging(torch.Tensor):
    """Sees functions, with the dispatch keys of any tensor."""

    seen: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(getattr(func, "__name__", str(func)))
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_subclass_that_sees_functions_sees_the_call():
    for _ in range(2):
        Logging.seen.clear()
        assert type(attention(Q, K.as_subclass(Logging), V)) is Logging
        assert any("forward" in name for name in Logging.seen)


def test_a_profiler_that_python_was_not_told_of_sees_the_call():
    attention(Q, K, V)
    profile = torch.profiler.profile()
    with profile:
        torch.autograd.profiler._is_profiler_enabled = False
        attention(Q, K, V)
    assert any("tilewise::forward" in event.key for event in profile.key_averages())


def test_below_autograd_nothing_is_recorded():
    """Where an operator of the user's is made of attention: its derivative is the user's, too."""
    q = Q.clone().requires_grad_()
    for _ in range(2):
        attention(q, K, V)
        with torch._C._AutoDispatchBelowAutograd():
            assert not attention(q, K, V).requires_grad


def test_hooks_may_unpack_anything(repeated: list[again.Known]):
    """A lazy minus sign, whose memory has the other one: it must reach no kernel."""
    q = Q.clone().requires_grad_()

    def unpack(t: Tensor) -> Tensor:
        return torch._neg_view(-t) if t.is_floating_point() else t

    want = torch.autograd.grad(attention(q, K, V).square().sum(), q)[0]
    called: list[bool] = []
    prepare = ops.prepare

    def note(args: tuple[Any, ...]) -> Any:
        called.append(any(isinstance(t, Tensor) and t.is_neg() for t in args))
        return prepare(args)

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        out = attention(q, K, V)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "prepare", note)
        got = torch.autograd.grad(out.square().sum(), q)[0]
    torch.testing.assert_close(got, want)
    assert called == [False]
    assert len(repeated) == 1


def test_an_iterator_is_no_window_to_know_again():
    for _ in range(2):
        want = attention(Q, K, V, window=(1, None))
        torch.testing.assert_close(attention(Q, K, V, window=iter((1, None))), want)


def test_a_lazy_minus_sign_is_not_forgotten():
    """The real and imaginary part of a conjugate share its memory."""
    pair = torch.view_as_complex(torch.stack((Q, some(2, 6, 2, 8, seed=9)), -1))
    negative = pair.conj().imag
    assert negative.is_neg()
    attention(pair.imag, K, V)
    torch.testing.assert_close(attention(negative, K, V), attention(negative.clone(), K, V))


def test_gradients_of_a_lazy_minus_sign():
    k = torch.view_as_complex(torch.stack((K, K), -1)).conj().imag
    q = Q.clone().requires_grad_()
    got = [torch.autograd.grad(attention(q, k, V).sum(), q)[0] for _ in range(2)]
    want = torch.autograd.grad(attention(q, k.clone(), V).sum(), q)[0]
    torch.testing.assert_close(got, [want, want])


def test_torchs_deterministic_mode_is_another_call(repeated: list[again.Known]):
    attention(Q, K, V)
    torch.use_deterministic_algorithms(True)
    try:
        attention(Q, K, V)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not repeated


def test_other_kernels_are_other_calls(monkeypatch: pytest.MonkeyPatch, repeated: list[again.Known]):
    attention(Q, K, V)
    monkeypatch.setattr(dispatch, "KERNELS", dispatch.KERNELS[::-1])
    attention(Q, K, V)
    assert not repeated


def test_tensors_are_not_kept_alive():
    q = Q.clone()
    for _ in range(2):
        attention(q, q, q)
    there = weakref.ref(q.untyped_storage())
    del q
    gc.collect()
    assert there() is None


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(again, "KEPT", 3)
    for n in range(1, 9):
        attention(Q[:, :n], K, V)
    assert len(again._known) <= 3


def test_a_pytorch_that_cannot_be_asked_always_gets_the_call(
    monkeypatch: pytest.MonkeyPatch, repeated: list[again.Known]
):
    monkeypatch.setattr(shortcut, "_CAN_ASK", False)
    for _ in range(2):
        attention(Q, K, V)
    assert not repeated


def test_on_a_cpu_nothing_is_kept(monkeypatch: pytest.MonkeyPatch):
    """The environment decides there which kernels run."""
    monkeypatch.undo()
    attention(Q, K, V)
    assert not again._known


def test_compiled_code_has_one_operator_after_eager_calls():
    attention(Q, K, V)
    compiled = torch.compile(lambda q: attention(q, K, V), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(Q), attention(Q, K, V))
