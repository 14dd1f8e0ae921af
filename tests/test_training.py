"""Attention in a model that is trained: by several processes, recomputed, in another precision."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import two_layers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tilewise import ops


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this PyTorch has no gloo")
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_training_step_of_two_processes(kind: str):
    """Operators that sharded parameters cannot pass, or gradients that are reduced meanwhile."""
    want = two_layers.trained_alone()
    got = two_layers.trained_by(kind, "cpu")
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-5)
        assert not torch.equal(want[name], two_layers.fresh().state_dict()[name])


class Forwards(TorchDispatchMode):
    """Counts how often attention's forward runs."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is forward_operator()
        return function(*args, **(kwargs or {}))


def forward_operator() -> Any:
    return getattr(torch.ops.tilewise.forward, ops._CONTRACT)


def keep_attention(context: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if function is forward_operator():
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize(("selective", "forwards"), [(False, 2), (True, 1)])
def test_activation_checkpointing(selective: bool, forwards: int):
    """What is recomputed must be the same; and what a policy keeps must not be recomputed."""
    layer = two_layers.Layer()
    x = two_layers.batch().requires_grad_()
    inputs = [x, *layer.parameters()]
    want = torch.autograd.grad(layer(x).square().sum(), inputs)
    options = {}
    if selective:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, keep_attention)
    with Forwards() as counted:
        out = checkpoint(layer, x, use_reentrant=False, **options)
        got = torch.autograd.grad(out.square().sum(), inputs)
    assert counted.count == forwards
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_autocast():
    """Under autocast the layers before attention hand it bf16, and gradients come back in fp32."""
    model = two_layers.fresh()
    x = two_layers.batch()
    want = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).square().mean()
    got = torch.autograd.grad(loss, list(model.parameters()))
    for a, b in zip(got, want, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() <= 5e-2 * b.norm()
