"""A model of two layers, and its training step alone, under DDP and under FSDP2, in processes."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from tilewise import attention, attention_varlen

WIDTH, HEADS, BATCH, LENGTH = 64, 4, 4, 24


class Layer(nn.Module):
    """Attention and a residual; given ``cu``, over packed sequences."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, cu: Tensor | None = None, longest: int = 0) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        if cu is None:
            mixed = attention(q, k, v, causal=True)
        else:
            ends = {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
            mixed = attention_varlen(
                q, k, v, **ends, max_seqlen_q=longest, max_seqlen_k=longest, causal=True
            )
        return x + self.out(mixed.flatten(-2))


class TwoLayers(nn.Module):
    def __init__(self, width: int = WIDTH, heads: int = HEADS) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(width, heads) for _ in range(2)])

    def forward(self, x: Tensor, *packed: Any) -> Tensor:
        for layer in self.layers:
            x = layer(x, *packed)
        return x


def batch() -> Tensor:
    return torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))


def fresh() -> TwoLayers:
    torch.manual_seed(0)
    return TwoLayers()


def step(model: nn.Module, x: Tensor) -> None:
    """One step of gradient descent."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(x).square().mean().backward()
    optimizer.step()


def trained_alone() -> dict[str, Tensor]:
    model = fresh()
    step(model, batch())
    return model.state_dict()


def trained_by(kind: str, device_type: str, world: int = 2) -> dict[str, Tensor]:
    """Parameters after a step of ``world`` processes, each with its share of the batch."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with mp.get_context("spawn").Manager() as manager:
        found = manager.dict()
        mp.spawn(_process, (world, port, kind, device_type, found), nprocs=world)
        return {name: torch.tensor(value) for name, value in found.items()}


def _process(rank: int, world: int, port: int, kind: str, device_type: str, found: Any) -> None:
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo", rank=rank, world_size=world)
    try:
        model, whole = _WRAPPERS[kind](fresh().to(device), device)
        step(model, batch().chunk(world)[rank].to(device))
        state = {name: whole(value) for name, value in model.state_dict().items()}
        if rank == 0:
            for name, value in state.items():
                found[name.removeprefix("module.")] = value.cpu().tolist()
        dist.barrier()  # nobody goes while another one still talks to it
    finally:
        dist.destroy_process_group()


def _ddp(model: nn.Module, device: torch.device) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    ids = [device.index] if device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(model, device_ids=ids), lambda x: x


def _fsdp2(model: nn.Module, device: torch.device) -> tuple[nn.Module, Callable[[Any], Tensor]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh), lambda x: x.full_tensor()


_WRAPPERS = {"ddp": _ddp, "fsdp2": _fsdp2}
