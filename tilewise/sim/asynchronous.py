"""What the asynchronous units have in common: their agents and their queues."""

from __future__ import annotations

from collections import deque
from typing import Any

from tilewise.sim.clocks import Agent, Clock, join
from tilewise.sim.engine import Engine, Partition
from tilewise.sim.findings import Site
from tilewise.sim.memory import View


class Agents:
    """Agents of asynchronous copies, one per destination."""

    def __init__(self) -> None:
        self.table: dict[Any, Agent] = {}


def agent_for(e: Engine, what: str, view: View) -> Agent:
    """The agent of one kind of copy into one region.

    Copies into the same region share an agent but do not know of each other, so two of them that nothing
    orders are still a race.
    """
    table = e.service(Agents).table
    key = (what, view.buffer, view.region)
    if key not in table:
        table[key] = Agent(f"{what} into {view.label}")
    return table[key]


class Pending:
    """An asynchronous operation that a partition can wait for."""

    def __init__(self, site: Site, tells: Clock, what: str) -> None:
        self.site, self.tells, self.what = site, tells, what
        self.done = False
        self.sleeper: Partition | None = None

    def finish(self) -> None:
        self.done = True
        if self.sleeper is not None:
            sleeper, self.sleeper = self.sleeper, None
            sleeper.resume()

    def wait(self, p: Partition, site: Site) -> None:
        """Block until it is done; afterwards the partition knows what it did."""
        if not self.done:
            self.sleeper = p
            p.block(self.what, lambda: (f"{self.what} issued at {self.site.place}", ""), site)
        join(p.clock, self.tells)


class Queue:
    """Operations that a partition waits for in order: "all but the newest n"."""

    what = "operation(s)"

    def __init__(self) -> None:
        self.pending: deque[Any] = deque()
        self.last = 0.0  # when the newest completes, if they complete in order
        self.agent: Agent | None = None

    def agent_of(self, p: Partition, what: str) -> Agent:
        if self.agent is None:
            self.agent = Agent(f"{what} of {p.full_name}")
        return self.agent

    def leftover(self) -> tuple[Any, ...] | None:
        """Text and sites of what must not be in flight when the partition ends."""
        if not self.pending:
            return None
        sites = [op.site for op in self.pending]
        return (f"{len(sites)} {self.what} not waited for, the first issued at {sites[0]}", *sites)
