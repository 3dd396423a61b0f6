"""Workers of real vLLM without enough CPU time: the tokens are right, and no rail is charged."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from answers import FLAG, RAILS, greedy
from cpu_share import cpu_hogs, cpu_quota
from timely import timely

from r2serve.observe import journal

if TYPE_CHECKING:
    from conftest import Engine

STARVED_S = float(os.environ.get("R2SERVE_STARVED_S", "60"))
"""Seconds of each shortage."""


@contextmanager
def a_hog_beside_each(workers: list[int]) -> Iterator[None]:
    """Runs a hog for each worker, and at least one for each core."""
    with cpu_hogs(max(len(workers), os.cpu_count() or 1)):
        yield


@contextmanager
def a_third_of_a_core_for_each(workers: list[int]) -> Iterator[None]:
    with ExitStack() as stack:
        limit = stack.enter_context(cpu_quota(30, 100))
        for worker in workers:
            limit(worker)
        yield


def counts(folder: Path) -> Counter[str]:
    """Returns what the journals of all workers have charged so far."""
    total: Counter[str] = Counter()
    for path in folder.glob(journal.PATTERN):
        found = journal.read(path)
        moves = [event.text for event in found.events if event.kind == "rail_state"]
        total["suspicions"] += sum(text.startswith("UP->SUSPECT") for text in moves)
        total["losses"] += sum("->DOWN" in text for text in moves)
        total["hedged chunks"] += sum(rail.hedged_chunks for rail in found.rails)
        hedges = [event for event in found.events if event.kind == "hedge"]
        total["chunks hedged as withheld"] += sum(
            event.value for event in hedges if event.text == "withheld"
        )
        total["ns of stalls"] += sum(group.stalled_ns for group in found.groups)
        total["ns short of CPU"] += found.short_of_cpu_ns
    return total


@pytest.mark.alone
@pytest.mark.long
@pytest.mark.timeout(STARVED_S + 1500)
@pytest.mark.parametrize("shortage", [a_hog_beside_each, a_third_of_a_core_for_each])
def test_a_shortage_of_cpu_is_charged_to_no_rail(
    start_engine: Callable[..., Engine],
    tmp_path_factory: pytest.TempPathFactory,
    show: Callable[[str], None],
    shortage: Callable[[list[int]], AbstractContextManager[None]],
) -> None:
    folder = tmp_path_factory.mktemp("starved")
    nodes = [RAILS | {"R2CCL_NODE": "per-rank", "R2CCL_JOURNAL_DIR": str(folder)}]
    engine = start_engine(2, FLAG, nodes)
    expected = greedy(engine)
    workers = [worker.pid for worker in engine.nodes[0].workers()]
    assert len(workers) == 2
    before = counts(folder)
    answers = 0
    with shortage(workers):
        ends = time.monotonic() + STARVED_S
        while time.monotonic() < ends:
            assert greedy(engine) == expected
            answers += len(expected)
    charged = counts(folder)
    charged.subtract(before)
    told = ", ".join(f"{count} {what}" for what, count in sorted(charged.items()))
    show(f"{shortage.__name__}, {STARVED_S:.0f} s: {answers} answers, {told}")
    assert charged["losses"] == 0, told
    assert charged["ns short of CPU"] > 0, "the workers had enough CPU time"
    if not charged["suspicions"]:
        assert charged["ns of stalls"] == 0, told
    timely(lambda: charged["chunks hedged as withheld"] == 0, told, within_s=0)
    timely(lambda: charged["ns of stalls"] == 0, f"charged to rails: {told}", within_s=0)
