"""mbarriers with true phases, arrival counts and byte counts; named barriers; the cluster barrier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilewise.sim.clocks import Agent, Clock, join
from tilewise.sim.engine import Engine, Partition
from tilewise.sim.findings import Site


class MBarrier:
    """One mbarrier. Parity cannot tell phase n from n + 2, so a waiter that falls behind is lost."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.count: int | None = None
        self.pending = self.bytes = self.phase = 0
        self.last: Clock = {}  # what passing the last completed phase tells
        self.next: Clock = {}  # what the current phase has gathered
        self.waiters: list[tuple[Partition, Callable[[], None]]] = []
        self.seen: dict[
            Partition, tuple[int, int, Site]
        ] = {}  # last phase a partition waited for, its tick
        self.lapped: dict[Partition, str] = {}
        self.arrivals: list[str] = []  # of the current phase, for messages

    def init(self, count: int, p: Partition, site: Site) -> None:
        if self.count is not None and (self.pending != self.count or self.waiters):
            p.engine.report("barrier", f"{self.name} is initialised again while in use, at {site}", site)
        self.count = self.pending = count
        self.bytes = self.phase = 0
        self.arrivals = []

    @property
    def state(self) -> str:
        if self.count is None:
            return "not initialised"
        came = ", ".join(self.arrivals[-4:]) or "nobody"
        also = f" and {self.bytes} bytes" if self.bytes else ""
        missing = f"{self.pending} of {self.count} arrivals{also} are missing"
        return f"phase {self.phase}; arrived: {came}; {missing}"

    def arrive(self, clock: Clock, count: int, e: Engine, site: Site) -> None:
        if self.count is None:
            e.report("barrier", f"arrive on uninitialised {self.name} at {site}", site)
            return
        if count > self.pending:
            want = f"{self.pending} more in phase {self.phase}"
            text = f"{count} arrival(s) on {self.name}, which expects {want}"
            e.report("barrier", f"{text}, at {site}", site, key=(self.name, site[:3]))
            count = self.pending
        self.pending -= count
        self.arrivals.append(f"{site.function}:{site.line} in {site.partition}")
        join(self.next, clock)
        self._flip(e)

    def expect(self, nbytes: int) -> None:
        self.bytes += nbytes

    def complete(self, clock: Clock, nbytes: int, e: Engine, site: Site) -> None:
        """Bytes of an asynchronous copy have arrived."""
        if self.count is None:
            e.report("barrier", f"a copy completes on uninitialised {self.name}, issued at {site}", site)
            return
        self.bytes -= nbytes
        join(self.next, clock)
        self._flip(e)

    def _flip(self, e: Engine) -> None:
        e.change()
        if self.pending or self.bytes:
            return
        for partition, (phase, tick, where) in self.seen.items():
            behind = phase < self.phase - 1
            if behind or tick > self.next.get(partition.agent, 0):
                text = (
                    f"{self.name} can complete phase {self.phase} before {partition.full_name} has seen "
                    f"phase {self.phase - 1} (it waited at {where.place}); it may then wait for ever"
                )
                self.lapped.setdefault(partition, text)
        for partition, _ in self.waiters:
            self._report_lap(partition)
        self.phase += 1
        self.pending = self.count or 0
        self.arrivals = []
        join(self.last, self.next)
        for _, poll in self.waiters:  # a waiter polls: it may look later, and miss a phase
            e.at(e.now + e.cost.poll(), poll)

    def _report_lap(self, p: Partition) -> None:
        """Being lapped matters only to a partition that waits again."""
        if p in self.lapped:
            site = self.seen[p][2]
            p.engine.report("lap", self.lapped.pop(p), site, key=(self.name, p))

    def passed(self, parity: int) -> bool:
        return (self.phase & 1) != parity

    def wait(self, p: Partition, parity: int, site: Site) -> None:
        e = p.engine
        if self.count is None:
            e.report("barrier", f"wait on uninitialised {self.name} at {site}", site)
        if parity not in (0, 1):
            e.report("barrier", f"wait on {self.name} with parity {parity} at {site}", site)
            parity &= 1
        self._report_lap(p)
        if not self.passed(parity):

            def poll() -> None:
                if entry in self.waiters and self.passed(parity):
                    self.waiters.remove(entry)
                    p.resume()

            entry = (p, poll)
            self.waiters.append(entry)
            p.block(self.name, lambda: (f"{self.name}, parity {parity}", self.state), site)
        join(p.clock, self.last)
        self.seen[p] = (self.phase - 1, p.clock[p.agent], site)

    def at_exit(self) -> None:
        from tilewise.sim import engine

        if self.bytes:
            engine.report("exit", f"the kernel ends while {self.name} is in {self.state}", key=self.name)


class Barriers:
    """A view of an allocation of mbarriers, for one CTA: index() picks one.

    `table[i][r]` is the barrier that CTA r means by number i; the CTAs of a pair may share it. Only the
    CTA that keeps a shared barrier waits for it.
    """

    def __init__(self, table: list[list[MBarrier]], rank: int, label: str = "") -> None:
        self.table, self.rank, self.label = table, rank, label

    def index(self, i: Any) -> Barriers:
        i = int(i)
        if not 0 <= i < len(self.table):
            from tilewise.sim import engine

            site = engine.current().site()
            engine.report("bounds", f"barrier {i} of {len(self.table)} in {self.label} at {site}", site)
            raise engine.SimStop
        return Barriers([self.table[i]], self.rank, self.label)

    slice = None  # a slice of barriers is not something kernels do

    @property
    def one(self) -> MBarrier:
        return self.on(self.rank)

    def on(self, rank: int) -> MBarrier:
        if len(self.table) != 1:
            raise TypeError(f"an mbarrier operation needs one barrier: index() {self.label} first")
        return self.table[0][rank]

    @property
    def kept_here(self) -> bool:
        """Is this CTA the one that keeps the barrier?"""
        return self.table[0].index(self.one) == self.rank

    @property
    def sharers(self) -> int:
        """How many CTAs mean the same barrier."""
        return sum(b is self.one for b in self.table[0])

    def at_exit(self) -> None:
        for barrier in {id(b): b for row in self.table for b in row}.values():
            barrier.at_exit()

    def rename(self, name: str) -> None:
        for i, row in enumerate(self.table):
            for b in row:
                b.name = f"{name}[{i}]" if len(self.table) > 1 else name


class Meeting:
    """A barrier that partitions reach together: bar.sync with a thread count, or the cluster barrier."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.agent = Agent(name)
        self.arrived = 0
        self.clock: Clock = {}
        self.sleepers: list[Partition] = []

    def arrive(self, p: Partition, weight: int, total: int, wait: bool, site: Site) -> None:
        self.arrived += weight
        join(self.clock, p.clock)
        p.release()
        p.engine.change()
        if self.arrived > total:
            text = f"{self.arrived} threads on {self.name}, which is for {total}, at {site}"
            p.engine.report("barrier", text, site)
        if self.arrived >= total:
            clock, self.clock, self.arrived = self.clock, {}, 0
            sleepers, self.sleepers = self.sleepers, []
            for s in sleepers:
                join(s.clock, clock)
                p.engine.at(p.engine.now, s.resume)
            if wait:
                join(p.clock, clock)
        elif wait:
            self.sleepers.append(p)
            p.block(self.name, lambda: (self.name, f"{self.arrived} of {total} have arrived"), site)
