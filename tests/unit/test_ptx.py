"""The shipped PTX under many orders of threads and writes: results, aborts, and each fence.

`tests/ptx` has the interpreter, and a model of each rank's proxy.
"""

from __future__ import annotations

import ctypes
import math
import random
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache

import pytest
from ptx import calls, node
from ptx.machine import Hang, Launch, Machine, Program
from ptx.memory import Agent, Fault, Race
from ptx.text import Text, UnknownInstruction
from shipped_ptx import text

PROGRAMS = {**calls.FLAT, **calls.IN_NODE}
KERNELS = (
    "stage",
    "deliver",
    "publish_input",
    "local_reduce_scatter",
    "stage_in_place",
    "publish_result",
    "local_all_gather",
    "deliver_shard",
    "reduce_and_deliver",
    "reduce_and_post",
    "quiesce",
)
ERRORS = (node.Wrong, Hang, Fault, Race)
SEEDS = 6
ROUNDS = 100
"""Seeds until every acquire and release has run."""


@cache
def shipped(name: str) -> Program:
    return Program(text().kernel(name))


def ranks_of(program: str) -> int:
    return 1 if program in calls.FLAT else 2


def loss(seed: int) -> node.Failure:
    """Returns when a proxy gives up: early or late, at once or long after the last collective."""
    chance = random.Random(seed)
    return node.Failure(chance.choice((0, 0, 1, 2, 4)), chance.choice((5, 30, 150)))


Run = Callable[[int], None]
"""A run with a seed."""


def fails(runs: Sequence[Run], seeds: int) -> bool:
    for seed, run in enumerate(seeds * list(runs)):
        try:
            run(seed)
        except ERRORS:
            return True
    return False


# ---- results and aborts ----


@pytest.mark.parametrize("program", PROGRAMS)
def test_results_are_right_in_every_order(program: str) -> None:
    for seed in range(SEEDS):
        calls.run(shipped, PROGRAMS[program], seed, ranks=ranks_of(program))


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_loss_ends_every_thread_and_no_host_takes_a_wrong_result(program: str) -> None:
    for seed in range(SEEDS):
        calls.run(shipped, PROGRAMS[program], seed, ranks=ranks_of(program), failure=loss(seed))


@pytest.mark.parametrize("program", calls.IN_NODE)
@pytest.mark.parametrize("loses", [False, True])
def test_five_ranks(program: str, loses: bool) -> None:
    """The compiler unrolls loops over four ranks."""
    failure = loss(0) if loses else None
    calls.run(shipped, PROGRAMS[program], 1, ranks=5, grid=(2, 1), failure=failure)


def test_no_host_takes_a_result_of_memory_that_a_peer_has_freed() -> None:
    for seed in range(25 * SEEDS):
        calls.run_beside_closing_peer(shipped, seed)


def test_a_loss_that_nobody_announces_is_found() -> None:
    with pytest.raises(Hang, match="GPU 0, block 0, thread 0"):
        calls.run(shipped, PROGRAMS["flat"], 1, failure=node.Failure(1, 5, silent=True))


@pytest.mark.parametrize("kernel", ["publish_input", "publish_result"])
def test_a_block_that_hides_that_it_gave_up_is_found(kernel: str) -> None:
    """The planted bug: blocks report to `DeviceState::reports`, but never that they gave up."""
    lines = [line.replace(" 65537, 1,", " 1, 1,") for line in text().lines]
    hiding = Program(Text("\n".join(lines)).kernel(f"r2ccl_{kernel}"))

    def programs(name: str) -> Program:
        return hiding if name == hiding.kernel.name else shipped(name)

    def run(seed: int) -> None:
        program = PROGRAMS["all-reduce after sends"]
        calls.run(programs, program, seed, ranks=2, failure=loss(seed))

    assert fails([run], ROUNDS)


# ---- fences ----


NOTHING_ELSE = "the reader of this word reads nothing else that the writer has written before"
FENCED = "membar.sys of ends_step() comes before, and no write for the reader comes between"
BRANCH = "only writes follow, and a write waits for the branch on the loaded word"
NOTHING_SHARED = "no other thread uses what the kernel reads or writes before the kernel ends"
EVERYWHERE = KERNELS
SHARD = ("deliver_shard",)
REDUNDANT: dict[tuple[str, str], tuple[Sequence[str], str]] = {
    ("ld", "mailbox.abort"): (EVERYWHERE, NOTHING_ELSE),
    ("ld", "inbox.lost"): (EVERYWHERE, NOTHING_ELSE),
    ("st", "mailbox.entered"): (EVERYWHERE, NOTHING_ELSE),
    ("st", "mailbox.left"): (EVERYWHERE, NOTHING_ELSE),
    ("st", "mailbox.lost"): (EVERYWHERE, NOTHING_ELSE),
    ("st", "inbox.lost"): (EVERYWHERE, NOTHING_ELSE),
    ("st", "inbox.input_ready"): (EVERYWHERE, FENCED),
    ("st", "inbox.inputs_read"): (EVERYWHERE, FENCED),
    ("st", "inbox.result_ready"): (EVERYWHERE, FENCED),
    ("st", "inbox.results_read"): (EVERYWHERE, FENCED),
    ("ld", "inbox.inputs_read"): (EVERYWHERE, BRANCH),
    ("ld", "inbox.results_read"): (EVERYWHERE, BRANCH),
    ("bar", "2"): (SHARD, NOTHING_SHARED),
    ("membar", "1"): (SHARD, NOTHING_SHARED),
    ("membar", "2"): (SHARD, NOTHING_SHARED),
    ("ld", "mailbox.arrived"): (("stage", "stage_in_place", "local_reduce_scatter"), BRANCH),
}
"""Fences without effect, with kernels and reason."""

