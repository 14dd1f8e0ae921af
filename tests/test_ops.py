"""tilewise.ops: the operators as torch sees them: schema, fakes, autograd, compilation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import problems
import pytest
import torch
from problems import Problem

from tilewise import attention, attention_varlen, ops
from tilewise.ops import OPTION_NAMES
from tilewise.registration import register_autograd
from tilewise.spec import Inputs

PROBLEMS = {
    "dense": Problem(((6, 7),) * 2, 2, 2),
    "causal, unequal dims": Problem(((6, 7),) * 2, 2, 2, head_dim_v=8, causal=True),
    "fp16, heads first": Problem(((6, 7),), 2, 2, dtype="fp16", layout="heads first"),
    "last dimension not contiguous": Problem(((6, 7),), 2, 2, layout="columns"),
    "varlen": Problem(((3, 4), (2, 5)), 2, 2, varlen=True, causal=True),
    "used lengths": Problem(((6, 7),) * 2, used_q=(6, 3), used_k=(0, 7)),
    "window": Problem(((6, 7),), window=(2, 1)),
    "dropout": Problem(((6, 7),), dropout_p=0.3),
    "bias": Problem(((6, 7),) * 2, 2, 2, bias=(False, True, True, True)),
    "bias and sink in the input dtype": Problem(
        ((6, 7),), dtype="bf16", bias=(True,) * 4, bias_dtype="input", sink="input"
    ),
    "sink": Problem(((6, 7),), 2, 2, sink="fp32"),
    "alibi, softcap": Problem(((6, 7),), 2, 2, alibi="heads", softcap=3.0),
    "no keys": Problem(((6, 0),)),
    "no sequences": Problem(()),
}
FP8 = {
    "rotated": Problem(((6, 7),) * 2, 2, 2, dtype="bf16", fp8="rotated", causal=True),
    "tensor, varlen": Problem(((3, 4), (2, 5)), 2, 2, varlen=True, dtype="fp16", fp8="tensor"),
    "given": Problem(((6, 7),) * 2, 2, 2, dtype="fp8"),
    "given with scales": Problem(((6, 7),) * 2, 2, 2, dtype="fp8", descale=True),
}
ALGORITHMS = ("fa2", "fa1")


def operator(name: str):
    return getattr(getattr(torch.ops.tilewise, name), ops._CONTRACT)


def arguments(
    p: Problem, algorithm: str = "auto", grad: bool = True
) -> tuple[tuple[Any, ...], problems.Tensors]:
    """A problem as the operators' flat arguments."""
    t = problems.tensors(replace(p, poison=False))
    x = t.x
    if grad:
        x = x._replace(
            **{
                n: getattr(x, n).detach().requires_grad_()
                for n in ("q", "k", "v", "bias", "sink")
                if getattr(x, n) is not None
            }
        )
    if p.fp8 is not None or p.dtype == "fp8":
        algorithm = "fa3"
    options = {
        "max_seqlen_q": t.spec.max_seqlen_q if p.varlen else None,
        "max_seqlen_k": t.spec.max_seqlen_k if p.varlen else None,
        "causal": p.causal,
        "window_left": p.window[0],
        "window_right": p.window[1],
        "scale": p.scale,
        "softcap": p.softcap,
        "dropout_p": p.dropout_p,
        "deterministic": p.deterministic,
        "algorithm": algorithm,
        "backend": "cpu",
        "fp8": p.fp8,
    }
    return (*x, *(options[n] for n in OPTION_NAMES)), t


# --- schema, fakes, registration ----------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_opcheck_forward(name: str, algorithm: str):
    torch.library.opcheck(operator("forward"), arguments(PROBLEMS[name], algorithm)[0])


