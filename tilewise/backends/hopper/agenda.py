"""Which program works on which query tiles, and in what order, where masks make tiles unequal.

All lengths of a dense batch are known on the host, so nothing has to be dealt out while kernels run:
the host plays it through once for a spec, and programs read their lists.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
import triton
from torch import Tensor

from tilewise import mask, schedule
from tilewise.spec import AttentionSpec


def agenda(spec: AttentionSpec, tile_q: int, tile_k: int, programs: int) -> Tensor | None:
    """Each program's query tiles, in its column, and then the number of all; int32, on spec.device.

    Tile t is number t % n of the n query tiles of head t // n, counting heads through the batch. None:
    programs take tiles in turn, for all take equally long; or because nothing may be copied now.
    """
    if spec.window == (None, None):
        return None
    costs = tuple(
        _cost(spec, row, tile_q, tile_k) for row in range(triton.cdiv(spec.max_seqlen_q, tile_q))
    )
    key = (costs, spec.batch * spec.heads_q, heads_together(spec), programs)
    place = (*key, spec.device)
    if place not in _kept and not capturing(spec.device):
        _kept[place] = _on_device(_deal_evenly(*key), spec.device)
    return _kept.get(place)


# For ever: a captured graph and kernels on other streams read a list long after the call, and nobody
# else holds it. It is 4 bytes a query tile.
_kept: dict[tuple[object, ...], Tensor] = {}


def _on_device(lists: Tensor, device: torch.device) -> Tensor:
    """Copied by a thread of its own: the caller's may be warming up a graph (torch.compile's
    reduce-overhead), and then allocates from a pool that is reset under what stays there."""
    if device.type != "cuda":
        return lists.to(device)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lists.to, device).result()


def capturing(device: torch.device) -> bool:
    """Whether calls are being recorded for a graph, when the host may copy nothing to the GPU."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _deal_evenly(costs: tuple[float, ...], heads: int, together: int, programs: int) -> Tensor:
    """The lists with as many more heads worked on at once as it takes for equally long ones: a head
    whose longest tiles come last keeps some programs waiting."""
    mean = sum(costs) * heads / programs
    while True:
        lists = deal(costs, heads, together, programs)
        taken = torch.tensor([*costs * heads, 0.0], device="cpu")[lists]
        longest = float(taken.sum(0).max())
        if together >= heads or longest <= schedule.EVEN_ENOUGH * mean:
            return lists
        together = min(2 * together, heads)


def deal(costs: tuple[float, ...], heads: int, together: int, programs: int) -> Tensor:
    """The lists, on the CPU. costs: of a head's query tiles. together: heads worked on at once."""
    lists: list[list[int]] = [[] for _ in range(programs)]
    free = [(0.0, p) for p in range(programs)]  # when, and who
    for head, row in _order(costs, heads, together):
        at, p = free[0]
        lists[p].append(head * len(costs) + row)
        heapq.heapreplace(free, (at + costs[row], p))
    rounds = max(map(len, lists)) + 1
    none = heads * len(costs)
    columns = [mine + [none] * (rounds - len(mine)) for mine in lists]
    return torch.tensor(columns, dtype=torch.int32, device="cpu").T.contiguous()


def heads_together(spec: AttentionSpec) -> int:
    """How many query heads to work on at once: those whose keys and values fit the L2 cache, where all
    query tiles but the first few find them."""
    row_bytes = (spec.head_dim + spec.head_dim_v) * spec.dtype.itemsize
    fitting = schedule.KEPT_IN_L2 // (max(1, spec.max_seqlen_k) * row_bytes)
    return min(max(1, fitting) * spec.group, spec.batch * spec.heads_q)


def _cost(spec: AttentionSpec, row: int, tile_q: int, tile_k: int) -> float:
    """How long a query tile takes, in key tiles."""
    first, _, _, stop = mask.key_tiles(
        row * tile_q, (row + 1) * tile_q, spec.max_seqlen_q, spec.max_seqlen_k, *spec.window, tile_k
    )
    return max(stop - first, 1) + schedule.BETWEEN_QUERY_TILES / tile_k


def _order(costs: tuple[float, ...], heads: int, together: int) -> Iterator[tuple[int, int]]:
    """(head, query tile), the longest first of as many heads as are worked on together."""
    rows = sorted(range(len(costs)), key=lambda row: -costs[row])
    for begin in range(0, heads, together):
        for row in rows:
            for head in range(begin, min(begin + together, heads)):
                yield head, row
