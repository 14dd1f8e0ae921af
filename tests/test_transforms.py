"""torch.func over attention: the numbers of plain PyTorch, or one error that says what is not there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functionalize, grad, grad_and_value, hessian, jacrev, jvp, vjp, vmap

from tilewise import UnsupportedError, attention, attention_varlen


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def fresh_compiler():
    yield
    torch._dynamo.reset()


def double(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def plain(q, k, v, sink=None, bias=None):
    """Causal attention as a textbook has it, for equal lengths and heads."""
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5
    if bias is not None:
        scores = scores + bias
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    scores = scores.masked_fill(later, -torch.inf)
    if sink is not None:
        column = sink[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], dim=-1)
    lse = scores.logsumexp(-1)
    weights = scores.softmax(-1)[..., : k.shape[1]]
    return torch.einsum("bhij,bjhd->bihd", weights, v), lse


def ours(q, k, v, sink=None, bias=None, algorithm="auto"):
    return attention(q, k, v, sink=sink, bias=bias, causal=True, return_lse=True, algorithm=algorithm)


def inputs() -> tuple[torch.Tensor, ...]:
    q, k, v = (double(2, 5, 3, 8) for _ in range(3))
    return q, k, v, double(3), double(2, 3, 5, 5)


def loss(function: Any) -> Any:
    """A number that depends on the output and on the log-sum-exp."""

    def of(*tensors: torch.Tensor) -> torch.Tensor:
        out, lse = function(*tensors)
        return out.square().sum() + lse.sin().sum()

    return of


def close(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


TRANSFORMS = {
    "grad": lambda f, x: grad(loss(f), argnums=tuple(range(5)))(*x),
    "grad of one argument": lambda f, x: grad(loss(f), argnums=2)(*x),
    "grad_and_value": lambda f, x: grad_and_value(loss(f))(*x),
    "grad of the output alone": lambda f, x: grad(lambda q: f(q, *x[1:])[0].sum())(x[0]),
    "grad of lse alone": lambda f, x: grad(lambda q: f(q, *x[1:])[1].sin().sum())(x[0]),
    "vjp": lambda f, x: vjp(lambda *t: f(*t)[0], *x)[1](x[2]),
    "jacrev": lambda f, x: jacrev(lambda q: f(q, *x[1:])[0].sum(-1))(x[0]),
    "vmap": lambda f, x: vmap(lambda q: f(q, *x[1:]))(torch.stack([x[0], x[1]])),
    "vmap along another dimension": lambda f, x: vmap(
        lambda q, sink: f(q, *x[1:3], sink), in_dims=(2, 1)
    )(torch.stack([x[0], x[1]], 2), torch.stack([x[3], -x[3]], 1)),
    "vmap of grad": lambda f, x: vmap(grad(lambda q: loss(f)(q, *x[1:])))(torch.stack([x[0], x[1]])),
    "grad of vmap": lambda f, x: grad(
        lambda q: vmap(lambda q: loss(f)(q, *x[1:]))(torch.stack([q, 2 * q])).sum()
    )(x[0]),
    "vmap of vmap": lambda f, x: vmap(vmap(lambda q: f(q, *x[1:])[0]))(
        torch.stack([x[0], x[1], x[2], x[0]]).unflatten(0, (2, 2))
    ),
}


@pytest.mark.parametrize("algorithm", ["fa2", "fa1"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_have_the_numbers_of_plain_pytorch(name: str, algorithm: str):
    """They ended in an error about setup_context from inside torch."""
    x = inputs()

    def chosen(*tensors: torch.Tensor) -> Any:
        return ours(*tensors, algorithm=algorithm)

    close(TRANSFORMS[name](chosen, x), TRANSFORMS[name](plain, x))


def test_packed_sequences():
    lengths = torch.tensor([0, 2, 5], dtype=torch.int32)
    q, k, v = (double(5, 3, 8) for _ in range(3))
    packed = {"cu_seqlens_q": lengths, "cu_seqlens_k": lengths, "max_seqlen_q": 3, "max_seqlen_k": 3}
    got = grad(lambda q: attention_varlen(q, k, v, **packed, causal=True).square().sum())(q)
    for rows in (slice(0, 2), slice(2, 5)):
        alone = [t[None, rows] for t in (q, k, v)]
        close(got[None, rows], grad(lambda q, k, v: plain(q, k, v)[0].square().sum())(*alone))


def test_heads_first():
    q, k, v = (t.transpose(1, 2).contiguous() for t in inputs()[:3])
    got = grad(lambda q: attention(q, k, v, causal=True, layout="bhsd").square().sum())(q)
    x = [t.transpose(1, 2) for t in (q, k, v)]
    close(got, grad(lambda q, k, v: plain(q, k, v)[0].square().sum())(*x).transpose(1, 2))


def test_ordinary_gradients_pass_through_a_transform():
    """A tensor of the world outside, used within, must get its gradient from there."""
    q, k, v, *_ = inputs()
    found = []
    for function in (ours, plain):
        leaf = q.clone().requires_grad_()
        _, value = grad_and_value(lambda k, leaf=leaf, f=function: loss(f)(leaf, k, v))(k)
        value.backward()
        found.append(leaf.grad)
    close(*found)


def test_dropout_of_each_sample():
    q = double(2, 1, 40, 1, 8)
    k = double(1, 40, 1, 8)

    def dropped(q, seed=None):
        return attention(q, k, k, dropout_p=0.5, seed=seed)

    same = vmap(lambda q: dropped(q, seed=3))(q)
    close(same, torch.stack([dropped(sample, seed=3) for sample in q]))
    twice = torch.stack([q[0], q[0]])
    different = vmap(dropped, randomness="different")(twice)
    assert not torch.equal(different[0], different[1])
    equal = vmap(dropped, randomness="same")(twice)
    assert torch.equal(equal[0], equal[1])
    seeds = torch.tensor([[3], [4]])
    close(vmap(dropped)(q, seeds), torch.stack([dropped(q[n], seed=3 + n) for n in range(2)]))


def test_batched_gradients():
    """torch.autograd's own vmap, as in its jacobian(vectorize=True)."""
    q, k, v, *_ = inputs()
    douts = double(4, *q.shape)
    results = []
    for function in (ours, plain):
        leaf = q.clone().requires_grad_()
        out, _ = function(leaf, k, v)
        results += torch.autograd.grad(out, leaf, douts, is_grads_batched=True)
    close(*results)


