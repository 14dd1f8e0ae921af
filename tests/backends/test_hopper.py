"""The Hopper kernels in the simulator: right on every edge, whatever the schedule, and never in doubt.

Small tiles would be other kernels, so problems span a few of the real ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import problems
import pytest
import torch
from edges import EDGES, MASKS
from problems import Problem, Size, how

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
pytest.importorskip("greenlet")

from tilewise import attention, dispatch, schedule, sim
from tilewise.backends.hopper import join, launch
from tilewise.backends.hopper.agenda import Agenda, heads_together
from tilewise.backends.hopper.launch import plan_forward

KERNEL = "hopper/fa3"
ROW = next(k for k in dispatch.KERNELS if k.name == KERNEL)
SUPPORTED = ROW.forward
PROGRAMS = 3  # so few that each has several query tiles
RANDOM = 30


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernel says that it can run here, and a GPU has PROGRAMS multiprocessors."""
    row = replace(ROW, unavailable=lambda device: None)
    monkeypatch.setattr(dispatch, "KERNELS", (row,))
    monkeypatch.setattr(schedule, "multiprocessors", lambda device: PROGRAMS)
    plan_forward.cache_clear()
    yield
    plan_forward.cache_clear()


def simulate(p: Problem, seeds: Iterable[int] = (0,)) -> list[problems.Results]:
    """Results under several schedules; none may be found fault with, all must be right."""
    p = replace(p, loss="none")
    t = problems.tensors(p)
    found = []
    for seed in seeds:
        with sim.intercept(seed=seed) as reports:
            got = problems.run(p, t, **how(KERNEL))
        for report in reports:
            report.raise_if_any()
        problems.check_results(p, t, got)
        found.append(got)
    return found


def edge_cases() -> Iterator[Any]:
    for n, (name, problem) in enumerate(EDGES.items()):
        p = replace(problem, dtype=("bf16", "fp16")[n % 2], loss="none", seed=n)
        if problems.features(p) <= SUPPORTED:
            yield pytest.param(p, id=name)


@pytest.mark.parametrize("problem", list(edge_cases()))
def test_edge(problem: Problem):
    simulate(problem)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("form", MASKS)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256), (192, 128), (160, 160), (40, 24)])
def test_every_variant_under_many_schedules(dims, form: str, dtype: str, sim_seeds: range):
    """A race or a deadlock shows in some order of events, not in all."""
    many_schedules(*dims, form, dtype, sim_seeds)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("form", MASKS)
def test_tiles_of_long_sequences(form: str, dtype: str, sim_seeds: range, monkeypatch: Any):
    """With head dims up to 64 they are others, which no problem of this size would meet."""
    monkeypatch.setattr(schedule, "SHORT", 0)
    many_schedules(64, 64, form, dtype, sim_seeds)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Query tiles are broken wherever they can be. The list: into how many parts, for each launch."""
    monkeypatch.setattr(schedule, "multiprocessors", lambda device: 5)
    monkeypatch.setattr(schedule, "BETWEEN_QUERY_TILES", 16)
    monkeypatch.setattr(schedule, "WORTH_BREAKING", -1)
    monkeypatch.setattr(schedule, "JOINING", -1e6)
    counts: list[int] = []

    def room(lists: Agenda, *args: Any) -> Any:
        assert lists.parts is not None
        counts.append(len(lists.parts))
        return join.room_for_parts(lists, *args)

    monkeypatch.setattr(launch, "room_for_parts", room)
    yield counts


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("form", MASKS)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256), (192, 128), (40, 24)])
def test_broken_query_tiles(dims, form: str, dtype: str, sim_seeds: range, broken: list[int]):
    """Each part has some of a tile's keys: rows may see none of them, of any, or be past the end."""
    p = Problem(((130, 700),), 1, 1, *dims, dtype, seed=dims[0], **MASKS[form])
    results = simulate(p, sim_seeds[:3])
    assert broken or "window" in form  # or this tests nothing
    for other in results[1:]:
        assert all(torch.equal(results[0][name], other[name]) for name in other)


@pytest.mark.parametrize("shift", [-150.0, -25.0, 150.0])
@pytest.mark.parametrize("causal", [False, True])
def test_broken_query_tiles_that_are_computed_again(causal: bool, shift: float, broken: list[int]):
    """Of a part, too, the second attempt is what is joined."""
    simulate(Problem(((200, 430),), 1, 1, 128, 128, "bf16", causal=causal, shift=shift))
    assert broken


