"""Charges what rail events cost a step to the requests that it served, and notes their pace.

Engine-neutral: an engine's plugin tells which requests a step serves, and when it begins and ends.
While nothing fails a step costs a few dictionary look-ups a request; only one that was held up is
written down.  For one thread: a worker runs one step at a time.
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
from r2serve.observe.step_baseline import StepBaseline

_LOG = logging.getLogger("r2serve.attribution")

REPORT_AFTER_S = 1.0
"""By then it is known where a fault is, and its line can be logged."""


class EngineView(Protocol):
    """What is asked of an engine (``_core.Engine``)."""

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
    """A request that is served for the first time."""

    id: str
    name: str
    """What its client knows it by."""
    prompt_tokens: int


@dataclass(frozen=True)
class Step:
    """One step: ids of the requests that it serves."""

    prefill: Sequence[str]
    decode: Sequence[str]
    yielding: Sequence[str]
    """Those that get a token by it."""
    new: Sequence[NewRequest] = ()
    finished: Iterable[str] = ()
    """Those that have ended since the step before."""
    tokens: int = 0
    """It computes so many, of all requests; 0: not known."""

    @property
    def one_each(self) -> bool:
        """It computes one token of each request: it takes as long as others that do."""
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
    """Of one worker process."""

    engines: Callable[[], Sequence[EngineView]]
    """Those that are open now."""
    about: Mapping[str, str] = field(default_factory=dict)
    """What the worker serves, in the engine's own words: ``model_name``, ``engine``."""
    _running: dict[str, _RunningRequest] = field(default_factory=dict)
    _step: Step | None = None
    _number: int = 0
    _began_ns: int = 0
    """This part of it: a step may be told of in several."""
    _part: int = 0
    _stalled_ns: int = 0
    _held: bool = False
    """The step was held up."""
    _noted: bool = False
    """And a line says so."""
    _usual: dict[tuple[int, bool], StepBaseline] = field(
        default_factory=lambda: defaultdict(StepBaseline)
    )
    """Of which part of a step, and whether its tokens are there then."""
    _seen: dict[int, int] = field(default_factory=dict)
    """Records read, by engine."""
    _log: RequestLog | None = None
    _report: StallReport | None = None

    def prompt_tokens(self, request: str) -> int:
        """Of a request that is running; 0 of any other."""
        running = self._running.get(request)
        return running.prompt_tokens if running else 0

    def has_tokens(self, request: str) -> bool:
        """Whether it is running and got its first token."""
        running = self._running.get(request)
        return running is not None and running.tokens > 0

    def began(self, step: Step) -> None:
        """The worker is about to run a step."""
        self._number += 1
        self._step = step
        self._part = 0
        self._held = self._noted = False
        self._announce(self._number)
        for request in step.finished:
            self._finished(request)
        if self._number == 1:
            self._opened_log()  # who asks what this worker serves, asks its log
        self._began_ns = time.monotonic_ns()
        for new in step.new:
            if new.id not in self._running:  # else it goes on after it was preempted
                name = new.name[:LONGEST_NAME]
                self._running[new.id] = _RunningRequest(name, new.prompt_tokens, self._began_ns)

    def ended(self, *, sampled: bool) -> None:
        """The step, or a part of it, is over.

        sampled: its tokens are there.
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
            usual.note(now_ns - self._began_ns, step.tokens, one_each=step.one_each)
        self._began_ns = now_ns
        self._part += 1
        if sampled:
            self._announce(0)
            for request in step.yielding:
                self._token(request, now_ns)
            self._step = None

    def _announce(self, number: int) -> None:
        """Collectives that follow are of that step; 0: of none."""
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
        if self._noted and not charged and late:  # by what held up the part before
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
        """One line a fault, once it is known where it is, whatever number of steps it held up."""
        if self._report is None or self._report.said:
            self._report = StallReport(engine, since_ns=stalls[0].time_ns - stalls[0].value)
            self._report.say_after(REPORT_AFTER_S)
        self._report.add(
            sum(stall.value for stall in stalls), self._names((*step.prefill, *step.decode))
        )

    def close(self) -> None:
        """Say at once what is not said yet.  Before the engine closes."""
        if self._report is not None:
            self._report.say()

    def _names(self, requests: Iterable[str]) -> list[str]:
        """Each once: several answers to one request share its name."""
        known = (self._running.get(request) for request in requests)
        return list(dict.fromkeys(running.name for running in known if running is not None))

    def _opened_log(self) -> RequestLog | None:
        """Beside the journal of this worker; None where it keeps none."""
        if self._log is None:
            for engine in self.engines():
                if engine.journal_path:
                    path = Path(engine.journal_path).with_suffix(".requests")
                    label = journal.parse(engine.journal_bytes(), events=False).label
                    self._log = RequestLog(path, writer="worker", label=label, about=self.about)
                    break
        return self._log
