"""The report of the hour of faults, as JSON, as tables and as a last line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from r2serve.demo.hour.stalls import (
    CausedStall,
    fault_of,
    gaps_of,
    stalls_of,
    unprovoked,
    was_noticed,
)
from r2serve.demo.report import first_difference
from r2serve.lab.kinds import KINDS
from r2serve.lab.player import Played
from r2serve.lab.serving.client import Run
from r2serve.observe.journal import Event

NO_FAULT = "no fault active"


@dataclass(frozen=True)
class WrongRequest:
    """A request with tokens different from the reference run.

    position: first differing token. tokens: number of differing tokens. request: index in order of
    sending.
    """

    request: int
    prompt: int
    position: int
    tokens: int


def wrong_requests(reference: Run, run: Run) -> list[WrongRequest]:
    """Returns the requests with wrong tokens; for a failed request, only received tokens count."""
    found = []
    for number, got in enumerate(run.requests):
        want = reference.requests[got.prompt].token_ids
        if not got.completed:
            want = want[: len(got.token_ids)]
        position = first_difference(want, got.token_ids)
        if position is not None:
            differing = sum(a != b for a, b in zip(want, got.token_ids, strict=False))
            differing += abs(len(want) - len(got.token_ids))
            found.append(WrongRequest(number, got.prompt, position, differing))
    return found


@dataclass
class Outcome:
    """A fault and the consequences. noticed: each faulted rail left UP at a worker.

    stalls_ms: stalls of collectives. gap_ms: longest gap between a client's tokens. A fault of the
    management NIC need not be noticed: the control rail carries little.
    """

    played: Played
    noticed: bool
    stalls_ms: list[float] = field(default_factory=list)
    gap_ms: float = 0.0

    def problems(self) -> list[str]:
        fault = self.played.fault
        where = f"{self.played.label} at {fault.at_s:g} s, node {fault.node}"
        found = []
        if self.played.rails and KINDS[fault.kind].leaves_up and not self.noticed:
            found.append(f"{where}: no worker noticed the fault")
        if self.played.back_ns is None:
            found.append(f"{where}: not all rails rejoined")
        return found

    def to_json(self) -> dict[str, Any]:
        played = self.played
        back = None
        if played.back_ns is not None and played.healed_ns is not None:
            back = round((played.back_ns - played.healed_ns) / 1e6)
        return {
            "label": played.label,
            "kind": played.fault.kind,
            "node": played.fault.node,
            "rails": list(played.rails),
            "at_s": played.fault.at_s,
            "duration_s": played.fault.duration_s,
            "late_s": round(played.late_s, 2),
            "noticed": self.noticed,
            "stalls_ms": [round(ms, 3) for ms in self.stalls_ms],
            "worst_gap_ms": round(self.gap_ms, 1),
            "back_after_ms": back,
        }


@dataclass
class HourReport:
    """Report of the whole hour. planned: faults in the schedule. Times are CLOCK_MONOTONIC."""

    mode: str
    seed: int
    seconds: float
    planned: int
    streams: int
    begin_ns: int = 0
    tokens_per_request: list[int] = field(default_factory=list)
    sent: int = 0
    completed: int = 0
    tokens: int = 0
    compared: bool = False
    wrong: list[WrongRequest] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    stalls: list[CausedStall] = field(default_factory=list)
    worst_gap_ms: float = 0.0
    rail_events: dict[str, int] = field(default_factory=dict)
    unprovoked: int = 0
    took_s: float = 0.0
    errors: list[str] = field(default_factory=list)

    def add_run(self, reference: Run, run: Run) -> None:
        self.sent, self.completed = len(run.requests), run.completed
        self.tokens, self.compared = run.tokens, True
        self.wrong = wrong_requests(reference, run)
        failed = Counter(request.error for request in run.requests if not request.completed)
        self.failures = [f"{count} x {text}" for text, count in failed.most_common()]

    def add_faults(self, played: Sequence[Played], events: Sequence[Event], run: Run) -> None:
        """Attributes stalls and gaps to faults. events: of all workers, oldest first."""
        self.outcomes = [Outcome(one, was_noticed(one, events)) for one in played]
        self.stalls = stalls_of(events, played)
        for stall in self.stalls:
            if stall.fault is not None:
                self.outcomes[stall.fault].stalls_ms.append(stall.ms)
        for gap in gaps_of(run):
            self.worst_gap_ms = max(self.worst_gap_ms, gap.ms)
            index = fault_of(played, gap.begin_ns, gap.end_ns)
            if index is not None:
                self.outcomes[index].gap_ms = max(self.outcomes[index].gap_ms, gap.ms)
        counts = Counter(
            event.text if event.kind == "rail_state" else event.kind for event in events
        )
        self.rail_events = dict(sorted(counts.items()))
        self.unprovoked = unprovoked(played, events)

    @property
    def lost(self) -> int:
        return self.sent - self.completed

    @property
    def wrong_tokens(self) -> int:
        return sum(one.tokens for one in self.wrong)

    @property
    def worst_stall_ms(self) -> float:
        return max((stall.ms for stall in self.stalls), default=0.0)

    def problems(self) -> list[str]:
        """Returns the reasons for a failure of the hour; empty if passed."""
        found = list(self.errors)
        if self.completed == 0:
            found.append("no request was completed")
        if self.lost:
            found.append(f"{self.lost} of {self.sent} requests were lost: {self.failures}")
        if not self.compared:
            found.append("tokens were not compared")
        found += [
            f"request {one.request} (prompt {one.prompt}): {one.tokens} tokens differ from the "
            f"reference, token {one.position} first"
            for one in self.wrong
        ]
        if len(self.outcomes) < self.planned:
            found.append(f"only {len(self.outcomes)} of {self.planned} faults were made")
        for outcome in self.outcomes:
            found += outcome.problems()
        return found

    @property
    def passed(self) -> bool:
        return not self.problems()

    def last_line(self) -> str:
        return (
            f"hour: {len(self.outcomes)} faults, {self.sent} requests, {self.lost} lost, "
            f"{self.wrong_tokens} wrong tokens, worst stall {self.worst_stall_ms:.1f} ms"
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the content of the --json file."""
        return {
            "mode": self.mode,
            "seed": self.seed,
            "seconds": self.seconds,
            "streams": self.streams,
            "tokens_per_request": self.tokens_per_request,
            "requests": {"sent": self.sent, "completed": self.completed, "failed": self.lost},
            "failures": self.failures,
            "tokens": self.tokens,
            "wrong_tokens": self.wrong_tokens,
            "wrong_requests": [vars(one) for one in self.wrong],
            "faults": [outcome.to_json() for outcome in self.outcomes],
            "planned_faults": self.planned,
            "stalls": [
                {
                    "at_s": round((stall.begin_ns - self.begin_ns) / 1e9, 3),
                    "ms": round(stall.ms, 3),
                    "fault": stall.fault,
                    "cause": stall.cause,
                }
                for stall in self.stalls
            ],
            "worst_stall_ms": round(self.worst_stall_ms, 3),
            "worst_gap_ms": round(self.worst_gap_ms, 1),
            "rail_events": self.rail_events,
            "left_up_unprovoked": self.unprovoked,
            "took_s": round(self.took_s, 1),
            "passed": self.passed,
            "problems": self.problems(),
        }


