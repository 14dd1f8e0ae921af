"""tilewise.philox: the published generator, and a mask that no tiling can change."""

from __future__ import annotations

import math
import random

import pytest
import torch

from tilewise import philox

LOW = 0xFFFFFFFF


def as_int64(unsigned: int) -> int:
    return unsigned - (1 << 64) if unsigned >= 1 << 63 else unsigned


def words(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    packed = torch.tensor([as_int64(key[0] | key[1] << 32)])
    return tuple(int(w) for w in philox.philox(tuple(torch.tensor([c]) for c in counter), packed))


def plain_philox(counter: tuple[int, ...], key: int) -> tuple[int, ...]:
    """Philox4x32-10 on Python's integers, to check what the vectorised one does with words and signs."""
    c0, c1, c2, c3 = counter
    k0, k1 = key & LOW, key >> 32 & LOW
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = b >> 32 ^ c1 ^ k0, b & LOW, a >> 32 ^ c3 ^ k1, a & LOW
        k0, k1 = k0 + 0x9E3779B9 & LOW, k1 + 0xBB67AE85 & LOW
    return c0, c1, c2, c3


# The test vectors that the authors of Philox publish with their library.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((LOW, LOW, LOW, LOW), (LOW, LOW), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS, ids=["zeros", "ones", "pi"])
def test_known_answers(counter, key, answer):
    assert words(counter, key) == answer


def test_random_words_equal_python_integers():
    """Products of 32-bit words overflow int64 if they are not split: wrong bits for large words only."""
    rng = random.Random(1)
    for _ in range(200):
        counter, key = tuple(rng.getrandbits(32) for _ in range(4)), rng.getrandbits(64)
        assert words(counter, (key & LOW, key >> 32)) == plain_philox(counter, key)


def test_an_element_takes_the_bits_its_position_says():
    """The mask's layout is fixed: kernels make these bits from positions alone, in their own order."""
    rng = random.Random(2)
    p = 0.37
    for _ in range(60):
        key, b, h, i, j = (rng.getrandbits(n) for n in (64, 6, 5, 18, 20))
        made = philox.keep_mask(
            torch.tensor([as_int64(key)]), b, range(h, h + 1), range(i, i + 1), range(j, j + 1), p
        )
        group, word, half = j // 32 * 4 + j // 2 % 4, j // 8 % 4, j % 2
        bits = plain_philox((group, i, h, b), key)[word] >> 16 * half & 0xFFFF
        assert bool(made) == (bits >= round(p * 65536))


def test_any_tile_is_the_slice_of_the_whole():
    """The same mask for every tile size and starting point, or backward drops other weights."""
    rng = random.Random(3)
    key = philox.fold(torch.tensor([1234567]), 5)
    whole = philox.keep_mask(key, 2, range(4), range(70), range(150), 0.4)
    for _ in range(100):
        heads, queries, keys = (
            range(*sorted((rng.randint(0, n), rng.randint(0, n)))) for n in (4, 70, 150)
        )
        tile = philox.keep_mask(key, 2, heads, queries, keys, 0.4)
        part = whole[heads.start : heads.stop, queries.start : queries.stop, keys.start : keys.stop]
        assert torch.equal(tile, part), (heads, queries, keys)


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9, 0.999])
def test_the_kept_share_is_what_p_says(p: float):
    shape = (8, 256, 512)
    keep = philox.keep_mask(torch.tensor([99]), 0, *map(range, shape), p)
    dropped, n = 1 - keep.double().mean().item(), math.prod(shape)
    exact = philox.threshold(p) / 65536
    assert abs(exact - p) <= 2**-17
    assert abs(dropped - exact) < 5 * math.sqrt(exact * (1 - exact) / n)


def test_the_expectation_is_unchanged():
    """Scaling by 1 / (1 - p) with the p that was asked for, not the p in 16 bits, is a bias."""
    for p in (1e-5, 0.1, 0.3, 1 / 3, 0.99999):
        kept = 1 - philox.threshold(p) / 65536
        assert philox.keep_scale(p) * kept == 1
    assert philox.keep_scale(0.0) == 1.0


def test_extreme_p():
    """Next to nothing drops nothing; next to everything still keeps something, so 1 / kept is finite."""
    keep = philox.keep_mask(torch.tensor([7]), 0, range(2), range(64), range(64), 1e-7)
    assert keep.all()
    assert philox.threshold(0.9999999) == 65535


def _correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """In units of its standard deviation for independent bits: about a standard normal draw."""
    a, b = a.double() - a.double().mean(), b.double() - b.double().mean()
    return float((a * b).mean() / (a.std() * b.std()) * math.sqrt(a.numel()))


def test_masks_of_other_heads_batches_rows_seeds_and_offsets_are_independent():
    """A counter that forgets an index repeats the mask along it."""
    shape = range(4), range(128), range(128)
    base = philox.keep_mask(philox.fold(torch.tensor([3]), 0), 0, *shape, 0.5)
    others = {
        "batch": philox.keep_mask(philox.fold(torch.tensor([3]), 0), 1, *shape, 0.5),
        "seed": philox.keep_mask(philox.fold(torch.tensor([4]), 0), 0, *shape, 0.5),
        "offset": philox.keep_mask(philox.fold(torch.tensor([3]), 1), 0, *shape, 0.5),
        "high word": philox.keep_mask(philox.fold(torch.tensor([3 + 2**32]), 0), 0, *shape, 0.5),
        "head": base.roll(1, 0),
        "row": base.roll(1, 1),
        "column": base.roll(1, 2),
        "half word": base.roll(2, 2),
        "word": base.roll(8, 2),
        "counter": base.roll(32, 2),
    }
    for name, other in others.items():
        assert abs(_correlation(base, other)) < 4.5, name


def test_seed_and_offset_fold_to_distinct_keys():
    """(seed + 1, 0) and (seed, 1) must not be the same stream, nor may any two offsets of one seed."""
    seeds = torch.arange(-50, 50)
    keys = torch.stack([philox.fold(seeds, n) for n in range(-50, 50)])
    assert len(keys.flatten().unique()) == keys.numel()


def test_offsets_wrap_instead_of_overflowing():
    """An offset is any int64, as a tensor or as an int; large ones must wrap, not raise."""
    seed = torch.tensor([11])
    for offset in (0, 1, 2, 2**40, -3, 2**63 - 1, -(2**63)):
        as_tensor = philox.fold(seed, torch.tensor([offset]))
        assert torch.equal(philox.fold(seed, offset), as_tensor)
        exact = 11 + offset * 0x9E3779B97F4A7C15 & 2**64 - 1
        assert as_tensor.item() == as_int64(exact)
