"""Charges the stalls of a step to the requests of the step, and measures the pace of requests.

Engine-neutral: the engine's plugin reports the begin, end and requests of each step. A step
without stalls costs a few dictionary look-ups per request; only stalled steps are logged. An engine
may begin a step before the step before has ended. Not thread-safe.
"""

from __future__ import annotations

import logging
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from r2serve.config import Config
from r2serve.observe import files, journal
from r2serve.observe.fault_report import StallReport
from r2serve.observe.journal import Event
from r2serve.observe.names import request_name
from r2serve.observe.request_log import RequestLog
from r2serve.observe.run_delay import run_delay_ns
from r2serve.observe.step_baseline import StepBaseline

_LOG = logging.getLogger("r2serve.attribution")

REPORT_AFTER_S = 1.5
"""Delay of a fault's log line, s; localisation usually ends within this time."""
MOST_OPEN = 64
"""More open steps than this are steps that an engine has dropped without an end."""


LAST_STEP = 2**32 - 1


def next_step(number: int) -> int:
    """Returns the number of the step after step ``number``. 0 is no step."""
    return number % LAST_STEP + 1


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
    """The client's id, unchecked; :func:`r2serve.observe.names.request_name` makes it a name."""
    prompt_tokens: int


@dataclass(frozen=True)
class Step:
    """A step of the engine, with the ids of the requests served."""

    number: int
    """From 1 to :data:`LAST_STEP`; the number in errors of the comparison between ranks, too."""
    prefill: Sequence[str]
    decode: Sequence[str]
    yielding: Sequence[str]
    """Requests that receive a token from this step."""
    new: Sequence[NewRequest] = ()
    finished: Iterable[str] = ()
    """Requests that ended since the previous step."""
    tokens: int = 0
    """Tokens computed for all requests together; 0 = unknown."""
    kind: str = ""
    """Steps of different kinds have separate baselines; empty: a forward pass."""

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


@dataclass(slots=True)
class _OpenStep:
    step: Step
    began_ns: int
    """Start of the current part of the step; an engine may report a step in several parts."""
    delay_ns: int
    """Run delay of the thread at the start of the part; see :mod:`r2serve.observe.run_delay`."""
    part: int = 0
    held: bool = False
    """A rail event stalled the step."""
    noted: bool = False
    """The request log has a line about the step."""
    stalls: list[tuple[EngineView, dict[int, str], list[Event]]] = field(default_factory=list)
    """Stalls not yet charged: the engine, names of its groups, and the events."""


