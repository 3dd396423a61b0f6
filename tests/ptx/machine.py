"""Runs grids of PTX kernels beside models of hosts, in an order chosen by a seed."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ptx.arithmetic import SPECIAL, Segment, Translator, mask, names, segment
from ptx.memory import Agent, Clock, Memory, Order, Scope
from ptx.text import Instruction, Kernel

STEPS = 200_000
"""Steps of a run; a run beyond this number hangs."""
SLEEP = 100
"""Longest time until an agent looks again. The fastest steps take 1 at most."""
LONGEST = 3
"""Logarithm of the longest pause of an agent."""
POISON = 0xA5


class Did(Enum):
    """What an agent did in a step."""

    work = 1
    order = 2  # an access or fence that orders others; a pause afterwards shows most
    wait = 3  # found nothing to do, or sleeps


class Hang(Exception):
    """Agents did not end."""


Steps = Iterator[Did]
Action = Callable[["Thread"], Did]
ORDERS = {"relaxed": Order.relaxed, "acquire": Order.acquire, "release": Order.release}


@dataclass(frozen=True)
class Access:
    """A load or store that other threads see."""

    shared: bool
    order: Order
    scope: Scope
    step: int  # bytes of an element
    negative: bool  # a load extends the sign

    @staticmethod
    def of(instruction: Instruction) -> Access:
        modes = list(instruction.opcode[1:-1])
        name = instruction.opcode[-1]
        order, scope = Order.weak, Scope.sys
        if modes and modes[0] in ORDERS:
            order, scope = ORDERS[modes[0]], Scope[modes[1]]
            modes = modes[2:]
        shared = modes[:1] == ["shared"]
        if modes[:1] in (["shared"], ["global"]):
            modes = modes[1:]
        if modes not in ([], ["v2"], ["v4"]):
            raise instruction.error()
        return Access(shared, order, scope, int(name[1:]) // 8, name[0] == "s")


class Program:
    """A kernel, translated when a thread first comes to an instruction."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.words: dict[tuple[int, int], str] = {}  # by line and address of a strong access
        self.segments: dict[int, tuple[Segment | None, int]] = {}
        self._actions: dict[int, Action] = {}
        self._translator = Translator(kernel)

    def without(self, numbers: Sequence[int]) -> Program:
        """Returns the kernel without the order given by the instructions of some lines.

        A fence or barrier has no effect, and an acquire or release is relaxed.
        """
        made = Program(self.kernel)
        made.segments = self.segments  # have no fence
        made._actions = dict(self._actions)
        for index, each in enumerate(self.kernel.instructions):
            if each.number in numbers:
                made._actions[index] = weakened(made, each)
        return made

    def note(self, instruction: Instruction, at: int, memory: Memory) -> None:
        """Keeps the name of the word that a strong access uses."""
        key = (instruction.number, at)
        if key not in self.words:
            self.words[key] = memory.name(at)

    def action(self, index: int) -> Action:
        if index not in self._actions:
            instruction = self.kernel.instructions[index]
            self._actions[index] = action_of(self, instruction)
        return self._actions[index]

    def segment(self, index: int) -> tuple[Segment | None, int]:
        """Returns the instructions from `index` on that only this thread sees, and their end."""
        if index not in self.segments:
            end = index
            instructions = self.kernel.instructions
            while is_private(instructions[end]):
                end += 1
            body = instructions[index:end]
            self.segments[index] = (segment(self.kernel, body) if body else None, end)
        return self.segments[index]

    def address(self, operand: str) -> Callable[[dict[str, Any]], int]:
        source = f"lambda r: {self._translator.address(operand)}"
        made: Callable[[dict[str, Any]], int] = eval(source)
        return made

    def check(self) -> None:
        """Raises UnknownInstruction for the first instruction without a rule."""
        for each in self.kernel.instructions:
            if is_private(each):
                self._translator.statement(each)
            else:
                action_of(self, each)


VISIBLE = ("atom", "bar", "bra", "membar", "fence", "nanosleep", "ret")


def is_private(instruction: Instruction) -> bool:
    if instruction.family in ("ld", "st"):
        return instruction.opcode[1] in ("param", "local")
    return instruction.family not in VISIBLE


@dataclass
class Grid:
    running: int  # threads
    at_end: Callable[[], None]


