"""A worker's log line about a fault: rail, cause, stall time, remaining rails and requests."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from typing import Protocol

from r2serve.observe import journal
from r2serve.observe.journal import Event, Journal
from r2serve.observe.reasons import named

_LOG = logging.getLogger("r2serve.faults")

BEFORE_NS = 1_000_000_000
"""Rail events up to this time before a stall count as possible causes, ns."""
TOGETHER_NS = 1_000_000_000
"""Losses of rails that share a port have a single cause up to this time apart, ns: Linux may report
the second loss late."""
NAMED = 5
"""Number of requests listed by name; further requests are only counted."""


class Source(Protocol):
    """Source of the journal's bytes (``_core.Engine``)."""

    def journal_bytes(self) -> bytes: ...


class StallReport:
    """Collects the stalled steps of a fault and logs a single line about them.

    Thread-safe: a timer may log the line while a worker adds steps.
    """

    def __init__(self, source: Source, *, since_ns: int, host: str = "") -> None:
        """since_ns: begin of the first stall, CLOCK_MONOTONIC in ns. host: name of this host."""
        self._source = source
        self._host = host
        self._since_ns = since_ns
        self._stalled_ns = 0
        self._steps = 0
        self._requests: dict[str, None] = {}  # an ordered set
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self.said = False

    def add(self, stalled_ns: int, requests: list[str]) -> None:
        """Adds a stalled step with the names of the requests served."""
        with self._lock:
            self._stalled_ns += stalled_ns
            self._steps += 1
            self._requests |= dict.fromkeys(requests)

    def say_after(self, seconds: float) -> None:
        """Schedules the log line on a daemon timer thread."""
        self._timer = threading.Timer(seconds, self.say)
        self._timer.daemon = True
        self._timer.start()

    def say(self) -> None:
        """Logs the line now, unless already logged."""
        with self._lock:
            if self.said:
                return
            self.said = True
            if self._timer is not None:
                self._timer.cancel()
            read = journal.parse(self._source.journal_bytes())
            _LOG.warning("%s", self.line(read))

    def line(self, read: Journal) -> str:
        """Returns the log line, composed from the journal `read`."""
        events = [event for event in read.events if event.time_ns >= self._since_ns - BEFORE_NS]
        moves = {event.entry: event for event in events if event.kind == "rail_state"}
        losses = {one.entry: one for one in events if one.kind == "rail_state" and one.value}
        causes = _by_cause(list(losses.values()), read)
        what = [
            (_lost(cause, events, self._where(cause, read)), cause[0].in_drill) for cause in causes
        ] or [
            (f"{self._where(rail, read)} to {_peers(rail)} was suspected", rail[0].in_drill)
            for rail in _by_rail(moves.values())
        ]
        short_ns = sum(event.value for event in events if event.kind == "short_of_cpu")
        short = f"; this host was short of CPU: {short_ns / 1e6:.0f} ms lost" if short_ns else ""
        steps = "1 step" if self._steps == 1 else f"{self._steps} steps"
        return (
            f"{_told(what) or _repeated(events)}: {self._stalled_ns / 1e6:.1f} ms stall in "
            f"{steps}; {_carrying(read, moves)}; {_requests(list(self._requests))}{short}"
        )

    def _where(self, cause: list[Event], read: Journal) -> str:
        """Returns the rails of a cause with their ports, and the host."""
        rails = {one.rail: read.rails[one.entry].device for one in cause if one.entry >= 0}
        names = [f"{name} ({device})" if device else name for name, device in rails.items()]
        return " and ".join(names) + (f" on {self._host}" if self._host else "")


def _peers(cause: list[Event]) -> str:
    return named([one.peer for one in cause], "peers")


def _by_rail(events: Iterable[Event]) -> list[list[Event]]:
    """Groups the events of a rail to several peers; events in a drill stay apart."""
    found: dict[tuple[str, bool], list[Event]] = {}
    for event in events:
        found.setdefault((event.rail, event.in_drill), []).append(event)
    return list(found.values())


def _told(what: list[tuple[str, bool]]) -> str:
    """Joins the causes; each is told as a drill or as a fault."""
    if all(drill for _, drill in what):
        return "drill: " * bool(what) + "; ".join(text for text, _ in what)
    return "; ".join("drill: " * drill + text for text, drill in what)


def _repeated(events: list[Event]) -> str:
    """Returns a cause without a change of state: chunks were sent again."""
    again = [event for event in events if event.kind in ("replay", "hedge") and event.rail]
    rails = {f"{rail[0].rail} to {_peers(rail)}": None for rail in _by_rail(again)}
    if not rails:
        return "no loss or suspicion of a rail is recorded"
    return f"chunks of {', '.join(rails)} were sent again"


def _by_cause(losses: list[Event], read: Journal) -> list[list[Event]]:
    """Groups the losses with a single cause: of rails that share a port, at the same time.

    A rail uses one port to all peers. Its losses of one kind at the same time are one cause.
    """
    causes: list[list[Event]] = []
    for loss in losses:
        for cause in causes:
            first = cause[0]
            unit, other = read.rails[loss.entry].unit, read.rails[first.entry].unit
            together = abs(loss.time_ns - first.time_ns) <= TOGETHER_NS
            of_port = _is_of_port(loss) and _is_of_port(first)
            one_port = unit and unit == other and of_port
            one_rail = loss.rail == first.rail and loss.text == first.text
            if loss.in_drill == first.in_drill and together and (one_port or one_rail):
                cause.append(loss)
                break
        else:
            causes.append([loss])
    return causes


def _is_of_port(loss: Event) -> bool:
    return loss.text.partition(" ")[2] in ("carrier_loss", "device_loss")


def _lost(cause: list[Event], events: list[Event], where: str) -> str:
    """Describes the loss of a rail, or of several rails by a single cause."""
    loss = cause[0]
    ends = {(one.entry, one.epoch) for one in cause}
    at = [
        f"the fault is {'' if event.text == 'transient' else 'at the '}{event.text}"
        for event in events
        if event.kind == "verdict" and (event.entry, event.epoch) in ends
    ]
    why = ", ".join(filter(None, [loss.text.partition(" ")[2], *at[-1:]]))
    if len({one.rail for one in cause}) == 1:
        return f"{where} to {_peers(cause)} was lost ({why})"
    return (
        f"{where} to {_peers(cause)} were lost together ({why}): one cause, because they share a "
        "port"
    )


def _carrying(read: Journal, touched: Iterable[int]) -> str:
    """Tells which rails to the touched peers are left; without touched rails, to all peers."""
    touched_peers = {read.rails[entry].peer_engine for entry in touched if entry >= 0}
    rails = [rail for rail in read.rails if rail.peer_engine in touched_peers or not touched_peers]
    left = [rail for rail in rails if rail.may_carry and rail.state in ("UP", "SUSPECT")]
    served = {rail.peer_engine for rail in left}
    without = dict.fromkeys(rail.peer for rail in rails if rail.peer_engine not in served)
    told = []
    if left:
        told.append(f"carried by {', '.join(dict.fromkeys(rail.name for rail in left))}")
    if without:
        told.append(f"no rail to {', '.join(without)} is left")
    return ", ".join(told) or "no rail is recorded"


def _requests(names: list[str]) -> str:
    if not names:
        return "no request waited"
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"requests: {', '.join(names[:NAMED])}{more}"
