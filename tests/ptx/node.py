"""Ranks of a node: memory, streams of launches, and a model of each rank's proxy.

The layouts are those of `csrc/device`; the sizes of the kernels' parameters confirm them. The model
of the proxy does the reads and writes of `Server::serve()`, in the same order, on a thread of the
host. The rails are left out: the proxy knows the data of all other nodes.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ptx.machine import POISON, Did, Launch, Machine, Program, Steps, Thread
from ptx.memory import Agent, Order

RING = 2
MOST_LOCAL_PEERS = 16
ENTRY_BYTES = 1024
RESULT_OFFSET = 512
ABORTED = 7  # any code but 0

MAILBOX_NAMES = ("posted", "arrived", "abort", "entered", "left", "lost")
MAILBOX = {128 * index: name for index, name in enumerate(MAILBOX_NAMES)}
COMMANDS, COMMAND_BYTES = 768, 16
MAILBOX_BYTES = 896
POSTED, ARRIVED, ABORT, ENTERED, LEFT, LOST = MAILBOX
INBOX_NAMES = ("input_ready", "inputs_read", "result_ready", "results_read")
INBOX = {
    128 * (MOST_LOCAL_PEERS * group + rank): name
    for group, name in enumerate(INBOX_NAMES)
    for rank in range(MOST_LOCAL_PEERS)
}
INBOX_LOST, INBOX_BYTES = 8192, 8320
INBOX[INBOX_LOST] = "lost"
STATE_BYTES = 12


class Wrong(Exception):
    """A result, or the input of a posted collective, has wrong bytes."""


@dataclass(frozen=True)
class Plan:
    """The proxy's work: the expected bytes of an entry, and the bytes to write, by offset."""

    reads: tuple[int, bytes]
    writes: tuple[int, bytes]


@dataclass(frozen=True)
class Failure:
    """The proxy carries `served` collectives, waits, and gives up.

    `silent` plants a bug: no abort word.
    """

    served: int
    waits: int
    silent: bool = False


HostWork = Callable[[Agent], None]
"""Done by the host once the work before has ended."""


@dataclass
class Rank:
    machine: Machine
    programs: Callable[[str], Program]
    number: int
    grid: tuple[int, int] = (2, 2)  # blocks of a kernel, threads of a block
    may_fail: bool = False
    begin: int = 0  # number of the last collective and of the last exchange before the program
    mailbox: int = 0
    state: int = 0
    staging: int = 0
    inbox: int = 0
    memory: int = 0  # entries that local peers read
    plans: list[Plan] = field(default_factory=list)
    work: list[Launch | HostWork] = field(default_factory=list)  # of the stream
    targets: list[tuple[int, bytes]] = field(default_factory=list)  # address, expected bytes
    failed: bool = False  # the proxy; the host reads this under the proxy's mutex
    ended: bool = False  # the stream

    def __post_init__(self) -> None:
        region = self.machine.memory.region
        begun = dict.fromkeys((POSTED, ARRIVED, ENTERED, LEFT), self.begin)
        self.mailbox = region("mailbox", words(MAILBOX_BYTES, begun), MAILBOX)
        self.state = region("state", words(STATE_BYTES, {0: self.begin, 4: self.begin}))
        self.staging = region("staging", bytes([POISON]) * (RING * ENTRY_BYTES))
        begun = {at: self.begin for at, name in INBOX.items() if name != "lost"}
        self.inbox = region("inbox", words(INBOX_BYTES, begun), INBOX)
        self.memory = region("entries", bytes([POISON]) * (RING * ENTRY_BYTES))

    def source(self, data: bytes) -> bytes:
        """Returns the address of new memory with these bytes, as an argument."""
        return pointer(self.machine.memory.region("source", data))

    def target(self, expected: bytes) -> bytes:
        """Returns the address of a new target, as an argument."""
        at = self.machine.memory.region("target", bytes([POISON]) * len(expected))
        self.targets.append((at, expected))
        return pointer(at)

    def plan(self, plan: Plan) -> bytes:
        self.plans.append(plan)
        return word(len(self.plans) - 1)

    def launch(self, kernel: str, *arguments: bytes, blocks: int | None = None) -> Launch:
        of_kernel, threads = self.grid
        program = self.programs(f"r2ccl_{kernel}")
        return Launch(program, arguments, blocks or of_kernel, threads)

    def check(self, target: int) -> HostWork:
        """Returns a check of a target, as a caller checks for errors before it uses a result.

        The proxy sets `failed` under a mutex before the abort word, so the host never misses it.
        """
        at, expected = self.targets[target]

        def check(host: Agent) -> None:
            lost = self.machine.memory.load(host, self.mailbox + LOST, 4, Order.acquire)
            if self.failed or lost != bytes(4):
                if not self.may_fail:
                    raise Wrong(f"{host.key} was told of a loss")
            elif self.machine.memory.load(host, at, len(expected)) != expected:
                raise Wrong(f"{host.key}: wrong result {target}")

        return check

    def free(self, host: Agent) -> None:
        """Another program uses the memory that local peers have read."""
        garbage = random.Random(self.number).randbytes(RING * ENTRY_BYTES)
        self.machine.memory.store(host, self.memory, garbage, Order.release)

    def stage_arguments(self) -> list[bytes]:
        """Mailbox, state and staging."""
        staging = struct.pack("<3Q", self.staging, ENTRY_BYTES, RESULT_OFFSET)
        return [pointer(self.mailbox), pointer(self.state), staging]


