"""The demo from text to report."""

from __future__ import annotations

from typing import Protocol

import torch

from tilewise import dispatch, doctor
from tilewise.demo import longseq, model
from tilewise.demo.corpus import Corpus
from tilewise.demo.report import ALL_LOSSES_COINCIDE, Check, Curve, Report, differences
from tilewise.demo.train import Plan, Trained, train

_PROMPT = b"def "
_SAMPLE_BYTES = 400


# Training amplifies rounding. Two materialised attentions that differ in nothing but the order of
# operations stay one unit in the last place apart (5e-7) for ten steps, drift to 2e-3 by the middle
# of 600 and stay there. An output wrong by 1e-4 is already 7e-6 apart within ten steps; a gradient
# that misses one key is 4e-2 apart in the end. The limits lie between.
_EARLY = 10
_EARLY_LIMIT = 5e-6  # nats
_LOSS_LIMIT = 1e-2

# Relative Frobenius errors: what rounding explains in each type, and no more.
_ERROR_LIMITS = {"float32": 1e-5, "bfloat16": 5e-3}


class Watcher(Protocol):
    """Told how the demo gets on, so that a person can be told too."""

    def begin(self, stage: str, steps: int | None) -> None:
        """A stage begins; `steps` is None where progress within it is unknown."""

    def advance(self, note: str) -> None:
        """One step of the stage is done."""


class Silence:
    """A watcher that says nothing."""

    def begin(self, stage: str, steps: int | None) -> None: ...

    def advance(self, note: str) -> None: ...


SILENCE = Silence()


def best_device() -> torch.device:
    """The GPU if there is one that a kernel of Tilewise runs on, otherwise the CPU."""
    if torch.cuda.is_available():
        gpu = torch.device("cuda", torch.cuda.current_device())
        if any(kernel.unavailable(gpu) is None for kernel in dispatch.KERNELS):
            return gpu
    return torch.device("cpu")


def demonstrate(
    corpus: Corpus,
    plan: Plan,
    length: int,
    device: torch.device,
    watcher: Watcher = SILENCE,
) -> Report:
    """Trains the same model twice, samples from it, runs the long sequence, checks all of it.

    length: of the long sequence, in tokens.
    Raises TextError if the text is too short to train on, RuntimeError if the long sequence dies.
    """
    text = corpus.split(plan.window)
    runs = []
    for name, attention in (("Tilewise", model.tiled), ("materialised", model.materialised)):
        watcher.begin(f"train, {name} attention", plan.steps)
        runs.append(train(plan, attention, text, device, lambda x: watcher.advance(f"loss {x:.3f}")))
    tiled, materialised = runs

    watcher.begin("write a sample", None)
    sample = _sample(tiled, plan, device)
    watcher.begin(f"long sequence, {length:,} tokens", None)
    long_sequence = longseq.in_fresh_process(length, device)

    curves = (_curve("Tilewise", tiled), _curve("materialised", materialised))
    return Report(
        environment=doctor.versions() | {"device": doctor.device_name(device)},
        text={"source": corpus.source, "files": corpus.files, "bytes": len(corpus.data)},
        plan=plan,
        kernels=_kernels(plan, device),
        curves=curves,
        prompt=_PROMPT.decode(),
        sample=_readable(sample),
        long_sequence=long_sequence,
        checks=_checks(curves, long_sequence),
    )


def _checks(curves: tuple[Curve, Curve], long: longseq.LongSequence) -> list[Check]:
    losses, apart = curves[0].losses, differences(curves)
    error_limit = _ERROR_LIMITS[long.dtype]
    checks = [
        Check(f"the first {_EARLY} losses coincide", max(apart[:_EARLY]), _EARLY_LIMIT),
        Check(ALL_LOSSES_COINCIDE, max(apart), _LOSS_LIMIT),
        Check("the loss falls", losses[-1], losses[0]),
        Check("long sequence: output against fp64", long.output_error, error_limit),
        Check("long sequence: gradient of q against fp64", long.dq_error, error_limit),
    ]
    if long.extra_bytes is not None:
        # Twice the results, which grow with the length, and the work space of tiles, which does not.
        limit = 2 * long.result_bytes + 64 * 2**20
        checks.append(Check("long sequence: bytes of memory", long.extra_bytes, limit))
    return checks


def _kernels(plan: Plan, device: torch.device) -> str:
    shape = plan.shape
    sizes = (plan.batch, shape.context, shape.heads, shape.width // shape.heads)
    like = torch.empty(sizes, device=device)
    return model.chosen_kernels(like, like, like)


def _curve(name: str, run: Trained) -> Curve:
    return Curve(name, run.losses, run.held_out_loss, run.seconds)


def _sample(run: Trained, plan: Plan, device: torch.device) -> bytes:
    prompt = torch.tensor(list(_PROMPT), device=device)
    generator = torch.Generator().manual_seed(plan.seed)
    return bytes(run.model.write(prompt, _SAMPLE_BYTES, generator).tolist())


def _readable(text: bytes) -> str:
    """Bytes as text that a terminal can show: what is not UTF-8 or not printable becomes a dot."""
    decoded = text.decode("utf-8", errors="replace")
    return "".join(c if c.isprintable() or c == "\n" else "·" for c in decoded)
