"""Common parts of the stall measurements: ranks in a lab under load, and readings of rails.

The lab has two nodes with two rails, and a rank on each node. The ranks run all-reduces without
pause and record the time of each call. Meanwhile a player makes a fault of a rail and records the
time of the fault.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from r2serve.bench.collectives.contenders import COMPUTE, Launch, WorkerCommand, python_worker
from r2serve.bench.collectives.control import WorkerGroup
from r2serve.lab.background import BackgroundPlay
from r2serve.lab.holder import LabCommandError
from r2serve.lab.lab import Lab
from r2serve.lab.player import Player
from r2serve.lab.rails import rail_index, wait_until

SIZES = (16 * 1024, 1024 * 1024)  # carried by a single rail; carried by both rails
RAILS = 2

# A call started later than this after the fault is slow for another reason.
CAUSED_WITHIN_NS = 300_000_000
HEAL_TIMEOUT_S = 20.0
LOOK_S = 0.05
ATTEMPTS = 5

# Short back-off and no flap damping: faults follow each other much faster than in production.
ENVIRONMENT = {
    "R2CCL_REJOIN_BACKOFF_MIN_MS": "50",
    "R2CCL_REJOIN_BACKOFF_MAX_MS": "100",
    "R2CCL_FLAP_HALF_LIFE_S": "0",
}


class StrikeError(RuntimeError):
    """The measurement failed: a fault did not strike, or a rail did not return to UP."""


class MissedError(StrikeError):
    """A fault missed the measured calls, or did not take its rail out of use.

    On a busy machine this happens by chance, so a fault has ATTEMPTS attempts.
    """


@dataclass(frozen=True)
class Soak:
    """Back-to-back calls of a rank: start of the first call and time of each call, in ns."""

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
    """Starts workers of ``impl``, rank r on node r; ``store`` is the rendezvous address."""
    control, log = scratch / f"{name}.control", scratch / f"{name}.log"
    ranks = len(lab.nodes)
    processes = [
        WorkerCommand(python_worker(impl, control, node.index, ranks, store), node.popen)
        for node in lab.nodes
    ]
    launch = Launch(processes, dict(environment))
    with WorkerGroup(f"{impl} on {name}", launch, ranks, control, log) as workers:
        yield workers


def r2ccl_group(
    lab: Lab, scratch: Path, name: str, rails: int, port: int, compute_us: int = 0
) -> AbstractContextManager[WorkerGroup]:
    """Starts workers of r2ccl on the first ``rails`` rails of the lab.

    ``compute_us``: computation of a rank's pinned thread before each call.
    """
    environment = {**ENVIRONMENT, "R2CCL_RAILS": ",".join(f"rail{i}" for i in range(rails))}
    environment[COMPUTE] = str(compute_us)
    store = f"{lab.nodes[0].management_address}:{port}"
    return group(lab, "r2ccl", scratch, name, store, environment)


def soak(workers: WorkerGroup, duration_ms: int) -> list[Soak]:
    """Runs back-to-back calls for ``duration_ms``; the last call is completed."""
    answers = workers.ask(f"soak {duration_ms}", "soak")
    return [Soak(int(start), [int(time) for time in times]) for start, *times in answers]


@contextmanager
def beside(player: Player) -> Iterator[BackgroundPlay]:
    """Plays faults in the background; the end of the context heals all faults.

    Raises StrikeError when a fault cannot be made or undone.
    """
    try:
        with BackgroundPlay(player) as play:
            yield play
    except LabCommandError as error:
        raise StrikeError(str(error)) from error


def hit_call(soaks: Sequence[Soak], struck_ns: int) -> tuple[int, int] | None:
    """Returns time (ns) and index of the call most affected by an event at ``struck_ns``.

    Candidates are the calls of all ranks that end at or after the event and start within
    CAUSED_WITHIN_NS of the event. The longest candidate is returned; None without candidates.
    """
    candidates = [
        (duration, index)
        for one in soaks
        for index, (duration, end) in enumerate(zip(one.times_ns, one.ends(), strict=True))
        if end >= struck_ns and end - duration < struck_ns + CAUSED_WITHIN_NS
    ]
    return max(candidates, default=None)


def rails_of(workers: WorkerGroup) -> list[list[tuple[int, str, int]]]:
    """Returns index, state and bytes sent of every rail, by rank."""
    result = []
    for answer in workers.ask("rails", "rails"):
        parts = [rail.rsplit(",", 2) for rail in answer]
        result.append([(rail_index(name), state, int(sent)) for name, state, sent in parts])
    return result


def sent(workers: WorkerGroup, rank: int) -> dict[int, int]:
    """Returns the bytes sent so far by each rail of a rank."""
    return {rail: sent for rail, _, sent in rails_of(workers)[rank]}


def states(workers: WorkerGroup, rank: int) -> dict[int, str]:
    """Returns the state of each rail of a rank."""
    return {rail: state for rail, state, _ in rails_of(workers)[rank]}


def wait_until_up(workers: WorkerGroup) -> None:
    """Waits until every rail of every rank is UP. Raises StrikeError after HEAL_TIMEOUT_S."""
    rails: list[tuple[int, str, int]] = []

    def all_up() -> bool:
        rails[:] = [rail for of_rank in rails_of(workers) for rail in of_rank]
        return all(state == "UP" for _, state, _ in rails)

    if not wait_until(all_up, HEAL_TIMEOUT_S, LOOK_S):
        raise StrikeError(f"rails did not rejoin in time: {rails}")
