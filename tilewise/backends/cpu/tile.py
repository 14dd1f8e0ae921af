# ruff: noqa: E741 (m and l are the names of the papers)
"""What FlashAttention 1, 2 and 3 share on a CPU: how a problem is cut into tiles, and what one tile is.

A ``Part`` is one sequence and one or, where they are short, some of its key/value heads. Parts are
independent, like the programs of a GPU's grid: ``threads`` runs them side by side. Their heads are the
batch dimension of every matrix product; the query heads of a group are rows of the same product (row
``i * G + g`` is query i of the group's head g), so that keys and values are never expanded.

Shapes below: H key/value heads of the part, G query heads to each, R queries and C keys of a tile.
Everything is computed in fp32 (fp64 for fp64 inputs), to which tiles are converted as they are loaded.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from tilewise import mask, philox
from tilewise.backends.cpu.threads import threads_each
from tilewise.ops import Gradients
from tilewise.spec import AttentionSpec, Inputs, Sequence, sequences

# One head's score tile has up to ROWS x KEYS elements: 512 KiB in fp32, half the second-level cache
# of a core, and large enough that the matrix product outweighs the calls around it.
ROWS = 256  # of the product: queries times the heads of a group
KEYS = 512

_LOG2_E = math.log2(math.e)


def exp_(x: Tensor) -> Tensor:
    """e ** x in place. Through exp2, which PyTorch runs several times faster on a CPU than exp."""
    return x.mul_(_LOG2_E).exp2_()


def compute_dtype(spec: AttentionSpec) -> torch.dtype:
    return torch.float64 if spec.dtype == torch.float64 else torch.float32


def parts(spec: AttentionSpec, x: Inputs) -> Iterator[Part]:
    """The problem as independent parts, in each as many heads as fill one tile of scores."""
    for seq in sequences(spec, x):
        tile = min(seq.length_q * spec.group, ROWS) * min(seq.length_k, KEYS)
        step = min(max(threads_each() * ROWS * KEYS // max(tile, 1), 1), spec.heads_kv)
        for head in range(0, spec.heads_kv, step):
            yield Part(spec, x, seq, range(head, min(head + step, spec.heads_kv)))


class Workspace(threading.local):
    """Memory for tiles, kept: fresh pages cost a thread as much as the arithmetic on them.

    Each thread has its own, some 512 KiB for a name.
    """

    def __init__(self) -> None:
        self.buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised contiguous tensor; the same memory each time for the same name."""
        size = math.prod(shape)
        buffer = self.buffers.get((name, dtype))
        if buffer is None or buffer.numel() < size:
            with torch.inference_mode(False):  # what that mode makes is of no use outside it
                buffer = self.buffers[name, dtype] = torch.empty(size, dtype=dtype, device="cpu")
        return buffer[:size].view(shape)


_workspace = Workspace()