@pytest.mark.parametrize("name", FP8)
def test_opcheck_fp8(name: str):
    """bf16 out of fp8, scales among the tensors, and a backward that needs none of what is saved."""
    p = FP8[name]
    utils = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if p.dtype != "fp8":  # of which PyTorch cannot tell whether two are equal
        utils.append("test_schema")
    args, t = arguments(p, grad=p.dtype != "fp8")
    torch.library.opcheck(operator("forward"), args, test_utils=utils)
    args, _ = arguments(p, grad=False)
    out, lse, saved = torch.ops.tilewise.forward(*args)
    assert saved.numel() == 0
    torch.library.opcheck(operator("forward_out"), (torch.zeros_like(out), *args), test_utils=utils)
    if p.dtype != "fp8":
        given = (t.dout.contiguous(), t.dlse, out, lse, saved, True, True, *args)
        torch.library.opcheck(operator("backward"), given)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_opcheck_forward_out(name: str, algorithm: str):
    args, t = arguments(PROBLEMS[name], algorithm, grad=False)
    out = torch.zeros(*t.x.q.shape[:-1], t.spec.head_dim_v, dtype=t.spec.dtype)
    torch.library.opcheck(operator("forward_out"), (out, *args))


@pytest.mark.parametrize("all_there_are", [False, True])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_opcheck_backward(name: str, algorithm: str, all_there_are: bool):
    """With or without a gradient of the log-sum-exp, and those of bias and sink."""
    args, t = arguments(PROBLEMS[name], algorithm, grad=False)
    out, lse, saved = torch.ops.tilewise.forward(*args)
    dout = t.dout.contiguous()
    torch.library.opcheck(
        operator("backward"),
        (dout, t.dlse if all_there_are else None, out, lse, saved, *[all_there_are] * 2, *args),
    )


@pytest.mark.parametrize("name", PROBLEMS)
def test_results_do_not_alias_inputs_or_one_another(name: str):
    args, _ = arguments(PROBLEMS[name], "fa1")
    results = [r for r in torch.ops.tilewise.forward(*args) if r.numel()]
    pointers = [r.data_ptr() for r in results]
    inputs = {a.data_ptr() for a in args if isinstance(a, torch.Tensor)}
    assert len(set(pointers)) == len(pointers) and not inputs & set(pointers)


# --- autograd -----------------------------------------------------------------------------------------

FULL = Problem(((6, 7),) * 2, 2, 2, causal=True, bias=(True, True, True, True), sink="fp32")
NAMES = ("q", "k", "v", "bias", "sink")


@pytest.mark.parametrize(
    "wanted", [("q",), ("k",), ("v",), ("bias",), ("sink",), ("q", "v"), ("k", "bias")]
)
def test_a_gradient_does_not_depend_on_which_others_are_asked_for(wanted: tuple[str, ...]):
    t = problems.tensors(FULL)
    everything = problems.run(FULL, t)
    leaves = {n: getattr(t.x, n).detach().requires_grad_(n in wanted) for n in NAMES}
    out, lse = attention(**leaves, causal=True, return_lse=True)
    got = torch.autograd.grad([out, lse], [leaves[n] for n in wanted], [t.dout, t.dlse])
    for name, gradient in zip(wanted, got, strict=True):
        assert torch.equal(gradient, everything[f"d{name}"])


def test_without_gradients_nothing_is_recorded():
    t = problems.tensors(FULL)
    out, lse = attention(*t.x[:3], return_lse=True)
    assert not out.requires_grad and not lse.requires_grad
    with torch.no_grad():
        assert not attention(t.x.q.requires_grad_(), *t.x[1:3]).requires_grad


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("loss", ["out", "lse", "both"])
def test_a_loss_of_either_result_alone(loss: str, algorithm: str):
    """The gradient of the result that the loss leaves out is None, not zeros of some other shape."""
    problems.check(Problem(((9, 12),), 2, 2, causal=True, loss=loss), algorithm=algorithm)


