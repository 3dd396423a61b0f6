"""How long the collective that a fault hits takes, and how fast the next ones are.

Two nodes of a lab, two rails, one rank each. The ranks do all-reduces without pause while a port
is cut or black-holed; each call's time is taken in the workers. A fault only strikes a rail that
carried bytes just before, nodes take turns, and every fault is healed before the next.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from r2serve.bench.collectives.control import WorkerGroup
from r2serve.bench.collectives.matrix import Workload, format_size
from r2serve.bench.collectives.peers import Launch, Process, python_worker
from r2serve.bench.collectives.runner import Progress
from r2serve.bench.collectives.statistics import median
from r2serve.drills.lab import Lab

KINDS = ("carrier", "blackhole")
SIZES = (16 * 1024, 1024 * 1024)  # one that a single rail carries and one that both do
RAILS = 2
STORE_PORT = 29400

BASELINE_MS = 150
BEFORE_FAULT_MS = 150
WINDOW_MS = 700
# A call that starts later than this after the fault is slow for another reason.
CAUSED_WITHIN_NS = 300_000_000
NEXT_COLLECTIVES = 100
IN_USE_SHARE = 0.05
HEAL_TIMEOUT_S = 20.0

# Faults follow each other far faster than in real life; a rail that flaps is not what is measured.
ENVIRONMENT = {
    "R2CCL_REJOIN_BACKOFF_MIN_MS": "50",
    "R2CCL_REJOIN_BACKOFF_MAX_MS": "100",
    "R2CCL_FLAP_HALF_LIFE_S": "0",
}


class FaultError(RuntimeError):
    """A fault that did not strike, or a rail that did not come back: no measurement."""


@dataclass(frozen=True)
class Fault:
    """One fault and what the collectives made of it.

    stall_ms: the longest call of any rank from the fault on. undisturbed_ms: the longest one in
    the moments before, while the lab runs a command like the fault's that changes nothing: what
    the scheduling of this machine, and making a fault on it, cost without the fault.
    next_ratio: median of the calls after the hit one, relative to the same with one healthy rail.
    """

    kind: str
    bytes: int
    node: int
    rail: int
    stall_ms: float
    undisturbed_ms: float
    next_ratio: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


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


def run(count: int, progress: Progress) -> list[Fault]:
    """``count`` faults of each kind and size. Raises LabUnavailableError where labs cannot be."""
    faults = []
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="r2serve-bench-")))
        lab = stack.enter_context(Lab(nodes=2, rails=RAILS))
        both = stack.enter_context(_group(lab, scratch, "both", RAILS, STORE_PORT))
        one = stack.enter_context(_group(lab, scratch, "one", 1, STORE_PORT + 1))
        for kind in KINDS:
            for size in SIZES:
                progress(f"stalls: {count} x {kind} during all_reduce of {format_size(size)}")
                request = Workload("all_reduce", size, "float32").request("auto")
                both.prepare(request)
                one.prepare(request)
                faults += [_strike(lab, both, one, kind, size, i) for i in range(count)]
    return faults


@contextmanager
def _group(lab: Lab, scratch: Path, name: str, rails: int, port: int) -> Iterator[WorkerGroup]:
    """r2ccl with rank r in node r, on the first ``rails`` rails of the lab."""
    control, log = scratch / f"{name}.control", scratch / f"{name}.log"
    store = f"{lab.nodes[0].management_address}:{port}"
    ranks = len(lab.nodes)
    processes = [
        Process(python_worker("r2ccl", control, node.index, ranks, store), node.popen)
        for node in lab.nodes
    ]
    environment = {**ENVIRONMENT, "R2CCL_RAILS": ",".join(f"rail{i}" for i in range(rails))}
    with WorkerGroup(f"r2ccl on {name}", Launch(processes, environment), ranks, control, log) as g:
        yield g


def _strike(
    lab: Lab, both: WorkerGroup, one: WorkerGroup, kind: str, size: int, index: int
) -> Fault:
    node = index % 2
    _wait_until_up(both)
    baseline = median(_soak(one, BASELINE_MS)[0].times_ns)
    used = _rails_in_use(both, node)
    rail = used[(index // 2) % len(used)]
    strike = lab.cut if kind == "carrier" else lab.black_hole
    struck_at: list[int] = []

    def fault_thread() -> None:
        time.sleep(BEFORE_FAULT_MS / 3000)
        lab.heal(node, rail)  # changes nothing, see Fault.undisturbed_ms
        time.sleep(BEFORE_FAULT_MS * 2 / 3000)
        struck_at.append(time.monotonic_ns())
        strike(node, rail)

    thread = threading.Thread(target=fault_thread)
    thread.start()
    try:
        soaks = _soak(both, WINDOW_MS)
    finally:
        thread.join()
        states = _states(both, node)
        lab.heal(node, rail)
    if states.get(rail) == "UP":
        raise FaultError(f"{kind} of rail {rail} of node {node} was not noticed")
    stall, undisturbed, following = analyse(soaks, struck_at[0])
    return Fault(
        kind=kind,
        bytes=size,
        node=node,
        rail=rail,
        stall_ms=stall / 1e6,
        undisturbed_ms=undisturbed / 1e6,
        next_ratio=median(following) / baseline,
    )


def analyse(soaks: Sequence[Soak], struck_ns: int) -> tuple[int, int, list[int]]:
    """The hit call's time, the longest time before the fault, and the times of the next calls.

    The hit call is the longest of any rank among those that end after the fault and start soon
    enough to be its doing; the same call of rank 0 is where "next" starts. Raises FaultError when
    the calls end too early to tell.
    """
    before: list[int] = []
    candidates: list[tuple[int, int]] = []
    for soak in soaks:
        for index, (duration, end) in enumerate(zip(soak.times_ns, soak.ends(), strict=True)):
            if end < struck_ns:
                before.append(duration)
            elif end - duration < struck_ns + CAUSED_WITHIN_NS:
                candidates.append((duration, index))
    if not before or not candidates:
        raise FaultError("the fault did not fall into the time of the collectives")
    stall, hit = max(candidates)
    following = list(soaks[0].times_ns[hit + 1 : hit + 1 + NEXT_COLLECTIVES])
    if not following:
        raise FaultError("no collective followed the one that the fault hit")
    return stall, max(before), following


def _soak(group: WorkerGroup, duration_ms: int) -> list[Soak]:
    answers = group.ask(f"soak {duration_ms}", "soak")
    return [Soak(int(start), [int(time) for time in times]) for start, *times in answers]


def _rails_in_use(group: WorkerGroup, node: int) -> list[int]:
    before = _sent(group, node)
    _soak(group, BASELINE_MS)
    grown = {rail: sent - before[rail] for rail, sent in _sent(group, node).items()}
    least = IN_USE_SHARE * max(grown.values())
    return [rail for rail, sent in sorted(grown.items()) if sent > least]


def _rails(group: WorkerGroup) -> list[list[tuple[int, str, int]]]:
    """Index, state and bytes sent of the rails of each rank."""
    result = []
    for answer in group.ask("rails", "rails"):
        parts = [rail.rsplit(",", 2) for rail in answer]
        result.append([(rail_index(name), state, int(sent)) for name, state, sent in parts])
    return result


def rail_index(name: str) -> int:
    """``1`` of ``rail1@node0``."""
    return int(name.partition("@")[0].removeprefix("rail"))


def _sent(group: WorkerGroup, node: int) -> dict[int, int]:
    return {rail: sent for rail, _, sent in _rails(group)[node]}


def _states(group: WorkerGroup, node: int) -> dict[int, str]:
    return {rail: state for rail, state, _ in _rails(group)[node]}


def _wait_until_up(group: WorkerGroup) -> None:
    deadline = time.monotonic() + HEAL_TIMEOUT_S
    while True:
        rails = [rail for of_rank in _rails(group) for rail in of_rank]
        if all(state == "UP" for _, state, _ in rails):
            return
        if time.monotonic() > deadline:
            raise FaultError(f"rails did not come back: {rails}")
        time.sleep(0.05)


@dataclass(frozen=True)
class Summary:
    """The faults of one kind at one size."""

    kind: str
    bytes: int
    faults: int
    stall_ms_median: float
    stall_ms_worst: float
    undisturbed_ms_worst: float
    next_ratio_median: float
    next_ratio_worst: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def summarise(faults: Sequence[Fault]) -> list[Summary]:
    groups: dict[tuple[str, int], list[Fault]] = {}
    for fault in faults:
        groups.setdefault((fault.kind, fault.bytes), []).append(fault)
    return [
        Summary(
            kind=kind,
            bytes=size,
            faults=len(group),
            stall_ms_median=median([fault.stall_ms for fault in group]),
            stall_ms_worst=max(fault.stall_ms for fault in group),
            undisturbed_ms_worst=max(fault.undisturbed_ms for fault in group),
            next_ratio_median=median([fault.next_ratio for fault in group]),
            next_ratio_worst=max(fault.next_ratio for fault in group),
        )
        for (kind, size), group in groups.items()
    ]