Fence = tuple[str, str]
"""Family and word of an acquire or release; family and number of a fence or barrier: ("bar", "2").

Barrier 1 comes before the work of a kernel, barrier 2 after. Fence 1 comes before the addition to
`DeviceState::reports`, fence 2 after.
"""


@cache
def users(kernel: str) -> tuple[str, ...]:
    """Returns the programs that launch a kernel."""
    found = []
    for name, program in PROGRAMS.items():
        machine = Machine(0, strict=True)
        ranks = [node.Rank(machine, shipped, i) for i in range(ranks_of(name))]
        calls.enqueue(ranks[0], ranks, program)
        launches = [each for each in ranks[0].work if isinstance(each, Launch)]
        if any(each.program is shipped(f"r2ccl_{kernel}") for each in launches):
            found.append(name)
    return tuple(found)


@cache
def fences(kernel: str) -> dict[Fence, list[int]]:
    """Returns the lines of each fence.

    The compiler copies acquires and releases of the source. Copies with the same word, or with the
    same register for the address, count as one.
    """
    program = shipped(f"r2ccl_{kernel}")
    found: dict[Fence, list[int]] = defaultdict(list)
    families: dict[int, str] = {}  # by line
    places: dict[int, str] = {}  # operand with the address, by line
    for each in program.kernel.instructions:
        if each.family in ("membar", "bar"):
            count = sum(family == each.family for family, _ in found)
            found[each.family, str(count + 1)] = [each.number]
        elif {"acquire", "release"} & set(each.opcode):
            families[each.number] = each.family
            places[each.number] = each.operands[each.family == "ld"]
    words: dict[str, set[str]] = defaultdict(set)  # by place
    for _ in watched(kernel):
        for (line, _), word in program.words.items():
            words[places[line]].add(word)
        if len(words) == len(set(places.values())):
            break
    for line, place in places.items():
        assert len(words[place]) == 1, f"line {line}: {words[place] or 'never executed'}"
        found[families[line], *words[place]].append(line)
    return found


def watched(kernel: str) -> Iterator[None]:
    """Runs programs with a kernel, until the caller has seen enough.

    The compiler unrolls loops over four ranks. Some waits end by a loss in a few seeds only.
    """
    for name in users(kernel):
        for loses in (True, False):
            ranks = 1 if name in calls.FLAT else 5
            calls.run(
                shipped,
                PROGRAMS[name],
                0,
                ranks=ranks,
                grid=(2, 1),
                failure=loss(0) if loses else None,
            )
            yield
    for seed in range(ROUNDS):
        for name in users(kernel)[:3]:
            ranks = ranks_of(name)
            calls.run(shipped, PROGRAMS[name], seed, ranks=ranks, grid=(2, 1), failure=loss(seed))
            yield


def is_redundant(kernel: str, fence: Fence) -> bool:
    return fence in REDUNDANT and kernel in REDUNDANT[fence][0]


def runs_of(kernel: str, programs: Callable[[str], Program]) -> list[Run]:
    """Returns runs that use a kernel."""
    found: list[Run] = []
    for name in users(kernel):

        def run(seed: int, name: str = name) -> None:
            calls.run(programs, PROGRAMS[name], seed, ranks=ranks_of(name))

        found.append(run)
    if kernel == "local_all_gather":
        found += [lambda seed: calls.run_beside_closing_peer(programs, seed)] * 50
    return found


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_other_fence_is_needed(kernel: str) -> None:
    whole = shipped(f"r2ccl_{kernel}")
    for fence, lines in fences(kernel).items():
        if is_redundant(kernel, fence):
            continue
        weaker = whole.without(lines)

        def programs(name: str, weaker: Program = weaker) -> Program:
            return weaker if name == f"r2ccl_{kernel}" else shipped(name)

        assert fails(runs_of(kernel, programs), SEEDS), (
            f"{kernel} is right without {fence}, lines {lines}"
        )


@cache
def without_redundant(name: str) -> Program:
    kernel = name.removeprefix("r2ccl_")
    lines = [n for fence, ns in fences(kernel).items() if is_redundant(kernel, fence) for n in ns]
    return shipped(name).without(lines)


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_redundant_fences_have_no_effect(program: str) -> None:
    """No run fails without all of them, so no run fails without a single one."""
    ranks = ranks_of(program)
    for seed in range(SEEDS):
        for failure in (None, loss(seed)):
            calls.run(without_redundant, PROGRAMS[program], seed, ranks=ranks, failure=failure)


