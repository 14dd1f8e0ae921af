"""Which kernel runs what: the support tables, and the choice made from them.

Every kernel family is one row of ``KERNELS``, in order of preference. What it supports is data: the
README's table, ``tilewise doctor --features`` and the reasons in an ``UnsupportedError`` all come from
here, and the tests run every cell that says yes.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

from tilewise.errors import UnsupportedError
from tilewise.spec import AttentionSpec, Inputs

Direction = Literal["forward", "backward"]

FEATURES = {
    "fp16": "fp16",
    "bf16": "bf16",
    "fp32": "fp32, IEEE accuracy",
    "fp64": "fp64",
    "fp8": "fp8 e4m3",
    "gqa": "grouped and multi-query heads",
    "unequal_dims": "different head dims of values and keys",
    "causal": "causal mask",
    "window": "sliding window",
    "varlen": "packed sequences (varlen)",
    "seqused": "used lengths (seqused)",
    "softcap": "softcap",
    "bias": "additive bias",
    "alibi": "ALiBi",
    "sink": "attention sink",
    "dropout": "dropout",
    "lse_grad": "gradient of the log-sum-exp",
    "deterministic": "deterministic",
}

_ALL = frozenset(FEATURES) - {"fp8"}
_TRITON = _ALL - {"fp64"}
_PLAIN = _TRITON - {"bias", "alibi", "sink", "dropout"}
_HOPPER = _TRITON - {"fp32"}
_QUANTIZED = frozenset(FEATURES) - {"fp16", "bf16", "fp32", "fp64", "lse_grad"}


@dataclass(frozen=True)
class Kernel:
    """A kernel family: who it is, where it lives, what it supports.

    ``module`` has ``forward(spec, inputs, out, lse, saved)`` and
    ``backward(spec, inputs, out, lse, saved, dout, dlse, grads)``, both filling what they are given.
    """

    backend: str
    algorithm: str
    module: str
    forward: frozenset[str]
    backward: frozenset[str]
    unavailable: Callable[[torch.device], str | None]  # why it cannot run there, None if it can
    reserved: str | None = None  # why algorithm="auto" passes it over

    @property
    def name(self) -> str:
        return f"{self.backend}/{self.algorithm}"

    def load(self) -> ModuleType:
        return importlib.import_module(self.module)

    def bind(
        self, spec: AttentionSpec, x: Inputs, out: Tensor, lse: Tensor
    ) -> Callable[[Inputs, Tensor, Tensor, Tensor], None]:
        """The module's ``forward`` for a spec and tensors that lie as these do. A module may have a
        shorter way for that, ``bind``."""
        module = self.load()
        shorter = module.bind(spec, x, out, lse) if hasattr(module, "bind") else None
        return shorter or partial(module.forward, spec)

    def refusal(self, spec: AttentionSpec, direction: Direction, extra: frozenset[str]) -> str | None:
        """Why this kernel cannot run the spec; None if it can."""
        return self.unavailable(spec.device) or self.lack(spec, direction, extra)

    def lack(self, spec: AttentionSpec, direction: Direction, extra: frozenset[str]) -> str | None:
        """What it does not support of the spec, wherever it runs; None if it supports all."""
        supported = getattr(self, direction)
        if not supported:
            return f"has no {direction}"
        missing = (spec.features | extra) - supported
        if missing:
            return f"no {direction} with " + ", ".join(
                FEATURES[name] for name in FEATURES if name in missing
            )
        return None


def _cpu(device: torch.device) -> str | None:
    return None if device.type == "cpu" else f"needs CPU tensors, these are on {device}"


@cache
def _triton_missing() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return None


def _triton(device: torch.device) -> str | None:
    missing = _triton_missing()
    if missing is not None:
        return missing
    if device.type == "cuda":
        if torch.version.hip:
            return None
        major, minor = torch.cuda.get_device_capability(device)
        return None if major >= 8 else f"needs sm_80 or newer, this GPU is sm_{major}{minor}"
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return f"needs a GPU tensor (or TRITON_INTERPRET=1 on a CPU), these are on {device}"


def _hopper(device: torch.device) -> str | None:
    missing = _triton_missing()
    if missing is not None:
        return missing
    if device.type != "cuda" or torch.version.hip:
        return f"needs an NVIDIA GPU, these are on {device}"
    capability = torch.cuda.get_device_capability(device)
    return None if capability == (9, 0) else "needs sm_90, this GPU is sm_{}{}".format(*capability)


_TEACHING = "FlashAttention-1 runs only when asked for by name"

KERNELS: tuple[Kernel, ...] = (
    Kernel("cpu", "fa2", "tilewise.backends.cpu.fa2", _ALL, _ALL, _cpu),
    Kernel("hopper", "fa3", "tilewise.backends.hopper.fa3", _HOPPER, _HOPPER, _hopper),
    Kernel("triton", "fa2", "tilewise.backends.triton.fa2", _TRITON, _TRITON, _triton),
    Kernel("cpu", "fa3", "tilewise.backends.cpu.fa3", _QUANTIZED, frozenset(), _cpu),
    Kernel("cpu", "fa1", "tilewise.backends.cpu.fa1", _ALL, _ALL, _cpu, _TEACHING),
    Kernel("triton", "fa1", "tilewise.backends.triton.fa1", _PLAIN, _PLAIN, _triton, _TEACHING),
)

_NOT_BUILT = {
    "fa4": "FlashAttention-4 (Blackwell) has no kernel in this version",
}


def survey(
    spec: AttentionSpec, direction: Direction, extra: frozenset[str] = frozenset()
) -> tuple[Kernel | None, list[tuple[str, str]]]:
    """The first kernel that is asked for, runs here and supports the spec, if any; and for each one
    before it, why it does not.

    extra: features of FEATURES that a spec does not know of (``lse_grad``).
    """
    passed_over: list[tuple[str, str]] = []
    for kernel in KERNELS:
        reason = _not_asked(kernel, spec) or kernel.refusal(spec, direction, extra)
        if reason is None:
            return kernel, passed_over
        passed_over.append((kernel.name, reason))
    return None, passed_over


def choose(spec: AttentionSpec, direction: Direction, extra: frozenset[str] = frozenset()) -> Kernel:
    """The kernel that runs the spec.

    Raises:
        UnsupportedError: with each kernel and its reason.
    """
    if _chosen.rows is not KERNELS:
        _chosen.rows = KERNELS
        _chosen.clear()
    key = spec, direction, extra
    kernel = _chosen.get(key)
    if kernel is not None:
        return kernel
    kernel, passed_over = survey(spec, direction, extra)
    if kernel is not None:
        if lasts(spec.device):
            _chosen.keep(key, kernel)
        return kernel
    asked = f"algorithm={spec.algorithm!r}, backend={spec.backend!r}"
    lines = [f"no kernel runs this {direction} with {asked} on {spec.device}:"]
    if spec.algorithm in _NOT_BUILT:
        lines.append(f"  {_NOT_BUILT[spec.algorithm]}")
    lines += [f"  {name}: {reason}" for name, reason in passed_over]
    raise UnsupportedError("\n".join(lines))


def lasts(device: torch.device) -> bool:
    """Whether what is chosen for a device stays so: what runs on a CPU depends on the environment."""
    return device.type == "cuda"


class _Chosen(dict[tuple[AttentionSpec, Direction, frozenset[str]], Kernel]):
    """What was chosen before among some rows of kernels."""

    rows: tuple[Kernel, ...] = ()
    KEPT = 1024

    def keep(self, key: tuple[AttentionSpec, Direction, frozenset[str]], kernel: Kernel) -> None:
        if len(self) >= self.KEPT:
            self.clear()
        self[key] = kernel


_chosen = _Chosen()


def _not_asked(kernel: Kernel, spec: AttentionSpec) -> str | None:
    if spec.backend not in ("auto", kernel.backend):
        return f"backend={spec.backend!r} was asked for"
    if spec.algorithm not in ("auto", kernel.algorithm):
        return f"algorithm={spec.algorithm!r} was asked for"
    if kernel.reserved is not None and spec.algorithm == "auto":
        return kernel.reserved
    return None


def saved_statistics(spec: AttentionSpec) -> int:
    """How many numbers per row a forward leaves for its backward besides the log-sum-exp.

    FlashAttention-1 leaves m and l. Later ones leave what rounding took from the log-sum-exp, all of
    log l where logits are huge: always on a CPU, where there is a bias on a GPU. An fp8
    forward leaves nothing: see ``ops``.
    """
    if "fp8" in spec.features:
        return 0
    if spec.algorithm == "fa1":
        return 2
    return 1 if spec.device.type == "cpu" or spec.bias else 0


def support_table() -> list[dict[str, str]]:
    """One row per feature: its text, and for each kernel what it supports of it."""
    rows = []
    for feature, text in FEATURES.items():
        row = {"feature": text}
        for kernel in KERNELS:
            row[kernel.name] = _cell(feature in kernel.forward, feature in kernel.backward)
        rows.append(row)
    return rows


def _cell(forward: bool, backward: bool) -> str:
    if forward and backward:
        return "yes"
    return "forward" if forward else "backward" if backward else "-"


def support_markdown() -> str:
    """The support table as Markdown."""
    rows = support_table()
    head = list(rows[0])
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(row.values()) + " |" for row in rows]
    return "\n".join(lines)
