"""What the measurements of stalls share: ranks in a lab that soak it in collectives, and readings.

Two nodes of a lab, two rails, one rank each. The ranks do all-reduces without pause and keep the
time of each call; meanwhile a player makes a fault of a rail and keeps its time as well.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from r2serve.bench.collectives.contenders import Launch, Process, python_worker
from r2serve.bench.collectives.control import WorkerGroup
from r2serve.lab.background import BackgroundPlay
from r2serve.lab.holder import LabCommandError
from r2serve.lab.lab import Lab
from r2serve.lab.player import Player

SIZES = (16 * 1024, 1024 * 1024)  # one that a single rail carries and one that both do
RAILS = 2

# A call that starts later than this after the fault is slow for another reason.
CAUSED_WITHIN_NS = 300_000_000
IN_USE_SHARE = 0.05
HEAL_TIMEOUT_S = 20.0

# Faults follow each other far faster than in real life; a rail that flaps is not what is measured.
ENVIRONMENT = {
    "R2CCL_REJOIN_BACKOFF_MIN_MS": "50",
    "R2CCL_REJOIN_BACKOFF_MAX_MS": "100",
    "R2CCL_FLAP_HALF_LIFE_S": "0",
}


class StrikeError(RuntimeError):
    """A fault that did not strike, or a rail that did not come back: no measurement."""


@dataclass(frozen=True)
class Soak:
    """Back-to-back calls of one rank: start of the first and the time of each, in ns."""

    start_ns: int
    times_ns: Sequence[int]

    def ends(self) -> Iterator[int]:
        end = self.start_ns
        for duration in self.times_ns:
            end += duration
            yield end


@contextmanager
def group(
    lab: Lab, impl: str, scratch: Path, name: str, store: str, environment: Mapping[str, str]
) -> Iterator[WorkerGroup]:
    """Workers of ``impl``, rank r in node r; ``store`` is what they meet through."""
    control, log = scratch / f"{name}.control", scratch / f"{name}.log"
    ranks = len(lab.nodes)
    processes = [
        Process(python_worker(impl, control, node.index, ranks, store), node.popen)
        for node in lab.nodes
    ]
    launch = Launch(processes, dict(environment))
    with WorkerGroup(f"{impl} on {name}", launch, ranks, control, log) as workers:
        yield workers


def r2ccl_group(
    lab: Lab, scratch: Path, name: str, rails: int, port: int
) -> AbstractContextManager[WorkerGroup]:
    """r2ccl on the first ``rails`` rails of the lab."""
    environment = {**ENVIRONMENT, "R2CCL_RAILS": ",".join(f"rail{i}" for i in range(rails))}
    store = f"{lab.nodes[0].management_address}:{port}"
    return group(lab, "r2ccl", scratch, name, store, environment)


def soak(workers: WorkerGroup, duration_ms: int) -> list[Soak]:
    """Back-to-back calls for that long; a call that is under way then is waited for."""
    answers = workers.ask(f"soak {duration_ms}", "soak")
    return [Soak(int(start), [int(time) for time in times]) for start, *times in answers]


@contextmanager
def beside(player: Player) -> Iterator[BackgroundPlay]:
    """Plays faults beside a soak, and heals all of them at its end.

    Raises StrikeError where a fault cannot be made or undone.
    """
    try:
        with BackgroundPlay(player) as play:
            yield play
    except LabCommandError as error:
        raise StrikeError(str(error)) from error


def hit_call(soaks: Sequence[Soak], struck_ns: int) -> tuple[int, int] | None:
    """Time in ns and index of the call that something at ``struck_ns`` may have slowed the most.

    It is the longest of any rank among those that end after that time and start soon enough to be
    its doing; None where there is none.
    """
    candidates = [
        (duration, index)
        for one in soaks
        for index, (duration, end) in enumerate(zip(one.times_ns, one.ends(), strict=True))
        if end >= struck_ns and end - duration < struck_ns + CAUSED_WITHIN_NS
    ]
    return max(candidates, default=None)


def in_use(before: Mapping[int, int], after: Mapping[int, int]) -> list[int]:
    """The rails that carried a fair share of what was sent between two readings, in order."""
    grown = {rail: sent - before[rail] for rail, sent in after.items()}
    least = IN_USE_SHARE * max(grown.values())
    return [rail for rail, sent in sorted(grown.items()) if sent > least]


def rails_of(workers: WorkerGroup) -> list[list[tuple[int, str, int]]]:
    """Index, state and bytes sent of the rails of each rank."""
    result = []
    for answer in workers.ask("rails", "rails"):
        parts = [rail.rsplit(",", 2) for rail in answer]
        result.append([(rail_index(name), state, int(sent)) for name, state, sent in parts])
    return result


def rail_index(name: str) -> int:
    """``1`` of ``rail1@node0``."""
    return int(name.partition("@")[0].removeprefix("rail"))


def sent(workers: WorkerGroup, rank: int) -> dict[int, int]:
    """Bytes that each rail of a rank has sent so far."""
    return {rail: sent for rail, _, sent in rails_of(workers)[rank]}


def states(workers: WorkerGroup, rank: int) -> dict[int, str]:
    """State of each rail of a rank."""
    return {rail: state for rail, state, _ in rails_of(workers)[rank]}


def wait_until_up(workers: WorkerGroup) -> None:
    """Until every rail of every rank is UP. Raises StrikeError when that takes HEAL_TIMEOUT_S."""
    deadline = time.monotonic() + HEAL_TIMEOUT_S
    while True:
        rails = [rail for of_rank in rails_of(workers) for rail in of_rank]
        if all(state == "UP" for _, state, _ in rails):
            return
        if time.monotonic() > deadline:
            raise StrikeError(f"rails did not come back: {rails}")
        time.sleep(0.05)