def test_every_row_of_the_table_is_used() -> None:
    used = {fence for kernel in KERNELS for fence in fences(kernel) if is_redundant(kernel, fence)}
    assert used == set(REDUNDANT)


# ---- instructions ----


def test_every_instruction_is_known() -> None:
    assert {f"r2ccl_{kernel}" for kernel in KERNELS} == set(text().ranges)
    for name in text().ranges:
        shipped(name).check()


def test_an_unknown_instruction_is_named() -> None:
    lines = [".visible .entry some(", ")", "{", "\t.reg .b32 %r<3>;", "\tpopc.b32 %r1, %r2;", "}"]
    program = Program(Text("\n".join(lines)).kernel("some"))
    with pytest.raises(UnknownInstruction, match=r"line 5: unknown instruction: popc\.b32 %r1"):
        program.check()


# ---- arithmetic ----

DTYPES = ("f16", "bf16", "f32", "f64", "i8", "u8", "i32", "i64", "boolean")  # as in base/types.hpp
OPS = ("sum", "prod", "min", "max")
COUNT, OPERANDS, PITCH = 19, 3, 160
FLOATS = {"f16": 2, "bf16": 2, "f32": 4, "f64": 8}
INTEGERS = {"i8": "b", "u8": "B", "i32": "i", "i64": "q"}


def number(dtype: str, data: bytes) -> float:
    if dtype == "bf16":
        dtype, data = "f32", bytes(2) + data
    value: float = struct.unpack({"f16": "<e", "f32": "<f", "f64": "<d"}[dtype], data)[0]
    return value


def stored(dtype: str, value: float) -> bytes:
    """Rounds to nearest even; there is a single NaN."""
    if dtype == "f64":
        return struct.pack("<d", math.nan if math.isnan(value) else value)
    if math.isnan(value):
        return bytes.fromhex({"f16": "007e", "bf16": "c07f", "f32": "0000c07f"}[dtype])
    if dtype == "f16":
        try:
            return struct.pack("<e", value)
        except OverflowError:
            return struct.pack("<e", math.copysign(math.inf, value))
    whole = struct.pack("<f", value)
    if dtype == "f32":
        return whole
    bits = int.from_bytes(whole, "little")
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).to_bytes(2, "little")


def reduced_floats(dtype: str, op: str, values: Sequence[float]) -> bytes:
    if op in ("min", "max"):
        if any(math.isnan(value) for value in values):
            return stored(dtype, math.nan)
        choose = min if op == "min" else max
        return stored(dtype, choose(values, key=lambda each: (each, math.copysign(1, each))))
    total = values[0]
    for value in values[1:]:
        total = total + value if op == "sum" else total * value
        if dtype != "f64":
            total = ctypes.c_float(total).value
    return stored(dtype, total)


def reduced_element(dtype: str, op: str, parts: Sequence[bytes]) -> bytes:
    if dtype in FLOATS:
        return reduced_floats(dtype, op, [number(dtype, part) for part in parts])
    if dtype == "boolean":
        true = [part != b"\0" for part in parts]
        return bytes([any(true) if op in ("sum", "max") else all(true)])
    values = [struct.unpack(f"<{INTEGERS[dtype]}", part)[0] for part in parts]
    made = {"sum": sum, "prod": math.prod, "min": min, "max": max}[op](values)
    count = len(parts[0])
    return (made % (1 << (8 * count))).to_bytes(count, "little")


def gpu_reduction(dtype: str, op: str, operands: Sequence[bytes]) -> bytes:
    """Returns the result of a kernel."""
    machine = Machine(0, strict=True)
    rank = node.Rank(machine, shipped, 0)
    host = Agent("host")
    count = len(operands[0])
    for number, operand in enumerate(operands):
        at = rank.staging + node.RESULT_OFFSET + number * PITCH
        machine.memory.store(host, at, operand)
    target = rank.target(bytes(count))
    kind = node.reduction(OPERANDS, DTYPES.index(dtype), OPS.index(op), PITCH)
    arguments = (*rank.stage_arguments(), target, node.size(count), kind, node.word(0))
    launch = Launch(shipped("r2ccl_reduce_and_deliver"), arguments, blocks=1, threads=2)
    machine.launch(launch, 0, host.clock, lambda threads: machine.memory.meet([host, *threads]))
    machine.run()
    return machine.memory.load(host, rank.targets[0][0], count)


@pytest.mark.parametrize("dtype", DTYPES)
def test_reductions_have_the_right_bits(dtype: str) -> None:
    element = FLOATS.get(dtype) or struct.calcsize(INTEGERS.get(dtype, "B"))
    chance = random.Random(dtype)
    for op in OPS:
        operands = [chance.randbytes(element * COUNT) for _ in range(OPERANDS)]
        elements = [slice(i * element, (i + 1) * element) for i in range(COUNT)]
        expected = [reduced_element(dtype, op, [each[i] for each in operands]) for i in elements]
        got = gpu_reduction(dtype, op, operands)
        assert [got[i] for i in elements] == expected, op