def render(report: HourReport, console: Console) -> None:
    """Prints the tables, the problems and the summary line."""
    console.print(_summary(report))
    if report.outcomes:
        console.print(_fault_table(report))
    for problem in report.problems():
        console.print(f"[red]failed:[/] {escape(problem)}", highlight=False)
    console.print(report.last_line(), highlight=False, soft_wrap=True)


def _summary(report: HourReport) -> Table:
    table = Table(title="an hour of faults", title_justify="left", show_header=False)
    for _ in range(2):
        table.add_column(overflow="fold")
    table.add_row("served over", report.mode)
    table.add_row("schedule", f"seed {report.seed}, {report.planned} faults, {report.seconds:g} s")
    table.add_row("requests completed", f"{report.completed} of {report.sent}")
    table.add_row("tokens", f"{report.tokens}, {report.wrong_tokens} wrong")
    table.add_row("worst gap between a client's tokens", f"{report.worst_gap_ms:.0f} ms")
    downs = sum(n for text, n in report.rail_events.items() if "->DOWN" in text)
    table.add_row("transitions to DOWN, all workers", str(downs))
    table.add_row("transitions from UP without a fault", str(report.unprovoked))
    table.add_row("duration", f"{report.took_s:.0f} s")
    return table


def _fault_table(report: HourReport) -> Table:
    table = Table(title="faults by kind", title_justify="left")
    table.add_column("fault", overflow="fold")
    for name in ("count", "noticed", "stalls", "worst stall ms", "worst client gap ms"):
        table.add_column(name, justify="right", overflow="fold")
    table.add_column("cause of the worst stall", overflow="fold")
    for label in dict.fromkeys(outcome.played.label for outcome in report.outcomes):
        indices = [i for i, one in enumerate(report.outcomes) if one.played.label == label]
        of_label = [report.outcomes[i] for i in indices]
        stalls = [stall for stall in report.stalls if stall.fault in indices]
        worst = max(stalls, key=lambda stall: stall.ms, default=None)
        table.add_row(
            label,
            str(len(of_label)),
            str(sum(outcome.noticed for outcome in of_label)),
            str(len(stalls)),
            *_worst(worst, max(outcome.gap_ms for outcome in of_label)),
        )
    others = [stall for stall in report.stalls if stall.fault is None]
    if others:
        worst = max(others, key=lambda stall: stall.ms)
        table.add_row(NO_FAULT, "", "", str(len(others)), *_worst(worst, None))
    return table


def _worst(stall: CausedStall | None, gap_ms: float | None) -> tuple[str, str, str]:
    gap = "" if gap_ms is None else f"{gap_ms:.0f}"
    return ("", gap, "") if stall is None else (f"{stall.ms:.1f}", gap, stall.cause)
