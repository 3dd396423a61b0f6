"""Distributions of stalls over many real faults, for r2ccl, MPTCP and UCX's failover mode.

The ranks run back-to-back all-reduces. Each fault strikes a rail with recent traffic, at the nodes
in turn, and is healed before the next fault. Before each fault, the same window is measured
without a fault: a lab command without effect takes the place of the fault.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from r2serve.bench.collectives import mptcp, strikes, ucx
from r2serve.bench.collectives.control import (
    NotSupported,
    WorkerError,
    WorkerGroup,
    WrongResult,
)
from r2serve.bench.collectives.matrix import CollectiveCall, format_size
from r2serve.bench.collectives.report import verdict_table
from r2serve.bench.collectives.runner import Progress, Skipped
from r2serve.bench.collectives.statistics import percentile
from r2serve.bench.collectives.strikes import ATTEMPTS, RAILS, SIZES, Soak, StrikeError
from r2serve.bench.collectives.verdict import Check, at_least, at_most, tally
from r2serve.lab.injector import Injector, LabInjector
from r2serve.lab.lab import Lab
from r2serve.lab.player import Player
from r2serve.lab.rails import rails_in_use
from r2serve.lab.schedule import Fault

# CARRIER: the port of the measuring node loses the carrier. PEER_CARRIER: the other node's port
# loses the carrier; the measuring node's carrier stays up. BLACK_HOLE: the switch drops all
# packets; every carrier stays up. EGRESS_REFUSED: the node's own kernel drops its packets.
# MIDDLEBOX_ACK: a hop acknowledges packets that the peer does not get. MADE maps each kind to the
# lab's fault.
CARRIER, PEER_CARRIER, BLACK_HOLE = "carrier_loss", "peer_carrier_loss", "black_hole"
EGRESS_REFUSED, MIDDLEBOX_ACK = "egress_refused", "middlebox_ack"
KINDS = (CARRIER, PEER_CARRIER, BLACK_HOLE)
ON_DEMAND = (EGRESS_REFUSED, MIDDLEBOX_ACK)
"""Kinds measured only where they are named."""
MADE = {kind: kind for kind in (*KINDS, *ON_DEMAND)} | {PEER_CARRIER: "carrier_loss"}
P99_MS = {
    CARRIER: 5.0,
    PEER_CARRIER: 10.0,
    BLACK_HOLE: 50.0,
    EGRESS_REFUSED: 50.0,
    MIDDLEBOX_ACK: 300.0,
}
TIMES_SHORTER = 20.0  # target for MPTCP's stall / r2ccl's stall, at the median and at p99

STORE_PORT = 29410
BEFORE_FAULT_MS = 100
WINDOW_MS = 450
# A fault is healed after this time. A stall without recovery is therefore at least as long.
PATIENCE_S = 30.0
# Systems without a report of rails out of use.
SILENT = ("mptcp", "ucx")


@dataclass(frozen=True)
class Sample:
    """A fault: the longest call affected by the fault, and the longest call without a fault.

    system: r2ccl, mptcp or ucx. node: the node of the struck port.
    """

    system: str
    kind: str
    bytes: int
    node: int
    rail: int
    stall_ms: float
    no_fault_ms: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Loss:
    """A fault without recovery, even after healing, or a wrong result; ``reason`` has the cause.

    node, rail: None if the result was wrong before any rail was struck.
    """

    system: str
    kind: str
    bytes: int
    node: int | None
    rail: int | None
    reason: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class NotSurvivedError(WorkerError):
    """The calls did not recover from a fault of ``rail`` at ``node``."""

    def __init__(self, node: int, rail: int, error: WorkerError) -> None:
        super().__init__(str(error))
        self.node = node
        self.rail = rail


@dataclass(frozen=True)
class Spread:
    """Percentiles of times in milliseconds."""

    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        p50, p90, p99 = (percentile(values, percent) for percent in (50, 90, 99))
        return cls(p50, p90, p99, max(values))

    def cells(self) -> list[str]:
        return [f"{value:.2f}" for value in (self.p50, self.p90, self.p99, self.max)]


@dataclass(frozen=True)
class Distribution:
    """The stalls of a system under the faults of a kind, at a size."""

    system: str
    kind: str
    bytes: int
    faults: int
    stall_ms: Spread
    no_fault_ms: Spread

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Measured:
    """Results: faults with recovery, faults without recovery, and systems not measured."""

    samples: list[Sample] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)

    def left(self, system: str, kinds: Sequence[str], count: int) -> list[tuple[str, int, int]]:
        """Returns the series still to be measured, as (kind, size, faults)."""
        done: list[Sample | Loss] = [*self.samples, *self.losses]
        here = Counter((one.system, one.kind, one.bytes) for one in done)
        return [
            (kind, size, faults)
            for kind in kinds
            for size, faults in split(count)
            if here[system, kind, size] != faults
        ]

    def forget(self, series: tuple[str, str, int]) -> None:
        """Removes the results of a series (system, kind, size)."""

        def of_others(one: Sample | Loss) -> bool:
            return (one.system, one.kind, one.bytes) != series

        self.samples[:] = filter(of_others, self.samples)
        self.losses[:] = filter(of_others, self.losses)


def resume(path: Path, commit: str) -> Measured:
    """Returns the results in a file of this commit.

    The results are empty when the file does not exist or belongs to another commit. Raises
    ValueError when the file is not a file of this benchmark.
    """
    if not path.exists():
        return Measured()
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["commit"] != commit:  # the format may differ as well
            return Measured()
        samples = [Sample(**sample) for sample in found["samples"]]
        return Measured(samples, [Loss(**loss) for loss in found["losses"]])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} has no stalls to continue: {error!r}") from error


def run(
    faults: int,
    of_mptcp: int,
    progress: Progress,
    kinds: Sequence[str] = KINDS,
    of_ucx: int = 0,
    measured: Measured | None = None,
    save: Callable[[Measured], None] = lambda _: None,
    compute_us: int = 0,
) -> Measured:
    """Measures faults of each kind, spread over SIZES, and returns all results.

    ``faults`` is the number per kind under r2ccl; ``of_mptcp`` and ``of_ucx`` are the numbers under
    MPTCP and UCX. Series complete in ``measured`` are not repeated. ``save`` is called after each
    new series. On a machine without MPTCP or UCX, the system is listed as skipped. ``compute_us``:
    computation of r2ccl's pinned ranks before each call, which is a part of the call's time.

    Raises:
        LabUnavailableError: the machine does not support labs.
        StrikeError: a fault cannot be made or undone.
        WorkerError: a worker of r2ccl or MPTCP ended.
        WrongResult: a collective of r2ccl returned a wrong result.
    """
    measured = measured or Measured()
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="r2serve-bench-")))
        lab = stack.enter_context(Lab(nodes=2, rails=RAILS))
        if measured.left("r2ccl", kinds, faults):
            started = strikes.r2ccl_group(lab, scratch, "both", RAILS, STORE_PORT, compute_us)
            with started as workers:
                _series("r2ccl", lab, workers, kinds, faults, measured, save, progress)
        if measured.left("mptcp", kinds, of_mptcp):
            try:
                mptcp.configure(lab)
            except mptcp.MptcpUnavailable as error:
                measured.skipped.append(Skipped("mptcp", str(error)))
            else:
                store = f"{lab.nodes[0].rail_address(0)}:{STORE_PORT + 1}"
                with strikes.group(lab, "mptcp", scratch, "mptcp", store, {}) as workers:
                    _series("mptcp", lab, workers, kinds, of_mptcp, measured, save, progress)
        if measured.left("ucx", kinds, of_ucx):
            _ucx_series(lab, scratch, kinds, of_ucx, measured, save, progress)
    save(measured)
    return measured


def _ucx_series(
    lab: Lab,
    scratch: Path,
    kinds: Sequence[str],
    count: int,
    measured: Measured,
    save: Callable[[Measured], None],
    progress: Progress,
) -> None:
    """Measures the series under UCX, with new workers for each fault.

    UCX is skipped when the workers do not start, or return a wrong result before the fault.
    """
    try:
        worker = ucx.program()
    except ucx.UcxUnavailable as error:
        measured.skipped.append(Skipped("ucx", str(error)))
        return
    for kind, size, faults in measured.left("ucx", kinds, count):
        measured.forget(("ucx", kind, size))
        progress(f"ucx: {faults} x {kind} during all_reduce of {format_size(size)}")
        request = CollectiveCall("all_reduce", size, "float32").request("auto")
        for index in range(faults):
            name = f"{kinds.index(kind)}-{size}-{index}"
            try:
                with ucx.group(lab, worker, scratch, name, STORE_PORT + 2) as workers:
                    workers.prepare(request)
                    measured.samples.append(_sample("ucx", lab, workers, kind, size, index))
            except NotSurvivedError as error:
                where = (error.node, error.rail)
                reason = str(error).splitlines()[0]
                measured.losses.append(Loss("ucx", kind, size, *where, reason))
            except (WorkerError, NotSupported) as error:
                measured.skipped.append(Skipped("ucx", str(error)))
                return
        save(measured)


def split(count: int) -> list[tuple[int, int]]:
    """Splits ``count`` faults over SIZES, as (size, faults); sizes without faults are left out."""
    parts = [(size, (count + place) // len(SIZES)) for place, size in enumerate(reversed(SIZES))]
    return [(size, part) for size, part in reversed(parts) if part]


def as_json(measured: Measured, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all results as JSON, with ``metadata``."""
    found = distributions(measured.samples)
    return {
        **metadata,
        "distributions": [one.as_json() for one in found],
        "skipped": [{"what": s.what, "reason": s.reason} for s in measured.skipped],
        "losses": [loss.as_json() for loss in measured.losses],
        "samples": [sample.as_json() for sample in measured.samples],
        "verdict": [check.as_json() for check in checks(found)],
    }


