"""The Hopper forward's lists of query tiles: complete, balanced, and of few heads at a time."""

from __future__ import annotations

import heapq
from dataclasses import replace
from unittest import mock

import problems
import pytest
import torch
from problems import Problem

pytest.importorskip("triton")

from hypothesis import given
from hypothesis import strategies as st

from tilewise import schedule
from tilewise.backends.hopper import agenda as module
from tilewise.backends.hopper.agenda import Agenda, agenda, heads_together, plan
from tilewise.spec import AttentionSpec

PROGRAMS = 132


def spec_of(length: int = 1024, batch: int = 2, heads: int = 8, **more: object) -> AttentionSpec:
    p = Problem(((65, 65),), heads, 1, 128, 128, "bf16", causal=True)
    spec = problems.tensors(replace(p, **more)).spec
    return replace(spec, batch=batch, max_seqlen_q=length, max_seqlen_k=length)


def table_of(spec: AttentionSpec, tile_q: int, tile_k: int, programs: int) -> torch.Tensor:
    """The lists where no query tile is broken."""
    found = agenda(spec, tile_q, tile_k, programs)
    assert found is not None and found.parts is None and found.broken is None
    return found.lists


def lists(table: torch.Tensor) -> list[list[int]]:
    none = int(table[-1].max())  # the number of all tiles, which is that of none
    assert (table[-1] == none).all()  # a number is read before it is known whether there is one
    return [[t for t in column if t != none] for column in table.T.tolist()]


