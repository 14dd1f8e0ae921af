"""Tensors past 2**31 elements and grids past 65535: a 32-bit offset wraps without a word.

Up to 60 GB of GPU memory, one test at a time whatever pytest's workers do.
"""

from __future__ import annotations

import fcntl
import gc
import math
import tempfile
from dataclasses import replace
from pathlib import Path

import problems
import pytest
import torch
from gpu_rows import ROWS, skip_if_missing
from problems import Problem, how
from torch import Tensor

from tilewise import attention, attention_varlen
from tilewise.spec import make_spec

DEVICE = "cuda"
LIMIT = 2**31


@pytest.fixture(autouse=True)
def room(request: pytest.FixtureRequest):
    """Enough memory, and nobody else who needs it: workers take turns."""
    skip_if_missing(request.getfixturevalue("kernel"))
    if torch.cuda.get_device_properties(0).total_memory < 64 << 30:
        pytest.skip("needs 64 GB of GPU memory")
    with open(Path(tempfile.gettempdir()) / "tilewise-large-tests.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        gc.collect()
        torch.cuda.empty_cache()


@pytest.mark.parametrize("dim", ["batch", "row", "head"])
@pytest.mark.parametrize("kernel", ROWS)
def test_inputs_with_strides_past_2_31(kernel: str, dim: str):
    """The same numbers far apart in memory: bitwise the same results. Between them lies NaN."""
    p = Problem(((130, 150),) * 2, 3, 1, 64, 64, "bf16", causal=True, deterministic=True)
    t = problems.tensors(p, DEVICE)
    n = ["batch", "row", "head"].index(dim)

    def far(x: Tensor) -> Tensor:
        strides = list(x.contiguous().stride())
        for m in range(n):  # keep the dimensions outside this one small
            strides[m] = math.prod(x.shape[m + 1 : n] + x.shape[n + 1 :])
        strides[n] = LIMIT // (x.shape[n] - 1) + 8
        size = 1 + sum((m - 1) * stride for m, stride in zip(x.shape, strides, strict=True))
        room = torch.full((size,), torch.nan, dtype=x.dtype, device=x.device)
        return room.as_strided(x.shape, strides).copy_(x)

    x = t.x._replace(q=far(t.x.q), k=far(t.x.k), v=far(t.x.v))
    got = problems.run(p, t._replace(x=x, dout=far(t.dout)), **how(kernel))
    want = problems.run(p, t, **how(kernel))
    for name in want:
        assert torch.equal(got[name], want[name]), name


@pytest.mark.parametrize("kernel", ROWS)
def test_results_past_2_31_elements(kernel: str):
    """A packed batch of 2**31 elements: its last sequence ends where 32 bits do not reach."""
    length, heads, dim = 64, 8, 256
    count = LIMIT // (length * heads * dim) + 2
    total = count * length
    q, k, v, dout = (
        torch.randn(total, heads, dim, device=DEVICE, dtype=torch.bfloat16) for _ in range(4)
    )
    leaves = [a.requires_grad_() for a in (q, k, v)]
    cu = torch.arange(count + 1, device=DEVICE, dtype=torch.int32) * length
    lengths = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": length, "max_seqlen_k": length}
    out, lse = attention_varlen(*leaves, causal=True, return_lse=True, **lengths, **how(kernel))
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)
    assert q.numel() > LIMIT

    p = Problem(((length, length),), heads, 1, dim, dim, "bf16", causal=True, loss="out")
    small = problems.tensors(p, DEVICE)
    for b in (0, count // 2, count - 2, count - 1):
        rows = slice(b * length, (b + 1) * length)
        x = small.x._replace(
            q=q[None, rows].detach(), k=k[None, rows].detach(), v=v[None, rows].detach()
        )
        part = problems.Tensors(make_spec(x, causal=True), x, dout[None, rows], small.dlse)
        got = {"out": out, "dq": dq, "dk": dk, "dv": dv}
        got = {name: value[None, rows].detach() for name, value in got.items()}
        problems.check_results(p, part, {**got, "lse": lse[None, :, rows].detach()})


@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
@pytest.mark.parametrize("kernel", ROWS)
def test_more_sequences_and_heads_than_a_grid_dimension_holds(kernel: str, varlen: bool):
    """65536 and more programs in y or z cannot be launched; nor may their number pass 32 bits."""
    batch, heads, sq, sk, dim = 8200, 9, 1, 3, 16
    q, dout = (torch.randn(batch, sq, heads, dim, device=DEVICE) for _ in range(2))
    k, v = (torch.randn(batch, sk, heads, dim, device=DEVICE) for _ in range(2))
    q, k, v, dout = (a.half() for a in (q, k, v, dout))
    leaves = [a.requires_grad_() for a in (q, k, v)]
    if varlen:
        cu_q, cu_k = (torch.arange(batch + 1, device=DEVICE, dtype=torch.int32) * n for n in (sq, sk))
        lengths = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": sq, "max_seqlen_k": sk}
        packed = [a.flatten(0, 1) for a in leaves]
        out = attention_varlen(*packed, **lengths, **how(kernel)).view(dout.shape)
    else:
        out = attention(*leaves, **how(kernel))
    got = [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    exact = [a.detach().double().requires_grad_() for a in leaves]
    weights = (torch.einsum("bihd,bjhd->bhij", *exact[:2]) / math.sqrt(dim)).softmax(-1)
    out = torch.einsum("bhij,bjhd->bihd", weights, exact[2])
    want = [out.detach(), *torch.autograd.grad(out, exact, dout.double())]
    for a, b in zip(got, want, strict=True):
        assert float((a.double() - b).norm() / b.norm()) < 8e-4


@pytest.mark.parametrize("kernel", ROWS)
def test_a_long_sequence(kernel: str):
    """32768 rows, where the scores would be 2**30 elements: some rows of it against fp64."""
    n, dim = 32768, 64
    p = replace(Problem(head_dim=dim, head_dim_v=dim, dtype="bf16", causal=True), lengths=((n, n),))
    q, k, v = (torch.randn(1, n, 1, dim, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    out, lse = attention(q, k, v, causal=p.causal, return_lse=True, **how(kernel))
    rows = torch.tensor([0, 1, 127, 128, 5000, 16384, n - 2, n - 1], device=DEVICE)
    scores = q[0, rows, 0].double() @ k[0, :, 0].double().T / math.sqrt(dim)
    scores = scores.masked_fill(torch.arange(n, device=DEVICE) > rows[:, None], -math.inf)
    want = scores.softmax(-1) @ v[0, :, 0].double()
    assert float((out[0, rows, 0].double() - want).norm() / want.norm()) < 5e-3
    torch.testing.assert_close(lse[0, 0, rows].double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
