"""The Hopper backward in the simulator; what surrounds it, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import problems
import pytest
import torch
from edges import EDGES, MASKS
from problems import Problem, Size

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
pytest.importorskip("greenlet")

from tilewise import dispatch, reference, schedule, sim
from tilewise.backends.hopper import around
from tilewise.backends.hopper import backward as module
from tilewise.backends.hopper.launch_backward import heads_at_a_time, plan_backward
from tilewise.ops import Gradients
from tilewise.spec import AttentionSpec, Inputs

KERNEL = next(k for k in dispatch.KERNELS if k.name == "hopper/fa3")
SUPPORTED = KERNEL.backward
PROGRAMS = 2  # so few that each takes several key tiles
RANDOM = 30


def forget_plans() -> None:
    for plan in (plan_backward, around.space_of, around.plan_prepare, around.plan_finish):
        plan.cache_clear()


@pytest.fixture(autouse=True)
def on_a_small_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(schedule, "multiprocessors", lambda device: PROGRAMS)
    forget_plans()
    yield
    forget_plans()


@pytest.fixture
def as_of_many_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles are those of long sequences, however short these are."""
    monkeypatch.setattr(schedule, "SHORT", 0)


def simulate(p: Problem, seeds: Iterable[int] = (0,), **options: Any) -> list[torch.Tensor]:
    """Gradients of a right forward under several schedules; none may be found fault with. Of each, the
    bits of dQ before it is rounded, which may hide in what order it was added up."""
    t = problems.tensors(p)
    dqs: list[torch.Tensor] = []

    def finish(spec: AttentionSpec, x: Inputs, rows: around.Prepared, dq: torch.Tensor) -> None:
        dqs.append(rows.dq.clone().view(torch.int32))
        around.finish_dq(spec, x, rows, dq)

    exact = t.x._replace(**{name: getattr(t.x, name).double() for name in "qkv"})
    out, exact_lse = reference.attention(t.spec, exact, torch.float64)
    out, lse = out.to(t.spec.dtype), exact_lse.float()
    saved = (exact_lse - lse).nan_to_num(0).float()[None]
    rows = {name: _rows(getattr(t.x, name)) for name in "qkv"}
    dout = torch.zeros_like(t.dout) if p.loss == "lse" else t.dout
    for seed in seeds:
        grads = Gradients(t.spec, t.x)
        for name in "qkv":
            getattr(grads, name).fill_(torch.nan)
        grads.clear_unused(t.spec, t.x)
        with sim.intercept(seed=seed, **options) as reports, patch.object(module, "finish_dq", finish):
            module.backward(
                t.spec, t.x._replace(**rows), out, lse, saved, _rows(dout),
                None if p.loss == "out" else t.dlse, grads,
            )  # fmt: skip
        for report in reports:
            report.raise_if_any()
        got = {"out": out, "lse": lse, "dq": grads.q, "dk": grads.k, "dv": grads.v}
        got |= {n: g for n, g in (("dbias", grads.bias), ("dsink", grads.sink)) if g is not None}
        problems.check_results(p, t, got)
    return dqs


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def edge_cases() -> Iterator[Any]:
    for n, (name, problem) in enumerate(EDGES.items()):
        # A bias's gradient is by a kernel for Triton's interpreter, whose products in bf16 are wrong.
        p = replace(problem, dtype=("bf16", "fp16")[n % 2 or problem.bias is not None], seed=n)
        if p.loss != "none" and problems.features(p) <= SUPPORTED:
            yield pytest.param(p, id=name)


@pytest.mark.parametrize("problem", list(edge_cases()))
def test_edge(problem: Problem):
    simulate(problem)


def some_dtype(dims: tuple[int, int], form: str) -> str:
    """Of 16 bits, which are alike to the kernel: this one or that."""
    return ("bf16", "fp16")[(sum(dims) // 8 + list(MASKS).index(form)) % 2]


@pytest.mark.parametrize("form", MASKS)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (128, 64), (40, 96)])
def test_every_variant_under_many_schedules(dims, form: str, sim_seeds: range, as_of_many_keys: None):
    """A race or a deadlock shows in some order of events, not in all."""
    p = Problem(((130, 300),), 1, 2, *dims, some_dtype(dims, form), seed=dims[0], **MASKS[form])
    simulate(p, sim_seeds)


@pytest.mark.parametrize("causal", [False, True])
def test_few_heads_of_packed_sequences_are_worked_on_at_once(causal: bool):
    """With the forward's number, four times as many under a mask, Q, dO and sums of dQ of all heads
    were fetched from memory again for each of their key tiles: a quarter more time at 512."""
    p = Problem(((512, 512),) * 2, 16, 1, 128, 128, "bf16", varlen=True, causal=causal)
    assert heads_at_a_time(problems.tensors(replace(p, lengths=((512, 512),) * 64)).spec) == 32


@pytest.mark.parametrize("form", MASKS)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)])
def test_variants_for_few_keys_under_many_schedules(dims, form: str, sim_seeds: range):
    """The same where K and V of the next key tile come while this one is worked on."""
    p = Problem(((130, 300), (0, 64)), 1, 1, *dims, "bf16", seed=dims[0], varlen=True, **MASKS[form])
    simulate(p, sim_seeds)


def test_key_tiles_that_nobody_sees_between_others(sim_seeds: range):
    """They have no steps, and K and V are not loaded: counts of both must agree all the same."""
    p = Problem(((130, 400),), 1, 1, 64, 64, "bf16", window=(20, -40))
    lengths = ((64, 200), (0, 200), (1, 1), (100, 0), (40, 300))
    packed = Problem(lengths, 2, 1, 64, 64, "bf16", varlen=True, causal=True)
    for problem in (p, packed, replace(packed, deterministic=True)):
        simulate(problem, sim_seeds[:10])