def show(measured: Measured, console: Console) -> None:
    """Prints a table for each kind of fault, and the targets."""
    found = distributions(measured.samples)
    kinds = [one.kind for one in found] + [loss.kind for loss in measured.losses]
    for kind in dict.fromkeys(kinds):
        of_kind = [one for one in found if one.kind == kind]
        losses = [loss for loss in measured.losses if loss.kind == kind]
        console.print(table(kind, of_kind, losses))
    for reason in dict.fromkeys(f"{loss.system}: {loss.reason}" for loss in measured.losses):
        console.print(f"[yellow]lost:[/] {reason}", highlight=False)
    for skipped in measured.skipped:
        console.print(f"[yellow]not run:[/] {skipped.what}: {skipped.reason}", highlight=False)
    if found:
        console.print(verdict_table(checks(found)))
        console.print(tally(checks(found)))


def table(kind: str, found: Sequence[Distribution], losses: Sequence[Loss] = ()) -> Table:
    """Returns the table of a kind: each distribution beside the windows without a fault."""
    title = f"{kind}: longest call, ms"
    if kind in P99_MS:
        title += f"; p99 of r2ccl wanted: at most {P99_MS[kind]:g}"
    shown = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("", "bytes", "windows"):
        shown.add_column(column, no_wrap=True)
    for column in ("p50", "p90", "p99", "max"):
        shown.add_column(column, justify="right", no_wrap=True)
    for one in found:
        what, size = one.system, format_size(one.bytes)
        shown.add_row(what, size, f"{one.faults} with a fault", *one.stall_ms.cells())
        shown.add_row("", "", "the same without", *one.no_fault_ms.cells())
    for (system, lost_bytes), count in Counter((one.system, one.bytes) for one in losses).items():
        shown.add_row(system, format_size(lost_bytes), f"{count} lost", *["never"] * 4)
    return shown