def test_functionalize_is_left_to_the_operator():
    q, k, v, *_ = inputs()
    assert torch.equal(functionalize(lambda q: attention(q, k, v))(q), attention(q, k, v))


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_of_a_transform_runs_attention_outside_the_graph(backend: str, batched: bool):
    q, k, v, *_ = inputs()

    def gradient(function):
        each = grad(lambda q: loss(function)(q, k, v))
        return vmap(each) if batched else each

    given = torch.stack([q, k]) if batched else q
    close(torch.compile(gradient(ours), backend=backend)(given), gradient(plain)(given))


def test_compile_of_a_transform_in_one_graph_says_why_not():
    q, k, v, *_ = inputs()
    compiled = torch.compile(
        grad(lambda q: attention(q, k, v).sum()), fullgraph=True, backend="aot_eager"
    )
    with pytest.raises(Exception, match=r"tilewise: under a transform of torch\.func"):
        compiled(q)


REFUSED = {
    "grad of grad": (
        lambda q, k, v: grad(lambda q: grad(lambda q: attention(q, k, v).sum())(q).sum())(q),
        UnsupportedError,
        "second derivatives",
    ),
    "hessian": (
        lambda q, k, v: hessian(lambda q: attention(q, k, v).sum())(q),
        UnsupportedError,
        "forward-mode",
    ),
    "jvp of grad": (
        lambda q, k, v: jvp(lambda v: grad(lambda q: attention(q, k, v).sum())(q), (v,), (v,)),
        UnsupportedError,
        "forward-mode",
    ),
    "jvp of what the gradient is multiplied with": (
        lambda q, k, v: jvp(lambda w: grad(lambda q: (attention(q, k, v) * w).sum())(q), (v,), (v,)),
        UnsupportedError,
        "forward-mode",
    ),
    "vmap of nothing": (
        lambda q, k, v: vmap(lambda q: attention(q, k, v))(q.new_zeros(0, *q.shape)),
        ValueError,
        "vmap: got a dimension of size 0",
    ),
    "out under vmap": (
        lambda q, k, v: vmap(lambda q: attention(q, k, v, out=torch.empty_like(k)))(q[None]),
        ValueError,
        "out: got a tensor under a transform of torch.func; allowed is None",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_one_clear_error(name: str):
    function, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        function(*inputs()[:3])


def test_forward_mode_over_a_backward_is_refused():
    """The tangent of the incoming gradient was dropped: the result had none, which reads as zero."""
    q, k, v, *_ = inputs()
    q.requires_grad_()
    with forward_ad.dual_level(), pytest.raises(UnsupportedError, match="forward-mode"):
        weight = forward_ad.make_dual(v, v)
        torch.autograd.grad((attention(q, k, v) * weight).sum(), q)
