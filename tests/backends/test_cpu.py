"""What is the CPU backend's alone: how it cuts problems into tiles, what that may not change, memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import problems
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import Problem
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tilewise import attention, mask
from tilewise.backends.cpu import fa1, fa2, tile
from tilewise.backends.cpu import threads as tile_threads
from tilewise.ops import Gradients
from tilewise.spec import sequences

ALGORITHMS = {"fa1": fa1, "fa2": fa2}
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "cpu.py"

EVERYTHING = Problem(
    lengths=((23, 31), (0, 4), (40, 17), (5, 0)),
    varlen=True,
    tail=(2, 3),
    heads_kv=2,
    group=3,
    head_dim=7,
    head_dim_v=5,
    window=(11, 6),
    softcap=5.0,
    bias=(True, True, True, True),
    bias_holes=True,
    alibi="batch",
    sink="fp32",
    sink_off=True,
    dropout_p=0.3,
)
PROBLEMS = {
    "everything": EVERYTHING,
    "full": Problem(lengths=((29, 37),) * 2, heads_kv=2),
    "causal, gqa": Problem(lengths=((37, 29),), causal=True, heads_kv=2, group=3),
    "narrow band": Problem(lengths=((41, 41),), window=(1, -1), group=2),
    "bias over all rows": Problem(lengths=((19, 23),) * 2, bias=(False, True, False, True), group=2),
    "bias over all keys": Problem(lengths=((19, 23),) * 2, bias=(True, False, True, False), causal=True),
    "holes in the bias": Problem(lengths=((19, 23),), bias=(False,) * 3 + (True,), bias_holes=True),
    "used lengths": Problem(lengths=((19, 23),) * 3, used_q=(19, 0, 7), used_k=(5, 9, 0), causal=True),
    "scores near 1000": Problem(lengths=((19, 23),), shift=1000.0, causal=True),
    "all scores equal": Problem(lengths=((19, 23),), equal_keys=True, window=(3, 9)),
}
TILES = [(1, 1), (3, 2), (2, 7), (16, 5), (1000, 1000)]


@pytest.fixture(params=TILES, ids=str)
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    _set_tiles(monkeypatch, *request.param)
    return request.param


def _set_tiles(monkeypatch: pytest.MonkeyPatch, rows: int, keys: int) -> None:
    monkeypatch.setattr(tile, "ROWS", rows)
    monkeypatch.setattr(tile, "KEYS", keys)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS.keys())
@pytest.mark.usefixtures("tiles")
def test_right_with_any_tiles(problem: Problem, algorithm: str):
    problems.check(replace(problem, dtype="fp64"), backend="cpu", algorithm=algorithm)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_many_tiles_are_as_exact_as_one(dtype: str, algorithm: str, monkeypatch: pytest.MonkeyPatch):
    """They add up in fp32 and are rounded once, at the end."""
    problem = Problem(lengths=((50, 100),), dtype=dtype, group=2, causal=True, dropout_p=0.2)
    _set_tiles(monkeypatch, 4, 3)
    many = problems.check(problem, backend="cpu", algorithm=algorithm)
    _set_tiles(monkeypatch, 1000, 1000)
    one = problems.check(problem, backend="cpu", algorithm=algorithm)
    for name, x in many.items():
        eps = torch.finfo(x.dtype).eps
        torch.testing.assert_close(x, one[name], rtol=2 * eps, atol=8 * eps)


@pytest.mark.parametrize("keys", [4, 8, 40])
def test_a_part_has_as_many_heads_as_fill_a_tile(keys: int, monkeypatch: pytest.MonkeyPatch):
    _set_tiles(monkeypatch, 8, 40)
    t = problems.tensors(Problem(lengths=((8, keys),), heads_kv=5))
    heads = [part.heads for part in tile.parts(t.spec, t.x)]
    assert [h for r in heads for h in r] == list(range(5))
    assert max(map(len, heads)) == min(40 // keys, 5)


bounds = st.none() | st.integers(-9, 30)


@given(
    q_len=st.integers(0, 24),
    k_len=st.integers(0, 24),
    causal=st.booleans(),
    window=st.tuples(bounds, bounds),
    rows=st.integers(1, 12),
    keys=st.integers(1, 12),
    group=st.integers(1, 3),
)
def test_tiles_cover_what_is_visible(
    q_len: int,
    k_len: int,
    causal: bool,
    window: tuple[int | None, int | None],
    rows: int,
    keys: int,
    group: int,
):
    """Each visible pair is in one tile, in either order of the loops; the element mask is exact; and no
    tile touches a row that sees nothing or a key that nobody sees."""
    problem = Problem(lengths=((q_len, k_len),), causal=causal, window=window, group=group)
    t = problems.tensors(problem)
    i, j = torch.arange(q_len)[:, None], torch.arange(k_len)[None, :]
    visible = mask.visible(i, j, q_len, k_len, *t.spec.window)
    with pytest.MonkeyPatch.context() as monkeypatch:
        _set_tiles(monkeypatch, rows, keys)
        (part,) = tile.parts(t.spec, t.x)
        by_query = [(a, *b) for a in part.query_blocks() for b in part.key_tiles(a)]
        by_key = [(b[0], a, b[1]) for a in part.key_blocks() for b in part.query_tiles(a)]
        for blocks, length in ((part.query_blocks(), q_len), (part.key_blocks(), k_len)):
            assert [n for block in blocks for n in block] == list(range(length))
        for cut in (by_query, by_key):
            visits = torch.zeros(q_len, k_len, dtype=torch.int32)
            for a, b, masked in cut:
                assert 0 < len(a) <= max(rows // group, 1) and 0 < len(b) <= keys
                where = slice(a.start, a.stop), slice(b.start, b.stop)
                seen = ~part._hidden(a, b).squeeze(1)
                assert torch.equal(seen, visible[where])
                assert masked or seen.all()
                assert visible[where[0]].any(1).all() and visible[:, where[1]].any(0).all()
                visits[where] += seen
            assert torch.equal(visits, visible.int())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_hidden_key_may_be_nan(algorithm: str, monkeypatch: pytest.MonkeyPatch):
    """Also one that other rows of its tile see: a masked score is -inf, whatever it was."""
    _set_tiles(monkeypatch, 8, 8)
    q, k, v = (torch.randn(1, 20, 2, 8) for _ in range(3))
    clean = attention(q, k, v, causal=True, algorithm=algorithm, backend="cpu")
    k[:, 13] = torch.nan
    out = attention(q, k, v, causal=True, algorithm=algorithm, backend="cpu")
    assert torch.equal(out[:, :13], clean[:, :13])
    assert out[:, 13:].isnan().all()


def test_fa1_saves_maximum_and_sum():
    problem = replace(EVERYTHING, dtype="fp64", dropout_p=0.0, sink_off=False, poison=False)
    t = problems.tensors(problem)
    lse = torch.full((t.spec.heads_q, t.x.q.shape[0]), -torch.inf, dtype=torch.float64)
    saved = torch.zeros(2, *lse.shape, dtype=torch.float64)
    fa1.forward(t.spec, t.x, t.x.q.new_zeros(*t.x.q.shape[:-1], t.spec.head_dim_v), lse, saved)
    want = problems.reference_results(t, "out", torch.float64)["lse"]
    for seq in sequences(t.spec, t.x):
        m, total = seq.rows(saved[0]), seq.rows(saved[1])
        torch.testing.assert_close(m + total.log(), seq.rows(want))
        assert ((total >= 1) & (total <= seq.length_k + 1)).all()  # m is the maximum, with the sink


# --- threads ----------------------------------------------------------------------------------------


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets PyTorch's number of threads, for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("bias", [None, (True,) * 4, (False,) * 4])
def test_threads_change_nothing(
    algorithm: str,
    bias: tuple[bool, bool, bool, bool] | None,
    threads: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
):
    """Bit for bit, and in a gradient to which all parts add too."""
    _set_tiles(monkeypatch, 8, 8)
    problem = replace(EVERYTHING, bias=bias, heads_kv=3)
    t = problems.tensors(problem)
    results = []
    for count in (1, 3, 3, 2):
        threads(count)
        results.append(problems.run(problem, t, backend="cpu", algorithm=algorithm))
    for got in results[1:]:
        for name, x in got.items():
            assert torch.equal(x, results[0][name]), name


def test_threads_leave_the_caller_alone(threads: Callable[[int], None]):
    """Its number of threads, that of threads to come, and its modes."""
    threads(3)
    q = torch.randn(1, 300, 4, 8, requires_grad=True)
    with torch.inference_mode():
        inferred = attention(q, q, q, backend="cpu")
    out = attention(q, q, q, backend="cpu")
    assert torch.equal(out, inferred)
    assert out.requires_grad and inferred.is_inference() and not out.is_inference()
    with ThreadPoolExecutor(1) as new:
        assert new.submit(torch.get_num_threads).result() == torch.get_num_threads() == 3


def test_more_threads_than_workers(threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tile_threads, "MOST_WORKERS", 2)
    threads(5)
    assert tile_threads.threads_each() == 2
    seen = []
    tile_threads.run(lambda _: seen.append(torch.get_num_threads()), range(6))
    assert seen == [2] * 6


def test_an_error_in_a_thread_is_raised(threads: Callable[[int], None]):
    threads(2)
    with pytest.raises(ZeroDivisionError):
        tile_threads.run(lambda n: 1 // n, [2, 1, 0])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_works_after_a_fork():
    """The parent's threads do not exist in a child."""
    program = """
import os, torch, tilewise
torch.set_num_threads(2)
q = torch.randn(1, 300, 4, 8)
out = tilewise.attention(q, q, q)
if os.fork() == 0:
    os._exit(0 if torch.equal(tilewise.attention(q, q, q), out) else 1)
os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)


# --- memory -----------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation makes."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
        for t in _tensors(result):
            if t.untyped_storage().data_ptr() not in given:  # neither a view nor in place
                self.count = max(self.count, t.numel())
        return result


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_nothing_of_the_size_of_the_scores(
    algorithm: str, threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
):
    """Nor a whole input in another dtype: only tiles, and what a few heads need for all their rows."""
    threads(1)  # the mode sees the operations of its own thread
    _set_tiles(monkeypatch, 16, 16)
    problem = Problem(
        lengths=((200, 200),),
        heads_kv=2,
        group=2,
        head_dim=8,
        head_dim_v=8,
        dtype="bf16",
        window=(100, 90),
        softcap=5.0,
        alibi="heads",
        sink="fp32",
        dropout_p=0.5,
    )
    t = problems.tensors(problem)
    out, lse = t.x.q.new_zeros(t.x.q.shape), torch.full((1, 4, 200), -torch.inf)
    saved = torch.zeros(2 if algorithm == "fa1" else 1, 1, 4, 200)
    grads = Gradients(t.spec, t.x)
    rows_of_one_head = 200 * problem.group * 8
    with Largest() as forward:
        ALGORITHMS[algorithm].forward(t.spec, t.x, out, lse, saved)
    with Largest() as backward:
        ALGORITHMS[algorithm].backward(t.spec, t.x, out, lse, saved, t.dout, t.dlse, grads)
    assert forward.count <= (rows_of_one_head if algorithm == "fa1" else 16 * 16 * 8)
    assert backward.count <= rows_of_one_head


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("padding", [-1e9, 1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("with_sink", [False, True])
def test_weights_add_up_to_one_under_a_huge_additive_mask(algorithm: str, padding: float, with_sink):
    """Rounding took log(number of keys) from lse, and the backward's weights added up to that number."""
    q, k, v = (torch.randn(1, 40, 2, 8, requires_grad=True) for _ in range(3))
    sink = torch.full((2,), padding, requires_grad=True) if with_sink else None
    out = attention(q, k, v, bias=torch.full((1, 1, 1, 40), padding), sink=sink, algorithm=algorithm)
    weight = 1 / 41 if with_sink else 1 / 40
    torch.testing.assert_close(out, (weight * v.sum(1, keepdim=True)).expand_as(out))
    dout = torch.randn_like(out)
    out.backward(dout)
    assert v.grad is not None
    torch.testing.assert_close(v.grad, (weight * dout.sum(1, keepdim=True)).expand_as(v))
    if sink is not None:
        torch.testing.assert_close(sink.grad, -weight * (dout * out).sum((0, 1, 3)))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_weights_add_up_to_one_where_many_keys_share_a_huge_logit(algorithm: str):
    """The same without a bias: a logit of 1e8 leaves fp32 no room for log(number of keys)."""
    q, k = torch.full((1, 1, 1, 1), 1e4), torch.full((1, 8, 1, 1), 1e4)
    v = torch.randn(1, 8, 1, 1, requires_grad=True)
    attention(q, k, v, algorithm=algorithm).sum().backward()
    torch.testing.assert_close(v.grad, torch.full_like(v, 1 / 8))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("threads", [1, 2])
def test_autocast_does_not_reach_the_products_inside(algorithm: str, threads: int):
    """It is a property of the thread that calls: results depended on which thread ran a part."""
    torch.manual_seed(0)
    q = torch.randn(2, 200, 4, 32, requires_grad=True)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        want = torch.autograd.grad(attention(q, q, q, algorithm=algorithm).sin().sum(), q)[0]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = torch.autograd.grad(attention(q, q, q, algorithm=algorithm).sin().sum(), q)[0]
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_extra_memory_at_16384(algorithm: str):
    """Under 100 MB beside the results, forward and backward, where the scores would be 8.6 GB."""
    command = [sys.executable, str(BENCHMARK), "--extra-memory", algorithm, "forward+backward"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    measured = json.loads(done.stdout)
    assert measured["scores_mb"] > 8000
    assert 0 < measured["extra_mb"] < 100
