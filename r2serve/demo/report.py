"""The demo's report, as JSON and as tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from r2serve.lab.serving.client import Run

FAULT_KINDS = ("carrier_loss", "black_hole")


@dataclass(frozen=True)
class Mismatch:
    """Position of the first token of a request different from the reference."""

    request: int
    position: int


def first_difference(want: Sequence[int], got: Sequence[int]) -> int | None:
    """Returns the position of the first difference, or the shorter length; None if equal."""
    for position, (a, b) in enumerate(zip(want, got, strict=False)):
        if a != b:
            return position
    return None if len(want) == len(got) else min(len(want), len(got))


def compare(reference: Run, run: Run) -> list[Mismatch]:
    """Returns the first difference of each differing request; a missing token is a difference."""
    if len(reference.requests) != len(run.requests):
        raise ValueError(f"{len(run.requests)} requests against {len(reference.requests)}")
    found = []
    for index, (want, got) in enumerate(zip(reference.requests, run.requests, strict=True)):
        position = first_difference(want.token_ids, got.token_ids)
        if position is not None:
            found.append(Mismatch(index, position))
    return found


@dataclass
class FaultReport:
    """A fault and the cost. bytes_before: bytes on the rail in the last step before the fault.

    rail_after: the rail in use during the fault; empty = unknown. missed_strikes: earlier attempts
    without a stalled collective. rejoin_ms: from the healing until the rails are UP; None = never.
    """

    kind: str
    rail: str
    bytes_before: int
    replayed_chunks: int
    hedged_chunks: int
    rail_after: str
    stall_ms_max: float
    stalls: int
    missed_strikes: int
    rejoin_ms: float | None
    tokens_per_s: dict[str, float] = field(default_factory=dict)

    def problems(self) -> list[str]:
        found = []
        if self.bytes_before <= 0:
            found.append(f"{self.kind} on {self.rail}: the rail was idle")
        if self.stalls == 0:
            found.append(f"{self.kind} on {self.rail}: no collective stalled")
        if self.replayed_chunks <= 0:
            found.append(f"{self.kind} on {self.rail}: no chunk was replayed")
        if not self.rail_after or self.rail_after == self.rail:
            found.append(f"{self.kind} on {self.rail}: the traffic did not move to another rail")
        if self.rejoin_ms is None:
            found.append(f"{self.kind} on {self.rail}: the healed rail did not rejoin")
        return found


@dataclass(frozen=True)
class ManagementReport:
    """A lost carrier of a node's management NIC during decoding.

    longest_gap_ms: longest gap between two tokens of a client meanwhile.
    """

    node: int
    away_s: float
    longest_gap_ms: float

    @property
    def what(self) -> str:
        return f"management NIC of node {self.node} away for {self.away_s:.1f} s"

    def problems(self) -> list[str]:
        if self.longest_gap_ms < 1e3 * self.away_s:
            return []
        return [f"{self.what}: no token for {self.longest_gap_ms / 1e3:.1f} s"]


@dataclass
class BaselineReport:
    """Result of the stock communicator with the same load and the same first fault.

    decode_step_ms: with a single stream. frozen_s: time without tokens at the end, s; None = no
    freeze.
    """

    decode_step_ms: float
    tokens_per_s: float
    frozen_s: float | None
    watched_s: float
    sent: int
    unfinished: int


@dataclass
class Report:
    """Report of the whole demo."""

    mode: str
    sent: int = 0
    completed: int = 0
    tokens_each: int = 0
    mismatches: list[Mismatch] = field(default_factory=list)
    compared: bool = False
    faults: list[FaultReport] = field(default_factory=list)
    management: ManagementReport | None = None
    """None without a lab, or if the fault could not be made."""
    tokens_per_s: dict[str, float] = field(default_factory=dict)
    decode_step_ms: float = 0.0
    baseline: BaselineReport | None = None
    seconds: float = 0.0
    errors: list[str] = field(default_factory=list)

    @property
    def tokens_identical(self) -> bool:
        return self.compared and not self.mismatches

    def problems(self) -> list[str]:
        """Returns the reasons for a failure of the demo; empty if passed."""
        found = list(self.errors)
        if self.sent == 0:
            found.append("no request was sent during the faults")
        elif self.completed < self.sent:
            found.append(f"{self.sent - self.completed} of {self.sent} requests were lost")
        if self.compared:
            found += [
                f"request {m.request}: token {m.position} differs from the reference"
                for m in self.mismatches
            ]
        else:
            found.append("tokens were not compared")
        for fault in self.faults:
            found += fault.problems()
        if self.management is not None:
            found += self.management.problems()
        missing = [kind for kind in FAULT_KINDS if kind not in [f.kind for f in self.faults]]
        found += [f"the {kind} fault was not made" for kind in missing]
        return found

    @property
    def passed(self) -> bool:
        return not self.problems()

    def to_json(self) -> dict[str, Any]:
        """Returns the content of the --json file."""
        baseline = management = None
        if self.management is not None:
            management = {
                "kind": "carrier_loss",
                "node": self.management.node,
                "away_s": round(self.management.away_s, 3),
                "longest_gap_ms": round(self.management.longest_gap_ms, 3),
            }
        if self.baseline is not None:
            baseline = {
                "decode_step_ms": round(self.baseline.decode_step_ms, 3),
                "tokens_per_s": round(self.baseline.tokens_per_s, 1),
                "fault": "carrier_loss",
                "frozen_s": _rounded(self.baseline.frozen_s),
                "watched_s": round(self.baseline.watched_s, 1),
                "requests": {"sent": self.baseline.sent, "unfinished": self.baseline.unfinished},
            }
        return {
            "requests": {
                "sent": self.sent,
                "completed": self.completed,
                "failed": self.sent - self.completed,
            },
            "tokens_identical": self.tokens_identical,
            "faults": [_fault_json(fault) for fault in self.faults],
            "management": management,
            "passed": self.passed,
            "problems": self.problems(),
            "mode": self.mode,
            "tokens_each": self.tokens_each,
            "tokens_per_s": {name: round(rate, 1) for name, rate in self.tokens_per_s.items()},
            "decode_step_ms": round(self.decode_step_ms, 3),
            "seconds": round(self.seconds, 1),
            "baseline": baseline,
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _fault_json(fault: FaultReport) -> dict[str, Any]:
    return {
        "kind": fault.kind,
        "rail": fault.rail,
        "bytes_before": fault.bytes_before,
        "replayed_chunks": fault.replayed_chunks,
        "hedged_chunks": fault.hedged_chunks,
        "rail_after": fault.rail_after,
        "stall_ms_max": round(fault.stall_ms_max, 3),
        "stalls": fault.stalls,
        "missed_strikes": fault.missed_strikes,
        "rejoin_ms": _rounded(fault.rejoin_ms),
        "tokens_per_s": {name: round(rate, 1) for name, rate in fault.tokens_per_s.items()},
    }


def render(report: Report, console: Console) -> None:
    """Prints the closing table and the verdict."""
    console.print(_summary(report))
    if report.faults:
        console.print(_fault_table(report.faults))
    if report.baseline is not None:
        console.print(_baseline_line(report))
    problems = report.problems()
    for problem in problems:
        console.print(f"[red]failed:[/] {escape(problem)}", highlight=False)
    if not problems:
        console.print(
            "[green]passed:[/] no request lost, all tokens equal to the reference run",
            highlight=False,
        )


def _summary(report: Report) -> Table:
    table = Table(title="r2serve demo", title_justify="left", show_header=False)
    for _ in range(2):
        table.add_column(overflow="fold")
    table.add_row("nodes and rails", report.mode)
    table.add_row("requests completed", f"{report.completed} of {report.sent}")
    table.add_row("requests lost", str(report.sent - report.completed))
    tokens = "not compared"
    if report.compared:
        tokens = "identical" if report.tokens_identical else "DIFFERENT"
    table.add_row("tokens", f"{tokens}, {report.tokens_each} per request")
    if report.management is not None:
        gap_ms = report.management.longest_gap_ms
        table.add_row(report.management.what, f"longest gap between tokens {gap_ms:.0f} ms")
    table.add_row("decode step, single stream", f"{report.decode_step_ms:.1f} ms")
    table.add_row("duration", f"{report.seconds:.0f} s")
    return table


def _fault_table(faults: Sequence[FaultReport]) -> Table:
    table = Table(title="faults during decoding", title_justify="left")
    for name in ("fault", "rail", "bytes in last step", "stall ms", "replayed chunks"):
        left = name in ("fault", "rail")
        table.add_column(name, justify="left" if left else "right", overflow="fold")
    table.add_column("rail after", overflow="fold")
    table.add_column("rejoined after ms", justify="right", overflow="fold")
    for fault in faults:
        table.add_row(
            fault.kind,
            fault.rail,
            str(fault.bytes_before),
            f"{fault.stall_ms_max:.1f}",
            str(fault.replayed_chunks),
            fault.rail_after or "none",
            "never" if fault.rejoin_ms is None else f"{fault.rejoin_ms:.0f}",
        )
    return table


def _baseline_line(report: Report) -> str:
    stock = report.baseline
    assert stock is not None
    if stock.frozen_s is None:
        fate = f"no freeze within {stock.watched_s:.0f} s of the rail's loss"
    else:
        fate = (
            f"no token for the last {stock.frozen_s:.0f} s of the watch after the rail's loss, "
            f"{stock.unfinished} of {stock.sent} requests unfinished"
        )
    return (
        f"stock communicator: decode step, single stream {stock.decode_step_ms:.1f} ms "
        f"(r2ccl {report.decode_step_ms:.1f} ms), {stock.tokens_per_s:.0f} tokens/s; {fate}"
    )
