"""Right kernels under a great many schedules: whatever is found here is a false alarm.

Prints a table. `--write` puts it into docs/simulator.md, where a test looks for every kernel of the
suite. Some minutes on one core, with OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from kernels import hopper_forward, hopper_persistent
from problems_sim import CASES, Case, backward_case, blackwell_demo, demo_case, error, forward_case

from tilewise import sim

DOCS = Path(__file__).parents[2] / "docs" / "simulator.md"
BEGIN, END = "<!-- soak:begin -->", "<!-- soak:end -->"
HEAD = "| kernel | launches | findings | wrong results |\n|---|---|---|---|"

# Besides the suite's own small ones: more tiles, stages and consumers than they have.
LARGER = [
    forward_case(hopper_forward, 768, 64, True, H=2, WGS=3, STAGES=3, PINNED=True),
    forward_case(hopper_persistent, 768, 128, True, SMS=2, PINGPONG=True),
    backward_case(512, 128, True, H=2),
    demo_case(blackwell_demo, "blackwell", 1024, 128, True),
]
SOAK = [*CASES, *LARGER]


def soak(case: Case, seeds: range) -> tuple[int, int, int]:
    """Launches, findings and wrong results; programs one after another, then interleaved."""
    right, launches, findings, wrong = case.right(), 0, 0, 0
    for together in (False, True):
        for seed in seeds:
            options = {**case.options, "together": together or case.options.get("together", False)}
            with sim.intercept(seed=seed, arch=case.arch, **options) as reports:
                result = case.run()
            launches += len(reports)
            findings += sum(len(r.findings) for r in reports)
            wrong += any(error(x, y) >= case.limit for x, y in zip(result, right, strict=True))
    return launches, findings, wrong


def written(text: str, table: str) -> str:
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{DOCS.name} has no {BEGIN} followed by {END}")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    began, lines, total = time.perf_counter(), [HEAD], [0, 0, 0]
    print(HEAD, flush=True)
    for case in SOAK:
        counts = soak(case, range(arguments.seeds))
        lines.append(f"| {case.name} | {' | '.join(map(str, counts))} |")
        print(lines[-1], flush=True)
        total = [a + b for a, b in zip(total, counts, strict=True)]
    lines.append(f"| all | {' | '.join(map(str, total))} |")
    print(lines[-1])
    print(f"{time.perf_counter() - began:.0f} s")
    if arguments.write:
        DOCS.write_text(written(DOCS.read_text(encoding="utf-8"), "\n".join(lines)), encoding="utf-8")


if __name__ == "__main__":
    main()