WIDE = [(129, 129), (160, 160), (192, 192), (256, 256), (192, 128), (256, 64), (64, 256)]


@pytest.mark.parametrize("form", MASKS)
@pytest.mark.parametrize("dims", WIDE)
def test_every_wide_variant_under_many_schedules(dims, form: str, sim_seeds: range):
    """The same of consumers that do not do alike work, whose halves of dQ are not alike late."""
    p = Problem(((130, 200),), 1, 2, *dims, some_dtype(dims, form), seed=dims[0], **MASKS[form])
    simulate(p, sim_seeds)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_packed_and_used_lengths(dims, sim_seeds: range, monkeypatch: pytest.MonkeyPatch):
    """Each sequence has rows of its own for statistics and dQ, whole tiles of them."""
    lengths = ((5, 200), (200, 5), (0, 30), (140, 300), (64, 0), (63, 65), (65, 1))
    p = Problem(lengths, 1, 2, *dims, "bf16", varlen=True, causal=True, tail=(3, 2))
    simulate(p)
    simulate(replace(p, lengths=((5, 100), (70, 65), (0, 3)), heads_kv=1), sim_seeds)
    used = Problem(((150, 280),) * 3, 2, 1, *dims, "bf16", used_q=(150, 0, 33), used_k=(1, 70, 280))
    simulate(used, sim_seeds[:5])
    monkeypatch.setattr(schedule, "KEPT_IN_L2", 1)
    many = replace(p, heads_kv=3)
    assert heads_at_a_time(problems.tensors(many).spec) == 1
    simulate(many)


@pytest.mark.parametrize("dim", [64, 128, 136, 256])
def test_a_softcap_that_saturates(dim: int):
    """Weights times its slope, rounded, were off by more than sums that cancel can bear."""
    p = Problem(((129, 97),) * 2, 2, 1, dim, dim, "bf16", causal=True, loss="out", seed=748)
    simulate(replace(p, scale=1, softcap=1, values=3.0))


def in_any_order(p: Problem, seeds: range) -> bool:
    """Whether dQ is the same to the bit, whoever of the programs is fast or slow."""
    first, *others = simulate(p, seeds[:5] if len(seeds) > 1 else range(3), together=True, resident=3)
    return all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("form", MASKS)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_deterministic_whoever_is_fast(dims, form: str, sim_seeds: range):
    """Sums depend on who adds first; and who waits for whom must not go in a circle."""
    lengths = (300, 700) if max(dims) <= 128 else (150, 300)  # of key tiles that are half as long
    p = Problem((lengths,), 1, 2, *dims, "bf16", seed=1, deterministic=True, **MASKS[form])
    assert in_any_order(p, sim_seeds)


def test_deterministic_with_heads_and_sequences(sim_seeds: range):
    """Whom a program follows is of the same sequence and head, also where those are short."""
    lengths = ((300, 500), (5, 200), (200, 5), (0, 300), (130, 0), (260, 390))
    p = Problem(lengths, 2, 1, 64, 64, "bf16", varlen=True, causal=True, deterministic=True)
    assert in_any_order(p, sim_seeds)
    used = Problem(((300, 500),) * 2, 2, 2, 64, 64, "bf16", used_q=(300, 33), used_k=(170, 500))
    assert in_any_order(replace(used, deterministic=True, window=(90, 60)), sim_seeds)


@pytest.mark.parametrize("stages", [1, 2])
def test_the_next_key_tile_waits_for_the_last_query_tile(stages: int, monkeypatch: pytest.MonkeyPatch):
    """That all is added was once told when queries were free, which is a query tile too early; and then
    with two stages of K and V, where another one's were free. Here all key tiles share a query tile."""
    tiles = schedule._HOPPER_BACKWARD_DETERMINISTIC
    changed = {(64, True): tiles[64, True]._replace(kv_stages=stages)}
    monkeypatch.setattr(schedule, "_HOPPER_BACKWARD_DETERMINISTIC", tiles | changed)
    for queries in (64, 192):
        p = Problem(((queries, 640),), 1, 2, 64, 64, "bf16", causal=True, deterministic=True)
        assert in_any_order(p, range(5))


def test_free_gradients_depend_on_who_is_fast():
    """Else the tests of order above would show nothing."""
    assert not in_any_order(Problem(((300, 700),), 1, 2, 64, 64, "bf16", seed=1), range(5))


SIZE = Size(
    lengths=(129, 1, 2, 3, 17, 64, 97, 127, 200, 259),
    head_dims=(64, 128, 16, 40, 96, 111, 136, 192, 256),
    sequences=(1, 2, 0, 3),
    heads_kv=(1, 2),
    groups=(1, 2, 3),
    dtypes=("bf16", "fp16"),
)


@pytest.mark.parametrize("block", range(RANDOM // 10))
def test_random_problems(block: int, monkeypatch: pytest.MonkeyPatch):
    """A failing problem is printed whole; its number is its seed. Every other block has the tiles of
    long sequences."""
    monkeypatch.setattr(schedule, "SHORT", schedule.SHORT * (block % 2))
    for seed in range(10 * block, 10 * block + 10):
        p = problems.random_problem(seed, SUPPORTED, SIZE)
        if p.bias is not None:
            p = replace(p, dtype="fp16")  # see ``edge_cases``
        try:
            simulate(replace(p, loss="both" if p.loss == "none" else p.loss))
        except Exception as error:
            raise AssertionError(f"random problem {seed}: {p}: {error}") from error
