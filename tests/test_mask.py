"""tilewise.mask against the mask written out: every (query, key) pair, thousands of problems."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tilewise import mask


class Case(NamedTuple):
    """A band as the user gives it, the longest lengths of its batch, and one sequence of the batch."""

    causal: bool
    window: tuple[int | None, int | None]
    longest: tuple[int, int]
    lengths: tuple[int, int]
    tile_q: int = 1
    tile_k: int = 1

    @property
    def band(self) -> tuple[int | None, int | None]:
        return mask.normalize_window(self.causal, self.window, *self.longest)


def _small_cases() -> Iterator[Case]:
    """Every band and length up to 5, so that nothing small is left to luck."""
    bounds = [None, *range(-6, 7)]
    for sq, sk, left, right in product(range(6), range(6), bounds, bounds):
        yield Case(False, (left, right), (5, 5), (sq, sk), 2, 3)


def _random_cases(count: int) -> Iterator[Case]:
    rng = random.Random(20)
    lengths = [0, 1, 2, 3, 5, 7, 8, 16, 17, 31, 32, 33, 48]
    bounds = [None, None, 0, 1, -1, 2, -2, 5, -7, 16, -16, 47, 100, -100, 2**31 - 1, -(2**31) + 1]
    for _ in range(count):
        longest = rng.choice(lengths), rng.choice(lengths)
        used = tuple(n if rng.random() < 0.5 else rng.randint(0, n) for n in longest)
        bound = [b if b is None or rng.random() < 0.7 else rng.randint(-60, 60) for b in bounds]
        yield Case(
            rng.random() < 0.3,
            (rng.choice(bound), rng.choice(bound)),
            longest,
            used,
            rng.choice([1, 2, 3, 8, 16, 64]),
            rng.choice([1, 2, 3, 8, 16, 64]),
        )


CASES = [*_random_cases(4000), *_small_cases()]


def dense(case: Case) -> Tensor:
    """The definition: (Sq, Sk), from the band as given, without any of tilewise.mask."""
    sq, sk = case.lengths
    i = torch.arange(sq)[:, None] + (sk - sq)  # bottom-right aligned
    j = torch.arange(sk)[None, :]
    seen = torch.ones(sq, sk, dtype=torch.bool)
    left, right = case.window
    if case.causal:
        seen &= j <= i
    if left is not None:
        seen &= j >= i - left
    if right is not None:
        seen &= j <= i + right
    return seen


def test_visible_is_the_dense_mask():
    """Normalizing must not move, open or close a band, in any sequence of the batch."""
    for case in CASES:
        sq, sk = case.lengths
        i, j = torch.arange(sq)[:, None], torch.arange(sk)[None, :]
        assert torch.equal(mask.visible(i, j, sq, sk, *case.band), dense(case)), case


def test_a_querys_range_of_keys_is_the_dense_mask():
    """The Hopper forward masks by these bounds, and takes a row for one that sees nothing by them. Also
    counted from the first key that any row sees, as that kernel does."""
    for case in CASES:
        sq, sk = case.lengths
        low, _ = mask.key_span(sq, sk, *case.band)
        for i, row in enumerate(dense(case).tolist()):
            for before in (0, low):
                first, stop = mask.key_range(i, sq, sk - before, *case.band)
                assert [first <= j < stop for j in range(sk - before)] == row[before:], (case, i)


def test_positions_beyond_the_lengths_are_not_visible():
    """Rows and columns that pad the last tile are nobody's."""
    i, j = torch.arange(8)[:, None], torch.arange(8)[None, :]
    for band in ((None, None), (None, 0), (2, 3)):
        seen = mask.visible(i, j, 5, 6, *band)
        assert seen[:5, :6].any() and not seen[5:].any() and not seen[:, 6:].any()


