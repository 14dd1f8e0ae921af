"""The Hopper forward's lists of query tiles: complete, balanced, and of few heads at a time."""

from __future__ import annotations

from dataclasses import replace

import problems
import pytest
import torch
from problems import Problem

pytest.importorskip("triton")

from tilewise import schedule
from tilewise.backends.hopper.agenda import agenda, heads_together
from tilewise.spec import AttentionSpec

PROGRAMS = 132


def spec_of(length: int = 1024, batch: int = 2, heads: int = 8, **more: object) -> AttentionSpec:
    p = Problem(((65, 65),), heads, 1, 128, 128, "bf16", causal=True)
    spec = problems.tensors(replace(p, **more)).spec
    return replace(spec, batch=batch, max_seqlen_q=length, max_seqlen_k=length)


def lists(table: torch.Tensor) -> list[list[int]]:
    none = int(table[-1].max())  # the number of all tiles, which is that of none
    assert (table[-1] == none).all()  # a number is read before it is known whether there is one
    return [[t for t in column if t != none] for column in table.T.tolist()]


@pytest.mark.parametrize("programs", [1, 3, PROGRAMS])
@pytest.mark.parametrize("length", [1, 128, 129, 1000])
def test_every_tile_is_on_one_list_once(length: int, programs: int):
    """A tile on none would leave rows unwritten, one on two would be a race."""
    spec = spec_of(length)
    table = agenda(spec, 128, 128, programs)
    assert table is not None and table.dtype == torch.int32 and table.is_contiguous()
    found = sorted(t for mine in lists(table) for t in mine)
    assert found == list(range(16 * -(-length // 128)))


def test_without_a_mask_there_is_none():
    assert agenda(spec_of(causal=False), 128, 128, PROGRAMS) is None


@pytest.mark.parametrize("length", [512, 1024, 2048, 4096, 8192, 16384])
def test_programs_are_done_at_the_same_time(length: int):
    """Dealt out in turn, forth and back, the longest of them took 1.7 times the mean."""
    spec = spec_of(length, 16384 // length, 16)
    table = agenda(spec, 128, 128, PROGRAMS)
    assert table is not None
    tiles = length // 128
    loads = [sum(t % tiles + 1 for t in mine) for mine in lists(table)]
    assert max(loads) <= 1.1 * sum(loads) / PROGRAMS


def test_one_head_at_a_time_would_leave_programs_waiting():
    """Of long sequences with D=256, the keys of one head fill what stays in L2."""
    spec = replace(spec_of(8192, 1, 8), head_dim=256, head_dim_v=256)
    table = agenda(spec, 128, 64, PROGRAMS)
    assert table is not None and heads_together(spec) == 1
    loads = [sum(t % 64 + 1 for t in mine) for mine in lists(table)]
    assert max(loads) <= 1.05 * sum(loads) / PROGRAMS


def test_a_list_outlives_its_plan():
    """A captured graph knows only where it lies."""
    spec = spec_of(640)
    first = agenda(spec, 128, 128, 3)
    assert first is agenda(replace(spec, scale=3.0), 128, 128, 3)


def test_while_a_graph_is_recorded_nothing_is_copied(monkeypatch: pytest.MonkeyPatch):
    """The copy would be an error. What was copied before is used."""
    known = agenda(spec_of(768), 128, 128, 3)
    monkeypatch.setattr("tilewise.backends.hopper.agenda.capturing", lambda device: True)
    assert agenda(spec_of(768), 128, 128, 3) is known
    assert agenda(spec_of(896), 128, 128, 3) is None


def test_lists_are_made_on_the_cpu_whatever_the_default_device():
    """On a GPU they would be allocated by the caller's thread, from a pool that may be reset."""
    spec = spec_of(1152)
    with torch.device("meta"):
        table = agenda(spec, 128, 128, 3)
    assert table is not None and table.device.type == "cpu"


def test_few_heads_are_worked_on_at_once():
    """Keys and values of all heads do not fit the L2 cache: each tile would come from memory."""
    spec = spec_of(2048, 8, 16)
    assert heads_together(spec) * 2048 * 512 == schedule.KEPT_IN_L2
    table = agenda(spec, 128, 128, PROGRAMS)
    assert table is not None
    for turn in table[: min(map(len, lists(table)))] // 16:  # heads of tiles that run at about one time
        assert int(turn.max() - turn.min()) <= 3 * heads_together(spec)


def test_heads_that_share_keys_stay_together():
    spec = replace(spec_of(2**20), heads_kv=2)
    assert heads_together(spec) == spec.group == 4


def test_never_more_heads_than_there_are():
    """The kernel multiplies the number by that of a head's query tiles, in 32 bits."""
    assert heads_together(spec_of(1)) == 16
