"""System-scope operations of the shipped PTX in a call, all polls successful.

A change of a kernel changes the tables here and in docs/kernels.md. A change that raises a count
has to state the reason here.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from ptx import calls, node
from ptx.calls import Collective
from ptx.counts import CountedProgram, Counts, InOrder, begin, kind_of, measure
from ptx.machine import Hang
from ptx.memory import Agent
from ptx.text import Text
from shipped_ptx import text

GPUS = 8  # of a node with an exchange
BLOCKS = 3  # the first, the last, and another one

# Loads, those of the host's memory, stores, those to the host's memory, fences: of each block; then
# of the first block and of the last block in addition.
KERNELS = {
    "stage": (Counts(2, 2, 0, 0, 2), Counts(), Counts(0, 0, 1, 1)),
    "deliver": (Counts(1, 1), Counts(), Counts()),
    "reduce_and_deliver": (Counts(1, 1), Counts(), Counts()),
    "reduce_and_post": (Counts(1, 1, 0, 0, 2), Counts(), Counts(0, 0, 1, 1)),
    "publish_input": (Counts(10, 1, 0, 0, 2), Counts(0, 0, 1, 1), Counts(0, 0, 8)),
    "local_reduce_scatter": (Counts(11, 2, 0, 0, 2), Counts(), Counts(1, 0, 9, 1)),
    "publish_result": (Counts(9, 1, 0, 0, 2), Counts(), Counts(0, 0, 8)),
    "local_all_gather": (Counts(9, 0, 0, 0, 2), Counts(), Counts(1, 0, 9, 1)),
    "stage_in_place": (Counts(3, 2, 0, 0, 2), Counts(0, 0, 1, 1), Counts(0, 0, 17, 1)),
    "deliver_shard": (Counts(2, 1, 0, 0, 2), Counts(), Counts(0, 0, 17, 1)),
}
MEASURED: tuple[tuple[Collective, int], ...] = (
    (calls.reduced, 1),
    (calls.reposted, 1),
    (calls.all_reduce, GPUS),
    (calls.reduce_scatter, GPUS),
    (calls.all_gather, GPUS),
)
"""Collectives that launch every kernel of the table, with the ranks of a node."""

CALLS: dict[str, tuple[Collective, int, Counts]] = {
    "any collective with a result": (calls.flat, 1, Counts(3, 3, 1, 1, 2)),
    "all-reduce": (calls.all_reduce, GPUS, Counts(41, 4, 35, 3, 8)),
    "reduce-scatter": (calls.reduce_scatter, GPUS, Counts(24, 4, 35, 3, 6)),
    "all-gather": (calls.all_gather, GPUS, Counts(22, 3, 35, 3, 6)),
}
"""Calls with kernels of one block, as for 16 KiB; with the GPUs of a node."""


@cache
def programs(name: str) -> CountedProgram:
    return CountedProgram(text().kernel(name))


def test_each_kernel_has_the_operations_of_the_table() -> None:
    found = {}
    for collective, ranks in MEASURED:
        for launched in measure(programs, collective, ranks, BLOCKS):
            if len(launched.blocks) == BLOCKS:  # quiesce has a single block
                first, each, last = launched.blocks
                name = launched.kernel.removeprefix("r2ccl_")
                found[name] = (each, first - each, last - each)
    assert found == KERNELS
    assert {f"r2ccl_{name}" for name in (*KERNELS, "quiesce")} == set(text().ranges)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_has_the_operations_of_the_table(name: str) -> None:
    collective, ranks, expected = CALLS[name]
    found = Counts()
    for launched in measure(programs, collective, ranks, blocks=1):
        if launched.kernel != "r2ccl_quiesce":  # runs once, before memory is freed
            (block,) = launched.blocks
            found += block
    assert found == expected


def with_host(count: int, of_host: int) -> str:
    return f"{count} ({of_host})"


def test_the_page_prints_the_tables() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "kernels.md").read_text()
    for name, (each, first, last) in KERNELS.items():
        cells = (
            f"`{name}`",
            with_host(each.loads, each.host_loads),
            str(each.fences),
            with_host(first.stores, first.host_stores),
            str(last.loads),
            with_host(last.stores, last.host_stores),
        )
        assert f"| {' | '.join(cells)} |" in page
    for name, (_, gpus, counts) in CALLS.items():
        cells = (
            name,
            str(gpus),
            with_host(counts.loads, counts.host_loads),
            with_host(counts.stores, counts.host_stores),
            str(counts.in_series),
            str(counts.fences),
        )
        assert f"| {' | '.join(cells)} |" in page


# ---- the counter itself ----


def test_operations_of_system_scope_count() -> None:
    kinds = {
        "ld.acquire.sys.u32 %r1, [%rd1];": "load",
        "ld.relaxed.sys.u32 %r1, [%rd1];": "load",
        "st.release.sys.u32 [%rd1], %r1;": "store",
        "st.relaxed.sys.u32 [%rd1], %r1;": "store",
        "membar.sys;": "fence",
        "fence.acq_rel.sys;": "fence",
        "ld.acquire.gpu.u32 %r1, [%rd1];": "",
        "ld.global.u32 %r1, [%rd1];": "",
        "ld.param.u64 %rd1, [some_param_0];": "",
        "st.shared.u32 [%r1], %r1;": "",
        "membar.gl;": "",
        "bar.sync 0;": "",
        "add.s32 %r1, %r1, %r1;": "",
    }
    lines = [".visible .entry some(", ")", "{", *kinds, "}"]
    instructions = Text("\n".join(lines)).kernel("some").instructions
    assert [kind_of(each) for each in instructions] == list(kinds.values())


def test_a_further_fence_is_counted() -> None:
    name = "r2ccl_stage"
    lines = [text().lines[index] for index in text().ranges[name]]
    at = next(index for index, line in enumerate(lines) if "membar.sys" in line)
    lines.insert(at, lines[at])
    more = CountedProgram(Text("\n".join([f".visible .entry {name}(", *lines, "}"])).kernel(name))

    def changed(wanted: str) -> CountedProgram:
        return more if wanted == name else programs(wanted)

    stage, _ = measure(changed, calls.flat, 1, blocks=1)
    assert stage.blocks == [Counts(2, 2, 1, 1, 3)]


def test_a_poll_without_success_is_no_count() -> None:
    machine = InOrder()
    rank = node.Rank(machine, programs, 0, (1, 2))
    call = calls.flat(rank, [rank], 0)
    rank.work += call.receive(0)
    host = Agent("stream")
    machine.memory.store(host, rank.state, node.word(1))  # posted, and never carried out
    begin(machine, rank, host, rank.work[0])
    with pytest.raises(Hang, match="GPU 0, block 0, thread 0 has polled without success"):
        machine.run()
