"""Writes what the simulator shows into README.md, between its two markers, and draws its picture.

python scripts/readme_simulator.py
"""

from __future__ import annotations

import difflib
import inspect
from pathlib import Path

import torch

from tilewise import sim
from tilewise.sim import catalogue, picture
from tilewise.sim.kernels import hopper
from tilewise.sim.mutate import edit
from tilewise.sim.predict import predict

README = Path(__file__).parent.parent / "README.md"
PICTURE = README.parent / "docs" / "simulator-steady.svg"
BEGIN = "<!-- simulator:begin -->"
END = "<!-- simulator:end -->"

# The defect: consumers of the demonstration kernel never give a stage of V back.
FUNCTION, LINE, INSTEAD = "consume", "v_ring.release(i - 1)", "pass"


def defect() -> str:
    """The changed line, as a diff with a line before and after."""
    source = inspect.getsource(getattr(hopper, FUNCTION).fn).splitlines()
    n = next(n for n, line in enumerate(source) if line.strip() == LINE)
    broken = [*source[:n], *source[n + 1 :]]
    lines = list(difflib.unified_diff(source, broken, n=1, lineterm=""))
    return "\n".join(lines[3:])  # without the names of files and the line numbers


def report() -> str:
    """What is said of the kernel with the defect."""
    broken = edit(hopper, FUNCTION, "a stage of V is never released", LINE, INSTEAD).load()
    x = torch.zeros(1, 1, 512, 64, dtype=torch.bfloat16)
    with sim.intercept(seed=0, stop_at_first=True) as reports:
        broken.forward(x, x, x, False)
    return str(reports[0])


def drawn() -> str:
    """The picture: the package's forward at head dim 128, in the middle of a program with 2048 keys."""
    row = catalogue.find("hopper-forward")
    size = 16, 2048, 128, False
    return picture.draw(predict(lambda: row.run("h200", *size), "h200", hoisted=row.hoisted))


def updated(text: str) -> str:
    """`text` with the report as it is now. Raises ValueError if a marker is missing."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md has no {BEGIN} followed by {END}")
    block = f"```diff\n{defect()}\n```\n\n```\n{report()}\n```"
    return f"{before}{BEGIN}\n{block}\n{END}{after}"


if __name__ == "__main__":
    PICTURE.write_text(drawn(), encoding="utf-8")
    README.write_text(updated(README.read_text(encoding="utf-8")), encoding="utf-8")
