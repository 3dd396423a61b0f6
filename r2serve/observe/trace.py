"""Converts journals to the Trace Event Format of the Chromium project, for Perfetto.

Each process has a track for stalls and a track per pair of rail and peer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from r2serve.observe.journal import Event, Journal

_STALLS = 0  # track for stalls and events without a rail


def chrome_trace(journals: Iterable[Journal]) -> dict[str, Any]:
    """Returns a trace in the JSON Object Format; times are CLOCK_MONOTONIC in us.

    The trace's process ids number the journals from 1, because OS process ids may repeat between
    nodes.
    """
    events = [event for place, one in enumerate(journals, 1) for event in _process(place, one)]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _process(place: int, journal: Journal) -> list[dict[str, Any]]:
    tracks = {(rail.name, rail.peer): number for number, rail in enumerate(journal.rails, 1)}
    names = {_STALLS: "collectives"} | {
        number: f"{rail} to {peer}" for (rail, peer), number in tracks.items()
    }
    name = f"r2ccl {journal.process} {journal.label}".strip()
    found = [_metadata(place, None, "process_name", name)]
    found += [_metadata(place, at, "thread_name", names[at]) for at in names]
    states: dict[int, Event] = {}
    for event in journal.events:
        track = tracks.get((event.rail, event.peer), _STALLS)
        if event.kind == "rail_state":
            if before := states.get(track):
                found.append(_span(place, track, before, event.time_ns))
            states[track] = event
        elif event.kind == "stall":
            found.append(_stall(place, event))
        else:
            found.append(_instant(place, track, event))
    end = max((event.time_ns for event in journal.events), default=0)
    found += [_span(place, track, event, end) for track, event in states.items()]
    return found


def _metadata(process: int, track: int | None, what: str, name: str) -> dict[str, Any]:
    made: dict[str, Any] = {"ph": "M", "pid": process, "name": what, "args": {"name": name}}
    return made if track is None else made | {"tid": track}


def _span(process: int, track: int, move: Event, end_ns: int) -> dict[str, Any]:
    """Returns a span for the new state of a rail, from its transition to `end_ns`."""
    moved, _, cause = move.text.partition(" ")
    return {
        "ph": "X",
        "pid": process,
        "tid": track,
        "name": moved.partition("->")[2],
        "cat": "rail",
        "ts": move.time_ns / 1e3,
        "dur": (end_ns - move.time_ns) / 1e3,
        "args": {"epoch": move.epoch, "cause": cause},
    }


def _stall(process: int, event: Event) -> dict[str, Any]:
    """Returns a span that ends at the event's time, because stalls are recorded at their end."""
    return {
        "ph": "X",
        "pid": process,
        "tid": _STALLS,
        "name": "stall",
        "cat": "stall",
        "ts": (event.time_ns - event.value) / 1e3,
        "dur": event.value / 1e3,
        "args": {
            "communicator": event.comm,
            "collective": event.text,
            "call": event.call,
            "bytes": event.detail,
        },
    }


def _instant(process: int, track: int, event: Event) -> dict[str, Any]:
    return {
        "ph": "i",
        "s": "t",
        "pid": process,
        "tid": track,
        "name": f"{event.kind} {event.text}".strip(),
        "cat": event.kind,
        "ts": event.time_ns / 1e3,
        "args": {"value": event.value, "epoch": event.epoch},
    }
