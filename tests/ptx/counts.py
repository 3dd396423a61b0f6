"""Counts of system-scope loads, stores and fences in the shipped PTX, of the busiest thread.

Each of these operations concerns memory outside the GPU's caches: memory of the host behind PCIe,
or memory of another GPU. Acquires, releases and fences of a thread follow each other, so the count
of the busiest thread is the number of operations in series. Loads and stores of data are left out.

The run leaves nothing to chance: no write is read late, and every poll succeeds at once.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

from ptx.calls import Collective, enqueue
from ptx.machine import (
    Access,
    Action,
    Did,
    Hang,
    Launch,
    Machine,
    Program,
    Steps,
    Thread,
    is_private,
)
from ptx.memory import Agent, Memory, Order, Scope
from ptx.node import HostWork, Rank, proxy
from ptx.text import Instruction, Kernel

HOST = "mailbox"
"""The region in memory of the host that strong accesses of kernels use."""


@dataclass(frozen=True)
class Counts:
    """Operations of a thread."""

    loads: int = 0
    host_loads: int = 0  # of memory of the host
    stores: int = 0
    host_stores: int = 0  # to memory of the host
    fences: int = 0

    @property
    def in_series(self) -> int:
        return self.loads + self.stores

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: Counts) -> Counts:
        return Counts(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


def kind_of(instruction: Instruction) -> str:
    """Returns `load`, `store` or `fence`; empty: another scope, or an access to data."""
    if instruction.family in ("membar", "fence"):
        return "fence" if instruction.opcode[-1] == "sys" else ""
    if instruction.family not in ("ld", "st") or is_private(instruction):
        return ""
    access = Access.of(instruction)
    if access.order == Order.weak or access.scope != Scope.sys:
        return ""
    return "load" if instruction.family == "ld" else "store"


def operation(kind: str, in_host: bool) -> Counts:
    host = int(in_host)
    if kind == "load":
        return Counts(loads=1, host_loads=host)
    return Counts(stores=1, host_stores=host) if kind == "store" else Counts(fences=1)


class CountedProgram(Program):
    """A kernel that counts the operations of each thread, by GPU, block and thread of the block."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self.counts: dict[tuple[int | None, int, int], Counts] = {}
        self._counted: dict[int, Action] = {}

    def action(self, index: int) -> Action:
        if index not in self._counted:
            self._counted[index] = self._count(index, super().action(index))
        return self._counted[index]

    def _count(self, index: int, act: Action) -> Action:
        instruction = self.kernel.instructions[index]
        kind = kind_of(instruction)
        if not kind:
            return act
        address: Callable[[dict[str, Any]], int] | None = None
        if kind != "fence":
            address = self.address(instruction.operands[kind == "load"])

        def counted(thread: Thread) -> Did:
            registers = thread.registers
            in_host = (
                address is not None
                and thread.memory.name(address(registers)).partition(".")[0] == HOST
            )
            key = (thread.device, registers["%ctaid.x"], registers["%tid.x"])
            self.counts[key] = self.counts.get(key, Counts()) + operation(kind, in_host)
            return act(thread)

        return counted

    def busiest(self, blocks: int) -> list[Counts]:
        """Returns the counts of the busiest thread of each block, over all GPUs."""
        found = [Counts()] * blocks
        for (_, block, _), counts in self.counts.items():
            found[block] = max(found[block], counts, key=lambda each: (each.in_series, each.fences))
        return found


class InOrder(Machine):
    """All agents take turns in a fixed order; each runs until it waits."""

    def __init__(self) -> None:
        super().__init__(0, strict=True)
        self.memory = Memory(random.Random(0), staleness=0, strict=True)
        self._agents: list[tuple[Agent, Steps]] = []

    def add(self, agent: Agent, steps: Steps) -> None:
        self._agents.append((agent, steps))

    def run(self) -> None:
        """Runs until all grids have ended and every proxy waits.

        Raises:
            Hang: a thread has polled without success, or waits at a barrier forever.
        """
        worked = True
        while worked:
            worked = False
            turn, self._agents = self._agents, []
            for agent, steps in turn:
                did = next(steps, None)
                while did is not None and did is not Did.wait:
                    worked = True
                    did = next(steps, None)
                if did is None:
                    continue
                if isinstance(agent, Thread) and agent not in agent.block.waiting:
                    raise Hang(f"{agent.key} has polled without success")
                self._agents.append((agent, steps))
        left = [agent.key for agent, _ in self._agents if isinstance(agent, Thread)]
        if left:
            raise Hang(f"still at a barrier: {', '.join(left)}")


@dataclass(frozen=True)
class Launched:
    """A kernel of a call, with the counts of each block."""

    kernel: str
    blocks: list[Counts]


def measure(
    programs: Callable[[str], CountedProgram], collective: Collective, ranks: int, blocks: int
) -> list[Launched]:
    """Returns the kernels of a call in their order, with `blocks` blocks of two threads.

    A kernel of all ranks ends before the next kernel begins, so every poll succeeds at once.
    """
    machine = InOrder()
    node = [Rank(machine, programs, number, (blocks, 2)) for number in range(ranks)]
    hosts = [Agent(f"stream of rank {rank.number}") for rank in node]
    for rank in node:
        enqueue(rank, node, (collective,))
        proxy(rank, None)
    found = []
    for works in zip(*(rank.work for rank in node), strict=True):
        launch = works[0]
        counted = programs(launch.program.kernel.name) if isinstance(launch, Launch) else None
        if counted is not None:
            counted.counts.clear()
        for rank, host, work in zip(node, hosts, works, strict=True):
            begin(machine, rank, host, work)
        machine.run()
        if counted is not None and isinstance(launch, Launch):
            found.append(Launched(counted.kernel.name, counted.busiest(launch.blocks)))
    return found


def begin(machine: Machine, rank: Rank, host: Agent, work: Launch | HostWork) -> None:
    """Launches a grid, or does a work of the host."""

    def at_end(threads: list[Thread]) -> None:
        machine.memory.meet([host, *threads])

    if isinstance(work, Launch):
        machine.launch(work, rank.number, host.clock, at_end)
    else:
        work(host)
