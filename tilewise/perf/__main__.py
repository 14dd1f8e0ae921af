"""The benchmark where neither typer nor rich is installed: plain text, the same options and statuses.

python -m tilewise.perf --preset quick --out result.json
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import fields

from tilewise.cli import streams
from tilewise.perf import bench, results, summary
from tilewise.perf.grid import BadRequest
from tilewise.perf.request import HELP, Request
from tilewise.perf.results import Cell
from tilewise.perf.timing import clock_for


class Lines:
    """A watcher that prints a line a problem."""

    def begin(self, problems: int) -> None:
        self._total, self._done, self._start = problems, 0, time.monotonic()

    def step(self, what: str) -> None: ...

    def advance(self, cells: list[Cell]) -> None:
        self._done += 1
        seconds = time.monotonic() - self._start
        print(f"[{self._done}/{self._total}, {seconds:.0f} s] {cells[0].problem}")
        _, factor = summary.unit_of(cells)
        for cell in cells:
            shown = [f"{m.contender} {summary.shown(m, factor)}" for m in cell.measurements]
            print(f"  {cell.direction:9}" + ", ".join(shown), flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tilewise bench", description="Time attention, in turns.")
    for option in fields(Request):
        name = "--" + option.name.replace("_", "-")
        parser.add_argument(name, default=option.default, help=HELP[option.name])
    parser.add_argument("--cycles", action="store_true", help="Count cycles with Nsight Compute.")
    asked = vars(parser.parse_args(arguments))
    count_cycles = asked.pop("cycles")
    try:
        plan = Request(**asked).plan(count_cycles=count_cycles)
    except BadRequest as error:
        print(f"tilewise bench: {error}", file=sys.stderr)
        return 2
    out = plan.out
    run = bench.execute(
        plan,
        clock_for(plan.device),
        Lines(),
        keep=lambda run: None if out is None else results.write(run, out),
    )
    for direction in run.directions:
        print(f"{direction}: times as fast, geometric mean and least")
        for ours, peer, mean, least, cells in summary.against_peers(run, direction):
            print(f"  {ours} as {peer}: {mean}, {least} ({cells} cells)")
    for line in summary.complaints(run):
        print(line)
    return run.status


if __name__ == "__main__":
    streams.run(lambda: sys.exit(main()))