@dataclass
class Attribution:
    """Attribution for a single worker process."""

    engines: Callable[[], Sequence[EngineView]]
    """Returns the engines open now."""
    about: Mapping[str, str] = field(default_factory=dict)
    """Labels of the engine's own metrics: ``model_name``, ``engine``."""
    journal_limit_bytes: int = Config.journal_limit_bytes
    """Bound on all files of the journal's folder together."""
    _running: dict[str, _RunningRequest] = field(default_factory=dict)
    _open: dict[int, _OpenStep] = field(default_factory=dict)
    """Steps begun and not ended, by key, in the order of their begin."""
    _begun: bool = False
    """A step has begun."""
    _stalled_ns: int = 0
    _usual: dict[tuple[str, int, bool], StepBaseline] = field(
        default_factory=lambda: defaultdict(StepBaseline)
    )
    """Baselines by kind and part of the step, and by whether the part ends with sampled tokens."""
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

    def began(self, step: Step, key: int = 0) -> None:
        """Marks the start of a step; ``key`` distinguishes steps that are open together."""
        first, self._begun = not self._begun, True
        self._announce(step.number)
        for request in step.finished:
            self._finished(request)
        if first:
            self._opened_log()  # the sidecar reads the worker's model from the log's header
        now_ns = time.monotonic_ns()
        self._open.pop(key, None)
        while len(self._open) >= MOST_OPEN:  # steps that an engine has dropped
            del self._open[next(iter(self._open))]
        self._open[key] = _OpenStep(step, now_ns, run_delay_ns())
        for new in step.new:
            if new.id not in self._running:  # else: resumed after a preemption
                name = request_name(new.name)
                self._running[new.id] = _RunningRequest(name, new.prompt_tokens, now_ns)

    def ended(self, *, sampled: bool, key: int = 0) -> None:
        """Marks the end of a part of the step with this key.

        sampled: True if the step's tokens are available, which ends the step.
        """
        one = self._open.get(key)
        if one is None:
            return
        now_ns = time.monotonic_ns()
        step, usual = one.step, self._usual[one.step.kind, one.part, sampled]
        if self._collect() or one.stalls or one.noted:
            one.held = True
            self._charge(one, now_ns, usual.ns(step.tokens, one_each=step.one_each))
        elif not one.held:
            ran_ns = now_ns - one.began_ns - (run_delay_ns() - one.delay_ns)
            usual.note(max(ran_ns, 1), step.tokens, one_each=step.one_each)
        one.began_ns = now_ns
        one.delay_ns = run_delay_ns()
        one.part += 1
        if sampled:
            del self._open[key]
            latest = next(reversed(self._open.values()), None)
            self._announce(latest.step.number if latest else 0)
            for request in step.yielding:
                self._token(request, now_ns)

    def _announce(self, number: int) -> None:
        """Tells the engines the step number of the next collectives; 0 = outside of steps."""
        for engine in self.engines():
            engine.set_step(number)

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

    def _collect(self) -> bool:
        """Gives new stalls to their steps; returns whether a collective stalled since last time."""
        engines = self.engines()
        stalled_ns = sum(engine.stalled_ns for engine in engines)
        if stalled_ns == self._stalled_ns:
            return False
        self._stalled_ns = stalled_ns
        for engine in engines:
            read = journal.parse(engine.journal_bytes(), after=self._seen.get(engine.process, 0))
            self._seen[engine.process] = read.record_count
            stalls = [event for event in read.events if event.kind == "stall"]
            groups = {group.id: group.name for group in read.groups} if stalls else {}
            for one in self._open.values():
                mine = [event for event in stalls if event.step == one.step.number]
                if mine:
                    one.stalls.append((engine, groups, mine))
        return True

    def _charge(self, one: _OpenStep, now_ns: int, usual_ns: int) -> None:
        charged = bool(one.stalls)
        for engine, groups, stalls in one.stalls:
            self._note(one, now_ns, usual_ns, groups, stalls)
            self._tell(one.step, engine, stalls)
        one.stalls.clear()
        late = 0 < usual_ns < now_ns - one.began_ns
        if one.noted and not charged and late:  # delayed by a stall of an earlier part
            self._note(one, now_ns, usual_ns)

    def _note(
        self,
        one: _OpenStep,
        now_ns: int,
        usual_ns: int,
        groups: Mapping[int, str] | None = None,
        stalls: Sequence[Event] = (),
    ) -> None:
        if (log := self._opened_log()) is None:
            return
        one.noted = True
        groups = groups or {}
        log.write(
            {
                "step": one.step.number,
                "began_ns": one.began_ns,
                "ended_ns": now_ns,
                "usual_ns": usual_ns,
                "delay_ns": run_delay_ns() - one.delay_ns,
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
                "prefill": self._names(one.step.prefill),
                "decode": self._names(one.step.decode),
            }
        )

    def _tell(self, step: Step, engine: EngineView, stalls: list[Event]) -> None:
        """Adds stalls to the pending fault report, or starts a new report.

        The report is logged after REPORT_AFTER_S as a single line, however many steps stalled.
        """
        if self._report is None or self._report.said:
            began_ns = stalls[0].time_ns - stalls[0].value
            self._report = StallReport(engine, since_ns=began_ns, host=socket.gethostname())
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
                    read = journal.parse(engine.journal_bytes(), events=False)
                    self._log = RequestLog(
                        path,
                        writer="worker",
                        label=read.label,
                        about=self.about,
                        serving_engine=read.serving_engine,
                        room_for=partial(
                            files.room_for, path.parent, limit_bytes=self.journal_limit_bytes
                        ),
                    )
                    break
        return self._log
