"""Which fault a stall, or a gap between a client's tokens, belongs to, and what the cause was."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from r2serve.lab.player import Played
from r2serve.lab.serving.client import Run
from r2serve.lab.serving.journals import Journals
from r2serve.observe.journal import Event

# Of what follows a fault's end, this much is still its own: a rail that is UP again has yet to be
# given traffic.
AFTERMATH_NS = 500_000_000
# A stall's length is the sum of a call's waits, so what began it may lie before it by as much as
# the call took.
EARLIER_NS = 1_000_000_000


class EventLog:
    """Collects events from journals, whose rings hold only the last ones of each worker."""

    def __init__(self, journals: Journals, begin_ns: int) -> None:
        self._journals = journals
        self._begin_ns = begin_ns
        self._events: set[Event] = set()

    def collect(self) -> None:
        self._events.update(self._journals.events(self._begin_ns, 2**63))

    @property
    def events(self) -> list[Event]:
        """All that was collected, oldest first."""
        return sorted(self._events, key=lambda event: event.time_ns)


@dataclass(frozen=True)
class Stall:
    """A collective's wait, in CLOCK_MONOTONIC ns. fault: index of what was played, None: none."""

    begin_ns: int
    end_ns: int
    fault: int | None
    cause: str

    @property
    def ms(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e6


def fault_of(played: Sequence[Played], begin_ns: int, end_ns: int) -> int | None:
    """Index of the last fault that struck before end_ns and was not over at begin_ns."""
    found = None
    for index, one in enumerate(played):
        over_ns = 2**63 if one.back_ns is None else one.back_ns + AFTERMATH_NS
        if one.struck_ns <= end_ns and begin_ns <= over_ns:
            found = index
    return found


def stalls_of(events: Sequence[Event], played: Sequence[Played]) -> list[Stall]:
    """All stalls among the events, which are oldest first, each with its fault and its cause."""
    times = [event.time_ns for event in events]
    found = []
    for event in events:
        if event.kind == "stall":
            begin_ns, end_ns = event.time_ns - event.value, event.time_ns
            near = events[bisect_left(times, begin_ns - EARLIER_NS) : bisect_right(times, end_ns)]
            fault = fault_of(played, begin_ns, end_ns)
            found.append(Stall(begin_ns, end_ns, fault, cause_of(near, begin_ns, end_ns)))
    return found


def cause_of(events: Iterable[Event], begin_ns: int, end_ns: int) -> str:
    """The weightiest rail event in a wait, or else shortly before it; the first of these."""
    within: tuple[int, str] = 0, ""
    earlier = within
    for event in events:
        if begin_ns <= event.time_ns <= end_ns:
            within = max(within, _weigh(event), key=lambda found: found[0])
        elif begin_ns - EARLIER_NS <= event.time_ns < begin_ns:
            earlier = max(earlier, _weigh(event), key=lambda found: found[0])
    if within[0]:
        return within[1]
    return f"{earlier[1]}, before it" if earlier[0] else "no rail event recorded"


def _weigh(event: Event) -> tuple[int, str]:
    if event.kind == "rail_state":
        for weight, state in ((5, "->DOWN"), (4, "->SUSPECT"), (1, "->")):
            if state in event.text:
                return weight, f"{event.rail} {event.text}"
    if event.kind in ("hedge", "replay"):
        return 3 if event.kind == "hedge" else 2, f"{event.kind} from {event.rail}"
    return 0, ""


def was_noticed(one: Played, events: Iterable[Event]) -> bool:
    """Whether each rail that the fault took was UP and left that state in some worker's eyes."""
    end_ns = 2**63 if one.healed_ns is None else one.healed_ns + AFTERMATH_NS
    left = {
        event.rail.partition("@")[0]
        for event in events
        if event.kind == "rail_state"
        and event.text.startswith("UP->")
        and one.struck_ns <= event.time_ns <= end_ns
    }
    return all(f"rail{rail}" in left for rail in one.rails)


def unprovoked(played: Sequence[Played], events: Iterable[Event]) -> int:
    """How often a rail left UP while no fault was under way, as a busy machine makes them."""
    return sum(
        event.kind == "rail_state"
        and event.text.startswith("UP->")
        and fault_of(played, event.time_ns, event.time_ns) is None
        for event in events
    )


@dataclass(frozen=True)
class Gap:
    """Time between two tokens of one request as its client saw them, in CLOCK_MONOTONIC ns."""

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
