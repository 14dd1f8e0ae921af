"""Rows that belong to no sequence hold 0, those of sequences are left to kernels: both ways to do it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise import unused
from tilewise.spec import Inputs, make_spec

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def clear_by_kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernel, with few programs that take several blocks each."""
    clear = pytest.importorskip("tilewise.backends.triton.clear")
    for name, small in (("PROGRAMS", 6), ("TAIL", 3), ("BLOCK", 4)):
        monkeypatch.setattr(clear, name, small)
    clear._plan.cache_clear()
    return lambda *args: clear.clear(*[a.to(DEVICE) if torch.is_tensor(a) else a for a in args])


def kept(t: torch.Tensor, cu: list[int] | None, used: list[int] | None, longest: int) -> torch.Tensor:
    """t where sequences use it, 0 elsewhere, row by row."""
    want = torch.zeros_like(t)
    entries = len(t) if cu is None else len(cu) - 1
    for b in range(entries):
        whole = t[b] if cu is None else t[cu[b] : cu[b + 1]]
        n = min(len(whole), longest if used is None else used[b])
        (want[b] if cu is None else want[cu[b] : cu[b + 1]])[:n] = whole[:n]
    return want


lengths_of = st.lists(st.integers(0, 9), min_size=1, max_size=5)


@pytest.mark.parametrize("way", ["kernel", "indices"])
@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    lengths=lengths_of,
    packed=st.booleans(),
    shape=st.sampled_from([(1, 1), (3, 8), (2, 40)]),
)
def test_only_rows_of_sequences_are_left(way: str, data: Any, lengths: list[int], packed: bool, shape):
    used = None
    if not packed or data.draw(st.booleans()):
        used = [data.draw(st.integers(0, n)) for n in lengths]
    longest = max(lengths)
    cu = None
    t = torch.ones(len(lengths), longest, *shape)
    if packed:
        cu = torch.tensor([0, *lengths]).cumsum(0).tolist()
        t = torch.ones(cu[-1] + data.draw(st.integers(0, 30)), *shape)
    else:
        used = [min(n, longest) for n in used]
    want = kept(t, cu, used, longest)
    tensors = [None if n is None else torch.tensor(n, dtype=torch.int32) for n in (cu, used)]
    with pytest.MonkeyPatch.context() as patch:
        clear = unused._clear_some if way == "indices" else clear_by_kernel(patch)
        got = t if way == "indices" else t.to(DEVICE)
        clear(got, *tensors, longest)
    assert torch.equal(got.cpu(), want)


def test_rows_beyond_the_longest_are_not_left_as_they_were(monkeypatch: pytest.MonkeyPatch):
    """On a GPU nobody can say, without waiting for it, that max_seqlen is too small."""
    t = torch.ones(20, 1, 8, device=DEVICE)
    clear_by_kernel(monkeypatch)(t, torch.tensor([0, 12, 18], dtype=torch.int32), None, 7)
    assert t[:, 0, 0].tolist() == [1.0] * 7 + [0.0] * 5 + [1.0] * 6 + [0.0] * 2


def test_lengths_that_make_no_sense_do_not_write_out_of_bounds(monkeypatch: pytest.MonkeyPatch):
    around = torch.ones(30, 1, 8, device=DEVICE)
    clear_by_kernel(monkeypatch)(around[10:20], torch.tensor([-5, 40, 12], dtype=torch.int32), None, 3)
    assert around[:10].min() == 1 and around[20:].min() == 1


def test_a_dense_batch_has_no_such_rows():
    q = torch.ones(2, 5, 1, 8)
    spec = make_spec(Inputs(q, q, q))
    unused.clear(spec, Inputs(q, q, q), "q", q)
    assert q.min() == 1