def test_a_query_that_sees_nothing_of_a_part(broken: list[int]):
    """What a part has for it is 0 times whatever the values hold, and must not be joined."""
    q, k, v = (torch.randn(1, n, 1, 64).bfloat16() for n in (300, 600, 600))
    v[:, 448:] = torch.nan
    with sim.intercept():
        out = attention(q, k, v, causal=True, **how(KERNEL))
    assert broken
    assert out[0, :64].isfinite().all()  # query i sees keys up to i + 300, in tiles of 64
    assert not out[0, 150:].isfinite().any()


def test_many_parts_of_one_query_tile(monkeypatch: pytest.MonkeyPatch, broken: list[int]):
    """More than are loaded at a time when they are joined."""
    monkeypatch.setattr(schedule, "multiprocessors", lambda device: 11)
    for form in MASKS.values():
        simulate(Problem(((70, 900),), 1, 1, 64, 64, "bf16", **form))
    assert max(broken) > join.AT_ONCE


def many_schedules(d: int, dv: int, form: str, dtype: str, sim_seeds: range) -> None:
    p = Problem(((130, 300),), 1, 1, d, dv, dtype, seed=d, **MASKS[form])
    results = simulate(p, sim_seeds)
    for other in results[1:]:
        assert all(torch.equal(results[0][name], other[name]) for name in other)


@pytest.mark.parametrize("short", [0, schedule.SHORT])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)])
def test_packed_and_used_lengths(dims, short: int, sim_seeds: range, monkeypatch: Any):
    monkeypatch.setattr(schedule, "SHORT", short)
    lengths = ((5, 200), (200, 5), (0, 30), (140, 300), (64, 0))
    p = Problem(lengths, 1, 3, *dims, "bf16", varlen=True, causal=True, tail=(3, 2), poison=True)
    simulate(p, sim_seeds)
    used = Problem(((150, 280),) * 3, 2, 1, *dims, "bf16", used_q=(150, 0, 33), used_k=(1, 70, 280))
    simulate(replace(used, poison=True), sim_seeds)
    simulate(Problem(((1, 1),) * 3, 1, 2, *dims, "bf16", used_q=(1, 0, 1), used_k=(1, 1, 0)))


def grown(key: int, causal: bool, dim: int) -> tuple[torch.Tensor, ...]:
    """Scores of one key more than 2**127 times as heavy as those of the key tile that comes first."""
    q, k, v = (torch.randn(1, 300, 2, dim, generator=torch.Generator().manual_seed(n)) for n in range(3))
    k[:, key] *= 60
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_rows_that_outgrow_their_anchor_are_computed_again(dim: int, causal: bool, sim_seeds: range):
    """They would be infinite, or not a number; and a wrong one might hide in a finite sum."""
    q, k, v = grown(1, causal, dim)
    with sim.intercept(seed=sim_seeds[-1]) as reports:
        out, lse = attention(q, k, v, causal=causal, return_lse=True, **how(KERNEL))
    for report in reports:
        report.raise_if_any()
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) / dim**0.5
    if causal:
        scores = scores.masked_fill(torch.ones(300, 300, dtype=torch.bool).triu(1), -torch.inf)
    assert (scores.amax(-1) - scores[..., -128:].amax(-1)).max() > 127  # or this tests nothing
    want = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v.double())
    assert (out.double() - want).norm() / want.norm() < 5e-3
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shift", [-150.0, -25.0, 60.0, 150.0])
@pytest.mark.parametrize("lengths", [(200, 230), (130, 150)])
def test_rows_that_see_nothing_of_the_first_key_tile(lengths, shift: float):
    """Nothing is subtracted from their scores: far below 0 all weights are too small to keep their
    digits, or 0, as if the row saw nothing; far above, infinite."""
    p = Problem((lengths,), 1, 2, 128, 128, "bf16", causal=True, shift=shift)
    simulate(p)


@pytest.mark.parametrize("shift", [-150.0, 150.0])
def test_packed_tiles_are_computed_again_by_the_same_program(shift: float, sim_seeds: range):
    """Programs claim packed tiles as they come, the second time the ones they had."""
    lengths = ((200, 230), (150, 190), (0, 7), (64, 100), (300, 340), (1, 2))
    p = Problem(lengths, 1, 2, 128, 128, "bf16", causal=True, varlen=True, shift=shift)
    simulate(p, sim_seeds)


@pytest.mark.parametrize("form", [{"causal": True}, {"window": (10, 5)}, {"window": (30, -20)}])
def test_a_query_that_sees_nothing_gets_0_whatever_the_values_hold(form: dict[str, Any]):
    """Its weights are 0, but 0 times infinity is not a number."""
    q, k, v = (torch.randn(1, n, 2, 64).bfloat16() for n in (300, 100, 100))
    v[:, 50] = torch.inf
    v[:, 51] = torch.nan
    with sim.intercept():
        out, lse = attention(q, k, v, return_lse=True, **form, **how(KERNEL))
    dead = lse == -torch.inf
    assert dead.any() and not dead.all()
    assert (out.transpose(1, 2)[dead] == 0).all()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("size", [1e4, 2e4, 5e4, 1e6, 1e8])
