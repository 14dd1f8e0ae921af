"""The kernels that `tilewise trace` knows by name: a table, one row a kernel.

A row names the host function that launches the kernel, so nothing is imported before it is traced. The
function is called as its `work` says, on tensors of zeros with batch 1, and with the row's options.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tilewise.perf import gpus


@dataclass(frozen=True)
class Traced:
    """A kernel that can be traced.

    host: "module:function". work: "forward", host(q, k, v, causal, **options), or "backward",
    host(q, k, v, o, do, lse, causal, **options); q to do [1, heads, seqlen, head_dim], bf16. family: of
    GPUs. multiple: what seqlen must be a multiple of. options: by head dim. sms: the option that takes
    the GPU's number of SMs, if the kernel is persistent. hoisted: see `timing.SmCost`.
    """

    name: str
    what: str
    host: str
    work: Literal["forward", "backward"]
    family: Literal["ampere", "hopper", "blackwell"]
    head_dims: tuple[int, ...]
    multiple: int
    options: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    sms: str = ""
    hoisted: bool = False

    def run(self, gpu: str, heads: int, seqlen: int, head_dim: int, causal: bool) -> None:
        """Launch it once, as on that GPU."""
        import torch

        module, function = self.host.split(":")
        host: Callable[..., Any] = getattr(importlib.import_module(module), function)
        x = torch.zeros(1, heads, seqlen, head_dim, dtype=torch.bfloat16)
        tensors = [x, x, x]
        if self.work == "backward":
            tensors += [x, x, torch.zeros(1, heads, seqlen)]
        options = dict(self.options.get(head_dim, {}))
        if self.sms:
            options[self.sms] = gpus.find(gpu).sms
        host(*tensors, causal, **options)

    def flops(self, heads: int, seqlen: int, head_dim: int, causal: bool) -> float:
        """The useful ones: two products in the forward, five in the backward."""
        products = 2 if self.work == "forward" else 5
        return 2.0 * products * heads * seqlen * seqlen * head_dim / (2 if causal else 1)


CATALOGUE = (
    Traced(
        name="hopper-forward",
        what="the package's attention forward: persistent, an anchor instead of a running maximum",
        host="tilewise.sim.kernels.product:hopper_forward",
        work="forward",
        family="hopper",
        head_dims=(64, 128, 256),
        multiple=1,
        hoisted=True,
    ),
    Traced(
        name="hopper-demo",
        what="a plain attention forward: TMA producer, two consumers, two products in flight",
        host="tilewise.sim.kernels.hopper:forward",
        work="forward",
        family="hopper",
        head_dims=(64, 128, 256),
        multiple=128,
        options={256: {"BLOCK": 64}},
        hoisted=True,
    ),
    Traced(
        name="blackwell-demo",
        what="a plain attention forward after FlashAttention-4: two query tiles by turns, tensor memory",
        host="tilewise.sim.kernels.blackwell:forward",
        work="forward",
        family="blackwell",
        head_dims=(64, 128),
        multiple=256,
    ),
)

# Names that a demonstration answers to as long as no row has them.
STAND_INS = {"blackwell-forward": "blackwell-demo"}

# Whose tables are used unless another GPU is named.
USUAL_GPU = {"ampere": "a100", "hopper": "h200", "blackwell": "b200"}


def find(name: str) -> Traced:
    """ValueError, with the names there are, if this is none."""
    rows = {row.name: row for row in CATALOGUE}
    row = rows.get(name) or rows.get(STAND_INS.get(name, ""))
    if row is None:
        raise ValueError(f"unknown kernel {name!r}; known are {', '.join(sorted({*rows, *STAND_INS}))}")
    return row
