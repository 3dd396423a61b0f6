"""Reads a worker's journal: live rail counters and the last events.

The layout is that of ``csrc/journal/journal.hpp``, version 2.  A journal is readable while it is
written and after its writer died.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path

MAGIC = b"R2JOURNL"
VERSION = 2

_HEADER = struct.Struct("<8sIIIIIIQ24x")
_RAIL = struct.Struct("<32s32sBBBBIQQQQQqqQ")
_RECORD = struct.Struct("<QqBBBBIIIQQQ")

RAIL_KINDS = ("tcp", "shm", "control", "verbs", "sim")
RAIL_STATES = ("CONNECTING", "PROBATION", "UP", "SUSPECT", "DOWN", "FENCING")
RAIL_CAUSES = (
    "none",
    "carrier",
    "socket-error",
    "peer-notice",
    "dead-deadline",
    "protocol",
    "probation",
    "injected",
    "checksum",
    "recalled",
    "completion-error",
    "device-error",
)
RAIL_VERDICTS = ("none", "local NIC", "remote NIC", "path", "transient", "peer")
EVENT_KINDS = ("", "rail_state", "stall", "replay", "hedge", "abort", "verdict", "speed")


class JournalError(ValueError):
    """The bytes are no journal of this version."""


@dataclass(frozen=True)
class RailCounters:
    """A rail as it is now; ``*_bytes`` and chunks count since the process started."""

    name: str
    kind: str
    peer: str
    state: str
    cause: str
    verdict: str
    epoch: int
    tx_bytes: int
    rx_bytes: int
    data_tx_bytes: int
    replayed_chunks: int
    hedged_chunks: int
    last_tx_ns: int
    round_trip_ns: int
    rate: int
    """Bytes per second when the rail was last what traffic waited for; 0: it never was."""


@dataclass(frozen=True)
class Event:
    """One record.

    ``time_ns`` is CLOCK_MONOTONIC.  ``value`` is nanoseconds for a stall, chunks for a replay or
    hedge, the error code for an abort, bytes per second for a speed; ``detail`` is the bytes of the
    stalled call.
    """

    time_ns: int
    kind: str
    rail: str
    peer: str
    epoch: int
    comm: int
    call: int
    value: int
    detail: int
    text: str


@dataclass(frozen=True)
class Journal:
    """A snapshot.  ``events`` are oldest first; the oldest ones may have been overwritten."""

    process: int
    rails: list[RailCounters] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)


def read(path: str | Path, *, events: bool = True) -> Journal:
    """Read a journal file; without its events that takes a fraction of the time.

    Raises:
        OSError: the file cannot be read.
        JournalError: it is no journal of this version.
    """
    return parse(Path(path).read_bytes(), events=events)


def parse(data: bytes, *, events: bool = True) -> Journal:
    """Parse a journal's bytes.

    Raises:
        JournalError: they are no journal of this version.
    """
    if len(data) < _HEADER.size:
        raise JournalError(f"{len(data)} bytes are too few for a journal")
    magic, version, process, rail_capacity, record_capacity, rail_count, _, count = (
        _HEADER.unpack_from(data)
    )
    if magic != MAGIC or version != VERSION:
        raise JournalError(f"not a journal of version {VERSION}: {magic!r}, version {version}")
    records_at = _HEADER.size + rail_capacity * _RAIL.size
    if len(data) < records_at + record_capacity * _RECORD.size or rail_count > rail_capacity:
        raise JournalError("the journal is truncated")
    rails = [
        _rail(_RAIL.unpack_from(data, _HEADER.size + index * _RAIL.size))
        for index in range(rail_count)
    ]
    found = []
    oldest = max(0, count - record_capacity) + 1
    for sequence in range(oldest, count + 1) if events else ():
        place = records_at + (sequence - 1) % record_capacity * _RECORD.size
        record = _RECORD.unpack_from(data, place)
        if record[0] == sequence:  # else: overwritten while it was copied
            found.append(_event(record, rails))
    return Journal(process=process, rails=rails, events=found)


def _name(names: tuple[str, ...], index: int) -> str:
    return names[index] if index < len(names) else f"unknown-{index}"


def _rail(values: tuple[bytes | int, ...]) -> RailCounters:
    name, peer, kind, state, cause, verdict, *numbers = values
    assert isinstance(name, bytes)
    assert isinstance(peer, bytes)
    integers = [int(number) for number in numbers]
    return RailCounters(
        name.split(b"\0", 1)[0].decode("utf-8", "replace"),
        _name(RAIL_KINDS, int(kind)),
        peer.split(b"\0", 1)[0].decode("utf-8", "replace"),
        _name(RAIL_STATES, int(state)),
        _name(RAIL_CAUSES, int(cause)),
        _name(RAIL_VERDICTS, int(verdict)),
        *integers,
    )


def _event(values: tuple[int, ...], rails: list[RailCounters]) -> Event:
    _, time_ns, kind, before, after, cause, rail, epoch, call, comm, value, detail = values
    text = ""
    if _name(EVENT_KINDS, kind) == "rail_state":
        text = f"{_name(RAIL_STATES, before)}->{_name(RAIL_STATES, after)}"
        if cause:
            text += f" {_name(RAIL_CAUSES, cause)}"
    elif _name(EVENT_KINDS, kind) == "verdict":
        text = _name(RAIL_VERDICTS, after)
    elif _name(EVENT_KINDS, kind) == "speed":
        text = "slow" if after else "no longer slow"
    known = rail < len(rails)
    return Event(
        time_ns=time_ns,
        kind=_name(EVENT_KINDS, kind),
        rail=rails[rail].name if known else "",
        peer=rails[rail].peer if known else "",
        epoch=epoch,
        comm=comm,
        call=call,
        value=value,
        detail=detail,
        text=text,
    )
