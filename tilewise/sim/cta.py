"""Programs: a CTA with its memories and barriers, and the cluster it belongs to."""

from __future__ import annotations

from typing import Any

from tilewise.sim.barriers import Barriers, Meeting
from tilewise.sim.clocks import Clock, join, knows
from tilewise.sim.engine import Engine, Partition
from tilewise.sim.memory import Allocation


class Cluster:
    """The CTAs that run one program together (`num_ctas`); usually one."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.ctas: list[Cta] = []
        self.meetings: dict[str, Meeting] = {}
        self.results: dict[str, Any] = {}
        self.refused = False  # has it seen that no program is left to take over?
        self.allocations: list[Any] = []  # in program order, made by whichever CTA comes first

    def allocate(self, cta: Cta, make: Any) -> Any:
        """The cluster's n-th allocation, where n counts this CTA's allocations."""
        n = cta.allocated
        cta.allocated += 1
        if n == len(self.allocations):
            self.allocations.append(make())
        return self.allocations[n]

    def meet(self, p: Partition) -> None:
        """All CTAs of the cluster reach the same place of the same partition."""
        if self.size > 1:
            name = p.name
            meeting = self.meetings.setdefault(name, Meeting(f"the cluster barrier of {name}"))
            meeting.arrive(p, 1, self.size, True, p.site())


class Cta:
    """One CTA: a program id, its place in the cluster, and what must be in order when it ends."""

    def __init__(
        self,
        engine: Engine,
        program_id: tuple[int, int, int],
        grid: tuple[int, int, int],
        num_warps: int,
        cluster: Cluster,
        options: dict[str, Any],
    ) -> None:
        self.engine, self.program_id, self.grid, self.num_warps = engine, program_id, grid, num_warps
        self.cluster, self.rank = cluster, len(cluster.ctas)
        self.options = options  # of the launch, e.g. maxnreg
        self.allocated = 0
        self.names: dict[str, int] = {}  # of allocations, how many have each
        self.fresh_barriers = False
        self.main: Any = None  # the partition that the kernel itself runs in
        cluster.ctas.append(self)
        engine.ctas.append(self)

    @property
    def name(self) -> str:
        name = "({}, {}, {})".format(*self.program_id)
        return name if self.cluster.size == 1 else f"{name} CTA {self.rank}"

    @property
    def memories(self) -> list[Allocation]:
        return [a for a in self.cluster.allocations if isinstance(a, Allocation)]

    def at_exit(self) -> None:
        """Called when everything has returned: the memory goes, so nobody may still be using it."""
        if self.rank:
            return
        for item in self.cluster.allocations:
            if isinstance(item, Barriers):
                item.at_exit()
        known: Clock = {}
        for cta in self.cluster.ctas:  # a cluster ends together
            join(known, cta.main.clock)
        for allocation in self.memories:
            for buffer in allocation.buffers:
                for access in buffer.log:
                    if not knows(known, access.agent, access.tick):
                        text = f"the kernel can end before this {access}, in {allocation.name}, is done"
                        self.engine.report("exit", text, access.site, key=access.site[:3])
