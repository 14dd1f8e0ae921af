"""IO accounting: the formulas against the paper, and against what the kernels really load and store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tilewise import attention, schedule
from tilewise.perf import memory
from tilewise.perf.memory import SelfAttention
from tilewise.spec import Inputs, make_spec


@dataclass
class Counter:
    """Bytes of unmasked elements that kernels load, store and add to in Triton's interpreter."""

    read: int = 0
    written: int = 0
    added: int = 0

    def reset(self) -> None:
        self.read = self.written = self.added = 0


@pytest.fixture
def counter(monkeypatch):
    """Every access of a kernel passes through one of three methods of the interpreter's builder."""
    if torch.cuda.is_available():
        pytest.skip("counts in Triton's interpreter, which runs where there is no GPU")
    from triton.runtime.interpreter import InterpreterBuilder as Builder

    counts = Counter()

    def watch(method: str, kind: str, pointers_at: int, mask_at: int) -> None:
        original = getattr(Builder, method)

        def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
            width = args[pointers_at].dtype.element_ty.primitive_bitwidth // 8
            setattr(counts, kind, getattr(counts, kind) + width * int(args[mask_at].data.sum()))
            return original(self, *args, **kwargs)

        monkeypatch.setattr(Builder, method, counted)

    watch("create_masked_load", "read", 0, 1)
    watch("create_masked_store", "written", 0, 2)
    watch("create_atomic_rmw", "added", 1, 3)
    return counts


def of_kernels(account: memory.Account) -> tuple[int, int, int]:
    flows = [flow for flow in account.flows if flow.kernel]
    return sum(f.read for f in flows), sum(f.written for f in flows), sum(f.added for f in flows)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("seqlen", [64, 70], ids=["aligned", "ragged"])
@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
def test_formula_is_what_the_kernel_moves(counter, algorithm, seqlen, causal, dtype):
    """Head dim 24 in tiles 32 wide, lengths no multiple of the tile: padding must not be counted."""
    p = SelfAttention(seqlen, head_dim=24, heads=2, batch=1, causal=causal, itemsize=dtype.itemsize)
    q, k, v = (torch.ones(1, seqlen, 2, 24, dtype=dtype, requires_grad=True) for _ in range(3))
    tile = schedule.triton_tile(f"{algorithm}_forward", make_spec(Inputs(q, k, v)), 32)
    expected = getattr(memory, algorithm)(p, tile.q, tile.k)

    out = attention(q, k, v, causal=causal, algorithm=algorithm, backend="triton")
    assert (counter.read, counter.written, counter.added) == of_kernels(expected["forward"])
    counter.reset()
    out.sum().backward()
    assert (counter.read, counter.written, counter.added) == of_kernels(expected["backward"])


def test_materialised_is_the_papers_count():
    """Algorithm 0: Q, K, V, O once, S and P written and read. Algorithm 3: 7 times N², 8 times Nd."""
    p = SelfAttention(seqlen=1000, head_dim=64)
    accounts = memory.materialised(p)
    assert accounts["forward"].moved == 2 * (4 * 1000 * 64 + 4 * 1000**2)
    assert accounts["backward"].moved == 2 * (8 * 1000 * 64 + 7 * 1000**2)


@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_quadruples_with_twice_the_length_and_halves_with_twice_the_memory(algorithm, direction):
    """Θ(N²d²/M): the terms in N alone fade as N grows."""

    def moved(seqlen: int, sram: int) -> int:
        p = SelfAttention(seqlen, head_dim=128)
        sides = getattr(memory, f"{algorithm}_tile")(sram, p)
        return getattr(memory, algorithm)(p, *sides)[direction].moved

    n, sram = 2**16, 2**17
    assert moved(2 * n, sram) / moved(n, sram) == pytest.approx(4, rel=0.02)
    assert moved(n, 2 * sram) / moved(n, sram) == pytest.approx(1 / 2, rel=0.02)


def test_extra_memory_is_linear_unless_materialised():
    small, large = SelfAttention(1024, 64), SelfAttention(2048, 64)
    growth = {
        name: [
            count(large)[d].extra_bytes / count(small)[d].extra_bytes for d in ("forward", "backward")
        ]
        for name, count in {
            "materialised": memory.materialised,
            "fa1": lambda p: memory.fa1(p, 64, 64),
            "fa2": lambda p: memory.fa2(p, 64, 64),
        }.items()
    }
    assert growth == {"materialised": [4, 4], "fa1": [2, 2], "fa2": [2, 2]}


def test_causal_visits_the_lower_half_of_the_tiles():
    p = SelfAttention(1024, 64, heads=3, causal=True)
    assert memory.visited_tiles(p, 128, 128) == 3 * 8 * 9 / 2
    assert memory.visited_tiles(p, 128, 64) == 3 * 8 * 9


def test_a_tile_of_the_papers_fits_its_memory_and_the_problem():
    p = SelfAttention(4096, 64)
    assert memory.fa1_tile(2 * 4 * 64 * 100, p) == (64, 100)  # M = 4 d × 100 numbers of 2 bytes
    assert memory.fa2_tile(2 * 4 * 64 * 100, p) == (100, 100)
    assert memory.fa1_tile(10**6, SelfAttention(5, 64)) == (5, 5)
    assert memory.fa1_tile(1, p) == (1, 1)


def test_fa1_moves_less_than_materialised_attention_with_the_papers_tiles():
    """The first paper's point, with its A100: d = 64 and about 100 KB on chip."""
    p = SelfAttention(4096, 64)
    ours = memory.fa1(p, *memory.fa1_tile(100_000, p))["forward"].moved
    assert ours < memory.materialised(p)["forward"].moved / 1.5
    assert memory.fa2(p, *memory.fa2_tile(100_000, p))["forward"].moved < ours / 2
