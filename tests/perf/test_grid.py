"""The grid: what a person may type, what the presets are, and how work is counted."""

from __future__ import annotations

import itertools

import pytest
import torch

from tilewise import mask
from tilewise.perf import grid
from tilewise.perf.grid import BadRequest
from tilewise.perf.problem import Problem, make


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("512", (512,)),
        ("16k", (16384,)),
        ("512..4k", (512, 1024, 2048, 4096)),
        ("1k..3k", (1024, 2048)),
        ("64,128, 256", (64, 128, 256)),
        ("1k,512..1k", (1024, 512)),
    ],
)
def test_sizes_are_read(text, found):
    assert grid.sizes(text, "--seqlen") == found


@pytest.mark.parametrize("text", ["", "0", "-1", "x", "1k..", "..2", "4k..512", "1.5k", "k", "²"])
def test_sizes_that_make_no_sense_are_refused_by_name(text):
    with pytest.raises(BadRequest, match="--seqlen"):
        grid.sizes(text, "--seqlen")


@pytest.mark.parametrize(
    "text", ["1000000000000", "16385k", "512..99999999", "9" * 5000, "9" * 5000 + "k"]
)
def test_sizes_have_a_bound(text):
    """The largest went to the allocator, and a very long one was an error of Python's own."""
    with pytest.raises(
        BadRequest, match=r"^--seqlen: got .* allowed is a whole number from 1 to 16777216"
    ) as e:
        grid.sizes(text, "--seqlen")
    assert len(str(e.value)) < 200
    assert grid.sizes("16384k", "--seqlen") == (2**24,)


def test_the_papers_grid():
    problems = grid.problems(grid.preset("paper", "cuda"))
    assert len(problems) == 3 * 6 * 2
    assert all(p.batch * p.seqlen == 16384 and p.heads * p.head_dim == 2048 for p in problems)
    assert {p.dtype for p in problems} == {"bf16"}


def test_gqa_has_64_heads_over_8():
    assert {(p.heads, p.kv_heads) for p in grid.problems(grid.preset("gqa", "cuda"))} == {(64, 8)}


def test_mla_has_values_narrower_than_queries():
    problems = grid.problems(grid.preset("mla", "cuda"))
    assert {(p.head_dim, p.head_dim_v, p.heads, p.causal) for p in problems} == {(192, 128, 16, True)}


def test_the_values_head_dim_has_a_bound():
    with pytest.raises(BadRequest, match="--head-dim-v: got 257; allowed is 1 to 256"):
        grid.problems(grid.Axes(head_dim_v=257))


def test_windows_are_narrower_than_the_sequence():
    problems = grid.problems(grid.preset("window", "cuda"))
    assert {p.window for p in problems} == {(w, 0) for w in grid.WINDOWS}
    narrow = grid.Axes(seqlens=(1024,), kind="window")
    assert {p.window[0] for p in grid.problems(narrow)} == {256, 512}


def test_a_grid_of_windows_without_room_is_empty():
    with pytest.raises(BadRequest, match="empty"):
        grid.problems(grid.Axes(seqlens=(128,), kind="window"))


def test_packed_problems_all_have_the_same_tokens():
    problems = grid.problems(grid.preset("varlen", "cuda"))
    assert {sum(p.lengths or ()) for p in problems} == {65536}
    assert all(max(p.lengths or ()) == p.seqlen and len(p.lengths or ()) == p.batch for p in problems)


def test_mixed_lengths_are_always_the_same_ones():
    lengths = grid.mixed_lengths(65536)
    assert lengths == grid.mixed_lengths(65536)
    assert max(lengths) <= grid.LONGEST and min(lengths) >= 1 and len(set(lengths)) > 4


def test_each_feature_is_one_change():
    problems = grid.problems(grid.preset("features", "cuda"))
    plain = next(p for p in problems if p.name == "plain")
    extra = {p.name: p.needs - plain.needs for p in problems if p is not plain}
    assert all(len(needs) == 1 for needs in extra.values()), extra


def test_quick_is_smaller_on_a_cpu():
    work = {
        device: sum(p.flops("forward") for p in grid.problems(grid.preset("quick", device)))
        for device in ("cpu", "cuda")
    }
    assert work["cpu"] < 3e9 < work["cuda"]


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(BadRequest, match="--kv-heads: got 3"):
        grid.problems(grid.Axes(kv_heads=3))


def _plain(**changes):
    sizes = {"batch": 2, "seqlen": 12, "heads": 3, "kv_heads": 3, "head_dim": 8, "head_dim_v": 8}
    return Problem(**{**sizes, "dtype": "fp32", "causal": False, **changes})


def test_flops_are_those_of_the_papers():
    p = _plain()
    assert p.flops("forward") == 4 * 2 * 3 * 12 * 12 * 8
    assert _plain(causal=True).flops("forward") == p.flops("forward") / 2
    assert p.flops("backward") == 2.5 * p.flops("forward")
    assert _plain(head_dim_v=24).flops("forward") == 2 * p.flops("forward")


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("window", [(3, 0), (3, 2), (0, 0), (None, 4), (5, None)])
def test_a_window_counts_the_pairs_it_shows(window, causal):
    p = _plain(window=window, causal=bool(causal))
    i = torch.arange(12)
    bounds = mask.normalize_window(p.causal, p.window, 12, 12)
    dense = mask.visible(i[:, None], i, 12, 12, *bounds).sum().item()
    if bounds == (None, 0):
        dense = 72  # a causal mask is half of all by convention
    assert p.visible() == 2 * dense


def test_packed_sequences_count_one_by_one():
    p = _plain(batch=3, seqlen=5, lengths=(5, 2, 5))
    assert p.visible() == 25 + 4 + 25


def test_problems_that_look_alike_are_told_apart():
    problems = [p for name in grid.PRESETS for p in grid.problems(grid.preset(name, "cuda"))]
    for _, some in itertools.groupby(problems, key=lambda p: p.panel):
        ticks = [p.tick for p in dict.fromkeys(some)]
        assert len(ticks) == len(set(ticks))


def test_tensors_follow_from_the_problem():
    p = _plain(batch=2, seqlen=7, lengths=(7, 3), kv_heads=1, sink=True, alibi=True)
    data, again = (make(p, torch.device("cpu")) for _ in range(2))
    assert data.q.shape == (10, 3, 8) and data.k.shape == (10, 1, 8)
    assert data.cu_seqlens is not None and data.cu_seqlens.tolist() == [0, 7, 10]
    assert torch.equal(data.q, again.q) and not torch.equal(data.q, data.dout)
