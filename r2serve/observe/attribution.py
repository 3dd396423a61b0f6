"""Charges the stalls of a step to the requests of the step, and measures the pace of requests.

Engine-neutral: the engine's plugin reports the begin, end and requests of each step. A step
without stalls costs a few dictionary look-ups per request; only stalled steps are logged. Not
thread-safe: a worker runs a single step at a time.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from r2serve.observe import journal
from r2serve.observe.fault_report import StallReport
from r2serve.observe.journal import Event
from r2serve.observe.request_log import LONGEST_NAME, RequestLog
from r2serve.observe.run_delay import run_delay_ns
from r2serve.observe.step_baseline import StepBaseline

_LOG = logging.getLogger("r2serve.attribution")

REPORT_AFTER_S = 1.0
"""Delay of a fault's log line, s; localisation usually ends within this time."""


class EngineView(Protocol):
    """The subset of ``_core.Engine`` used here."""

    @property
    def stalled_ns(self) -> int: ...
    @property
    def journal_path(self) -> str: ...
    @property
    def process(self) -> int: ...
    def journal_bytes(self) -> bytes: ...
    def set_step(self, step: int) -> None: ...


@dataclass(frozen=True)
class NewRequest:
    """A request in its first step."""

    id: str
    name: str
    """Client-visible name."""
    prompt_tokens: int


@dataclass(frozen=True)
class Step:
    """A step of the engine, with the ids of the requests served."""

    prefill: Sequence[str]
    decode: Sequence[str]
    yielding: Sequence[str]
    """Requests that receive a token from this step."""
    new: Sequence[NewRequest] = ()
    finished: Iterable[str] = ()
    """Requests that ended since the previous step."""
    tokens: int = 0
    """Tokens computed for all requests together; 0 = unknown."""

    @property
    def one_each(self) -> bool:
        """True for a pure decode step, with exactly 1 token per request."""
        return 0 < self.tokens == len(self.prefill) + len(self.decode)


@dataclass(slots=True)
class _RunningRequest:
    name: str
    prompt_tokens: int
    scheduled_ns: int
    first_token_ns: int = 0
    last_token_ns: int = 0
    tokens: int = 0
    worst_gap_ns: int = 0
    worst_gap_ended_ns: int = 0