def _series(
    system: str,
    lab: Lab,
    workers: WorkerGroup,
    kinds: Sequence[str],
    count: int,
    measured: Measured,
    save: Callable[[Measured], None],
    progress: Progress,
) -> None:
    for kind, size, faults in measured.left(system, kinds, count):
        measured.forget((system, kind, size))
        progress(f"{system}: {faults} x {kind} during all_reduce of {format_size(size)}")
        request = CollectiveCall("all_reduce", size, "float32").request("auto")
        for index in range(faults):
            try:
                # A fault may impair an MPTCP connection for long: each fault gets a new connection.
                workers.prepare(request, anew=system == "mptcp")
            except WrongResult as error:
                if system == "r2ccl":
                    raise
                measured.losses.append(Loss(system, kind, size, None, None, str(error)))
                continue
            measured.samples.append(_sample(system, lab, workers, kind, size, index))
        save(measured)


def _sample(
    system: str, lab: Lab, workers: WorkerGroup, kind: str, size: int, index: int
) -> Sample:
    """Measures a fault, in up to ATTEMPTS attempts.

    An attempt fails when the fault missed the calls on a busy machine, or when r2ccl did not take
    the rail out of use. Raises NotSurvivedError when the calls do not recover. Raises StrikeError
    after the last attempt.
    """
    node = index % len(lab.nodes)
    for _ in range(ATTEMPTS):
        strikes.wait_until_up(workers)
        before = strikes.sent(workers, node)
        quiet, _ = _window(workers, NoFault(lab), kind, node, 0)
        used = rails_in_use(before, strikes.sent(workers, node))
        rail = used[(index // 2) % len(used)]
        try:
            stall, noticed = _window(workers, LabInjector(lab), kind, node, rail)
        except WorkerError as error:
            raise NotSurvivedError(node, rail, error) from error
        if stall is not None and quiet is not None and (noticed or system in SILENT):
            return Sample(system, kind, size, node, rail, stall / 1e6, quiet / 1e6)
    raise StrikeError(f"{ATTEMPTS} times a {kind} at node {node} did not strike")


class NoFault:
    """An injector without faults: a lab command without effect takes the place of each fault."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self.rails = lab.rails

    def make(self, kind: str, node: int, rail: int | None) -> None:
        del kind
        self._lab.heal(node, rail or 0)

    def undo(self, kind: str, node: int, rail: int | None) -> None:
        """Does nothing: no fault was made."""


def _window(
    workers: WorkerGroup, injector: Injector, kind: str, node: int, rail: int
) -> tuple[int | None, bool]:
    """Plays a fault of ``injector``; returns the affected call's time, and the rail's reaction.

    The time is in ns, None if the fault missed the calls. The second value is True if the rail
    went out of use.
    """
    fault = Fault(BEFORE_FAULT_MS / 1e3, MADE[kind], node, rail, PATIENCE_S)
    with strikes.beside(Player([fault], injector)) as play:
        soaks = strikes.soak(workers, WINDOW_MS)
        noticed = strikes.states(workers, node)[rail] != "UP"
    struck = [played.struck_ns for played in play.played]
    found = strikes.hit_call(witnesses(kind, node, soaks), struck[0]) if struck else None
    return None if found is None else found[0], noticed


def witnesses(kind: str, node: int, soaks: Sequence[Soak]) -> list[Soak]:
    """Returns the soaks of the ranks that measure a fault of ``kind`` at the port of ``node``."""
    if kind == CARRIER:
        return [soaks[node]]
    if kind == PEER_CARRIER:
        return [soak for rank, soak in enumerate(soaks) if rank != node]
    return list(soaks)


def distributions(samples: Sequence[Sample]) -> list[Distribution]:
    """Groups samples by kind, size and system; sorted by the kind's first appearance, then size."""
    groups: dict[tuple[str, int, str], list[Sample]] = {}
    for sample in samples:
        groups.setdefault((sample.kind, sample.bytes, sample.system), []).append(sample)
    kinds = list(dict.fromkeys(kind for kind, _, _ in groups))
    return [
        Distribution(
            system=system,
            kind=kind,
            bytes=size,
            faults=len(group),
            stall_ms=Spread.of([sample.stall_ms for sample in group]),
            no_fault_ms=Spread.of([sample.no_fault_ms for sample in group]),
        )
        for (kind, size, system), group in sorted(
            groups.items(), key=lambda item: (kinds.index(item[0][0]), item[0][1])
        )
    ]


def checks(found: Sequence[Distribution]) -> list[Check]:
    """Returns the checks of r2ccl's p99, and of the ratio to MPTCP's stalls where measured."""
    others = {(one.kind, one.bytes): one for one in found if one.system == "mptcp"}
    result = []
    for own in found:
        if own.system != "r2ccl":
            continue
        name = f"{own.kind}, {format_size(own.bytes)}"
        result.append(
            at_most(f"{name}: p99 of {own.faults}, ms", own.stall_ms.p99, P99_MS[own.kind])
        )
        other = others.get((own.kind, own.bytes))
        if other is not None:
            for word, above, below in (
                ("median", other.stall_ms.p50, own.stall_ms.p50),
                ("p99", other.stall_ms.p99, own.stall_ms.p99),
            ):
                result.append(
                    at_least(f"{name}: MPTCP / r2ccl, {word}", above / below, TIMES_SHORTER)
                )
    return result
