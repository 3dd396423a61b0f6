"""Programs of collectives on the ranks of a node, and their right results."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ptx.machine import Did, Launch, Machine, Program, Steps
from ptx.memory import Agent, Order, add
from ptx.node import (
    INBOX_LOST,
    RESULT_OFFSET,
    Failure,
    HostWork,
    Plan,
    Rank,
    exchange,
    flag,
    pointer,
    proxy,
    reduction,
    rows,
    size,
    stream,
    word,
)

ELEMENTS = 15  # of a shard: three vectors of 16 bytes, and a rest
BYTES = 4 * ELEMENTS
I32, SUM = 6, 0
NOTHING = reduction(0, 0, 0, 0)

Receive = Callable[[int], list[Launch]]
"""Returns the launches that receive a collective, by lag."""


@dataclass(frozen=True)
class Call:
    posts: list[Launch]
    receive: Receive
    has_result: bool = True
    alone: bool = False  # no other collective is posted before this one is received


def data(*key: int, elements: int = ELEMENTS) -> bytes:
    """Returns elements that differ from the elements of all other keys."""
    return random.Random(repr(key)).randbytes(4 * elements)


def total(parts: Sequence[bytes]) -> bytes:
    columns = zip(*(struct.unpack(f"<{len(part) // 4}I", part) for part in parts), strict=True)
    return b"".join(word(sum(column) % (1 << 32)) for column in columns)


# ---- without local peers ----


def flat(rank: Rank, _: Sequence[Rank], call: int) -> Call:
    """The result is a sum that the host has computed."""
    mine, result = data(call, 0), data(call, 1)
    plan = rank.plan(Plan((0, mine), (RESULT_OFFSET, result)))
    begin = rank.stage_arguments()
    source, target = rank.source(mine), rank.target(result)
    return Call(
        [rank.launch("stage", *begin, source, rows(BYTES), plan, flag(True))],
        lambda lag: [rank.launch("deliver", *begin, target, rows(BYTES), word(lag))],
    )


def reduced(rank: Rank, _: Sequence[Rank], call: int) -> Call:
    """Two kernels stage the input, and the kernel that receives computes the sum."""
    mine, other = data(call, 0), data(call, 1)
    plan = rank.plan(Plan((0, mine), (RESULT_OFFSET, mine + other)))
    begin = rank.stage_arguments()
    source, target = rank.source(mine), rank.target(total([mine, other]))
    half = BYTES // 2
    rest = rows(BYTES - half, offset=half, first=half)
    about = (size(BYTES), reduction(2, I32, SUM, BYTES))
    return Call(
        [
            rank.launch("stage", *begin, source, rows(half), plan, flag(False)),
            rank.launch("stage", *begin, source, rest, plan, flag(True)),
        ],
        lambda lag: [rank.launch("reduce_and_deliver", *begin, target, *about, word(lag))],
    )


def reposted(rank: Rank, _: Sequence[Rank], call: int) -> Call:
    """A kernel computes the sum and posts it as the next collective."""
    mine, other, last = data(call, 0), data(call, 1), data(call, 2)
    own = total([mine, other])
    first = rank.plan(Plan((0, mine), (RESULT_OFFSET, mine + other)))
    second = rank.plan(Plan((RESULT_OFFSET, own), (RESULT_OFFSET + BYTES, last)))
    begin = rank.stage_arguments()
    source, target = rank.source(mine), rank.target(own + last)
    about = (size(0), size(BYTES), size(0), reduction(2, I32, SUM, BYTES), second)
    return Call(
        [
            rank.launch("stage", *begin, source, rows(BYTES), first, flag(True)),
            rank.launch("reduce_and_post", *begin, *about),
        ],
        lambda lag: [rank.launch("deliver", *begin, target, rows(2 * BYTES), word(lag))],
        alone=True,
    )


def sent(rank: Rank, _: Sequence[Rank], call: int) -> Call:
    """A collective without result."""
    mine = data(call, 0)
    plan = rank.plan(Plan((0, mine), (RESULT_OFFSET, b"")))
    arguments = (*rank.stage_arguments(), rank.source(mine), rows(BYTES), plan, flag(True))
    return Call([rank.launch("stage", *arguments)], lambda lag: [], has_result=False, alone=True)


# ---- with the exchange inside the node ----


def inputs(ranks: Sequence[Rank], call: int) -> list[bytes]:
    return [data(call, each.number, elements=ELEMENTS * len(ranks)) for each in ranks]


def local_sum(ranks: Sequence[Rank], number: int, call: int) -> bytes:
    """Returns the sum of a rank's shard over the ranks of the node."""
    shard = slice(BYTES * number, BYTES * (number + 1))
    return total([each[shard] for each in inputs(ranks, call)])