class Block:
    def __init__(self, grid: Grid, threads: int, shared: int) -> None:
        self.grid = grid
        self.shared = shared  # address
        self.running = threads
        self.waiting: list[Thread] = []

    def open(self, memory: Memory) -> None:
        """Opens the barrier once all running threads wait."""
        if self.waiting and len(self.waiting) == self.running:
            memory.meet(self.waiting)
            self.waiting = []

    def leave(self, memory: Memory) -> None:
        """A thread ends."""
        self.running -= 1
        self.open(memory)
        self.grid.running -= 1
        if self.grid.running == 0:
            self.grid.at_end()


class Thread(Agent):
    """A thread of a grid."""

    def __init__(
        self,
        key: str,
        program: Program,
        memory: Memory,
        block: Block,
        device: int,
        parameters: bytes,
    ) -> None:
        super().__init__(key, device, block)
        self.program = program
        self.memory = memory
        self.parameters = parameters
        local = program.kernel.local.values()
        self.local = bytearray([POISON]) * sum(each.size for each in local)
        self.registers: dict[str, Any] = {}
        self.next = 0
        self.ended = False

    def steps(self) -> Steps:
        """Yields after each instruction that other threads see."""
        program, registers = self.program, self.registers
        while not self.ended:
            run, self.next = program.segment(self.next)
            if run is not None:
                run(registers, self.parameters, self.local)
            instruction = program.kernel.instructions[self.next]
            self.next += 1
            if instruction.guard and registers[instruction.guard] == instruction.negated:
                continue
            did = program.action(self.next - 1)(self)
            if instruction.family == "bra":
                continue
            yield did
            while self in self.block.waiting:
                yield Did.wait


# ---- instructions that other threads see ----


def action_of(program: Program, instruction: Instruction) -> Action:
    try:
        return _action_of(program, instruction)
    except (IndexError, KeyError, ValueError) as error:
        raise instruction.error() from error


def _action_of(program: Program, instruction: Instruction) -> Action:
    family, modes, operands = instruction.family, instruction.opcode[1:], instruction.operands
    if family == "bra":
        target = program.kernel.labels[operands[0]]
        return lambda thread: _jump(thread, target)
    if family == "ret":
        return _end
    if family == "nanosleep":
        return lambda thread: Did.wait
    if family == "bar" and modes == ("sync",) and operands == ("0",):
        return _arrive
    if family == "membar" and modes in (("sys",), ("gl",), ("cta",)):
        scope = {"sys": Scope.sys, "gl": Scope.gpu, "cta": Scope.cta}[modes[0]]
        return lambda thread: _fence(thread, scope)
    if family == "fence" and modes[0] in ("sc", "acq_rel"):
        return lambda thread: _fence(thread, Scope[modes[1]])
    if family == "atom" and modes == ("global", "add", "u32"):
        return _addition(program, instruction)
    if family in ("ld", "st"):
        access = Access.of(instruction)
        return (_load if family == "ld" else _store)(program, instruction, access)
    raise instruction.error()


def weakened(program: Program, instruction: Instruction) -> Action:
    if instruction.family in ("bar", "membar", "fence"):
        return lambda thread: Did.order
    old = Access.of(instruction)
    assert old.order in (Order.acquire, Order.release), instruction.text
    access = Access(old.shared, Order.relaxed, old.scope, old.step, old.negative)
    return (_load if instruction.family == "ld" else _store)(program, instruction, access)


def _jump(thread: Thread, target: int) -> Did:
    thread.next = target
    return Did.work


def _end(thread: Thread) -> Did:
    thread.ended = True
    thread.block.leave(thread.memory)
    return Did.work


def _arrive(thread: Thread) -> Did:
    thread.block.waiting.append(thread)
    thread.block.open(thread.memory)
    return Did.work


def _fence(thread: Thread, scope: Scope) -> Did:
    thread.memory.fence(thread, scope)
    return Did.order


def _load(program: Program, instruction: Instruction, access: Access) -> Action:
    registers = names(instruction.operands[0])
    address = program.address(instruction.operands[1])
    step, masks = access.step, [mask(program.kernel.width(each)) for each in registers]

    def load(thread: Thread) -> Did:
        at = address(thread.registers) + (thread.block.shared if access.shared else 0)
        count = step * len(registers)
        data = thread.memory.load(thread, at, count, access.order, access.scope)
        for i, register in enumerate(registers):
            part = data[i * step : (i + 1) * step]
            value = int.from_bytes(part, "little", signed=access.negative)
            thread.registers[register] = value & masks[i]
        if access.order == Order.weak:
            return Did.work
        program.note(instruction, at, thread.memory)
        return Did.order

    return load