class Part:
    """One sequence, some heads. Tiles are ranges of positions: ``i`` of queries, ``j`` of keys."""

    def __init__(self, spec: AttentionSpec, x: Inputs, seq: Sequence, heads: range) -> None:
        self.spec, self.x, self.seq, self.heads = spec, x, seq, heads
        self.group = spec.group
        self.heads_q = range(heads.start * spec.group, heads.stop * spec.group)
        self.dtype = compute_dtype(spec)
        self.query_step = max(ROWS // spec.group, 1)
        self.all_queries = range(seq.length_q)

    # Which tiles there are

    def query_blocks(self) -> Iterator[range]:
        """All queries in tiles that lie either inside the span of those that see a key or outside."""
        return _blocks(self.seq.length_q, self.seeing_queries(), self.query_step)

    def key_blocks(self) -> Iterator[range]:
        """All keys in tiles that lie either inside the span of those that are seen or outside."""
        return _blocks(self.seq.length_k, self.seen_keys(), KEYS)

    def seeing_queries(self) -> range:
        """The queries that see a key."""
        left, right = self.spec.window
        return _inside(
            self.seq.length_q, mask.key_span(self.seq.length_k, self.seq.length_q, right, left)
        )

    def seen_keys(self) -> range:
        """The keys that a query sees."""
        span = mask.key_span(self.seq.length_q, self.seq.length_k, *self.spec.window)
        return _inside(self.seq.length_k, span)

    def key_tiles(self, i: range) -> Iterator[tuple[range, bool]]:
        """The keys that queries ``i`` see, in tiles; with each, whether it needs an element mask."""
        sq, sk = self.seq.length_q, self.seq.length_k
        return _cut(mask.key_tiles(i.start, i.stop, sq, sk, *self.spec.window, 1), KEYS)

    def query_tiles(self, j: range) -> Iterator[tuple[range, bool]]:
        """The queries that see keys ``j``, in tiles; with each, whether it needs an element mask."""
        sq, sk, (left, right) = self.seq.length_q, self.seq.length_k, self.spec.window
        bounds = mask.key_tiles(j.start, j.stop, sk, sq, right, left, 1)
        return _cut(bounds, self.query_step)

    # Loads and stores. The part's view of any tensor is (H, positions, G or 1, width).

    def queries(self, t: Tensor) -> Tensor:
        """The part's view of q, out or one of their gradients."""
        t = self.seq.queries(t)[:, self.heads_q.start : self.heads_q.stop]
        return t.unflatten(1, (len(self.heads), self.group)).transpose(0, 1)

    def keys(self, t: Tensor) -> Tensor:
        """The part's view of k, v or one of their gradients."""
        t = self.seq.keys(t)[:, self.heads.start : self.heads.stop]
        return t.transpose(0, 1).unsqueeze(2)

    def rows(self, t: Tensor) -> Tensor:
        """The part's view of a statistic of each row, lse for one."""
        t = self.seq.rows(t)[self.heads_q.start : self.heads_q.stop]
        return t.unflatten(0, (len(self.heads), self.group)).transpose(1, 2).unsqueeze(-1)

    def load(self, view: Tensor, where: range) -> Tensor:
        """A tile of a view: (H, R G, width) of queries, (H, C, width) of keys."""
        return view[:, where.start : where.stop].flatten(1, 2).to(self.dtype)

    def store(self, view: Tensor, where: range, tile: Tensor) -> None:
        target = view[:, where.start : where.stop]
        target.copy_(tile.view(target.shape))

    def packed(self, i: range) -> slice:
        """Where the rows of queries ``i`` lie in a tensor of all rows of the part, (H, Sq G, ...)."""
        return slice(i.start * self.group, i.stop * self.group)

    def zeros(self, rows: int, width: int) -> Tensor:
        return torch.zeros(len(self.heads), rows, width, dtype=self.dtype, device="cpu")

    def new_tile(self, name: str, rows: int, columns: int) -> Tensor:
        """Workspace, (H, rows, columns): it lasts until the next one of this name."""
        return _workspace.take(name, (len(self.heads), rows, columns), self.dtype)

    # One tile of scores

    def scaled(self, q: Tensor) -> Tensor:
        """The factor of the scores goes into the queries, once per load."""
        return q * self.factor

    @property
    def factor(self) -> float:
        return self.spec.scale / (self.spec.softcap or 1.0)

    def start(self, i: range) -> tuple[Tensor, Tensor]:
        """(m, l) of the online softmax before the first key, each (H, R G, 1): the sink, if any.

        The least finite number stands in for m = -inf: exp(s - m) is then 0 for s = -inf, not NaN.
        """
        sink = self.sink_logits(i)
        m = sink.clamp_min(torch.finfo(self.dtype).min)
        return m, exp_(sink - m)

    def start_without_sink(self, i: range) -> tuple[Tensor, Tensor]:
        """``start`` for those who let it join at the end."""
        l = self.zeros(len(i) * self.group, 1)
        return torch.full_like(l, torch.finfo(self.dtype).min), l

    def join_sink(self, i: range, m: Tensor, l: Tensor, o: Tensor) -> Tensor:
        """Give the sink, if any, its share of l and of the unnormalised o, in place; the new m.

        After the last key, so that weights are measured against the row's largest score alone. Where
        they become fp8, those far below a large sink would become 0.
        """
        if self.x.sink is None:
            return m
        sink = self.sink_logits(i)
        m_new = torch.maximum(m, sink)
        rescale = exp_(m - m_new)
        l.mul_(rescale).add_(exp_(sink - m_new))
        o.mul_(rescale)
        return m_new

    def sink_logits(self, i: range) -> Tensor:
        """The logit of the sink in each row, -inf without one: (H, R G, 1)."""
        shape = (len(self.heads), len(i) * self.group, 1)
        if self.x.sink is None:
            return torch.full(shape, -math.inf, dtype=self.dtype, device="cpu")
        sink = self.x.sink[self.heads_q.start : self.heads_q.stop].to(self.dtype)
        return sink.view(-1, 1, self.group).expand(-1, len(i), -1).reshape(shape)

    def scores(
        self, q: Tensor, k: Tensor, i: range, j: range, masked: bool, slope: Tensor | None = None
    ) -> Tensor:
        """The logits of a tile, (H, R G, C), -inf where a query does not see a key.

        q: from ``scaled``. slope: where to write the softcap's derivative by the product, from
            ``new_slope``. The result is workspace: it lasts until the next call.
        """
        s = torch.bmm(q, k.mT, out=self.new_tile("scores", q.shape[1], len(j)))
        if self.spec.softcap is not None:
            s.tanh_()
            if slope is not None:
                torch.mul(s, s, out=slope).neg_().add_(1).mul_(self.spec.softcap)
            s.mul_(self.spec.softcap)
        if self.x.bias is not None:
            self._unpacked(s).add_(self.bias_tile(self.x.bias, i, j))
        if self.x.alibi_slopes is not None:
            self._unpacked(s).addcmul_(self._slopes(), self._distance(i, j), value=-1)
        if masked:
            self._unpacked(s).masked_fill_(self._hidden(i, j), -math.inf)
        return s

    def _unpacked(self, tile: Tensor) -> Tensor:
        """(H, R G, C) as (H, R, G, C)."""
        return tile.unflatten(1, (-1, self.group))

    def _slopes(self) -> Tensor:
        slopes = self.x.alibi_slopes
        assert slopes is not None
        slopes = slopes if slopes.dim() == 1 else slopes[self.seq.number]
        slopes = slopes[self.heads_q.start : self.heads_q.stop].to(self.dtype)
        return slopes.view(len(self.heads), 1, self.group, 1)

    def _distance(self, i: range, j: range) -> Tensor:
        """How far each key is from its query's place on the diagonal: (R, 1, C)."""
        offset = self.seq.length_k - self.seq.length_q
        diagonal = torch.arange(i.start + offset, i.stop + offset, dtype=self.dtype, device="cpu")
        columns = torch.arange(j.start, j.stop, dtype=self.dtype, device="cpu")
        return (diagonal.view(-1, 1, 1) - columns).abs_()

    def _hidden(self, i: range, j: range) -> Tensor:
        """Which keys a query does not see: (R, 1, C)."""
        # A tile is a small problem of its own: the same band, moved to where the tile lies in it.
        move = (self.seq.length_k - j.stop) - (self.seq.length_q - i.stop)
        left, right = self.spec.window
        left = None if left is None else left - move
        right = None if right is None else right + move
        return _hidden(len(i), len(j), left, right)

    def bias_tile(self, t: Tensor, i: range, j: range) -> Tensor:
        """The view of a tensor shaped like the bias that broadcasts over (H, R, G, C)."""
        t = t[self.seq.number if t.shape[0] > 1 else 0]
        if t.shape[0] > 1:
            t = t[self.heads_q.start : self.heads_q.stop]
            t = t.unflatten(0, (len(self.heads), self.group))
        else:
            t = t.unsqueeze(0)
        t = t if t.shape[2] == 1 else t[:, :, i.start : i.stop]
        t = t if t.shape[3] == 1 else t[:, :, :, j.start : j.stop]
        return t.transpose(1, 2)

    # Dropout

    def kept(self, i: range, j: range) -> Tensor | None:
        """Which weights of a tile dropout keeps, bool (H, R, G, C); None without dropout."""
        if self.spec.dropout_p == 0:
            return None
        assert self.x.dropout_key is not None
        keep = philox.keep_mask(
            self.x.dropout_key, self.seq.number, self.heads_q, i, j, self.spec.dropout_p
        )
        return keep.unflatten(0, (len(self.heads), self.group)).transpose(1, 2)

    def dropped(self, p: Tensor, keep: Tensor | None) -> Tensor:
        """A tile of weights, or of their gradients, after dropout; p itself stays as it is."""
        if keep is None:
            return p
        dropped = self.new_tile("dropped", *p.shape[1:])
        torch.mul(p, philox.keep_scale(self.spec.dropout_p), out=dropped)
        self._unpacked(dropped).mul_(keep)
        return dropped

    # Gradients

    def delta(self, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None, i: range) -> Tensor:
        """rowsum(dO * O), less the gradient of the log-sum-exp, from the views of all: (H, R G, 1).

        Both reach a score s with weight p: ds = p (dp - rowsum(dO * O)) + p dlse.
        """
        delta = (self.load(do, i) * self.load(o, i)).sum(dim=-1, keepdim=True)
        if dlse is None:
            return delta
        # A row that saw nothing has the constant -inf for its log-sum-exp.
        return (delta - self.load(dlse, i)).masked_fill_(self.load(lse, i) == -math.inf, 0)

    def new_slope(self, rows: int, columns: int) -> Tensor | None:
        return None if self.spec.softcap is None else self.new_tile("slope", rows, columns)

    def weight_gradient(self, do: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
        """dP = dO V^T where dropout kept the weight, else 0: (H, R G, C), workspace."""
        dp = torch.bmm(do, v.mT, out=self.new_tile("gradient", do.shape[1], v.shape[1]))
        return self.dropped(dp, keep)


class Sums:
    """The gradients of bias and sink, to which many tiles add, in the precision of the computation."""

    def __init__(self, spec: AttentionSpec, grads: Gradients) -> None:
        self.grads = grads
        self.bias = self.sink = None
        self.shared = False  # whether parts add to the same elements
        if grads.bias is not None:
            whole = (spec.batch, spec.heads_q, spec.max_seqlen_q, spec.max_seqlen_k)
            self.shared = grads.bias.shape[:2] != whole[:2]
            # If an element is one tile's alone, it needs no second tensor of that size.
            alone = grads.bias.shape == whole
            self.bias = grads.bias if alone else torch.zeros_like(grads.bias, dtype=compute_dtype(spec))
        if grads.sink is not None:
            self.sink = grads.sink.new_zeros(spec.batch, spec.heads_q, dtype=compute_dtype(spec))

    def add_bias(self, part: Part, ds: Tensor, i: range, j: range) -> None:
        """ds: (H, R G, C), the gradient of a tile of scores."""
        if self.bias is not None:
            target = part.bias_tile(self.bias, i, j)
            target += ds.unflatten(1, (-1, part.group)).sum_to_size(target.shape)

    def add_sink(self, part: Part, weight: Tensor, delta: Tensor) -> None:
        """weight: the sink's share of each row, (H, R G, 1): it has no value, so its dp is 0."""
        if self.sink is not None:
            by_row = (weight * -delta).unflatten(1, (-1, part.group))
            heads = slice(part.heads_q.start, part.heads_q.stop)
            self.sink[part.seq.number, heads] += by_row.sum(dim=1).flatten()

    def finish(self) -> None:
        if self.grads.bias is not None and self.bias is not None:
            self.grads.bias.copy_(self.bias)
        if self.grads.sink is not None and self.sink is not None:
            self.grads.sink.copy_(self.sink.sum(dim=0))


@lru_cache(maxsize=8)  # the tiles along a diagonal are all alike
def _hidden(rows: int, columns: int, left: int | None, right: int | None) -> Tensor:
    i = torch.arange(rows, dtype=torch.int32, device="cpu").view(-1, 1, 1)
    j = torch.arange(columns, dtype=torch.int32, device="cpu")
    return ~mask.visible(i, j, rows, columns, left, right)


def _inside(length: int, span: tuple[int, int]) -> range:
    low = min(span[0], length)
    return range(low, max(min(span[1], length), low))


def _blocks(length: int, span: range, size: int) -> Iterator[range]:
    for start, stop in ((0, span.start), (span.start, span.stop), (span.stop, length)):
        for first in range(start, stop, size):
            yield range(first, min(first + size, stop))


def _cut(bounds: tuple[int, int, int, int], size: int) -> Iterator[tuple[range, bool]]:
    low, full_low, full_high, high = bounds
    for first in range(low, high, size):
        tile = range(first, min(first + size, high))
        yield tile, tile.start < full_low or tile.stop > full_high
