"""Which program works on which query tiles, and in what order, where that is not simply in turn.

All lengths of a dense batch are known on the host, so nothing has to be dealt out while kernels run:
the host plays it through once for a spec, and programs read their lists. Where whole query tiles would
leave programs waiting for the last ones, some are broken into parts, each with some of their key tiles;
``join`` puts together what comes of those.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from tilewise import mask, schedule
from tilewise.spec import AttentionSpec


class Agenda(NamedTuple):
    """int32, on the spec's device. Query tile t is number t % n of the n ones of head t // n, counting
    heads through the batch."""

    lists: Tensor  # (turns, programs): t, or the number of all tiles and more: 0 for none, 1 + a part
    parts: Tensor | None  # (parts, 3): query tile, and from which to which of its key tiles they go
    broken: Tensor | None  # (tiles, 3): query tile, its first part, how many there are


def agenda(spec: AttentionSpec, tile_q: int, tile_k: int, programs: int) -> Agenda | None:
    """The lists. None: programs take tiles in turn, for all take equally long; or because nothing may be
    copied now."""
    costs = tuple(
        _key_tiles(spec, row, tile_q, tile_k) for row in range(triton.cdiv(spec.max_seqlen_q, tile_q))
    )
    heads = spec.batch * spec.heads_q
    cycles = tile_q * tile_k * 2 * (spec.head_dim + spec.head_dim_v) / schedule.FLOPS_A_CYCLE
    joining = round(schedule.JOINING / cycles, 1)
    if spec.bias:
        joining = math.inf  # parts do not say what rounding took from their log-sum-exps
    between = schedule.BETWEEN_QUERY_TILES / tile_k
    key = (costs, heads, heads_together(spec), programs, between, joining)
    place = (*key, spec.device)
    if place not in _kept and not capturing(spec.device):
        if len(_kept) >= schedule.LISTS_KEPT:
            forget()
        lists = plan(*key)
        _kept[place] = None if lists is None else _on_device(lists, spec.device)
    return _kept.get(place)


_kept: dict[tuple[object, ...], Agenda | None] = {}
_captured: dict[int, Agenda] = {}


def capture(found: Agenda) -> None:
    """Keep it for ever: a graph that is being recorded reads it in every replay, and nobody else holds
    it."""
    _captured[id(found)] = found


def forget() -> None:
    """Drop all lists but captured ones, once no kernel on any stream can still read them."""
    for device in {place[-1] for place in _kept}:
        if isinstance(device, torch.device) and device.type == "cuda":
            torch.cuda.synchronize(device)
    _kept.clear()
    for clear in when_forgotten:
        clear()


when_forgotten: list[Callable[[], None]] = []  # of whoever else holds lists


def _on_device(lists: Agenda, device: torch.device) -> Agenda:
    """Copied by a thread of its own: the caller's may be warming up a graph (torch.compile's
    reduce-overhead), and then allocates from a pool that is reset under what stays there."""
    if device.type != "cuda":
        return lists
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_moved, lists, device).result()


def _moved(lists: Agenda, device: torch.device) -> Agenda:
    parts, broken = (None if t is None else t.to(device) for t in lists[1:])
    return Agenda(lists.lists.to(device), parts, broken)


def capturing(device: torch.device) -> bool:
    """Whether calls are being recorded for a graph, when the host may copy nothing to the GPU."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def plan(
    key_tiles: tuple[int, ...],
    heads: int,
    together: int,
    programs: int,
    between: float,
    joining: float,
) -> Agenda | None:
    """The lists, on the CPU: None if they say no more than to take whole tiles in turn.

    key_tiles: of a head's query tiles. together: heads worked on at once. between, joining: how many key
    tiles take as long as going from one query tile to the next, and as putting parts together.
    """
    costs = tuple(n + between for n in key_tiles)
    mean = sum(costs) * heads / programs
    equal = len(set(costs)) == 1
    if equal:
        longest = costs[0] * triton.cdiv(len(costs) * heads, programs)
        whole = None
    else:
        some = min(programs, len(costs) * heads)
        whole, longest, together = _deal_evenly(costs, heads, together, some)
    joining = max(joining, schedule.WORTH_BREAKING * mean)
    if longest - mean > joining:
        order = iter(range(len(costs) * heads)) if equal else _order(costs, heads, together)
        broken = _deal_parts(key_tiles, between, heads, order, programs, mean, longest - joining)
        if broken is not None and broken.parts is not None:
            return broken
    return whole