@pytest.mark.parametrize("programs", [1, 3, PROGRAMS])
@pytest.mark.parametrize("length", [129, 300, 1000])
def test_every_tile_is_on_one_list_once(length: int, programs: int):
    """A tile on none would leave rows unwritten, one on two would be a race."""
    spec = spec_of(length)
    table = table_of(spec, 128, 128, programs)
    assert table.dtype == torch.int32 and table.is_contiguous()
    found = sorted(t for mine in lists(table) for t in mine)
    assert found == list(range(16 * -(-length // 128)))


@pytest.mark.parametrize("length", [1, 128])
def test_a_mask_that_leaves_tiles_equal_needs_none(length: int):
    """Every program then takes each tile of its turns once, as without a mask."""
    assert agenda(spec_of(length), 128, 128, PROGRAMS) is None


def test_without_a_mask_there_is_none():
    assert agenda(spec_of(causal=False), 128, 128, PROGRAMS) is None


@pytest.mark.parametrize("length", [512, 1024, 2048, 4096, 8192, 16384])
def test_programs_are_done_at_the_same_time(length: int):
    """Dealt out in turn, forth and back, the longest of them took 1.7 times the mean."""
    spec = spec_of(length, 16384 // length, 16)
    table = table_of(spec, 128, 128, PROGRAMS)
    tiles = length // 128
    loads = [sum(t % tiles + 1 for t in mine) for mine in lists(table)]
    assert max(loads) <= 1.1 * sum(loads) / PROGRAMS


def test_one_head_at_a_time_would_leave_programs_waiting():
    """Of long sequences with D=256, the keys of one head fill what stays in L2."""
    spec = replace(spec_of(8192, 1, 8), head_dim=256, head_dim_v=256)
    table = table_of(spec, 128, 64, PROGRAMS)
    assert heads_together(spec) == 1
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
        table = table_of(spec, 128, 128, 3)
    assert table.device.type == "cpu"


def test_few_heads_are_worked_on_at_once():
    """Keys and values of all heads do not fit the L2 cache: each tile would come from memory."""
    spec = spec_of(2048, 8, 16)
    assert heads_together(spec) * 2048 * 512 == schedule.KEPT_IN_L2
    table = table_of(spec, 128, 128, PROGRAMS)
    for turn in table[: min(map(len, lists(table)))] // 16:  # heads of tiles that run at about one time
        assert int(turn.max() - turn.min()) <= 3 * heads_together(spec)


def test_heads_that_share_keys_stay_together():
    spec = replace(spec_of(2**20), heads_kv=2)
    assert heads_together(spec) == spec.group == 4


def test_never_more_heads_than_there_are():
    """The kernel multiplies the number by that of a head's query tiles, in 32 bits."""
    assert heads_together(spec_of(1)) == 16


def key_tiles_done(found: Agenda, key_tiles: tuple[int, ...], heads: int) -> list[list[list[int]]]:
    """What each program works on: as key tiles, numbered through query tiles and heads."""
    tiles = heads * len(key_tiles)
    starts = [0]
    for t in range(tiles):
        starts.append(starts[-1] + key_tiles[t % len(key_tiles)])
    assert (found.lists[-1] == tiles).all()
    done: list[list[list[int]]] = []
    for column in found.lists.T.tolist():
        done.append([])
        for n in column[: column.index(tiles)]:
            t, first, stop = n, 0, key_tiles[n % len(key_tiles)]
            if n > tiles:
                assert found.parts is not None
                t, first, stop = found.parts[n - tiles - 1].tolist()
            done[-1].append(list(range(starts[t] + first, starts[t] + stop)))
    return done


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=6).map(tuple),
    st.integers(1, 9),
    st.integers(1, 5),
    st.sampled_from([1, 2, 7, 30]),
    st.sampled_from([0.0, 1.5, 12.0]),
    st.sampled_from([0.0, 3.0, 1e9]),
    st.sampled_from([1, 10, 4096]),
)
def test_every_key_tile_is_visited_once(key_tiles, heads, together, programs, between, joining, at_once):
    """One left out would be missing from the softmax, one visited twice would count twice."""
    with mock.patch.object(schedule, "DEALT_AT_ONCE", at_once):
        found = plan(key_tiles, heads, min(together, heads), programs, between, joining)
    if found is None:
        return  # in turn
    done = key_tiles_done(found, key_tiles, heads)
    every = sorted(n for mine in done for some in mine for n in some)
    assert every == list(range(sum(key_tiles) * heads))
    assert all(some for mine in done for some in mine)
    if found.broken is None:
        assert found.parts is None
        return
    assert found.parts is not None
    parts = found.parts.tolist()
    covered = []
    for t, first, count in found.broken.tolist():
        assert count > 1 and {p[0] for p in parts[first : first + count]} == {t}
        covered += parts[first : first + count]
    assert covered == parts and len({t for t, _, _ in covered}) == len(found.broken)
    whole = sum(key_tiles) * heads + between * len(key_tiles) * heads
    longest = max(sum(len(some) + between for some in mine) for mine in done)
    unbroken = -(-heads // programs) * (max(key_tiles) + between)
    assert whole / programs <= longest + 1e-6 and longest < max(whole / programs * 2, unbroken)


@pytest.mark.parametrize("causal", [False, True])
def test_a_few_queries_of_a_long_sequence_use_the_whole_gpu(causal: bool):
    """8 query tiles would keep 8 of 132 multiprocessors busy."""
    spec = replace(spec_of(causal=causal), batch=1, max_seqlen_q=128, max_seqlen_k=65536)
    found = agenda(spec, 128, 64, PROGRAMS)
    assert found is not None
    done = key_tiles_done(found, (1024,), 8)
    assert max(sum(map(len, mine)) for mine in done) < 1024 * 8 / PROGRAMS * 1.2


@pytest.mark.parametrize("length", [512, 2048])
def test_short_problems_are_not_broken(length: int):
    """Joining the parts would take longer than the programs wait."""
    assert agenda(spec_of(length, 16384 // length, 16, causal=False), 128, 64, PROGRAMS) is None
    table_of(spec_of(length, 16384 // length, 16), 128, 64, PROGRAMS)


def test_many_rounds_are_not_worth_a_list():
    """One of 65,536 query tiles would be made on the host, for less than a percent."""
    assert agenda(spec_of(8192, 64, 16, causal=False), 128, 64, PROGRAMS) is None


@pytest.mark.parametrize("window", [(None, 0), (4096, 0), (128, 64)])
def test_a_million_query_tiles_are_dealt_out_like_some_thousand(window: tuple[int | None, int]):
    """One by one that took most of a second."""
    spec = replace(spec_of(32768, 64, 64), window_left=window[0], window_right=window[1])
    with mock.patch("heapq.heapreplace", side_effect=heapq.heapreplace) as dealt:
        table = table_of(spec, 128, 64, PROGRAMS)
    assert dealt.call_count < 40_000
    tiles = 64 * 64 * 256
    assert int((table < tiles).sum()) == tiles
    lengths = (table < tiles).sum(0).float()
    assert lengths.max() < 1.1 * lengths.mean()


@pytest.mark.parametrize(("rows", "keys"), [(1, 2048), (1, 8192), (128, 2048), (64, 131072)])
def test_a_level_is_found_in_a_few_tries(rows: int, keys: int):
    """The mean is far below what one part takes where there are more programs than work: a search from
    there in small steps took 75 ms, for every 64 keys more."""
    spec = replace(spec_of(heads=1, causal=False), batch=1, max_seqlen_q=rows, max_seqlen_k=keys)
    with mock.patch.object(module, "_fill", side_effect=module._fill) as tries:
        agenda(spec, 128, 64, PROGRAMS)
    assert tries.call_count <= 20


def test_lists_that_nobody_reads_are_forgotten(monkeypatch: pytest.MonkeyPatch):
    """A server that decodes meets ever new lengths; a captured graph reads its list for ever."""
    monkeypatch.setattr(schedule, "LISTS_KEPT", 3)
    monkeypatch.setattr(module, "_kept", {})
    told = []
    monkeypatch.setattr(module, "when_forgotten", [lambda: told.append(True)])
    captured = agenda(spec_of(256), 128, 128, 3)
    assert captured is not None
    module.capture(captured)
    for length in range(384, 384 + 8 * 128, 128):
        agenda(spec_of(length), 128, 128, 3)
        assert len(module._kept) <= 3
    assert told and module._captured[id(captured)] is captured
