"""How long the collective that a fault hits takes, and how fast the next ones are.

Two nodes of a lab, two rails, one rank each. The ranks do all-reduces without pause while a port
is cut or black-holed; each call's time is taken in the workers. A fault only strikes a rail that
carried bytes just before, nodes take turns, and every fault is healed before the next.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from r2serve.bench.collectives import strikes
from r2serve.bench.collectives.control import WorkerGroup
from r2serve.bench.collectives.matrix import Workload, format_size
from r2serve.bench.collectives.runner import Progress
from r2serve.bench.collectives.statistics import median
from r2serve.bench.collectives.strikes import RAILS, SIZES, Soak, StrikeError
from r2serve.lab.injector import LabInjector
from r2serve.lab.lab import Lab
from r2serve.lab.player import Player
from r2serve.lab.schedule import Aim, Fault

KINDS = ("carrier_loss", "black_hole")
STORE_PORT = 29400

BASELINE_MS = 150
BEFORE_FAULT_MS = 150
WINDOW_MS = 700
NEXT_COLLECTIVES = 100


@dataclass(frozen=True)
class MeasuredFault:
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


def run(count: int, progress: Progress) -> list[MeasuredFault]:
    """``count`` faults of each kind and size. Raises LabUnavailableError where labs cannot be."""
    faults = []
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="r2serve-bench-")))
        lab = stack.enter_context(Lab(nodes=2, rails=RAILS))
        both = stack.enter_context(strikes.r2ccl_group(lab, scratch, "both", RAILS, STORE_PORT))
        one = stack.enter_context(strikes.r2ccl_group(lab, scratch, "one", 1, STORE_PORT + 1))
        for kind in KINDS:
            for size in SIZES:
                progress(f"stalls: {count} x {kind} during all_reduce of {format_size(size)}")
                request = Workload("all_reduce", size, "float32").request("auto")
                both.prepare(request)
                one.prepare(request)
                faults += [_strike(lab, both, one, kind, size, i) for i in range(count)]
    return faults


def _strike(
    lab: Lab, both: WorkerGroup, one: WorkerGroup, kind: str, size: int, index: int
) -> MeasuredFault:
    node = index % 2
    strikes.wait_until_up(both)
    baseline = median(strikes.soak(one, BASELINE_MS)[0].times_ns)
    before = strikes.sent(both, node)
    strikes.soak(both, BASELINE_MS)
    used = strikes.in_use(before, strikes.sent(both, node))
    rail = used[(index // 2) % len(used)]

    def aim() -> int:
        lab.heal(node, rail)  # changes nothing, see MeasuredFault.undisturbed_ms
        return rail

    fault = Fault(BEFORE_FAULT_MS / 1e3, kind, node, Aim.IN_USE, math.inf)
    player = Player([fault], LabInjector(lab), aim=aim, ahead_s=BEFORE_FAULT_MS * 2 / 3000)
    with strikes.beside(player) as play:
        soaks = strikes.soak(both, WINDOW_MS)
        states = strikes.states(both, node)
    if not play.played or states.get(rail) == "UP":
        raise StrikeError(f"{kind} of rail {rail} of node {node} was not noticed")
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
    """The hit call's time, the longest time before the fault, and the times of the next calls.

    The hit call is that of strikes.hit_call; the same call of rank 0 is where "next" starts.
    Raises StrikeError when the calls end too early to tell.
    """
    before = [
        duration
        for soak in soaks
        for duration, end in zip(soak.times_ns, soak.ends(), strict=True)
        if end < struck_ns
    ]
    found = strikes.hit_call(soaks, struck_ns)
    if not before or found is None:
        raise StrikeError("the fault did not fall into the time of the collectives")
    stall, hit = found
    following = list(soaks[0].times_ns[hit + 1 : hit + 1 + NEXT_COLLECTIVES])
    if not following:
        raise StrikeError("no collective followed the one that the fault hit")
    return stall, max(before), following


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
