"""State of a request: engine timings, and stalls caused by rail events."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

MAX_STEPS = 32
"""Number of stalled steps kept per request: the most recent."""
MAX_SPANS = 64

QUEUE, PREFILL, DECODE = "queue", "prefill", "decode"
"""Phases of a request: until the first step, until the first token, until the end."""


@dataclass(frozen=True, slots=True)
class Stall:
    """A collective stalled by a rail event; times are CLOCK_REALTIME in ns."""

    collective: str
    group: str
    call: int
    began_clock_ns: int
    ns: int

    @property
    def ended_clock_ns(self) -> int:
        return self.began_clock_ns + self.ns


@dataclass(frozen=True, slots=True)
class HeldStep:
    """A stalled step of a worker; times are CLOCK_REALTIME in ns."""

    worker: str
    """Key of the worker's journal."""
    label: str
    step: int
    phase: str
    began_clock_ns: int
    ended_clock_ns: int
    stalls: tuple[Stall, ...]
    late_clock_ns: tuple[tuple[int, int], ...] = ()
    """Intervals from the expected to the actual end; the stalls if no baseline is known."""

    def is_part_of(self, other: HeldStep) -> bool:
        """Returns True if both are parts of the same step."""
        return (self.worker, self.step, self.phase) == (other.worker, other.step, other.phase)

    def joined(self, later: HeldStep) -> HeldStep:
        ended_ns = max(self.ended_clock_ns, later.ended_clock_ns)
        return replace(
            self,
            stalls=self.stalls + later.stalls,
            late_clock_ns=self.late_clock_ns + later.late_clock_ns,
            ended_clock_ns=ended_ns,
        )


@dataclass(frozen=True, slots=True)
class Pace:
    """Token times of a request at the worker; ``*_clock_ns`` are CLOCK_REALTIME."""

    scheduled_clock_ns: int
    first_token_clock_ns: int
    last_token_clock_ns: int
    tokens: int
    worst_gap_s: float
    worst_gap_ended_clock_ns: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Times of a request at the engine's front end; ``*_clock_ns`` are CLOCK_REALTIME."""

    reason: str
    prompt_tokens: int
    tokens: int
    queued_s: float
    prefill_s: float
    decode_s: float
    e2e_s: float
    arrived_clock_ns: int
    ended_clock_ns: int

    @property
    def ttft_s(self) -> float:
        """Time from arrival to the first token, s."""
        return max(0.0, self.e2e_s - self.decode_s)

    @property
    def mean_itl_s(self) -> float:
        """Mean inter-token latency, s."""
        return self.decode_s / (self.tokens - 1) if self.tokens > 1 else 0.0


class Spans:
    """A union of time intervals, ns; overlapping intervals are merged.

    Intervals should be added nearly in time order. Only the last ``MAX_SPANS`` intervals are kept;
    older intervals are folded into a sum. Time before the end of the folded part is not counted
    again.
    """

    __slots__ = ("_folded_ns", "_folded_until", "_spans")

    def __init__(self) -> None:
        self._spans: list[tuple[int, int]] = []  # sorted and disjoint
        self._folded_ns = 0
        self._folded_until = 0

    @classmethod
    def of(cls, intervals: Iterable[tuple[int, int]]) -> Spans:
        made = cls()
        for begin, end in sorted(intervals):
            made.add(begin, end)
        return made

    def add(self, begin: int, end: int) -> None:
        begin = max(begin, self._folded_until)
        if begin >= end:
            return
        first = bisect_left(self._spans, begin, key=lambda span: span[1])
        last = first
        while last < len(self._spans) and self._spans[last][0] <= end:
            begin = min(begin, self._spans[last][0])
            end = max(end, self._spans[last][1])
            last += 1
        self._spans[first:last] = [(begin, end)]
        if len(self._spans) > MAX_SPANS:
            oldest = self._spans.pop(0)
            self._folded_ns += oldest[1] - oldest[0]
            self._folded_until = oldest[1]

    @property
    def total_ns(self) -> int:
        return self._folded_ns + sum(end - begin for begin, end in self._spans)