def test_an_lse_that_is_not_used_costs_no_gradient():
    """Kernels without a gradient of lse may still run whoever does not ask for one."""
    seen = []
    kernel = ops.dispatch.choose

    def spy(spec, direction, extra=frozenset()):
        seen.append((direction, extra))
        return kernel(spec, direction, extra)

    t = problems.tensors(FULL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops.dispatch, "choose", spy)
        out, lse = attention(t.x.q.requires_grad_(), *t.x[1:3], return_lse=True)
        out.sum().backward(retain_graph=True)
        lse.sum().backward()
    assert seen == [
        ("forward", frozenset()),
        ("backward", frozenset()),
        ("backward", frozenset({"lse_grad"})),
    ]


@pytest.mark.parametrize("layout", ["expanded", "heads first", "columns", "sliced", "offset"])
def test_any_strides_of_grad_out(layout: str):
    """sum() gives strides 0, transposes give any: reading them as contiguous is silently wrong."""
    for algorithm in ALGORITHMS:
        problems.check(Problem(((9, 12),) * 2, 2, 2, dout_layout=layout), algorithm=algorithm)


def test_gradients_accumulate_over_calls():
    t = problems.tensors(Problem(((9, 12),)))
    q = t.x.q.requires_grad_()
    for _ in range(2):
        attention(q, *t.x[1:3]).backward(t.dout)
    (once,) = torch.autograd.grad(attention(q, *t.x[1:3]), q, t.dout)
    assert torch.equal(q.grad, 2 * once)


def test_one_tensor_as_query_key_and_value():
    x = torch.randn(1, 6, 2, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: attention(x, x, x, causal=True), x)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_gradcheck_through_the_operators(algorithm: str):
    p = Problem(
        ((4, 5),), 1, 2, 3, 2, "fp64", softcap=2.0, bias=(True,) * 4, bias_dtype="input", sink="input"
    )
    t = problems.tensors(p)
    leaves = [getattr(t.x, n).requires_grad_() for n in NAMES]

    def results(q, k, v, bias, sink):
        return attention(
            q,
            k,
            v,
            bias=bias,
            sink=sink,
            softcap=2.0,
            dropout_p=0.3,
            seed=5,
            return_lse=True,
            algorithm=algorithm,
        )

    assert torch.autograd.gradcheck(results, leaves)


# --- autocast -----------------------------------------------------------------------------------------


