"""The machine under a simulated kernel: an event queue, partitions as coroutines, and findings.

A partition (a group of warps of `gl.warp_specialize`) is a greenlet. It runs straight-line Python until
it does something that another agent can see (shared memory, a barrier, an asynchronous unit); there it
calls `point()`, and the event queue decides who is next. Asynchronous operations are events. Times come
from the cost model (cost.py); order comes from vector clocks (clocks.py).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import greenlet

from tilewise.sim.clocks import Agent, Clock
from tilewise.sim.cost import CostModel
from tilewise.sim.findings import Finding, Site, kernel_frame
from tilewise.sim.options import Options
from tilewise.sim.watchdog import RunawayLoop, Watchdog

T = TypeVar("T")

# Events without a change of any memory or barrier before spinning counts as a livelock.
IDLE_EVENTS = 20_000


class SimStop(Exception):
    """Ends a run in which no further step makes sense; never shown to the user."""


_current: Engine | None = None


def engine() -> Engine:
    if _current is None:
        raise RuntimeError("this operation is only simulated inside tilewise.sim.launch")
    return _current


def running() -> bool:
    """Is a simulated kernel executing now? Register arithmetic also works outside, e.g. in tests."""
    return _current is not None


def current() -> Partition:
    partition = engine().partition
    assert partition is not None
    return partition


def report(kind: str, text: str, *sites: Site, key: Any = None) -> None:
    engine().report(kind, text, *sites, key=key)


class Engine:
    """Runs one or more programs (CTAs) as a discrete-event simulation."""

    def __init__(self, cost: CostModel, options: Options) -> None:
        self.cost, self.options = cost, options
        self.now = 0.0
        self.heap: list[tuple[float, int, Callable[[], None]]] = []
        self.events = 0
        self.changed_at = 0  # self.events when something last changed
        self.findings: list[Finding] = []
        self.seen: set[Any] = set()
        self.partitions: list[Partition] = []
        self.partition: Partition | None = None
        self.ctas: list[Any] = []
        self.pending: deque[tuple[int, int, int]] = deque()  # programs of the launch not yet started
        self.dozing: list[Callable[[], None]] = []  # wakes those who look for a change in vain
        self.services: dict[type, Any] = {}
        self.hub = greenlet.getcurrent()
        cost.attach(self)

    def service(self, kind: type[T]) -> T:
        """The engine's only instance of a class, e.g. the log of global memory."""
        if kind not in self.services:
            self.services[kind] = kind()
        return self.services[kind]

    def at(self, time: float, event: Callable[[], None]) -> None:
        self.events += 1
        heapq.heappush(self.heap, (max(time, self.now), self.events, event))

    def change(self) -> None:
        """Something others can see has changed; spinning without that is a livelock."""
        self.changed_at = self.events

    def run(self) -> None:
        global _current
        previous, _current = _current, self
        self.hub = greenlet.getcurrent()
        try:
            with Watchdog(self, self.options.watchdog_seconds):
                while self.heap or self.dozing:
                    if not self.heap:
                        self._rouse()
                    self.now, _, event = heapq.heappop(self.heap)
                    event()
                self._finish()
        except SimStop:
            pass
        finally:
            for p in self.partitions:  # unwind what is still suspended
                if p.greenlet and not p.greenlet.dead:
                    p.greenlet.throw(greenlet.GreenletExit)
            _current = previous

    def _rouse(self) -> None:
        """Nobody else can run: those who look in vain look again, which ends in a livelock or in a loop
        that gives up."""
        dozing, self.dozing = self.dozing, []
        for wake in dozing:
            self.at(self.now, wake)

    def _finish(self) -> None:
        stuck = [p for p in self.partitions if not p.done]
        if stuck:
            text = "nobody can run" + "".join(p.waiting() for p in stuck)
            sites = [p.wait_site for p in stuck if p.wait_site is not None]
            self.report("deadlock", text, *sites, key="deadlock")
        else:
            for cta in self.ctas:
                cta.at_exit()

    def livelock(self) -> None:
        busy = [p for p in self.partitions if not p.done]
        text = f"{IDLE_EVENTS} steps without any change{self._programs(busy)}"
        text += "".join(p.waiting() for p in busy) + (f"\n    {self.apart}" if self.apart else "")
        sites = [p.last_site for p in busy if p.last_site is not None]
        self.report("livelock", text, *sites)
        raise SimStop

    @staticmethod
    def _programs(partitions: Sequence[Partition]) -> str:
        names = dict.fromkeys(p.cta.name for p in partitions)
        return f" in program {', '.join(names)}" if names else ""

    @property
    def apart(self) -> str:
        """For a message: who waits for global memory may wait for a program that is not here."""
        grid = self.ctas[0].grid if self.ctas else (1, 1, 1)
        if self.options.together or grid == (1, 1, 1):
            return ""
        return "programs ran one after another; if one waits for another: together=True"

    def report(self, kind: str, text: str, *sites: Site, key: Any = None) -> None:
        """Note a finding once; `key` tells which findings are the same."""
        key = (kind, text if key is None else key)
        if key in self.seen:
            return
        self.seen.add(key)
        self.findings.append(Finding(kind, text, tuple(sites), self.options.seed, self.now))
        if len(self.findings) >= self.options.max_findings:
            raise SimStop