def _check_tiles(seen: Tensor, tiles: tuple[int, int, int, int], tile: int, row_tile: int, n: int):
    """``tiles`` of row tile ``n``: visited iff some row sees a key there, full iff all see all of it."""
    first, full_first, full_stop, stop = tiles
    rows = seen[n * row_tile : (n + 1) * row_tile]
    count = -(-seen.shape[1] // tile)
    assert 0 <= first <= full_first <= full_stop <= stop
    for t in range(count):
        part = rows[:, t * tile : (t + 1) * tile]
        assert (first <= t < stop) == bool(part.any())
        whole = len(rows) > 0 and part.shape[1] == tile and bool(part.all())
        assert (full_first <= t < full_stop) == whole
    assert stop <= max(count, first)


@pytest.mark.parametrize("role", ["keys of a query tile", "queries of a key tile"])
def test_visited_tiles_are_exactly_those_with_a_visible_key(role: str):
    """A tile too few drops keys, one too many costs time, a full tile that is not leaks masked keys."""
    for case in CASES:
        sq, sk = case.lengths
        left, right = case.band
        seen, tile, row_tile = dense(case), case.tile_k, case.tile_q
        if role == "queries of a key tile":  # the same band with the roles swapped
            seen, sq, sk, left, right = seen.T, sk, sq, right, left
            tile, row_tile = row_tile, tile
        for n in range(-(-sq // row_tile) + 1):  # one row tile too many: it visits nothing
            bounds = n * row_tile, (n + 1) * row_tile
            tiles = mask.key_tiles(*bounds, sq, sk, left, right, tile)
            try:
                _check_tiles(seen, tiles, tile, row_tile, n)
            except AssertionError as error:
                raise AssertionError(f"{case}, row tile {n}: {tiles}") from error


@pytest.mark.parametrize("role", ["keys", "queries"])
def test_key_span_is_the_hull_of_the_visible_keys(role: str):
    """Loads outside the span are skipped: it must hold every visible key and no other at its ends."""
    for case in CASES:
        sq, sk = case.lengths
        left, right = case.band
        seen = dense(case)
        if role == "queries":
            seen, sq, sk, left, right = seen.T, sk, sq, right, left
        low, high = mask.key_span(sq, sk, left, right)
        used = seen.any(0).nonzero().flatten().tolist()
        if used:
            assert (low, high) == (used[0], used[-1] + 1), case
        elif sq:
            assert low >= high, case
        assert low >= 0 and high <= sk, case


def test_causal_equals_its_window_after_normalizing():
    """(S - 1, 0) must take causal's path bit for bit, so both have to be one and the same band."""
    for sq, sk in product(range(40), range(40)):
        causal = mask.normalize_window(True, (None, None), sq, sk)
        assert mask.normalize_window(False, (max(sk - 1, 0), 0), sq, sk) == causal
        assert mask.normalize_window(True, (sk + 5, 7), sq, sk) == causal
        assert mask.normalize_window(False, (2**31 - 1, 0), sq, sk) == causal


def test_idle_bounds_vanish():
    """A window wider than the sequences is no window: kernels must not pay for it."""
    for case in CASES:
        if case.lengths != case.longest or 0 in case.lengths or dense(case).logical_not().any():
            continue
        assert case.band == (None, None), case


def test_empty_bands_are_one_band():
    """However a window comes to hold nothing, the kernels see one canonical band."""
    empty = mask.normalize_window(False, (-1, 0), 7, 9)
    for window in ((-4, 3), (2, -3), (-(2**31) + 1, 5), (0, -(2**31) + 1), (-5, -6)):
        assert mask.normalize_window(False, window, 7, 9) == empty
    assert mask.normalize_window(True, (-1, None), 7, 9) == empty


def test_bounds_stay_small_enough_for_32_bit_positions():
    """Kernels add bounds to positions in int32: a window of 2**31 - 1 must not wrap around."""
    for case in CASES:
        limit = sum(case.longest) + 1
        assert all(b is None or abs(b) <= limit for b in case.band), case


def test_hand_drawn_masks():
    """Small enough to check by eye, bottom-right aligned."""

    def drawn(sq: int, sk: int, causal: bool, window: tuple[int | None, int | None]) -> list[str]:
        band = mask.normalize_window(causal, window, sq, sk)
        seen = mask.visible(torch.arange(sq)[:, None], torch.arange(sk)[None], sq, sk, *band)
        return ["".join("x" if s else "." for s in row) for row in seen.tolist()]

    none = (None, None)
    assert drawn(2, 4, True, none) == ["xxx.", "xxxx"]
    assert drawn(4, 2, True, none) == ["..", "..", "x.", "xx"]  # the first rows see nothing
    assert drawn(1, 5, True, none) == ["xxxxx"]
    assert drawn(3, 3, False, (1, 0)) == ["x..", "xx.", ".xx"]
    assert drawn(3, 3, False, (0, None)) == ["xxx", ".xx", "..x"]
    assert drawn(3, 3, False, (-1, None)) == [".xx", "..x", "..."]
    assert drawn(3, 3, False, (None, -2)) == ["...", "...", "x.."]
    assert drawn(3, 4, False, (0, 0)) == [".x..", "..x.", "...x"]
    assert drawn(2, 3, False, (-2, 1)) == ["...", "..."]