# ---- arguments of kernels ----


def words(count: int, values: dict[int, int]) -> bytes:
    """Returns `count` bytes: zeros, and words by offset."""
    made = bytearray(count)
    for at, value in values.items():
        made[at : at + 4] = word(value)
    return bytes(made)


def pointer(address: int) -> bytes:
    return struct.pack("<Q", address)


def word(value: int) -> bytes:
    return struct.pack("<I", value)


def flag(value: bool) -> bytes:
    return bytes([value])


def rows(bytes_of_row: int, *, offset: int = 0, first: int = 0) -> bytes:
    """A single row."""
    return struct.pack("<5Q", 1, bytes_of_row, 0, offset, first)


def size(value: int) -> bytes:
    return struct.pack("<Q", value)


def reduction(operands: int, dtype: int, op: int, pitch: int) -> bytes:
    return struct.pack("<IBBxxQ", operands, dtype, op, pitch)


def exchange(own: Rank, ranks: Sequence[Rank]) -> bytes:
    def padded(addresses: Iterable[int]) -> list[int]:
        return [*addresses, *[0] * (MOST_LOCAL_PEERS - len(ranks))]

    return struct.pack(
        "<5Q2I34Q",
        *(own.mailbox, own.state, own.staging, ENTRY_BYTES, RESULT_OFFSET),
        *(len(ranks), own.number),
        *padded(rank.inbox for rank in ranks),
        *padded(rank.memory for rank in ranks),
        *(ENTRY_BYTES, RESULT_OFFSET),
    )


# ---- agents of the host ----


def reached(counter: int, wanted: int) -> bool:
    return (counter - wanted) % (1 << 32) < 1 << 31


def stream(rank: Rank) -> None:
    """Starts the stream of a rank: each kernel begins after the end of the kernel before."""
    machine, host = rank.machine, Agent(f"stream of rank {rank.number}")
    following = iter(rank.work)

    def advance(threads: list[Thread]) -> None:
        machine.memory.meet([host, *threads])
        for each in following:
            if isinstance(each, Launch):
                return machine.launch(each, rank.number, host.clock, advance)
            each(host)
        rank.ended = True

    advance([])


def proxy(rank: Rank, failure: Failure | None) -> None:
    """Adds the proxy of a rank."""
    memory, mailbox = rank.machine.memory, rank.mailbox
    host = Agent(f"proxy of rank {rank.number}")

    def read(offset: int, order: Order) -> int:
        return int.from_bytes(memory.load(host, mailbox + offset, 4, order), "little")

    def give_up() -> None:
        rank.failed = True
        if failure is None or not failure.silent:
            memory.store(host, mailbox + ABORT, word(ABORTED), Order.release)

    def serve(sequence: int) -> Steps:
        at = mailbox + COMMANDS + sequence % RING * COMMAND_BYTES
        found, number = struct.unpack("<2I", memory.load(host, at, 8))
        if found != sequence:
            if read(LOST, Order.acquire):
                give_up()
                return
            raise Wrong(f"{host.key}: {sequence} was posted, with the command of {found}")
        plan = rank.plans[number]
        entry = rank.staging + sequence % RING * ENTRY_BYTES
        offset, expected = plan.reads
        for half in halves(expected):
            yield Did.work
            got = memory.load(host, entry + offset + half.start, len(half))
            if got != expected[half.start : half.stop]:
                raise Wrong(f"{host.key}: wrong input of collective {sequence}")
        offset, result = plan.writes
        for half in halves(result):
            memory.store(host, entry + offset + half.start, result[half.start : half.stop])
            yield Did.work
        memory.store(host, mailbox + ARRIVED, word(sequence), Order.release)

    def steps() -> Steps:
        served = 0
        while not rank.ended and not rank.failed:
            sequence = (rank.begin + served + 1) % (1 << 32)
            if failure is not None and served == failure.served:
                for _ in range(failure.waits):
                    yield Did.wait
                give_up()
            elif reached(read(POSTED, Order.acquire), sequence):
                yield from serve(sequence)
                served += 1
                yield Did.work
            else:
                yield Did.wait

    rank.machine.add(host, steps())


def halves(data: bytes) -> tuple[range, range]:
    middle = len(data) // 2
    return range(middle), range(middle, len(data))
