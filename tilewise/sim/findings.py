"""What a run found: one finding per defect, with the places in the kernel and the seed that shows it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

KINDS = {
    "race": "two accesses to shared or tensor memory, one a write, that nothing orders",
    "global": "the same in global memory; other than between TMA stores only with together=True",
    "fence": "written through the generic proxy, read by TMA or MMA, no fence_async_shared between",
    "register": "registers of an unfinished warpgroup MMA were read or handed on",
    "deadlock": "nobody can run and somebody has not finished",
    "livelock": "somebody runs without end and nothing changes",
    "lap": "a barrier can complete a phase before a waiter has seen the one before it",
    "barrier": "a barrier used uninitialised, over-arrived, or with a phase that is not 0 or 1",
    "exit": "a partition or the kernel ends while its asynchronous work is in flight",
    "uninit": "memory read that nothing has written",
    "bounds": "an address, index or slice outside its memory",
    "overflow": "int32 arithmetic that does not fit",
    "launch": "a program asks to take over another after it was told that none is left",
    "assert": "a device_assert of the kernel failed",
}

_SIM = os.path.dirname(os.path.abspath(__file__)) + os.sep
_KERNELS = _SIM + "kernels" + os.sep  # kernels that are shown, though they lie here
_HELPERS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "gluon") + os.sep


class Site(NamedTuple):
    """A place in a kernel: function and line, and who was there."""

    function: str
    line: int
    file: str
    partition: str
    tile: str
    helper: str = ""  # the function of tilewise.gluon that the line called, e.g. "acquire"

    @property
    def place(self) -> str:
        """Without who was there."""
        call = f" ({self.helper})" if self.helper else ""
        tile = f", {self.tile}" if self.tile else ""
        return f"{self.function}:{self.line}{call}{tile}"

    def __str__(self) -> str:
        call = f" ({self.helper})" if self.helper else ""
        who = f" in {self.partition}" if self.partition else ""
        tile = f", {self.tile}" if self.tile else ""
        return f"{self.function}:{self.line}{call}{who}{tile}"


def kernel_frame() -> tuple[Any, str]:
    """The innermost frame of the kernel itself, and the helper of tilewise.gluon it is in, if any."""
    frame = sys._getframe(1)
    helper = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_HELPERS):
            helper = frame.f_code.co_name
        elif not name.startswith(_SIM) or name.startswith(_KERNELS):
            break
        frame = frame.f_back  # type: ignore[assignment]
    return frame, helper


@dataclass(frozen=True)
class Finding:
    """A defect. `text` is complete; `sites` are the places it names, the later access first."""

    kind: str
    text: str
    sites: tuple[Site, ...]
    seed: int | None
    time: float

    @property
    def what(self) -> Any:
        """The same for the same defect of another program. A livelock's text names the program."""
        return self.kind, [s[:3] for s in self.sites] if self.kind == "livelock" else self.text

    def __str__(self) -> str:
        return f"[{self.kind}] {self.text} (seed {self.seed})"


class SimulationError(AssertionError):
    """Raised by `Report.raise_if_any` and `check`; its text is the findings."""

    def __init__(self, findings: Sequence[Finding], context: str = "") -> None:
        self.findings = list(findings)
        lines = [f"{len(self.findings)} finding(s){context}:"]
        super().__init__("\n".join(lines + [f"  {f}" for f in self.findings]))


@dataclass
class Report:
    """The outcome of one launch."""

    kernel: str
    seed: int | None
    findings: list[Finding] = field(default_factory=list)
    engines: list[Any] = field(default_factory=list)  # one per group of programs that ran together

    @property
    def ok(self) -> bool:
        return not self.findings

    @property
    def kinds(self) -> set[str]:
        return {f.kind for f in self.findings}

    @property
    def cycles(self) -> float:
        """The longest run of any engine, in the cost model's unit of time."""
        return max((e.now for e in self.engines), default=0.0)

    def raise_if_any(self) -> Report:
        if self.findings:
            raise SimulationError(self.findings, f" in {self.kernel}, seed {self.seed}")
        return self

    def __str__(self) -> str:
        if self.ok:
            return f"{self.kernel}, seed {self.seed}: no findings"
        head = f"{self.kernel}, seed {self.seed}: {len(self.findings)} finding(s)"
        return "\n".join([head, *(f"  {f}" for f in self.findings)])