def result(ranks: Sequence[Rank], number: int, call: int) -> bytes:
    """Returns the sum of a rank's shard over all nodes."""
    return total([local_sum(ranks, number, call), data(call, -1 - number)])


def published(
    rank: Rank, ranks: Sequence[Rank], call: int, plan: bytes | None = None
) -> list[Launch]:
    """Returns launches that reduce the own shard, and post it for a sum over all nodes."""
    if plan is None:
        own = local_sum(ranks, rank.number, call)
        plan = rank.plan(Plan((0, own), (RESULT_OFFSET, result(ranks, rank.number, call))))
    about, source = exchange(rank, ranks), rank.source(inputs(ranks, call)[rank.number])
    shard = rows(BYTES, first=BYTES * rank.number)
    kind = (bytes([I32]), bytes([SUM]), plan, flag(True))
    everything = rows(BYTES * len(ranks))
    return [
        rank.launch("publish_input", about, source, everything, flag(True)),
        rank.launch("local_reduce_scatter", about, shard, *kind),
    ]


def gathered(rank: Rank, ranks: Sequence[Rank], parts: Sequence[bytes]) -> Receive:
    about, target = exchange(rank, ranks), rank.target(b"".join(parts))
    count = len(parts[0])
    outputs = b"".join(rows(count, first=count * number) for number in range(len(ranks)))
    outputs += bytes(len(rows(0)) * 16 - len(outputs))
    return lambda lag: [
        rank.launch("publish_result", about, size(count), NOTHING, word(lag)),
        rank.launch("local_all_gather", about, outputs, target, word(lag), flag(True)),
    ]


def all_reduce(rank: Rank, ranks: Sequence[Rank], call: int) -> Call:
    parts = [result(ranks, each.number, call) for each in ranks]
    return Call(published(rank, ranks, call), gathered(rank, ranks, parts))


def reduce_scatter(rank: Rank, ranks: Sequence[Rank], call: int) -> Call:
    target = rank.target(result(ranks, rank.number, call))
    about = (exchange(rank, ranks), target, size(BYTES), NOTHING)
    return Call(
        published(rank, ranks, call),
        lambda lag: [rank.launch("deliver_shard", *about, word(lag))],
    )


def all_gather(rank: Rank, ranks: Sequence[Rank], call: int) -> Call:
    parts = [data(call, each.number) + data(call, -1 - each.number) for each in ranks]
    own, other = parts[rank.number][:BYTES], parts[rank.number][BYTES:]
    plan = rank.plan(Plan((RESULT_OFFSET, own), (RESULT_OFFSET + BYTES, other)))
    about = (exchange(rank, ranks), rank.source(own), size(BYTES), size(0), plan)
    return Call([rank.launch("stage_in_place", *about)], gathered(rank, ranks, parts))


def all_reduce_by_gpu(rank: Rank, ranks: Sequence[Rank], call: int) -> Call:
    """GPUs reduce the data of all nodes, and post the sums as another collective."""
    own, other = local_sum(ranks, rank.number, call), data(call, -1 - rank.number)
    reduced_shard = result(ranks, rank.number, call)
    first = rank.plan(Plan((0, own), (RESULT_OFFSET, own + other)))
    second = rank.plan(Plan((RESULT_OFFSET, reduced_shard), (RESULT_OFFSET, b"")))
    about = (pointer(rank.inbox), size(BYTES), size(0), reduction(2, I32, SUM, BYTES), second)
    posts = [
        *published(rank, ranks, call, first),
        rank.launch("reduce_and_post", *rank.stage_arguments(), *about),
    ]
    parts = [result(ranks, each.number, call) for each in ranks]
    return Call(posts, gathered(rank, ranks, parts), alone=True)


