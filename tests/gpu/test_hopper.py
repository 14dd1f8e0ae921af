"""What is the Hopper kernels' alone on a real GPU: anchors that are outgrown, hangs, determinism."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import problems
import pytest
import torch
from edges import EDGES, MASKS
from problems import Problem, Size

from tilewise import attention, attention_varlen, dispatch, dropout_mask

DEVICE = "cuda"
KERNEL = next(k for k in dispatch.KERNELS if k.name == "hopper/fa3")
HOW = {"backend": "hopper", "algorithm": "fa3"}
LAUNCHES = 10_000
FUZZ = int(os.environ.get("TILEWISE_FUZZ", 10_000))
BLOCK = 100
SIZE = Size(
    lengths=(129, 1, 2, 17, 64, 127, 128, 200, 320, 513, 1025),
    head_dims=(64, 128, 16, 40, 96, 111, 192, 256),
    sequences=(1, 2, 3, 0, 6),
    dtypes=("bf16", "fp16"),
)


@pytest.fixture(autouse=True)
def hopper():
    missing = KERNEL.unavailable(torch.device(DEVICE, 0))
    if missing is not None:
        pytest.skip(missing)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("edge", EDGES)
def test_edge(edge: str, dtype: str):
    p = replace(EDGES[edge], dtype=dtype)
    if not problems.features(p) <= KERNEL.forward:
        pytest.skip("not in the support table")
    problems.check(p, DEVICE, **HOW)


DIMS = [(129, 129), (160, 160), (192, 192), (256, 256), (192, 128), (16, 256), (256, 64)]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("dims", DIMS)
def test_wide_heads(dims: tuple[int, int], dtype: str):
    """Backward, other consumers than up to 128: halves of columns, of 32 to 128, the second shorter."""
    p = Problem(((450, 700),), 2, 2, *dims, dtype, causal=True)
    problems.check(p, DEVICE, **HOW)
    problems.check(replace(p, softcap=5.0, causal=False, window=(100, 30)), DEVICE, **HOW)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("form", ["full", "causal", "window that leaves keys and queries out"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_many_tiles_for_each_program(dims: tuple[int, int], form: str, deterministic: bool):
    """A count of stages that is wrong at the end of a tile shows in the next, which small problems have
    none of: a GPU has more multiprocessors than those have tiles."""
    p = Problem(((700, 750),) * 9, 8, 2, *dims, "bf16", deterministic=deterministic, **MASKS[form])
    problems.check(p, DEVICE, **HOW)
    long = replace(p, lengths=((1100, 1300),) * 5)
    problems.check(long, DEVICE, **HOW)
    lengths = ((500, 300), (0, 300), (1, 1), (700, 0), (300, 900), (64, 128), (129, 1500)) * 2
    problems.check(replace(p, lengths=lengths, varlen=True), DEVICE, **HOW)


TERMS = {
    "bias": {"bias": (True, False, True, True), "bias_holes": True},
    "bias of keys, causal": {
        **{"bias": (False, True, False, True), "bias_dtype": "input", "causal": True}
    },
    "ALiBi": {"alibi": "batch"},
    "ALiBi, causal": {"alibi": "heads", "causal": True},
    "sink": {"sink": "bf16", "sink_off": True},
    "dropout": {"dropout_p": 0.3},
    "dropout, causal": {"dropout_p": 0.3, "causal": True},
    "dropout, keys from anywhere": {"dropout_p": 0.3, "window": (200, 50)},
    "everything": {
        **{"bias": (True,) * 4, "alibi": "heads", "sink": "fp32", "dropout_p": 0.2},
        **{"softcap": 5.0, "window": (260, 90)},
    },
}


@pytest.mark.parametrize("form", TERMS)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_terms(dims: tuple[int, int], form: str):
    """Several tiles for each program, of heads and sequences that differ in what is added to scores."""
    dtype = ("bf16", "fp16")[(list(TERMS).index(form) + dims[0] // 64) % 2]
    p = Problem(((300, 450),) * 9, 4, 3, *dims, dtype, **TERMS[form])
    problems.check(p, DEVICE, **HOW)
    problems.check(replace(p, deterministic=True, lengths=((450, 300),) * 5), DEVICE, **HOW)
    lengths = ((500, 300), (0, 300), (1, 1), (300, 0), (300, 900), (64, 128), (129, 500)) * 2
    problems.check(replace(p, lengths=lengths, varlen=True), DEVICE, **HOW)


@pytest.mark.parametrize("form", ["bias", "ALiBi, causal", "sink", "dropout", "everything"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_terms_are_deterministic(dim: int, form: str):
    p = Problem(((500, 600),) * 2, 2, 2, dim, dim, "bf16", deterministic=True, **TERMS[form])
    t = problems.tensors(p, DEVICE)
    first = problems.run(p, t, **HOW)
    for _ in range(200):
        again = problems.run(p, t, **HOW)
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("low", [0, 32, 37])
def test_dropout_is_that_of_its_witness(low: int):
    queries, keys = 200, 224 + low
    window = (160, None) if low else (None, None)
    q = torch.zeros(2, queries, 4, 64, device=DEVICE, dtype=torch.float16)
    k = torch.zeros(2, keys, 2, 64, device=DEVICE, dtype=torch.float16)
    v = torch.zeros(2, keys, 2, 256, device=DEVICE, dtype=torch.float16)
    v[:, torch.arange(224), :, torch.arange(224)] = 1
    out = attention(q, k, v, window=window, dropout_p=0.3, seed=11, **HOW)
    keep = dropout_mask(2, 4, queries, keys, dropout_p=0.3, seed=11).to(DEVICE)
    i = torch.arange(queries, device=DEVICE)[:, None] + keys - queries
    j = torch.arange(keys, device=DEVICE)
    seen = j >= i - 160 if low else torch.ones(queries, keys, dtype=torch.bool, device=DEVICE)
    assert torch.equal(out.transpose(1, 2)[..., :224] > 0, (keep & seen)[..., :224])


@pytest.mark.parametrize("block", range(-(-FUZZ // BLOCK)))
def test_random_problems(block: int):
    """A failing problem is printed whole. A block has one kind, or compiling would take hours."""
    kind = problems.random_problem(block, KERNEL.forward, SIZE)
    for seed in range(BLOCK * block, min(BLOCK * (block + 1), FUZZ)):
        p = problems.alike(kind, seed, SIZE)
        try:
            problems.check(p, DEVICE, **HOW)
        except Exception as error:
            raise AssertionError(f"random problem {seed}: {p}: {error}") from error


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_rows_that_outgrow_their_anchor_are_computed_again(dim: int, causal: bool):
    """They would be infinite, or not a number; and a wrong one might hide in a finite sum."""
    torch.manual_seed(dim)
    q, k, v = (torch.randn(2, 1500, 4, dim, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    k[:, 1] *= 60
    k[1, 700] *= 30
    out, lse = attention(q, k, v, causal=causal, return_lse=True, **HOW)
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) / dim**0.5
    if causal:
        hidden = torch.ones(1500, 1500, dtype=torch.bool, device=DEVICE).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    want = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v.double())
    assert (out.double() - want).norm() / want.norm() < 5e-3
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_outputs_of_the_first_query_tiles(dim: int, dtype: torch.dtype):
    """Eight bytes of a barrier were found in them, whose memory had become the output's buffer: the
    hardware wrote its state back late. What is computed at once, as no key is seen, was hit most."""
    q = torch.randn(40 * 200, 8, dim, device=DEVICE, dtype=dtype)
    k = torch.randn(0, 8, dim, device=DEVICE, dtype=dtype)
    cu_q = torch.arange(0, len(q) + 1, 200, device=DEVICE, dtype=torch.int32)
    cu_k = torch.zeros_like(cu_q)
    lengths = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 200, "max_seqlen_k": 200}
    for causal in (False, True) * 20:
        out = attention_varlen(q, k, k, causal=causal, **lengths, **HOW)
        assert not out.count_nonzero()


def test_no_hang_over_many_launches_of_random_shapes():
    """Every shape is its own dance of barriers; one that waits forever would stop here."""
    pick = random.Random(0)
    kinds = [(64, 64), (128, 128), (256, 256)]  # each compiles a few kernels
    for _ in range(LAUNCHES):
        d, dv = pick.choice(kinds)
        heads, group = pick.choice(((1, 1), (2, 2), (3, 1)))
        causal, packed = pick.random() < 0.5, pick.random() < 0.3
        lengths = [(pick.randint(1, 600), pick.randint(1, 900)) for _ in range(pick.randint(1, 4))]
        if not packed:
            lengths = lengths[:1] * len(lengths)
        sq, sk = (sum(side) for side in zip(*lengths, strict=True))
        q = torch.randn(sq, heads * group, d, device=DEVICE, dtype=torch.bfloat16)
        k = torch.randn(sk, heads, d, device=DEVICE, dtype=torch.bfloat16)
        v = torch.randn(sk, heads, dv, device=DEVICE, dtype=torch.bfloat16)
        q.requires_grad_()
        if packed:
            ends = [
                torch.tensor([0, *side]).cumsum(0).int().to(DEVICE)
                for side in zip(*lengths, strict=True)
            ]
            longest = [max(side) for side in zip(*lengths, strict=True)]
            out = attention_varlen(
                q, k, v, cu_seqlens_q=ends[0], cu_seqlens_k=ends[1], max_seqlen_q=longest[0],
                max_seqlen_k=longest[1], causal=causal, **HOW,
            )  # fmt: skip
        else:
            n = len(lengths)
            out = attention(*(t.unflatten(0, (n, -1)) for t in (q, k, v)), causal=causal, **HOW)
        out.sum().backward()
        assert q.grad is not None
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256), (40, 24)])
def test_a_few_queries_of_many_keys(dims: tuple[int, int], causal: bool, dtype: str):
    """Their query tiles are broken into parts, which a second kernel joins."""
    import plans  # not without Triton

    # No longer: the bound on the error takes a number for each pair of keys.
    p = Problem(((200, 8000),) * 2, 1, 2, *dims, dtype, causal=causal, loss="none")
    t = problems.tensors(p, DEVICE)
    assert plans.forward(t.spec, t.x).join is not None
    problems.check(p, DEVICE, **HOW)


def test_broken_query_tiles_are_the_same_every_time():
    q = torch.randn(1, 128, 8, 128, device=DEVICE, dtype=torch.bfloat16)
    k, v = (torch.randn(1, 40_000, 4, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    k[0, 7] *= 60  # some parts are computed twice
    first = attention(q, k, v, **HOW)
    for _ in range(50):
        assert torch.equal(first, attention(q, k, v, **HOW))


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_the_same_every_time(dim: int):
    q, k, v = (torch.randn(2, 1100, 5, dim, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    first = attention(q, k, v, causal=True, **HOW)
    for _ in range(50):
        assert torch.equal(first, attention(q, k, v, causal=True, **HOW))


def test_a_graph_replays_a_causal_call():
    """Its list of query tiles lies on the GPU, and must still be there."""
    q, k, v = (torch.randn(3, 700, 6, 64, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    attention(q, k, v, causal=True, **HOW)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, causal=True, **HOW)
    for length in range(1, 40):
        attention(*(t[:, :length] for t in (q, k, v)), causal=True, **HOW)
    q.copy_(torch.randn_like(q))
    graph.replay()
    assert torch.equal(out, attention(q, k, v, causal=True, **HOW))


def test_a_graph_replays_a_packed_call():
    """Its programs count the query tiles they claim: from 0 in every replay."""
    ends = torch.tensor([0, 300, 310, 1500, 2100], device=DEVICE, dtype=torch.int32)
    packed = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 1200, "max_seqlen_k": 1200}
    q, k, v = (torch.randn(2100, 6, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    attention_varlen(q, k, v, causal=True, **packed, **HOW)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention_varlen(q, k, v, causal=True, **packed, **HOW)
    for _ in range(3):
        q.copy_(torch.randn_like(q))
        ends[1:3] += 40
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, attention_varlen(q, k, v, causal=True, **packed, **HOW))


def test_compiled_with_graphs():
    """The pool of a graph that warms up is reset: a list of query tiles in it would be overwritten."""
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, causal=True) * 2, mode="reduce-overhead")
    for length in (900, 1100, 1300):
        for _ in range(4):
            q, k, v = (
                torch.randn(2, length, 4, 64, device=DEVICE, dtype=torch.bfloat16) for _ in range(3)
            )
            torch.compiler.cudagraph_mark_step_begin()
            got = compiled(q, k, v).clone()
            [torch.full((length,), -1, device=DEVICE, dtype=torch.int32) for _ in range(20)]
            assert torch.equal(got, attention(q, k, v, causal=True) * 2)