def _deal_evenly(
    costs: tuple[float, ...], heads: int, together: int, programs: int
) -> tuple[Agenda, float, int]:
    """Lists of whole tiles, how long the longest takes, and how many heads are worked on at once: as
    many more as it takes for equally long lists, since a head whose longest tiles come last keeps some
    programs waiting."""
    mean = sum(costs) * heads / programs
    while True:
        # Of very many heads, some are dealt out, and the rest again and again as those were.
        some = together * triton.cdiv(schedule.DEALT_AT_ONCE, together * len(costs))
        some = min(some, heads)
        times = heads // some
        lists, free, _ = _deal(costs, _order(costs, some, together), [(0.0, p) for p in range(programs)])
        rest = [head * len(costs) for head in (some * times, heads)]
        free = [(at * times, p) for at, p in free]
        order = (rest[0] + t for t in _order(costs, heads - some * times, together))
        last, free, _ = _deal(costs, order, free)
        longest = max(free)[0]
        if together >= heads or longest <= schedule.EVEN_ENOUGH * mean:
            table = _table(lists, rest[1], times, some * len(costs), last)
            return Agenda(table, None, None), longest, together
        together = min(2 * together, heads)


def _deal(
    costs: tuple[float, ...],
    order: Iterable[int],
    free: list[tuple[float, int]],
    level: float = math.inf,
) -> tuple[list[list[int]], list[tuple[float, int]], list[int]]:
    """Each program's list, if the next tile goes to whoever is free first, and when they are then. The
    first tile that would end beyond the level is left, and all after it."""
    lists: list[list[int]] = [[] for _ in free]
    heapq.heapify(free)
    tiles = iter(order)
    for t in tiles:
        at, p = free[0]
        end = at + costs[t % len(costs)]
        if end > level:
            return lists, free, [t, *tiles]
        lists[p].append(t)
        heapq.heapreplace(free, (end, p))
    return lists, free, []


def _deal_parts(
    key_tiles: tuple[int, ...],
    between: float,
    heads: int,
    order: Iterator[int],
    programs: int,
    mean: float,
    limit: float,
) -> Agenda | None:
    """Lists as short as they get if the last tiles are broken; None if not shorter than the limit.

    mean: of the lists. Up to there all tiles stay whole, however long the longest will be.
    """
    costs = tuple(n + between for n in key_tiles)
    lists, free, rest = _deal(costs, order, [(0.0, p) for p in range(programs)], mean)
    # The lowest level that is enough: up in growing steps, then between the last two.
    least = min(_least(between), *key_tiles)
    low = max(mean, between + least)
    level, step, best = low, 0.01, None
    while level < limit and best is None:
        best = _fill(key_tiles, between, rest, free, level)
        if best is None:
            low, level, step = level, level * (1 + step), step * 2
    for _ in range(6 if best is not None else 0):
        middle = (low + level) / 2
        found = _fill(key_tiles, between, rest, free, middle)
        if found is None:
            low = middle
        else:
            level, best = middle, found
    return None if best is None else _with_parts(lists, best, key_tiles, len(key_tiles) * heads)


def _least(between: float) -> int:
    """Key tiles of a part: fewer take less time than to begin and end one."""
    return max(1, round(between))


Part = tuple[int, int, int, int]  # program, query tile, from key tile to key tile


