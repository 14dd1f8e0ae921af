"""What the demo found, as data: its checks and the file `report.json`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tilewise.demo.longseq import LongSequence
from tilewise.demo.train import Plan

#: The check that the picture draws the limit of.
ALL_LOSSES_COINCIDE = "all losses coincide"


@dataclass(frozen=True)
class Check:
    """One claim and whether it held: a measured value that must not exceed its limit."""

    claim: str
    value: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.value <= self.limit  # a NaN fails


@dataclass(frozen=True)
class Curve:
    """One model's training: losses in nats per byte, the time in seconds."""

    attention: str
    losses: list[float]
    held_out_loss: float
    seconds: float


def differences(curves: tuple[Curve, Curve]) -> list[float]:
    """How far the two losses are apart at each step."""
    one, other = curves
    return [abs(a - b) for a, b in zip(one.losses, other.losses, strict=True)]


@dataclass(frozen=True)
class Report:
    """Everything the demo measured. `curves` are Tilewise's and the materialised one, in that order;
    `prompt` and `sample` are text as a person would read it."""

    environment: dict[str, Any]
    text: dict[str, Any]
    plan: Plan
    kernels: str
    curves: tuple[Curve, Curve]
    prompt: str
    sample: str
    long_sequence: LongSequence
    checks: list[Check]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def as_data(self) -> dict[str, Any]:
        """All of it in JSON's own types."""
        data = asdict(self)
        data["checks"] = [{**asdict(check), "passed": check.passed} for check in self.checks]
        return {"passed": self.passed, **data}

    def write(self, folder: Path) -> Path:
        """Writes `report.json` into an existing folder and returns its path."""
        path = folder / "report.json"
        path.write_text(json.dumps(self.as_data(), indent=2) + "\n", encoding="utf-8")
        return path
