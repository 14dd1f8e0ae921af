"""Happens-before as vector clocks: whether two accesses are ordered, whatever the times were.

An agent is anything that acts on its own: a partition, or a stream of asynchronous operations. Its
clock says, for each other agent, up to which of that agent's steps everything is known to have
happened. Barriers, waits, forks and atomics carry clocks from one agent to another.
"""

from __future__ import annotations

from typing import Any


class Agent:
    """One thread of action; `tick` counts the steps that others can learn about."""

    __slots__ = ("ends", "name", "tick")

    def __init__(self, name: str) -> None:
        self.name = name
        self.tick = 0
        self.ends: dict[int, Any] = {}  # of a partition: the places where its steps were handed on

    def advance(self) -> int:
        self.tick += 1
        return self.tick

    def __repr__(self) -> str:
        return self.name


Clock = dict[Agent, int]


def join(into: Clock, other: Clock) -> None:
    """After this, `into` knows everything that `other` knows."""
    get = into.get
    for agent, tick in other.items():
        if get(agent, 0) < tick:
            into[agent] = tick


def knows(clock: Clock, agent: Agent, tick: int) -> bool:
    return tick <= clock.get(agent, 0)