def _fill(
    key_tiles: tuple[int, ...],
    between: float,
    rest: list[int],
    free: list[tuple[float, int]],
    level: float,
) -> list[Part] | None:
    """Deal out query tiles so that no list is longer than the level, broken where they do not fit; None
    if they do not fit at all. free: when which program is."""
    least = _least(between)
    free = list(free)
    parts: list[Part] = []
    for t in rest:
        left = key_tiles[t % len(key_tiles)]
        while left > 0:
            if not free:
                return None
            at, p = free[0]
            take = int(level - at - between)
            take = left if take >= left else min(take, left - least)
            if take < min(least, left):
                heapq.heappop(free)  # is full
                continue
            parts.append((p, t, left - take, left))
            heapq.heapreplace(free, (at + take + between, p))
            left -= take
    return parts


def _with_parts(
    lists: list[list[int]], dealt: list[Part], key_tiles: tuple[int, ...], tiles: int
) -> Agenda:
    parts: list[tuple[int, int, int]] = []
    broken: list[list[int]] = []
    for p, t, first, stop in dealt:
        if stop - first == key_tiles[t % len(key_tiles)]:
            lists[p].append(t)
            continue
        if stop == key_tiles[t % len(key_tiles)]:
            broken.append([t, len(parts), 0])
        broken[-1][2] += 1
        lists[p].append(tiles + 1 + len(parts))
        parts.append((t, first, stop))
    table = _table(lists, tiles)
    if not parts:
        return Agenda(table, None, None)
    tables = [torch.tensor(rows, dtype=torch.int32, device="cpu") for rows in (parts, broken)]
    return Agenda(table, *tables)


def _table(
    lists: list[list[int]], none: int, times: int = 1, step: int = 0, last: list[list[int]] | None = None
) -> Tensor:
    """Lists as columns: each so many times, a step further on each time, and then the last ones."""
    if last is None:
        last = [[] for _ in lists]
    turns = 1 + max(times * len(mine) + len(rest) for mine, rest in zip(lists, last, strict=True))
    if times > 1:
        columns = torch.full((len(lists), turns), none, dtype=torch.int32, device="cpu")
        further = torch.arange(times, dtype=torch.int32, device="cpu")[:, None] * step
        for column, mine, rest in zip(columns, lists, last, strict=True):
            repeated = (torch.tensor(mine, dtype=torch.int32, device="cpu") + further).flatten()
            column[: len(repeated)] = repeated
            stop = len(repeated) + len(rest)
            column[len(repeated) : stop] = torch.tensor(rest, dtype=torch.int32, device="cpu")
    else:
        whole = [mine + rest for mine, rest in zip(lists, last, strict=True)]
        padded = [mine + [none] * (turns - len(mine)) for mine in whole]
        columns = torch.tensor(padded, dtype=torch.int32, device="cpu")
    return columns.T.contiguous()


def heads_together(spec: AttentionSpec, kept: int | None = None) -> int:
    """How many query heads to work on at once: those whose keys and values fit the L2 cache, where all
    query tiles but the first few find them. kept: bytes that stay there, ``schedule.KEPT_IN_L2``."""
    row_bytes = (spec.head_dim + spec.head_dim_v) * spec.dtype.itemsize
    fitting = (kept or schedule.KEPT_IN_L2) // (max(1, spec.max_seqlen_k) * row_bytes)
    return min(max(1, fitting) * spec.group, spec.batch * spec.heads_q)


def _key_tiles(spec: AttentionSpec, row: int, tile_q: int, tile_k: int) -> int:
    """How many key tiles a query tile has: counted from the first that any query sees, as
    ``tile.query_tile`` does, but never none."""
    low, _ = mask.key_span(spec.max_seqlen_q, spec.max_seqlen_k, *spec.window)
    left, right = spec.window
    first, _, _, stop = mask.key_tiles(
        row * tile_q, (row + 1) * tile_q, spec.max_seqlen_q, spec.max_seqlen_k - low, left, right, tile_k
    )
    return max(stop - first, 1)


def _order(costs: tuple[float, ...], heads: int, together: int) -> Iterator[int]:
    """Query tiles, the longest first of as many heads as are worked on together."""
    rows = sorted(range(len(costs)), key=lambda row: -costs[row])
    for begin in range(0, heads, together):
        for row in rows:
            for head in range(begin, min(begin + together, heads)):
                yield head * len(costs) + row