class Partition:
    """A group of warps with one flow of control."""

    speed = 1.0

    def __init__(
        self,
        cta: Any,
        name: str,
        function: Callable[..., Any],
        args: Sequence[Any],
        clock: Clock,
        warps: int,
    ) -> None:
        self.engine: Engine = cta.engine
        self.cta, self.name, self.warps = cta, name, warps
        self.agent = Agent(self._agent_name())
        self.clock = dict(clock)
        self.clock[self.agent] = self.agent.advance()
        self.t = self.engine.now  # local time; may run ahead of the engine's between two points
        self.tile = ""
        self.done = False
        self.wait_reason: Callable[[], tuple[str, str]] | None = None
        self.wait_site: Site | None = None
        self.last_site: Site | None = None
        self.steps = 0  # visible actions so far
        self.looked: Any = None  # at what a scalar atomic looked in vain: address, value, step
        self.joiners: list[Callable[[], None]] = []
        self.queues: dict[type, Any] = {}
        self.greenlet: Any = greenlet.greenlet(
            lambda: self._main(function, args), parent=self.engine.hub
        )
        self.engine.partitions.append(self)
        self.engine.cost.partition(self)

    @property
    def full_name(self) -> str:
        return self.agent.name

    def rename(self, name: str) -> None:
        """The main partition takes the name of the function that it runs in warp_specialize."""
        self.name = name
        self.agent.name = self._agent_name()

    def _agent_name(self) -> str:
        return self.name if len(self.engine.ctas) < 2 else f"{self.name} of program {self.cta.name}"

    def queue(self, kind: type[T]) -> T:
        """This partition's only instance of a class: its queue of one kind of asynchronous operation."""
        if kind not in self.queues:
            self.queues[kind] = kind()
        return self.queues[kind]

    def _main(self, function: Callable[..., Any], args: Sequence[Any]) -> None:
        try:
            function(*args)
        except RunawayLoop as error:
            site = error.site(self)
            text = f"{self.name} of program {self.cta.name} loops at {site} without any operation that "
            text += "others can see"
            self.engine.report("livelock", text, site)
            raise SimStop from None
        self.sync()
        self.ended()
        self.done = True
        self.engine.change()
        for joiner in self.joiners:
            joiner()

    def ended(self) -> None:
        """Called when the partition's function returns: nothing of its own may still be in flight."""
        for queue in self.queues.values():
            problem = queue.leftover()
            if problem:
                text, *sites = problem
                self.engine.report("exit", f"{self.full_name} ends with {text}", *sites)

    def start(self) -> None:
        self.engine.at(self.t, self.resume)

    def resume(self) -> None:
        self.engine.partition = self
        self.greenlet.switch()

    def sync(self) -> None:
        """Let everybody else catch up with this partition's local time."""
        e = self.engine
        if self.t > e.now:
            if not e.heap or e.heap[0][0] > self.t:
                e.now = self.t  # nobody has anything to do before
                e.events += 1
            else:
                e.at(self.t, self.resume)
                e.hub.switch()

    def point(self) -> Site:
        """A place where the interleaving matters, called before every visible action: the place."""
        e = self.engine
        self.steps += 1
        self.t = max(self.t, e.now) + e.cost.step(self)
        self.sync()
        self.last_site = self.site()
        if (
            self.cta.fresh_barriers
        ):  # Triton makes new barriers known to the whole cluster before their use
            self.cta.fresh_barriers = False
            self.cta.cluster.meet(self)
        if e.events - e.changed_at > IDLE_EVENTS:
            e.livelock()
        return self.last_site

    def site(self) -> Site:
        frame, helper = kernel_frame()
        if frame is None:
            return Site("?", 0, "?", self.full_name, self.tile, helper)
        code = frame.f_code
        return Site(code.co_name, frame.f_lineno, code.co_filename, self.full_name, self.tile, helper)

    def block(self, what: str, reason: Callable[[], tuple[str, str]], site: Site) -> None:
        """Sleep until somebody calls resume().

        what: the name of what it waits for. reason: the same at length, and what it waits to change.
        """
        self.wait_reason, self.wait_site = reason, site
        start = self.engine.now
        self.engine.hub.switch()
        self.wait_reason = self.wait_site = None
        self.t = self.engine.now
        self.engine.cost.waited(self, what, start)

    def doze(self, watch: Callable[[Callable[[], None]], None], what: str, site: Site) -> None:
        """Sleep until what it looks at in vain has changed, or nobody else can run.

        So a loop that spins while a copy is held back takes one step and not thousands.
        """
        asleep = True

        def wake() -> None:
            nonlocal asleep
            if asleep:
                asleep = False
                self.resume()

        watch(wake)
        self.engine.dozing.append(wake)
        self.block(what, lambda: (f"{what} to change", self.engine.apart), site)
        if wake in self.engine.dozing:
            self.engine.dozing.remove(wake)

    def waiting(self) -> str:
        """For a message: what this partition waits for, where, and what is missing; a line each."""
        if self.wait_reason is None or self.wait_site is None:
            return f"\n    {self.full_name} waits for nothing; it is at {self.last_site}"
        what, state = self.wait_reason()
        lines = [f"{self.full_name} waits for {what}", f"  at {self.wait_site.place}"]
        return "".join(f"\n    {line}" for line in [*lines, *([f"  {state}"] if state else [])])

    def release(self) -> None:
        """What this partition does from here on is not covered by clocks that were copied so far."""
        self.agent.ends[self.clock[self.agent]] = self.last_site
        self.clock[self.agent] = self.agent.advance()

    def fork(self, agent: Agent, in_order: bool = False) -> tuple[Clock, Clock, int]:
        """Start an asynchronous operation of `agent`.

        Returns what the operation knows (the partition's clock), what its completion tells others, and
        its tick. `in_order`: operations of this agent complete one after another, so each knows the
        last.
        """
        tick = agent.advance()
        known = dict(self.clock)
        if in_order:
            known[agent] = tick
        tells = dict(known)
        tells[agent] = tick
        self.release()
        return known, tells, tick
