"""Attributes stalls, and gaps between a client's tokens, to faults and to causes."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from r2serve.lab.player import Played
from r2serve.lab.serving.client import Run
from r2serve.lab.serving.journals import Journals
from r2serve.observe.journal import Event

# Events this long after the rejoin still belong to the fault, as traffic returns to the rail.
AFTERMATH_NS = 500_000_000
# Search range for causes before a stall. A stall's length is the sum of a call's waits, so the
# first wait may lie before the computed begin of the stall.
EARLIER_NS = 1_000_000_000


class EventLog:
    """Collects events from journals repeatedly, because a journal's ring keeps only the last."""

    def __init__(self, journals: Journals, begin_ns: int) -> None:
        self._journals = journals
        self._begin_ns = begin_ns
        self._events: set[Event] = set()

    def collect(self) -> None:
        self._events.update(self._journals.events(self._begin_ns, 2**63))

    @property
    def events(self) -> list[Event]:
        """All collected events, oldest first."""
        return sorted(self._events, key=lambda event: event.time_ns)


@dataclass(frozen=True)
class CausedStall:
    """A stall of a collective, CLOCK_MONOTONIC in ns. fault: index of the fault; None = none."""

    begin_ns: int
    end_ns: int
    fault: int | None
    cause: str

    @property
    def ms(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e6


def fault_of(played: Sequence[Played], begin_ns: int, end_ns: int) -> int | None:
    """Returns the index of the last fault overlapping [begin_ns, end_ns], aftermath included."""
    found = None
    for index, one in enumerate(played):
        over_ns = 2**63 if one.back_ns is None else one.back_ns + AFTERMATH_NS
        if one.struck_ns <= end_ns and begin_ns <= over_ns:
            found = index
    return found


def stalls_of(events: Sequence[Event], played: Sequence[Played]) -> list[CausedStall]:
    """Returns all stalls among the events, with faults and causes. events: oldest first."""
    times = [event.time_ns for event in events]
    found = []
    for event in events:
        if event.kind == "stall":
            begin_ns, end_ns = event.time_ns - event.value, event.time_ns
            near = events[bisect_left(times, begin_ns - EARLIER_NS) : bisect_right(times, end_ns)]
            fault = fault_of(played, begin_ns, end_ns)
            found.append(CausedStall(begin_ns, end_ns, fault, cause_of(near, begin_ns, end_ns)))
    return found


def cause_of(events: Iterable[Event], begin_ns: int, end_ns: int) -> str:
    """Returns the most severe rail event in a stall, or else within EARLIER_NS before the stall.

    Among equally severe events, the first counts.
    """
    within: tuple[int, str] = 0, ""
    earlier = within
    for event in events:
        if begin_ns <= event.time_ns <= end_ns:
            within = max(within, _weigh(event), key=lambda found: found[0])
        elif begin_ns - EARLIER_NS <= event.time_ns < begin_ns:
            earlier = max(earlier, _weigh(event), key=lambda found: found[0])
    if within[0]:
        return within[1]
    return f"{earlier[1]}, before the stall" if earlier[0] else "no rail event recorded"


def _weigh(event: Event) -> tuple[int, str]:
    """Returns the severity of an event as a cause (0: no cause), and the event's text."""
    if event.kind == "rail_state":
        for weight, state in ((5, "->DOWN"), (4, "->SUSPECT"), (1, "->")):
            if state in event.text:
                return weight, f"{event.rail} {event.text}"
    if event.kind in ("hedge", "replay"):
        return 3 if event.kind == "hedge" else 2, f"{event.kind} from {event.rail}"
    return 0, ""


def was_noticed(one: Played, events: Iterable[Event]) -> bool:
    """Returns True if each rail hit by the fault left UP for at least 1 worker.

    The control rail is the rail of the management NIC.
    """
    end_ns = 2**63 if one.healed_ns is None else one.healed_ns + AFTERMATH_NS
    left = {
        event.rail.partition("@")[0]
        for event in events
        if event.kind == "rail_state"
        and event.text.startswith("UP->")
        and one.struck_ns <= event.time_ns <= end_ns
    }
    hit = [f"rail{rail}" for rail in one.rails] or ["control"]
    return left.issuperset(hit)


def unprovoked(played: Sequence[Played], events: Iterable[Event]) -> int:
    """Returns the number of transitions from UP without a fault; a busy machine causes some."""
    return sum(
        event.kind == "rail_state"
        and event.text.startswith("UP->")
        and fault_of(played, event.time_ns, event.time_ns) is None
        for event in events
    )


@dataclass(frozen=True)
class Gap:
    """A gap between two tokens of a request at the client, CLOCK_MONOTONIC in ns."""

    begin_ns: int
    end_ns: int

    @property
    def ms(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e6


def gaps_of(run: Run) -> list[Gap]:
    return [
        Gap(begin, end)
        for request in run.requests
        for begin, end in zip(request.times_ns, request.times_ns[1:], strict=False)
    ]