Collective = Callable[[Rank, Sequence[Rank], int], Call]
FLAT: dict[str, tuple[Collective, ...]] = {
    "flat": (sent, sent, flat, flat, flat),
    "reduced": (reduced, reduced, reduced),
    "reposted": (reposted, reposted),
}
"""Programs without local peers. Each has more collectives than the ring has entries."""
IN_NODE: dict[str, tuple[Collective, ...]] = {
    "all-reduce after sends": (sent, sent, all_reduce),
    "all-gather after sends": (sent, sent, all_gather),
    "mixed": (reduce_scatter, all_gather, reduce_scatter, all_gather),
    "all-reduce by GPUs": (all_reduce_by_gpu, all_reduce_by_gpu),
    "all-reduce": (all_reduce, all_reduce, all_reduce),
    "reduce-scatter": (reduce_scatter, reduce_scatter, reduce_scatter),
    "all-gather": (all_gather, all_gather, all_gather),
}


def enqueue(rank: Rank, ranks: Sequence[Rank], program: Sequence[Collective]) -> None:
    """Posts each collective before the receipt of the last one, as calls in slices do."""
    waiting: Callable[[int], None] | None = None
    for number, collective in enumerate(program):
        call = collective(rank, ranks, number)
        checks = [rank.check(len(rank.targets) - 1)] if call.has_result else []

        def receive(lag: int, call: Call = call, checks: Sequence[HostWork] = checks) -> None:
            rank.work += [*call.receive(lag), *checks]

        if waiting is not None and call.alone:
            waiting(0)
            waiting = None
        rank.work += call.posts
        if waiting is not None:
            waiting(1)
        waiting = receive
        if call.alone:
            waiting(0)
            waiting = None
    if waiting is not None:
        waiting(0)
    if len(ranks) > 1:
        rank.work.append(rank.launch("quiesce", exchange(rank, ranks), blocks=1))
        rank.work.append(rank.free)


def run(
    programs: Callable[[str], Program],
    program: Sequence[Collective],
    seed: int,
    *,
    ranks: int = 1,
    grid: tuple[int, int] = (2, 2),
    failure: Failure | None = None,
) -> None:
    """Runs a program of each rank. `failure`: of the proxy of rank 0.

    Raises Wrong if a target has wrong bytes and the rank's host has seen no error. Without a
    failure, a read with more than one possible value is an error, too.
    """
    machine = Machine(seed, strict=failure is None)
    begin = random.Random(seed).choice((0, (1 << 32) - 2))  # numbers wrap in half of the runs
    may_fail = failure is not None
    node = [Rank(machine, programs, number, grid, may_fail, begin) for number in range(ranks)]
    for rank in node:
        enqueue(rank, node, program)
        proxy(rank, failure if rank.number == 0 else None)
        stream(rank)
    machine.run()


def run_beside_closing_peer(programs: Callable[[str], Program], seed: int) -> None:
    """Gathers the result of a peer that ends meanwhile, and whose memory is used again.

    Raises Wrong if the target has wrong bytes and the host has seen no error.
    """
    machine = Machine(seed, strict=False)
    node = [Rank(machine, programs, number, (4, 1), may_fail=True) for number in range(2)]
    own, peer = node
    host, other = Agent("host"), Agent("host of the peer")
    parts = [data(seed, number, elements=12) for number in range(2)]  # the last block reads nothing
    for rank, part in zip(node, parts, strict=True):
        machine.memory.store(host, rank.memory + RESULT_OFFSET, part)
    own.work += [
        lambda stream: add(stream.clock, host.clock),
        gathered(own, node, parts)(0)[-1],
        own.check(0),
    ]

    def closes() -> Steps:
        for _ in range(random.Random(seed).randrange(40)):
            yield Did.work
        machine.memory.store(other, own.inbox + INBOX_LOST, word(1), Order.release)
        yield Did.work
        peer.free(other)

    machine.add(other, closes())
    stream(own)
    machine.run()
