"""Round trips through each fault, and each second fault, with one NIC left at least."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from r2serve.bench.control.jobs import ControlError, Job, lab_of, talk
from r2serve.lab.injector import LabInjector
from r2serve.lab.lab import Lab
from r2serve.lab.player import Player
from r2serve.lab.schedule import Aim, Fault

KINDS = (
    "carrier_loss",
    "black_hole",
    "peer_port_loss",
    "address_loss",
    "one_way_loss_from",
    "one_way_loss_to",
    "reset",
    "slow",
    "flap",
)
"""Kinds by default; all of :data:`r2serve.lab.kinds.KINDS` may be given."""
TRIPS = ("zmq", "gloo", "store")
FIRST_S, SECOND_S, END_S, SPAN_S = 0.2, 1.2, 3.2, 3.6
"""Times of a pair since its begin: both strikes, the end of both, the end of the measurement."""
UNDISTURBED_S = 20.0
WORST_MS = 50.0
MEDIAN_TIMES, MEDIAN_MORE_MS = 1.5, 0.15
"""Limit of a median over a relay: a multiple of the direct median, and ms in addition."""

Port = tuple[int, int | None]
"""Node, and rail; None: the management NIC."""


@dataclass(frozen=True)
class FaultPair:
    """A fault, and a second fault at another NIC while the first lasts."""

    first: str
    at: Port
    second: str
    then_at: Port

    def faults(self) -> list[Fault]:
        return [
            _fault(FIRST_S, self.first, self.at),
            _fault(SECOND_S, self.second, self.then_at),
        ]

    def as_row(self) -> dict[str, str]:
        return {
            "first": f"{self.first}: {port_name(self.at)}",
            "second": f"{self.second}: {port_name(self.then_at)}",
        }


def _fault(at_s: float, kind: str, port: Port) -> Fault:
    node, rail = port
    aim: int | Aim = Aim.MANAGEMENT if rail is None else rail
    return Fault(at_s, kind, node, aim, END_S - at_s)


def port_name(port: Port) -> str:
    node, rail = port
    return f"mgmt@node{node}" if rail is None else f"rail{rail}@node{node}"


def pairs(kinds: Sequence[str], nics: int) -> list[FaultPair]:
    """Returns each fault with each second fault; ports take turns, never two of one network."""
    ports: list[Port] = [(node, rail) for rail in (None, *range(nics - 1)) for node in (0, 1)]
    found = []
    for index, (first, second) in enumerate(itertools.product(kinds, kinds)):
        at = ports[index % len(ports)]
        others = [port for port in ports if port[1] != at[1]]
        # The quotient changes after each round of first ports, so that all combinations come.
        found.append(FaultPair(first, at, second, others[index // len(ports) % len(others)]))
    return found


def measure(
    nics: int,
    kinds: Sequence[str],
    work: Path,
    watch: Callable[[str], None],
    *,
    real_time: bool = False,
) -> dict[str, Any]:
    """Returns the round trips of each pair of faults, and of undisturbed jobs, in ms.

    Raises:
        ControlError: a job failed.
        LabUnavailableError, LabCommandError: the lab failed.
    """
    with lab_of(nics) as lab:
        watch(f"{nics} NICs: direct connections")
        with Job(lab, work / "direct", talk("rounds"), relays=False, real_time=real_time) as job:
            direct = undisturbed(job)
        watch(f"{nics} NICs: over relays")
        with Job(lab, work / "relays", talk("rounds"), real_time=real_time) as job:
            job.settle()
            carried = undisturbed(job)
            rows = _all_struck(lab, job, pairs(kinds, nics), watch)
    return {"nics": nics, **judge(direct, carried, rows), "pairs": rows}


def undisturbed(job: Job) -> dict[str, Any]:
    """Returns the round trips of UNDISTURBED_S, by kind."""
    return _between_marks(job, lambda: time.sleep(UNDISTURBED_S))


def _all_struck(
    lab: Lab, job: Job, every: Sequence[FaultPair], watch: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Returns a row for each pair; a pair that ends the job is the last, with the reason."""
    rows: list[dict[str, Any]] = []
    for pair in every:
        try:
            rows.append(_struck(lab, job, pair, watch))
        except ControlError as error:
            watch(f"{pair.as_row()}: {error}")
            return [*rows, {**pair.as_row(), "failed": str(error)}]
    return rows


def _struck(lab: Lab, job: Job, pair: FaultPair, watch: Callable[[str], None]) -> dict[str, Any]:
    settled = job.settle()
    play = Player(pair.faults(), LabInjector(lab), seconds=SPAN_S).play
    row = {**pair.as_row(), "settled": settled, **_between_marks(job, play)}
    watch(f"{row['first']}, then {row['second']}: worst {worst_ms(row):.1f} ms")
    return row


def _between_marks(job: Job, act: Callable[[], object]) -> dict[str, Any]:
    job.mark("before")
    act()
    found = job.mark("after")
    return {kind: values for kind, values in found.items() if kind != "mark"}


def worst_ms(row: dict[str, Any]) -> float:
    """Returns the worst round trip of a row; infinite if a kind had none, or the job failed."""
    return max(row[kind]["worst"] if row.get(kind) else float("inf") for kind in TRIPS)


def judge(
    direct: dict[str, Any], carried: dict[str, Any], rows: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Returns the undisturbed round trips, the worst of all pairs, and whether limits are met."""
    limits = {kind: round(direct[kind]["p50"] * MEDIAN_TIMES + MEDIAN_MORE_MS, 3) for kind in TRIPS}
    worst = max(map(worst_ms, rows), default=0.0)
    return {
        "direct": direct,
        "relays": carried,
        "worst_ms": worst if worst < float("inf") else None,
        "worst_met": worst <= WORST_MS,
        "median_limits_ms": limits,
        "median_met": {kind: carried[kind]["p50"] <= limits[kind] for kind in TRIPS},
    }