def test_huge_logits(size: float, sign: int):
    """One multiply-add subtracts a rounded maximum from an exact product: beyond 1e9 exp2 of that is 0
    or infinite. One key has weight 1, whatever its score."""
    q = torch.full((1, 70, 1, 128), size, dtype=torch.bfloat16)
    k, v = q[:, :1] * sign, torch.ones(1, 1, 1, 128, dtype=torch.bfloat16)
    with sim.intercept():
        out, lse = attention(q, k, v, return_lse=True, **how(KERNEL))
    assert (out == 1).all()
    want = (q.double()[:, :, 0] @ k.double()[0, 0, 0]) / 128**0.5
    torch.testing.assert_close(lse[:, 0].double(), want, rtol=1e-5, atol=0)


@pytest.mark.parametrize("sign", [1, -1])
def test_huge_logits_in_fp16_are_right_or_not_a_number(sign: int):
    """fp16 has no second attempt. Weights that are all 0 must not look like those of an empty row."""
    q = torch.full((1, 70, 1, 128), 6e4, dtype=torch.float16)
    k, v = q[:, :1] * sign, torch.ones(1, 1, 1, 128, dtype=torch.float16)
    with sim.intercept():
        out, lse = attention(q, k, v, return_lse=True, **how(KERNEL))
    assert ((out == 1) | out.isnan()).all()
    assert (lse.isfinite() | lse.isnan() | (lse == torch.inf)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("hidden", [128, 0])
def test_scores_of_minus_infinity_are_weights_of_0(hidden: int, causal: bool, dtype: torch.dtype):
    """Of the key tile that comes first, or of all: -inf less -inf is not a number."""
    q, k, v = (torch.rand(1, 300, 1, 64, dtype=dtype) + 0.1 for _ in range(3))
    k[:, hidden:] = -torch.inf
    with sim.intercept():
        out, lse = attention(q, k, v, causal=causal, return_lse=True, **how(KERNEL))
    x = problems.Inputs(q.double(), k.double(), v.double())
    want, want_lse = problems.reference.attention(problems.make_spec(x, causal=causal), x, torch.float64)
    torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=1e-3)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-3, atol=1e-3)


def test_packed_sequences_when_few_heads_fit_the_cache(monkeypatch: pytest.MonkeyPatch):
    """Which tile a program works on then depends on how many heads are worked on together."""
    for name in ("KEPT_IN_L2", "KEPT_IN_L2_CLAIMED"):
        monkeypatch.setattr(schedule, name, 2 * 300 * 512)  # two heads of 300 keys
    lengths = ((5, 200), (200, 5), (0, 30), (140, 300), (64, 0))
    causal = Problem(lengths, 5, 1, 128, 128, "bf16", varlen=True, causal=True, tail=(3, 2))
    full = Problem(lengths, 3, 3, 128, 128, "bf16", varlen=True)
    for p in (causal, full):
        assert heads_together(problems.tensors(p).spec) == 2 * p.group
        simulate(p)


def test_what_the_copy_engine_cannot_address_is_copied_first():
    """Steps that are no multiple of 16 bytes, and memory that begins in the middle of one."""
    wide = torch.randn(1, 70, 2, 131, generator=torch.Generator().manual_seed(0)).half()
    q, k, v = wide[..., 1:65], wide[..., 2:66], wide[..., 65:]
    with sim.intercept():
        got = attention(q, k, v, causal=True, **how(KERNEL))
        want = attention(*(t.contiguous() for t in (q, k, v)), causal=True, **how(KERNEL))
    assert torch.equal(got, want)


SIZE = Size(
    lengths=(129, 1, 2, 3, 17, 64, 97, 127, 200, 259),
    head_dims=(64, 128, 16, 40, 96, 111, 256),
    sequences=(1, 2, 0, 3),
    heads_kv=(1, 2),
    groups=(1, 2, 3),
    dtypes=("bf16", "fp16"),
)


@pytest.mark.parametrize("block", range(RANDOM // 10))
def test_random_problems(block: int):
    """A failing problem is printed whole; its number is its seed."""
    for seed in range(10 * block, 10 * block + 10):
        p = problems.random_problem(seed, SUPPORTED, SIZE)
        try:
            simulate(p)
        except Exception as error:
            raise AssertionError(f"random problem {seed}: {p}: {error}") from error
