"""Memory that keeps every write of a byte, so that a read may return an old write.

Each agent (a thread of a GPU, or of a host) has a clock: the number of writes of each agent that
happened before. A read never returns a write older than a write in the clock. A read never returns
a write older than the last write read by the same agent. Any other write is possible. A release
attaches the clock of its agent to a write. An acquire of this write adds the attached clock to the
reader's own clock. These rules give the causality order of PTX.

Four simplifications:

* A write never waits for a later instruction, and a read never takes place after a later write of
  the same thread. Bulk reads of the kernels feed writes before the next barrier, so a read cannot
  be late there.
* A fence also orders weak reads and writes, and reads of other threads before a barrier. PTX leaves
  such races undefined. On hardware a weak read is a relaxed read, and is complete at a barrier.
* The order of all writes of a byte is the order of their execution.
* A fence of sequential consistency is a fence of acquire and release: the order of all such fences
  orders nothing. Kernels without an error here have no error with that order, too.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

Clock = dict[str, int]  # writes that happened before, by key of their agent


class Scope(IntEnum):
    """Agents that a fence or a strong access orders."""

    cta = 0
    gpu = 1
    sys = 2


class Order(IntEnum):
    weak = 0
    relaxed = 1
    acquire = 2
    release = 3


class Fault(Exception):
    """An access outside all regions."""


class Race(Exception):
    """A weak read of bytes that other agents write at the same time."""


def add(clock: Clock, other: Clock) -> None:
    for key, count in other.items():
        if clock.get(key, 0) < count:
            clock[key] = count


def by_scope() -> list[Clock]:
    return [{}, {}, {}]


@dataclass(eq=False)
class Agent:
    """A thread. `device` and `block` are None for a thread of a host.

    Agents that run one after the other, each with the clock of its predecessor, may share a key.
    """

    key: str
    device: int | None = None
    block: Any = None
    clock: Clock = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)  # last read of a byte: index of the write
    acquirable: list[Clock] = field(default_factory=by_scope)  # by the next fence
    released: list[Clock] = field(default_factory=by_scope)  # by the last fence

    def distance(self, other: Agent) -> Scope:
        """Returns the smallest scope with both agents."""
        if self is other or (self.block is not None and self.block is other.block):
            return Scope.cta
        same = self.device is not None and self.device == other.device
        return Scope.gpu if same else Scope.sys


@dataclass(eq=False, slots=True)
class Write:
    agent: Agent
    number: int  # among the writes with the key of the agent
    at: int
    data: bytes
    clocks: list[Clock]  # attached, by the distance of the reader


@dataclass(frozen=True)
class Region:
    name: str
    at: int
    first: Write  # initial content
    words: dict[int, str]  # names of words, by offset


class Memory:
    """`staleness`: probability that a read with a choice returns the oldest write.

    `strict`: a weak read with a choice between different values raises Race.
    """

    def __init__(self, chance: random.Random, staleness: float, *, strict: bool) -> None:
        self._strict = strict
        self._chance = chance
        self._staleness = staleness
        self._starts: list[int] = []
        self._regions: list[Region] = []
        self._history: dict[int, list[Write]] = {}
        self._initial = Agent("initial content")

    # ---- regions ----

    def region(self, name: str, content: bytes, words: dict[int, str] | None = None) -> int:
        """Adds a region and returns its address, a multiple of 256."""
        end = self._regions[-1].at + len(self._regions[-1].first.data) if self._regions else 0
        at = (end // 256 + 2) * 256
        first = Write(self._initial, 0, at, content, by_scope())
        self._regions.append(Region(name, at, first, words or {}))
        self._starts.append(at)
        return at

    def _region(self, at: int) -> Region | None:
        index = bisect_right(self._starts, at) - 1
        found = self._regions[index] if index >= 0 else None
        return found if found and at < found.at + len(found.first.data) else None

    def name(self, at: int) -> str:
        """Returns `region.word` of an address, or `region` where words have no names."""
        region = self._region(at)
        assert region is not None
        word = region.words.get(at - region.at)
        return f"{region.name}.{word}" if word else region.name

    def _writes(self, agent: Agent, at: int) -> list[Write]:
        """Returns the history of a byte."""
        if at not in self._history:
            region = self._region(at)
            if region is None:
                raise Fault(f"{agent.key} uses address {at:#x}, in no region")
            self._history[at] = [region.first]
        return self._history[at]

    # ---- accesses ----

    def load(
        self, agent: Agent, at: int, count: int, order: Order = Order.weak, scope: Scope = Scope.sys
    ) -> bytes:
        if order != Order.weak:
            return self._load_strong(agent, at, count, order, scope)
        data = bytearray()
        last: Write | None = None
        for byte in range(at, at + count):
            writes = self._history.get(byte) or self._writes(agent, byte)
            index = len(writes) - 1
            if index:
                index = self._choice(agent, byte, writes)
            write = writes[index]
            agent.seen[byte] = index
            data.append(write.data[byte - write.at])
            if write is not last:
                last = write
                self._acquire(agent, write, order, scope)
        return bytes(data)

    def _load_strong(self, agent: Agent, at: int, count: int, order: Order, scope: Scope) -> bytes:
        """Reads a word that is written as a whole only."""
        writes = self._writes(agent, at)
        index = len(writes) - 1
        if index and self._chance.random() < self._staleness:
            index = self._floor(agent, at, writes)
        write = writes[index]
        agent.seen[at] = index
        self._acquire(agent, write, order, scope)
        assert (write.at, len(write.data)) == (at, count) or write.agent is self._initial
        return write.data[at - write.at : at - write.at + count]

    def _choice(self, agent: Agent, byte: int, writes: list[Write]) -> int:
        """Returns the index of a write that a weak read may return."""
        floor = self._floor(agent, byte, writes)
        if self._strict:
            values = {each.data[byte - each.at] for each in writes[floor:]}
            if len(values) > 1:
                names = ", ".join(each.agent.key for each in writes[floor:])
                raise Race(f"{agent.key} reads {self.name(byte)}; written by {names}")
        stale = self._chance.random() < self._staleness
        return floor if stale else len(writes) - 1

    def _floor(self, agent: Agent, byte: int, writes: list[Write]) -> int:
        """Returns the index of the oldest write that the agent may read."""
        floor = agent.seen.get(byte, 0)
        for index in range(len(writes) - 1, floor, -1):
            if writes[index].number <= agent.clock.get(writes[index].agent.key, 0):
                return index
        return floor

    def _acquire(self, agent: Agent, write: Write, order: Order, scope: Scope) -> None:
        distance = agent.distance(write.agent)
        if order == Order.weak or distance <= scope:
            gains = agent.clock if order == Order.acquire else agent.acquirable[distance]
            add(gains, write.clocks[distance])

    def store(
        self,
        agent: Agent,
        at: int,
        data: bytes,
        order: Order = Order.weak,
        scope: Scope = Scope.sys,
    ) -> Write:
        number = agent.clock.get(agent.key, 0) + 1
        agent.clock[agent.key] = number
        write = Write(agent, number, at, data, by_scope())
        for byte in range(at, at + len(data)):
            self._writes(agent, byte).append(write)
        attached = [dict(agent.clock)] * 3 if order == Order.release else agent.released
        for distance in Scope:
            if order == Order.weak or distance <= scope:
                write.clocks[distance] = attached[distance]
        return write

    def add(self, agent: Agent, at: int, count: int, amount: int) -> int:
        """A relaxed atomic addition in the scope of a GPU; returns the value before."""
        write = self._writes(agent, at)[-1]
        self._acquire(agent, write, Order.relaxed, Scope.gpu)
        first = at - write.at
        before = int.from_bytes(write.data[first : first + count], "little")
        after = (before + amount) % (1 << (8 * count))
        made = self.store(agent, at, after.to_bytes(count, "little"), Order.relaxed, Scope.gpu)
        # An addition passes on the clock of the write that the addition read.
        made.clocks = [dict(clock) for clock in made.clocks]
        for mine, other in zip(made.clocks, write.clocks, strict=True):
            add(mine, other)
        return before

    # ---- order ----

    def fence(self, agent: Agent, scope: Scope) -> None:
        for distance in Scope:
            if distance <= scope:
                add(agent.clock, agent.acquirable[distance])
        for distance in Scope:
            if distance <= scope:
                agent.released[distance] = dict(agent.clock)

    def meet(self, agents: Iterable[Agent]) -> None:
        """A barrier of threads, or the boundary between two kernels of a stream."""
        agents = list(agents)
        whole: Clock = {}
        acquirable = by_scope()
        for agent in agents:
            add(whole, agent.clock)
            for distance in Scope:
                add(acquirable[distance], agent.acquirable[distance])
        for agent in agents:
            agent.clock = dict(whole)
            agent.acquirable = [dict(clock) for clock in acquirable]