def _store(program: Program, instruction: Instruction, access: Access) -> Action:
    address = program.address(instruction.operands[0])
    bits = 8 * access.step
    translator = Translator(program.kernel)
    values = [translator.value(each, bits) for each in names(instruction.operands[1])]
    joined = ", ".join(f"{each} & {mask(bits)}" for each in values)
    stored: Callable[[dict[str, Any]], tuple[int, ...]] = eval(f"lambda r: ({joined},)")

    def store(thread: Thread) -> Did:
        at = address(thread.registers) + (thread.block.shared if access.shared else 0)
        parts = (each.to_bytes(access.step, "little") for each in stored(thread.registers))
        thread.memory.store(thread, at, b"".join(parts), access.order, access.scope)
        if access.order == Order.weak:
            return Did.work
        program.note(instruction, at, thread.memory)
        return Did.order

    return store


def _addition(program: Program, instruction: Instruction) -> Action:
    target, place, amount = instruction.operands
    address = program.address(place)

    def add(thread: Thread) -> Did:
        at, by = address(thread.registers), thread.registers[amount]
        thread.registers[target] = thread.memory.add(thread, at, 4, by)
        return Did.order

    return add


# ---- grids and their order ----


@dataclass(frozen=True)
class Launch:
    program: Program
    arguments: Sequence[bytes]
    blocks: int = 2
    threads: int = 2


AtEnd = Callable[[list[Thread]], None]


class Machine:
    """All agents, in an order chosen by a seed.

    Steps take random times: some agents and some GPUs are much slower than others, and each agent
    pauses now and then.
    """

    def __init__(self, seed: int, *, strict: bool) -> None:
        self._chance = random.Random(seed)
        self.memory = Memory(self._chance, self._chance.choice((0.1, 0.5)), strict=strict)
        self._speeds: dict[int, int] = {}  # of a GPU: mean time of a step
        self._pauses = {Did.work: 0.01, Did.order: self._chance.choice((0.02, 0.2))}
        self._running: list[tuple[float, int, int, Agent, Steps]] = []  # a heap, by time
        self._added = 0
        self._now = 0.0

    def add(self, agent: Agent, steps: Steps) -> None:
        mean = self._chance.choice((1, 1, 5, 40))
        if agent.device is not None:
            mean *= self._speeds.setdefault(agent.device, self._chance.choice((1, 1, 10)))
        self._added += 1  # breaks ties
        begin = self._now + self._chance.random() * mean
        heapq.heappush(self._running, (begin, self._added, mean, agent, steps))

    def launch(self, launch: Launch, device: int, clock: Clock, at_end: AtEnd) -> None:
        """Adds the threads of a grid, which begin with `clock`."""
        kernel = launch.program.kernel
        parameters = bytearray()
        for (name, each), argument in zip(kernel.parameters.items(), launch.arguments, strict=True):
            assert len(argument) == each.size, f"{name} has {each.size} bytes"
            parameters += bytes(each.at - len(parameters)) + argument
        shared = max((each.at + each.size for each in kernel.shared.values()), default=0)
        threads: list[Thread] = []
        grid = Grid(launch.blocks * launch.threads, lambda: at_end(threads))
        for number in range(launch.blocks):
            region = self.memory.region("shared", bytes([POISON]) * shared)
            block = Block(grid, launch.threads, region)
            for index in range(launch.threads):
                key = f"GPU {device}, block {number}, thread {index}"
                thread = Thread(key, launch.program, self.memory, block, device, bytes(parameters))
                thread.clock = dict(clock)
                position = (index, launch.threads, number, launch.blocks)
                thread.registers.update(zip(SPECIAL, position, strict=True))
                threads.append(thread)
                self.add(thread, thread.steps())

    def run(self) -> None:
        """Runs until all agents have ended."""
        for _ in range(STEPS):
            if not self._running:
                return
            self._now, number, mean, agent, steps = heapq.heappop(self._running)
            did = next(steps, None)
            if did is None:
                continue
            duration = self._chance.random() * mean
            if did is Did.wait:
                duration += self._chance.random() * SLEEP
            elif self._chance.random() < self._pauses[did]:
                duration += 10 ** (self._chance.random() * LONGEST)
            entry = (self._now + duration, number, mean, agent, steps)
            heapq.heappush(self._running, entry)
        left = ", ".join(sorted(agent.key for *_, agent, _ in self._running))
        raise Hang(f"{STEPS} steps, and still running: {left}")
