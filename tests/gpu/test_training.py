"""Attention in a model that is compiled and trained on GPUs."""

from __future__ import annotations

import pytest
import torch
import two_layers
from torch._dynamo.testing import CompileCounterWithBackend

from tilewise import ops
from tilewise.spec import Inputs

DEVICE = "cuda"
LENGTHS = (64, 70, 100, 128, 129, 200, 257, 300, 511, 640)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    torch.manual_seed(0)
    yield
    torch.compiler.reset()


def model() -> torch.nn.Module:
    return two_layers.TwoLayers(256, 4).to(DEVICE, torch.bfloat16)


def gradients(module, model, x, *packed):
    return torch.autograd.grad(module(x, *packed).float().square().mean(), list(model.parameters()))


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_inductor_compiles_whole_and_once_for_all_lengths(packed: bool):
    """A graph break in every layer; a compilation for every length of a batch."""
    plain = model()
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(plain, backend=counter, fullgraph=True, dynamic=True)
    graphs = []  # compiled so far, after each length
    for length in LENGTHS:
        if packed:
            cu = torch.tensor([0, length, length + 7, 3 * length], dtype=torch.int32, device=DEVICE)
            x = torch.randn(3 * length, 256, device=DEVICE, dtype=torch.bfloat16)
            given = (x, cu, 2 * length)
        else:
            given = (torch.randn(2, length, 256, device=DEVICE, dtype=torch.bfloat16),)
        got, want = gradients(compiled, plain, *given), gradients(plain, plain, *given)
        for a, b in zip(got, want, strict=True):
            assert (a - b).float().norm() <= 3e-2 * b.float().norm()
        graphs.append(counter.frame_count)
    assert len(set(graphs)) == 1


@pytest.mark.parametrize("varlen", [False, True])
def test_opcheck(varlen: bool):
    """Fake tensors that differ from the real ones; outputs that alias inputs."""
    lead = (200,) if varlen else (2, 100)
    q, k, v = (torch.randn(*lead, 4, 64, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    x = Inputs(*(t.requires_grad_() for t in (q, k, v)))
    options = dict.fromkeys(ops.OPTION_NAMES) | {"causal": True, "dropout_p": 0.0}
    options |= {"deterministic": True, "algorithm": "auto", "backend": "auto"}
    if varlen:
        cu = torch.tensor([0, 90, 200], dtype=torch.int32, device=DEVICE)
        x = x._replace(cu_seqlens_q=cu, cu_seqlens_k=cu)
        options |= {"max_seqlen_q": 110, "max_seqlen_k": 110}
    operator = getattr(torch.ops.tilewise.forward, ops._CONTRACT)
    torch.library.opcheck(operator, (*x, *(options[name] for name in ops.OPTION_NAMES)))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_training_step_of_two_gpus(kind: str):
    """Gradients reduced by NCCL beside the backward, sharded parameters, a GPU that is not the first."""
    want = two_layers.trained_alone()
    got = two_layers.trained_by(kind, "cuda")
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-5)