def test_under_autocast_the_given_dtypes_decide():
    """Projections come out in bf16 and go in as bf16; fp32 given on purpose stays fp32."""
    t = problems.tensors(Problem(((9, 12),), 2, 2))
    x = torch.randn(1, 5, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        q = torch.nn.functional.linear(x, torch.randn(16, 16)).view(1, 5, 1, 16)
        assert attention(q, q, q).dtype == torch.bfloat16
        inside = attention(*t.x[:3])
    assert torch.equal(inside, attention(*t.x[:3]))


def test_backward_of_autocast_code():
    layer = torch.nn.Linear(16, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        q = layer(torch.randn(1, 5, 16)).view(1, 5, 1, 16)
        loss = attention(q, q, q, causal=True).float().square().mean()
    loss.backward()
    assert layer.weight.grad.dtype == torch.float32 and layer.weight.grad.isfinite().all()


# --- torch.compile ------------------------------------------------------------------------------------

# What the compiler makes of the graph is its own business; "aot_eager" runs the traced forward and
# backward graphs as they are, in little time. One test goes the whole way through the default.
BACKEND = "aot_eager"


class Block(torch.nn.Module):
    """A small attention layer, as a user would write it."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project = torch.nn.Linear(32, 3 * 32)
        self.sink = torch.nn.Parameter(torch.zeros(2))
        self.options = options

    def forward(self, x: torch.Tensor, **more: Any) -> torch.Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 2, 16)).unbind(-3)
        call = attention_varlen if "cu_seqlens_q" in more else attention
        return x + call(q, k, v, sink=self.sink, **self.options, **more).flatten(-2)


def same_with_gradients(module: Block, compiled: Any, x: torch.Tensor, **more: Any) -> None:
    results = []
    for function in (module, compiled):
        module.zero_grad()
        leaf = x.clone().requires_grad_()
        out = function(leaf, **more)
        out.square().sum().backward()
        results.append([out.detach(), leaf.grad, *(p.grad.clone() for p in module.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.fixture(autouse=True)
def fresh_compiler():
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"window": (3, 0), "softcap": 5.0},
        {"algorithm": "fa1"},
        {"dropout_p": 0.2, "seed": 3},
    ],
    ids=str,
)
def test_compile_dense(options: dict[str, Any]):
    block = Block(**options)
    compiled = torch.compile(block, fullgraph=True, backend=BACKEND)
    same_with_gradients(block, compiled, torch.randn(2, 9, 32))


@pytest.mark.parametrize("how", ["tensor", "rotated"])
def test_compile_fp8(how: str):
    block = Block(causal=True, fp8=how).bfloat16()
    compiled = torch.compile(block, fullgraph=True, backend=BACKEND)
    same_with_gradients(block, compiled, torch.randn(2, 9, 32).bfloat16())


def test_compile_fp8_tensors():
    q, k, v = (torch.randn(2, 9, 2, 16).to(torch.float8_e4m3fn) for _ in range(3))
    scale = torch.full((2, 2), 0.5)

    def call(q, k, v, scale):
        return attention(q, k, v, q_descale=scale, v_descale=scale)

    got = torch.compile(call, fullgraph=True, backend=BACKEND)(q, k, v, scale)
    assert got.dtype == torch.bfloat16 and torch.equal(got, call(q, k, v, scale))


def lengths_of(*lengths: int) -> dict[str, Any]:
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    return {"cu_seqlens_q": cu, "cu_seqlens_k": cu}


@pytest.mark.parametrize("as_tensor", [False, True])
def test_compile_varlen(as_tensor: bool):
    block = Block(causal=True)
    compiled = torch.compile(block, fullgraph=True, backend=BACKEND)
    longest = torch.tensor(6) if as_tensor else 6
    more = {**lengths_of(4, 0, 6), "max_seqlen_q": longest, "max_seqlen_k": longest}
    same_with_gradients(block, compiled, torch.randn(12, 32), **more)


@pytest.mark.parametrize("shape", [(2, 2, 5, 6), (1, 1, 1, 6), (1, 2, 5, 1), (1, 1, 1, 1)], ids=str)
def test_compile_varlen_with_a_bias_and_a_tensor_as_longest_length(shape: tuple[int, ...]):
    """While compiling, the total stood for a length that cannot be read, and the bias did not fit it."""
    lengths = {**lengths_of(4, 5), "cu_seqlens_k": torch.tensor([0, 6, 8], dtype=torch.int32)}
    q, k, bias = torch.randn(9, 2, 16), torch.randn(8, 2, 16), torch.randn(shape)

    def function(q, bias, longest_q, longest_k):
        longest = {"max_seqlen_q": longest_q, "max_seqlen_k": longest_k}
        return attention_varlen(q, k, k, **lengths, **longest, bias=bias, causal=True)

    results = []
    for call in (function, torch.compile(function, fullgraph=True, backend=BACKEND)):
        leaves = [t.clone().requires_grad_() for t in (q, bias)]
        out = call(*leaves, torch.tensor(5), torch.tensor(6))
        out.square().sum().backward()
        results.append([out.detach(), *(t.grad for t in leaves)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_compile_with_dynamic_shapes_compiles_once():
    """A length that becomes a constant of the graph means a new compilation for every batch."""
    block = Block(causal=True)
    graphs = 0

    def counting(graph, inputs):
        nonlocal graphs
        graphs += 1
        return graph.forward

    compiled = torch.compile(block, fullgraph=True, backend=counting, dynamic=True)
    for batch, length in ((2, 9), (3, 17), (2, 40), (5, 33)):
        x = torch.randn(batch, length, 32)
        torch.testing.assert_close(compiled(x), block(x))
    assert graphs == 1


@pytest.mark.parametrize("options", [{"causal": True}, {"window": (5, 2)}], ids=str)
def test_compile_dynamic_backward(options: dict[str, Any]):
    block = Block(**options)
    compiled = torch.compile(block, fullgraph=True, backend=BACKEND, dynamic=True)
    for length in (9, 17, 4):
        same_with_gradients(block, compiled, torch.randn(2, length, 32))


def test_compile_dynamic_varlen():
    block = Block(causal=True)
    compiled = torch.compile(block, fullgraph=True, backend=BACKEND, dynamic=True)
    for lengths in ((4, 0, 6), (9, 2), (1, 1, 1, 20)):
        more = {**lengths_of(*lengths), "max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}
        same_with_gradients(block, compiled, torch.randn(sum(lengths), 32), **more)


def test_compile_dropout_draws_anew_each_call():
    """A seed that is drawn while tracing would be a constant: the same mask for ever."""
    q, k, v = (torch.randn(1, 9, 2, 16) for _ in range(3))
    compiled = torch.compile(
        lambda *x, seed=None: attention(*x, dropout_p=0.5, seed=seed), fullgraph=True, backend=BACKEND
    )
    first, second = compiled(q, k, v), compiled(q, k, v)
    assert first.isfinite().all() and not torch.equal(first, second)
    for n in (5, 6):
        seed = torch.tensor([n, 2])
        want = attention(q, k, v, dropout_p=0.5, seed=(n, 2))
        torch.testing.assert_close(compiled(q, k, v, seed=seed), want)


def test_compile_returns_lse_and_its_gradient():
    def function(q):
        out, lse = attention(q, q, q, causal=True, return_lse=True)
        return out.sum() + lse.square().sum()

    q = torch.randn(1, 9, 2, 16, requires_grad=True)
    compiled = torch.compile(function, fullgraph=True, backend=BACKEND)
    (got,), (want,) = (torch.autograd.grad(f(q), q) for f in (compiled, function))
    torch.testing.assert_close(got, want)


def test_compile_keeps_bad_input_an_error_with_its_message():
    q = torch.randn(1, 9, 2, 16)
    compiled = torch.compile(lambda q: attention(q, q, q, softcap=-1.0), backend=BACKEND)
    with pytest.raises(Exception, match=r"softcap: got -1\.0; allowed is None or a number"):
        compiled(q)


def test_compile_by_the_default_compiler():
    block = Block(causal=True)
    compiled = torch.compile(block, fullgraph=True)
    same_with_gradients(block, compiled, torch.randn(2, 9, 32))


def test_export_makes_one_node():
    class Plain(torch.nn.Module):
        def forward(self, q):
            return attention(q, q, q, causal=True)

    exported = torch.export.export(Plain(), (torch.randn(1, 9, 2, 16),))
    targets = [node.target for node in exported.graph.nodes if node.op == "call_function"]
    assert operator("forward") in targets
    q = torch.randn(1, 9, 2, 16)
    assert torch.equal(exported.module()(q), attention(q, q, q, causal=True))


def test_option_names_follow_the_schema():
    schema = operator("forward")._schema
    names = [a.name for a in schema.arguments]
    assert names == [*Inputs._fields, *OPTION_NAMES]


def test_a_call_does_not_look_at_the_schema(monkeypatch: pytest.MonkeyPatch):
    """PyTorch's own registration does, argument by argument, in every call that records gradients."""

    def slow(*args: Any) -> Any:
        raise AssertionError("looked up the schema")

    monkeypatch.setattr("torch._library.utils.fill_defaults", slow)
    q, k, v = (torch.randn(1, 5, 2, 8, requires_grad=True) for _ in range(3))
    attention(q, k, v).sum().backward()
    assert q.grad is not None


def test_arguments_with_default_values_cannot_be_registered():
    """The dispatcher leaves them out, and everything after one would move."""
    with torch.library._scoped_library("tilewise_test", "FRAGMENT") as library:
        library.define("defaults(Tensor x, int n=1) -> Tensor")
        overload = torch.ops.tilewise_test.defaults.default
        with pytest.raises(ValueError, match="default values; allowed are none"):
            register_autograd(library, overload, lambda ctx, g: (g, None), lambda *_: None)
