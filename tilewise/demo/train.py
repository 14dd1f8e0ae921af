"""Training, twice the same: everything but the attention is fixed by the seed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from tilewise.demo.model import Attention, ByteGPT, Shape


@dataclass(frozen=True)
class Plan:
    """A model and how to train it. `batch` is in sequences, `rate` the peak learning rate.

    All arithmetic is in fp32: in a narrower type, training amplifies the differences in rounding until
    even two right attentions drift visibly apart.
    """

    shape: Shape
    batch: int
    steps: int
    rate: float
    seed: int

    @property
    def window(self) -> int:
        """Bytes of text in one training sequence: the context and the byte to predict at its end."""
        return self.shape.context + 1

    @staticmethod
    def for_device(device: torch.device) -> Plan:
        """Two minutes or so of training on two CPU cores; a bigger model on a GPU."""
        if device.type == "cuda":
            shape = Shape(layers=6, heads=6, width=384, context=1024)
            return Plan(shape, batch=16, steps=600, rate=1e-3, seed=0)
        shape = Shape(layers=4, heads=4, width=128, context=256)
        return Plan(shape, batch=8, steps=500, rate=2e-3, seed=0)


@dataclass(frozen=True)
class Trained:
    """A trained model with its losses (nats per byte), one a step and one on text held out."""

    model: ByteGPT
    losses: list[float]
    held_out_loss: float
    seconds: float


def train(
    plan: Plan,
    attention: Attention,
    text: tuple[Tensor, Tensor],
    device: torch.device,
    on_step: Callable[[float], None] = lambda loss: None,
) -> Trained:
    """Trains one model from `plan.seed`.

    text: the part to train on and the part held out, uint8, at least `plan.window` bytes each.
    on_step: told the loss after each step.
    """
    training, held_out = text
    torch.manual_seed(plan.seed)
    model = ByteGPT(plan.shape, attention).to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=plan.rate, betas=(0.9, 0.95))
    batches = torch.Generator().manual_seed(plan.seed)

    losses = []
    start = time.perf_counter()
    for step in range(plan.steps):
        for group in optimiser.param_groups:
            group["lr"] = plan.rate * _warm_up_then_decay(step, plan.steps)
        loss = _loss(model, _draw(training, plan, batches), device)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        losses.append(loss.item())
        on_step(losses[-1])
    seconds = time.perf_counter() - start

    with torch.no_grad():
        same_for_all = torch.Generator().manual_seed(plan.seed)
        draws = [_draw(held_out, plan, same_for_all) for _ in range(8)]
        held_out_losses = [_loss(model, windows, device).item() for windows in draws]
    return Trained(model, losses, sum(held_out_losses) / len(held_out_losses), seconds)


def _warm_up_then_decay(step: int, steps: int) -> float:
    """Share of the peak learning rate: up over the first tenth, then down in a straight line."""
    warm_up = max(1, steps // 10)
    return min((step + 1) / warm_up, (steps - step) / max(1, steps - warm_up))


def _draw(text: Tensor, plan: Plan, generator: torch.Generator) -> Tensor:
    """A batch of windows into the text and the byte after each: int64 (batch, context + 1)."""
    starts = torch.randint(len(text) - plan.window + 1, (plan.batch, 1), generator=generator)
    return text[starts + torch.arange(plan.window)].long()


def _loss(model: ByteGPT, windows: Tensor, device: torch.device) -> Tensor:
    windows = windows.to(device)
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