@dataclass
class Attribution:
    """Attribution for a single worker process."""

    engines: Callable[[], Sequence[EngineView]]
    """Returns the engines open now."""
    about: Mapping[str, str] = field(default_factory=dict)
    """Labels of the engine's own metrics: ``model_name``, ``engine``."""
    _running: dict[str, _RunningRequest] = field(default_factory=dict)
    _step: Step | None = None
    _number: int = 0
    _began_ns: int = 0
    """Start of the current part of the step; an engine may report a step in several parts."""
    _part: int = 0
    _stalled_ns: int = 0
    _delay_ns: int = 0
    """Run delay of the thread at the start of the part; see :mod:`r2serve.observe.run_delay`."""
    _held: bool = False
    """A rail event stalled the step."""
    _noted: bool = False
    """The request log has a line about the step."""
    _usual: dict[tuple[int, bool], StepBaseline] = field(
        default_factory=lambda: defaultdict(StepBaseline)
    )
    """Baselines by part of the step, and by whether the part ends with sampled tokens."""
    _seen: dict[int, int] = field(default_factory=dict)
    """Number of journal records read, by engine."""
    _log: RequestLog | None = None
    _report: StallReport | None = None

    def prompt_tokens(self, request: str) -> int:
        """Returns the prompt length of a running request; 0 for other requests."""
        running = self._running.get(request)
        return running.prompt_tokens if running else 0

    def has_tokens(self, request: str) -> bool:
        """Returns True for a running request that has received a token."""
        running = self._running.get(request)
        return running is not None and running.tokens > 0

    def began(self, step: Step) -> None:
        """Marks the start of a step."""
        self._number += 1
        self._step = step
        self._part = 0
        self._held = self._noted = False
        self._announce(self._number)
        for request in step.finished:
            self._finished(request)
        if self._number == 1:
            self._opened_log()  # the sidecar reads the worker's model from the log's header
        self._began_ns = time.monotonic_ns()
        self._delay_ns = run_delay_ns()
        for new in step.new:
            if new.id not in self._running:  # else: resumed after a preemption
                name = new.name[:LONGEST_NAME]
                self._running[new.id] = _RunningRequest(name, new.prompt_tokens, self._began_ns)

    def ended(self, *, sampled: bool) -> None:
        """Marks the end of a part of the step.

        sampled: True if the step's tokens are available, which ends the step.
        """
        if self._step is None:
            return
        now_ns = time.monotonic_ns()
        step, usual = self._step, self._usual[self._part, sampled]
        stalled_ns = sum(engine.stalled_ns for engine in self.engines())
        if stalled_ns != self._stalled_ns or self._noted:
            self._stalled_ns = stalled_ns
            self._held = True
            self._charge(step, now_ns, usual.ns(step.tokens, one_each=step.one_each))
        elif not self._held:
            ran_ns = now_ns - self._began_ns - (run_delay_ns() - self._delay_ns)
            usual.note(max(ran_ns, 1), step.tokens, one_each=step.one_each)
        self._began_ns = now_ns
        self._delay_ns = run_delay_ns()
        self._part += 1
        if sampled:
            self._announce(0)
            for request in step.yielding:
                self._token(request, now_ns)
            self._step = None

    def _announce(self, number: int) -> None:
        """Tells the engines the step number of the next collectives; 0 = outside of steps."""
        for engine in self.engines():
            engine.set_step(number % 2**32)

    def _token(self, request: str, now_ns: int) -> None:
        running = self._running.get(request)
        if running is None:
            return
        if running.tokens == 0:
            running.first_token_ns = now_ns
        elif (gap_ns := now_ns - running.last_token_ns) > running.worst_gap_ns:
            running.worst_gap_ns, running.worst_gap_ended_ns = gap_ns, now_ns
        running.last_token_ns = now_ns
        running.tokens += 1

    def _finished(self, request: str) -> None:
        running = self._running.pop(request, None)
        if running is None or (log := self._opened_log()) is None:
            return
        log.write(
            {
                "request": running.name,
                "scheduled_ns": running.scheduled_ns,
                "first_token_ns": running.first_token_ns,
                "last_token_ns": running.last_token_ns,
                "tokens": running.tokens,
                "worst_gap_ns": running.worst_gap_ns,
                "worst_gap_ended_ns": running.worst_gap_ended_ns,
            }
        )

    def _charge(self, step: Step, now_ns: int, usual_ns: int) -> None:
        charged = False
        for engine in self.engines():
            read = journal.parse(engine.journal_bytes(), after=self._seen.get(engine.process, 0))
            self._seen[engine.process] = read.record_count
            number = self._number % 2**32
            stalls = [one for one in read.events if one.kind == "stall" and one.epoch == number]
            if stalls:
                groups = {group.id: group.name for group in read.groups}
                self._note(step, now_ns, usual_ns, groups, stalls)
                self._tell(step, engine, stalls)
                charged = True
        late = 0 < usual_ns < now_ns - self._began_ns
        if self._noted and not charged and late:  # delayed by a stall of an earlier part
            self._note(step, now_ns, usual_ns)

    def _note(
        self,
        step: Step,
        now_ns: int,
        usual_ns: int,
        groups: Mapping[int, str] | None = None,
        stalls: Sequence[Event] = (),
    ) -> None:
        if (log := self._opened_log()) is None:
            return
        self._noted = True
        groups = groups or {}
        log.write(
            {
                "step": self._number,
                "began_ns": self._began_ns,
                "ended_ns": now_ns,
                "usual_ns": usual_ns,
                "delay_ns": run_delay_ns() - self._delay_ns,
                "stalls": [
                    {
                        "collective": stall.text,
                        "group": groups.get(stall.comm, ""),
                        "call": stall.call,
                        "ended_ns": stall.time_ns,
                        "ns": stall.value,
                    }
                    for stall in stalls
                ],
                "prefill": self._names(step.prefill),
                "decode": self._names(step.decode),
            }
        )

    def _tell(self, step: Step, engine: EngineView, stalls: list[Event]) -> None:
        """Adds stalls to the pending fault report, or starts a new report.

        The report is logged after REPORT_AFTER_S as a single line, however many steps stalled.
        """
        if self._report is None or self._report.said:
            self._report = StallReport(engine, since_ns=stalls[0].time_ns - stalls[0].value)
            self._report.say_after(REPORT_AFTER_S)
        self._report.add(
            sum(stall.value for stall in stalls), self._names((*step.prefill, *step.decode))
        )

    def close(self) -> None:
        """Logs the pending fault report at once. Call before the engine closes."""
        if self._report is not None:
            self._report.say()

    def _names(self, requests: Iterable[str]) -> list[str]:
        """Returns the distinct client-visible names; samples of a request (n > 1) share a name."""
        known = (self._running.get(request) for request in requests)
        return list(dict.fromkeys(running.name for running in known if running is not None))

    def _opened_log(self) -> RequestLog | None:
        """Returns the request log beside the worker's journal file; None without such a file."""
        if self._log is None:
            for engine in self.engines():
                if engine.journal_path:
                    path = Path(engine.journal_path).with_suffix(".requests")
                    label = journal.parse(engine.journal_bytes(), events=False).label
                    self._log = RequestLog(path, writer="worker", label=label, about=self.about)
                    break
        return self._log
