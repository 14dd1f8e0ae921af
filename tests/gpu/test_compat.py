"""The adapters on a GPU: its kernels behind other signatures, and under PyTorch's own function."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from textbook import attend
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilewise
from tilewise.compat import fa2, fa3, fa4, sdpa


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def leaves(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(s, device="cuda", dtype=torch.bfloat16, requires_grad=True) for s in shapes]


def heads_first(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [t.transpose(1, 2) for t in tensors]


def outputs(q, k, v) -> dict[str, torch.Tensor]:
    first = heads_first([q, k, v])
    return {
        "fa2": fa2.flash_attn_func(q, k, v, causal=True),
        "fa3": fa3.flash_attn_func(q, k, v, causal=True),
        "fa4": fa4.flash_attn_func(q, k, v, causal=True)[0],
        "sdpa": sdpa.scaled_dot_product_attention(*first, is_causal=True, enable_gqa=True).transpose(
            1, 2
        ),
    }


@pytest.mark.parametrize("adapter", ["fa2", "fa3", "fa4", "sdpa"])
def test_adapters(adapter):
    """An adapter that only works where the tests of a CPU run."""
    mine = leaves((2, 200, 4, 64), (2, 200, 2, 64), (2, 200, 2, 64))
    theirs = [t.detach().cpu().double().requires_grad_() for t in mine]
    got, want = outputs(*mine)[adapter], attend(*theirs, window=(None, 0))[0]
    dout = torch.randn(want.shape, dtype=torch.float64)
    grads = torch.autograd.grad(got, mine, dout.to(got))
    want_grads = torch.autograd.grad(want, theirs, dout)
    for a, b in zip((got, *grads), (want, *want_grads), strict=True):
        error = (a.detach().cpu().double() - b).norm() / b.norm()
        assert error < 1e-2


@pytest.mark.skipif(
    not hasattr(torch.nn.attention, "register_flash_attention_impl"),
    reason="this PyTorch has one flash implementation",
)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_registered(causal, compiled):
    """PyTorch's kernels running after all; another layout than compiled code counts on."""
    tensors = leaves((2, 256, 4, 64), (2, 256, 4, 64), (2, 256, 4, 64))
    dout = torch.randn_like(tensors[0])
    want = tilewise.attention(*tensors, causal=causal, deterministic=True)
    want_grads = torch.autograd.grad(want, tensors, dout)

    def run(q, k, v):
        return F.scaled_dot_product_attention(*heads_first([q, k, v]), is_causal=causal).transpose(1, 2)

    torch.use_deterministic_algorithms(True)  # so that equal bits can be asked for
    try:
        with sdpa.register(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            got = (torch.compile(run) if compiled else run)(*tensors)
            grads = torch.autograd.grad(got, tensors, dout)
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b in zip((got, *grads), (want, *want_grads), strict=True):
        assert torch.equal(a, b)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        torch.testing.assert_close(run(*tensors), want, atol=2e-2, rtol=2e-2)
