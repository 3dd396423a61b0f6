"""Duration of the collective affected by a fault, and speed of the next collectives.

The lab has two nodes with two rails, and a rank on each node. The ranks run all-reduces without
pause while a port loses the carrier or becomes a black hole. The workers measure the time of each
call. A fault strikes only a rail with recent traffic. The nodes take turns, and every fault is
healed before the next fault.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from r2serve.bench.collectives import strikes
from r2serve.bench.collectives.control import WorkerGroup
from r2serve.bench.collectives.matrix import CollectiveCall, format_size
from r2serve.bench.collectives.runner import Progress
from r2serve.bench.collectives.statistics import median
from r2serve.bench.collectives.strikes import ATTEMPTS, RAILS, SIZES, MissedError, Soak
from r2serve.lab.injector import LabInjector
from r2serve.lab.lab import Lab
from r2serve.lab.player import Player
from r2serve.lab.rails import rails_in_use
from r2serve.lab.schedule import Aim, Fault

KINDS = ("carrier_loss", "black_hole")
STORE_PORT = 29400

BASELINE_MS = 150
BEFORE_FAULT_MS = 150
WINDOW_MS = 700
NEXT_COLLECTIVES = 100


@dataclass(frozen=True)
class MeasuredFault:
    """A fault and its effect on the collectives.

    stall_ms: the longest call of any rank from the fault on.
    undisturbed_ms: the longest call just before the fault, while the lab runs a command without
    effect. The value shows the delay by the machine's scheduling and by the lab's command.
    next_ratio: median of the calls after the affected call, divided by the median of calls over a
    single healthy rail.
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


def run(count: int, progress: Progress) -> list[MeasuredFault]:
    """Measures ``count`` faults of each kind and size.

    Raises LabUnavailableError on a machine without support for labs.
    """
    faults = []
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="r2serve-bench-")))
        lab = stack.enter_context(Lab(nodes=2, rails=RAILS))
        both = stack.enter_context(strikes.r2ccl_group(lab, scratch, "both", RAILS, STORE_PORT))
        one = stack.enter_context(strikes.r2ccl_group(lab, scratch, "one", 1, STORE_PORT + 1))
        for kind in KINDS:
            for size in SIZES:
                progress(f"stalls: {count} x {kind} during all_reduce of {format_size(size)}")
                request = CollectiveCall("all_reduce", size, "float32").request("auto")
                both.prepare(request)
                one.prepare(request)
                faults += [_measure(lab, both, one, kind, size, i) for i in range(count)]
    return faults


def _measure(
    lab: Lab, both: WorkerGroup, one: WorkerGroup, kind: str, size: int, index: int
) -> MeasuredFault:
    """Measures a fault, in up to ATTEMPTS attempts. Raises MissedError after the last attempt."""
    for _ in range(ATTEMPTS - 1):
        with suppress(MissedError):
            return _strike(lab, both, one, kind, size, index)
    return _strike(lab, both, one, kind, size, index)


def _strike(
    lab: Lab, both: WorkerGroup, one: WorkerGroup, kind: str, size: int, index: int
) -> MeasuredFault:
    node = index % 2
    strikes.wait_until_up(both)
    baseline = median(strikes.soak(one, BASELINE_MS)[0].times_ns)
    before = strikes.sent(both, node)
    strikes.soak(both, BASELINE_MS)
    used = rails_in_use(before, strikes.sent(both, node))
    rail = used[(index // 2) % len(used)]

    def aim() -> int:
        lab.heal(node, rail)  # without effect; see MeasuredFault.undisturbed_ms
        return rail

    fault = Fault(BEFORE_FAULT_MS / 1e3, kind, node, Aim.IN_USE, math.inf)
    player = Player([fault], LabInjector(lab), aim=aim, ahead_s=BEFORE_FAULT_MS * 2 / 3000)
    with strikes.beside(player) as play:
        soaks = strikes.soak(both, WINDOW_MS)
        states = strikes.states(both, node)
    if not play.played or states.get(rail) == "UP":
        raise MissedError(f"{kind} of rail {rail} of node {node} was not noticed")
    stall, undisturbed, following = analyse(soaks, play.played[0].struck_ns)
    return MeasuredFault(
        kind=kind,
        bytes=size,
        node=node,
        rail=rail,
        stall_ms=stall / 1e6,
        undisturbed_ms=undisturbed / 1e6,
        next_ratio=median(following) / baseline,
    )


def analyse(soaks: Sequence[Soak], struck_ns: int) -> tuple[int, int, list[int]]:
    """Returns the affected call's time, the longest time before the fault, and later times, in ns.

    strikes.hit_call determines the affected call. The later times are of rank 0, from the next
    call on. Raises MissedError when the calls end too early.
    """
    before = [
        duration
        for soak in soaks
        for duration, end in zip(soak.times_ns, soak.ends(), strict=True)
        if end < struck_ns
    ]
    found = strikes.hit_call(soaks, struck_ns)
    if not before or found is None:
        raise MissedError("the fault did not fall into the time of the measured calls")
    stall, hit = found
    following = list(soaks[0].times_ns[hit + 1 : hit + 1 + NEXT_COLLECTIVES])
    if not following:
        raise MissedError("no collective followed the collective affected by the fault")
    return stall, max(before), following


@dataclass(frozen=True)
class Summary:
    """Summary of the faults of a kind at a size."""

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


def summarise(faults: Sequence[MeasuredFault]) -> list[Summary]:
    groups: dict[tuple[str, int], list[MeasuredFault]] = {}
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
