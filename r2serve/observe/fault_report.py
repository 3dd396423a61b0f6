"""The line that a worker logs of a fault: what failed, where, what it cost, and what carries on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from typing import Protocol

from r2serve.observe import journal
from r2serve.observe.journal import Event, Journal

_LOG = logging.getLogger("r2serve.faults")

BEFORE_NS = 1_000_000_000
"""Rail events of so long before a stall may be what it is of."""
NAMED = 5
"""Requests that are named; of more there is the number."""


class Source(Protocol):
    """Where the journal comes from (``_core.Engine``)."""

    def journal_bytes(self) -> bytes: ...


class StallReport:
    """What steps that were held up have in common: added to while they come, then said once."""

    def __init__(self, source: Source, *, since_ns: int) -> None:
        """since_ns: when the first stall began, CLOCK_MONOTONIC."""
        self._source = source
        self._since_ns = since_ns
        self._stalled_ns = 0
        self._steps = 0
        self._requests: dict[str, None] = {}  # in order
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self.said = False

    def add(self, stalled_ns: int, requests: list[str]) -> None:
        """A step that was held up."""
        with self._lock:
            self._stalled_ns += stalled_ns
            self._steps += 1
            self._requests |= dict.fromkeys(requests)

    def say_after(self, seconds: float) -> None:
        """Log the line then, in a thread of its own."""
        self._timer = threading.Timer(seconds, self.say)
        self._timer.daemon = True
        self._timer.start()

    def say(self) -> None:
        """Log the line now, unless it has been logged."""
        with self._lock:
            if self.said:
                return
            self.said = True
            if self._timer is not None:
                self._timer.cancel()
            read = journal.parse(self._source.journal_bytes())
            _LOG.warning("%s", self.line(read))

    def line(self, read: Journal) -> str:
        """What is known by now."""
        events = [event for event in read.events if event.time_ns >= self._since_ns - BEFORE_NS]
        moves = {event.entry: event for event in events if event.kind == "rail_state"}
        losses = {one.entry: one for one in events if one.kind == "rail_state" and one.value}
        what = [_lost(event, events) for event in losses.values()] or [
            f"{event.rail} to {event.peer} was suspected" for event in moves.values()
        ]
        drill = "drill: " if any(event.kind == "injected" for event in events) else ""
        steps = "1 step" if self._steps == 1 else f"{self._steps} steps"
        return (
            f"{drill}{'; '.join(what) or 'rail events'}: {self._stalled_ns / 1e6:.1f} ms stall in "
            f"{steps}; {_carrying(read, moves)}; {_requests(list(self._requests))}"
        )


def _lost(loss: Event, events: list[Event]) -> str:
    at = [
        f"the fault is {'' if event.text == 'transient' else 'at the '}{event.text}"
        for event in events
        if event.kind == "verdict" and event.entry == loss.entry and event.epoch == loss.epoch
    ]
    why = ", ".join(filter(None, [loss.text.partition(" ")[2], *at[-1:]]))
    return f"{loss.rail} to {loss.peer} was lost ({why})"


def _carrying(read: Journal, touched: Iterable[int]) -> str:
    peers = {read.rails[entry].peer_engine for entry in touched if entry >= 0}
    names = [
        rail.name
        for rail in read.rails
        if rail.peer_engine in peers and rail.may_carry and rail.state == "UP"
    ]
    return f"carried by {', '.join(dict.fromkeys(names))}" if names else "no rail is left"


def _requests(names: list[str]) -> str:
    if not names:
        return "no request waited"
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"requests: {', '.join(names[:NAMED])}{more}"