@dataclass(slots=True)
class TrackedRequest:
    """Everything known about a request so far."""

    name: str
    number: int
    """Serial number in order of first mention."""
    timings: Timings | None = None
    pace: Pace | None = None
    held_steps: int = 0
    queued_steps: int = 0
    """Part of `held_steps` during which the request was queued."""
    steps: deque[HeldStep] = field(default_factory=lambda: deque(maxlen=MAX_STEPS))
    waited: dict[str, Spans] = field(default_factory=dict)
    """Stalls by phase; only phases with stalls."""
    late: dict[str, Spans] = field(default_factory=dict)
    """Delays caused by the stalls, for the same phases."""
    scheduled: dict[str, int] = field(default_factory=dict)
    """First scheduling time per worker key, CLOCK_REALTIME in ns."""
    ended_at: tuple[str, str] | None = None
    """First worker to report the end of the request: journal key and label."""
    told: set[str] = field(default_factory=set)
    """Phases already counted in the metrics."""

    def stall_s(self, phase: str | None = None) -> float:
        """Returns the stall time of a phase, or of all phases, s."""
        phases = self.waited if phase is None else [phase]
        return sum(_total_ns(self.waited, each) for each in phases) / 1e9

    def late_s(self, phase: str | None = None) -> float:
        """Returns the delay in a phase, or in all phases, s; at least the stall time."""
        phases = self.waited if phase is None else [phase]
        totals = ((_total_ns(self.waited, each), _total_ns(self.late, each)) for each in phases)
        return sum(map(max, totals)) / 1e9

    @property
    def finished(self) -> bool:
        return self.timings is not None or self.pace is not None

    def hold(self, held: HeldStep) -> None:
        """Charges a stalled step; several parts of a step count as a single step."""
        for place, known in enumerate(self.steps):
            if known.is_part_of(held):
                self.steps[place] = known.joined(held)
                return
        self.held_steps += 1
        self.steps.append(held)

    def hold_queued(self, steps: Iterable[HeldStep]) -> None:
        """Charges the queue phase with stalls between arrival and first scheduling.

        A request that arrives during a stalled step waits for the end of this step. The result
        replaces the queue charge of an earlier call, which may have known fewer steps.

        steps: stalled steps of the workers that served the request.
        """
        if self.timings is None or not self.scheduled:
            return
        arrived_ns = self.timings.arrived_clock_ns
        begun_ns = min(*self.scheduled.values(), self.timings.ended_clock_ns)
        held: list[HeldStep] = []
        waits: list[tuple[int, int]] = []
        late: list[tuple[int, int]] = []
        for step in steps:
            stalls = []
            for stall in step.stalls:
                begin = max(stall.began_clock_ns, arrived_ns)
                end = min(stall.ended_clock_ns, begun_ns)
                if begin < end:
                    stalls.append(stall)
                    waits.append((begin, end))
            if stalls:
                held.append(replace(step, phase=QUEUE, stalls=tuple(stalls)))
                late += [
                    (max(begin, arrived_ns), min(end, begun_ns))
                    for begin, end in step.late_clock_ns
                ]
        others = [known for known in self.steps if known.phase != QUEUE]
        self.steps = deque(sorted([*held, *others], key=_began), maxlen=MAX_STEPS)
        self.held_steps += len(held) - self.queued_steps
        self.queued_steps = len(held)
        for charged, intervals in ((self.waited, waits), (self.late, late)):
            charged.pop(QUEUE, None)
            if waits:
                charged[QUEUE] = Spans.of(intervals)


def _total_ns(charged: Mapping[str, Spans], phase: str) -> int:
    return charged[phase].total_ns if phase in charged else 0


def _began(held: HeldStep) -> int:
    return held.began_clock_ns


def figures_of(request: TrackedRequest) -> dict[str, Any]:
    """Returns stalls, delays and timings of a request, by the field names of the HTTP API.

    Times are in s. ``*_without_s`` estimate the time without faults: measured time minus delay.
    Unknown fields are left out.
    """
    queue_s, prefill_s, decode_s = map(request.stall_s, (QUEUE, PREFILL, DECODE))
    stall_s = queue_s + prefill_s + decode_s
    first_late_s = request.late_s(QUEUE) + request.late_s(PREFILL)
    decode_late_s = request.late_s(DECODE)
    fields: dict[str, Any] = {
        "id": request.name,
        "number": request.number,
        "status": "finished" if request.finished else "running",
        "queue_stall_s": queue_s,
        "prefill_stall_s": prefill_s,
        "decode_stall_s": decode_s,
        "stall_s": stall_s,
        "late_s": first_late_s + decode_late_s,
        "held_steps": request.held_steps,
    }
    if request.pace is not None:
        fields |= {"tokens": request.pace.tokens, "worst_itl_s": request.pace.worst_gap_s}
    if (timings := request.timings) is not None:
        gaps = max(1, timings.tokens - 1)
        fields |= {
            "reason": timings.reason,
            "prompt_tokens": timings.prompt_tokens,
            "tokens": timings.tokens,
            "queued_s": timings.queued_s,
            "ttft_s": timings.ttft_s,
            "mean_itl_s": timings.mean_itl_s,
            "e2e_s": timings.e2e_s,
            "stall_percent": 100 * stall_s / timings.e2e_s if timings.e2e_s else 0.0,
            "ttft_without_s": max(0.0, timings.ttft_s - first_late_s),
            "mean_itl_without_s": max(0.0, timings.mean_itl_s - decode_late_s / gaps),
            "e2e_without_s": max(0.0, timings.e2e_s - first_late_s - decode_late_s),
        }
    return fields
