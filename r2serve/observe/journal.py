"""Reader of a worker's journal: live counters of rails and collectives, and the last events.

``csrc/journal/journal.hpp`` defines the layout, version 5 (docs/journal.md). A journal is readable
after the writer has died, too. Files are read, never mapped, so truncation cannot crash the reader.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from r2serve.observe.choice import NO_CHOICE, Choice
from r2serve.observe.safe_open import open_regular

MAGIC = b"R2JOURNL"
VERSION = 5
PATTERN = "r2ccl-*.journal"

_HEADER = struct.Struct("<8sIIIIIIIIQqqq32sQ16s64s")
_RAIL = struct.Struct("<32s32s32sBBBBIBBBBIqQQQQQqqQBBBBI")
_GROUP = struct.Struct("<32sQIIqQQQBB4s2x")
_LATENCY = struct.Struct("<QQQ24Q")
_RECORD = struct.Struct("<QqBBBBIIIQQQ")

RAIL_KINDS = ("tcp", "shm", "control", "verbs", "sim")
RAIL_STATES = ("CONNECTING", "PROBATION", "UP", "SUSPECT", "DOWN", "FENCING")
RAIL_CAUSES = (
    "none",
    "carrier_loss",
    "socket_error",
    "peer_notice",
    "dead_deadline",
    "protocol",
    "probation",
    "injected",
    "checksum",
    "recalled",
    "completion_error",
    "device_loss",
    "address_loss",
)
NEVER_UP_REASONS = (
    "",
    "refused",
    "no_route",
    "own_address",
    "no_answer",
    "rejected",
    "probe_unanswered",
    "no_connection",
)
"""Reasons why a rail has never been up; empty: none, or not known yet."""
RAIL_VERDICTS = ("none", "local NIC", "remote NIC", "path", "transient", "peer")
EVENT_KINDS = (
    "",
    "rail_state",
    "stall",
    "replay",
    "hedge",
    "abort",
    "verdict",
    "speed",
    "injected",
    "short_of_cpu",
)
FAULTS = ("heal", "carrier_loss", "black_hole", "reset", "slow", "corrupt", "egress_refused")
COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "gather",
    "all_to_all",
    "send",
    "recv",
    "barrier",
)
BUCKETS_S = (*(4096e-9 * 2**power for power in range(23)), float("inf"))
"""Upper bounds of a latency histogram's buckets, in seconds."""

_GROUP_BYTES = _GROUP.size + len(COLLECTIVES) * _LATENCY.size


class JournalError(ValueError):
    """The data is not a journal of this version."""


@dataclass(frozen=True)
class RailCounters:
    """State and counters of a rail; ``*_bytes`` and chunks count from the process start."""

    name: str
    kind: str
    peer: str
    device: str
    """Network interface, for verbs with RDMA device, as ``eth0/mlx5_0:1``; empty = not named."""
    state: str
    cause: str
    verdict: str
    slow: bool
    epoch: int
    may_carry: bool
    """The rail may carry data; a management NIC may only as the fallback."""
    graceful_close: bool
    """A graceful close has begun, by the peer or by this process."""
    peer_engine: int
    """Number of the peer's engine; unique even if peers in two groups share a label."""
    since_ns: int  # time of the last state change
    tx_bytes: int
    rx_bytes: int
    data_tx_bytes: int
    replayed_chunks: int
    hedged_chunks: int
    last_tx_ns: int
    round_trip_ns: int
    rate: int
    """Bandwidth when last measured as the bottleneck, bytes/s; 0 = never measured."""
    been_up: bool = True
    """False: the rail has never been up; a rail that has been up and is not UP now is lost."""
    never_up: str = ""  # one of NEVER_UP_REASONS
    reserve: bool = False
    """The rail carries data only while no other rail is up."""
    unit: int = 0
    """Rails of a process with an equal unit above 0 share a port or cable."""
    drill: str = ""  # fault kind of a running drill by either end; empty = none
    unheard_ms: int = 0  # time without a frame from the peer's process on any rail

    @property
    def presence(self) -> str:
        """Returns ``up``, ``lost``, or ``never up`` for a rail that has not been up yet."""
        if self.state in ("UP", "SUSPECT"):
            return "up"
        return "lost" if self.been_up else "never up"


@dataclass(frozen=True)
class Latency:
    """Completed calls of a collective type within a communicator."""

    calls: int
    total_ns: int
    bytes: int
    """Sum of the larger buffer (input or output) of this rank over all calls."""
    buckets: tuple[int, ...]
    """Calls per duration bucket of :data:`BUCKETS_S`, not cumulative."""


@dataclass(frozen=True)
class Group:
    """A communicator of the process."""

    name: str
    id: int
    rank: int
    ranks: int
    call: str
    """The collective in progress; empty = none."""
    call_began_ns: int
    failed_calls: int
    stalled_calls: int
    stalled_ns: int
    closed: bool
    latencies: dict[str, Latency]
    """Latencies by collective; only collectives with calls."""
    choice: Choice = NO_CHOICE
    """The choice that the latest all-reduce made."""


@dataclass(frozen=True)
class Event:
    """A record of the journal.

    ``time_ns``: CLOCK_MONOTONIC. ``value``: 1 for a rail_state that lost a rail in use, ns for a
    stall, chunks for a replay or hedge, error code for an abort, bytes/s for a speed. ``detail``:
    bytes of a stalled call. ``epoch``: epoch of the rail; for a stall see :attr:`step`.
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
    sequence: int = 0  # number of the record within the journal, from 1
    entry: int = -1  # index into the journal's rails; -1 = no rail

    @property
    def step(self) -> int:
        """Step of the serving engine, in whose call the stall was; 0 = none, or no stall."""
        return self.epoch if self.kind == "stall" else 0

    @property
    def in_drill(self) -> bool:
        """Whether a drill by either end of the rail explains the event."""
        return self.kind != "stall" and self.detail == 1


@dataclass(frozen=True)
class Journal:
    """A snapshot of a journal. ``events`` are oldest first; the oldest may be overwritten.

    Times are CLOCK_MONOTONIC in ns; :meth:`clock_ns` converts a time to CLOCK_REALTIME.
    """

    process: int
    """Process id."""
    rails: list[RailCounters] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    label: str = ""  # display name of the process, e.g. "rank 0"
    opened_ns: int = 0
    opened_clock_ns: int = 0
    heartbeat_ns: int = 0
    """Time of the last link tick; 0 = closed gracefully."""
    record_count: int = 0  # records ever written
    engine: int = 0  # number of the engine within the job
    short_of_cpu_ns: int = 0
    """Time in which the process was ready to run and did not run, as its own thread saw."""
    serving_engine: str = ""
    """Name of the serving engine (vLLM) of the process; empty = none."""
    host: str = ""

    def clock_ns(self, time_ns: int) -> int:
        """Converts a CLOCK_MONOTONIC time of this journal to CLOCK_REALTIME, both in ns."""
        return self.opened_clock_ns + time_ns - self.opened_ns


@dataclass(frozen=True)
class _Header:
    """Fields after the version, in the order of the file."""

    process: int
    rail_capacity: int
    group_capacity: int
    record_capacity: int
    rail_count: int
    group_count: int
    engine: int
    record_count: int
    opened_ns: int
    opened_clock_ns: int
    heartbeat_ns: int
    label: str
    short_of_cpu_ns: int
    serving_engine: str
    host: str

    @property
    def groups_at(self) -> int:
        return _HEADER.size + self.rail_capacity * _RAIL.size

    @property
    def records_at(self) -> int:
        return self.groups_at + self.group_capacity * _GROUP_BYTES

    @property
    def size(self) -> int:
        return self.records_at + self.record_capacity * _RECORD.size

    def runs(self, after: int) -> Iterator[tuple[int, int, int]]:
        """Yields the ring's runs of records after `after`: first sequence, offset, count."""
        first = max(after, self.record_count - self.record_capacity) + 1
        while first <= self.record_count:
            place = (first - 1) % self.record_capacity
            many = min(self.record_count + 1 - first, self.record_capacity - place)
            yield first, self.records_at + place * _RECORD.size, many
            first += many


def read(
    path: str | Path, *, events: bool = True, after: int = 0, owners: Collection[int] | None = None
) -> Journal:
    """Reads a journal file.

    events: False skips all events. after: only events with a higher sequence number. owners: users
    to whom the file may belong; None: any user.

    Raises:
        OSError: the file cannot be read, or belongs to another user.
        JournalError: the file is not a journal of this version.
    """
    file = open_regular(path, owners)
    try:
        header = _header(os.pread(file, _HEADER.size, 0), os.fstat(file).st_size)
        ring = [
            (first, os.pread(file, many * _RECORD.size, offset))
            for first, offset, many in (header.runs(after) if events else ())
        ]
        # Records overwritten during the copy may be torn; read the count again to drop these.
        newest = _header(os.pread(file, _HEADER.size, 0), header.size).record_count
        return _parse(
            header,
            os.pread(file, header.rail_count * _RAIL.size, _HEADER.size),
            os.pread(file, header.group_count * _GROUP_BYTES, header.groups_at),
            ring,
            whole_after=newest + 1 - header.record_capacity,
        )
    except struct.error as error:
        raise JournalError("the journal was truncated while it was read") from error
    finally:
        os.close(file)


def parse(data: bytes, *, events: bool = True, after: int = 0) -> Journal:
    """Parses a journal's bytes; ``events`` and ``after`` as in :func:`read`.

    Raises:
        JournalError: the bytes are not a journal of this version.
    """
    header = _header(data[: _HEADER.size], len(data))
    ring = [
        (first, data[offset : offset + many * _RECORD.size])
        for first, offset, many in (header.runs(after) if events else ())
    ]
    return _parse(header, data[_HEADER.size :], data[header.groups_at :], ring)


def _header(data: bytes, size: int) -> _Header:
    if len(data) < _HEADER.size:
        raise JournalError(f"{len(data)} bytes are too few for a journal")
    magic, version, *rest = _HEADER.unpack(data)
    if magic != MAGIC or version != VERSION:
        raise JournalError(f"not a journal of version {VERSION}: {magic!r}, version {version}")
    fields: list[Any] = [_text(value) if isinstance(value, bytes) else value for value in rest]
    header = _Header(*fields)
    if (
        size < header.size
        or header.rail_count > header.rail_capacity
        or header.group_count > header.group_capacity
        or (header.record_count and not header.record_capacity)
    ):
        raise JournalError("the journal is truncated")
    return header


def _parse(
    header: _Header,
    rails: bytes,
    groups: bytes,
    ring: list[tuple[int, bytes]],
    whole_after: int = 0,
) -> Journal:
    found = [
        _rail(_RAIL.unpack_from(rails, index * _RAIL.size)) for index in range(header.rail_count)
    ]
    return Journal(
        process=header.process,
        rails=found,
        groups=[_group(groups, index * _GROUP_BYTES) for index in range(header.group_count)],
        events=[
            _event(record, found)
            for first, run in ring
            for sequence, record in enumerate(_RECORD.iter_unpack(run), first)
            if record[0] == sequence > whole_after  # else: overwritten during the copy
        ],
        label=header.label,
        short_of_cpu_ns=header.short_of_cpu_ns,
        serving_engine=header.serving_engine,
        host=header.host,
        opened_ns=header.opened_ns,
        opened_clock_ns=header.opened_clock_ns,
        heartbeat_ns=header.heartbeat_ns,
        record_count=header.record_count,
        engine=header.engine,
    )


def _text(data: bytes) -> str:
    return data.split(b"\0", 1)[0].decode("utf-8", "replace")


def _name(names: tuple[str, ...], index: int) -> str:
    return names[index] if index < len(names) else f"unknown-{index}"


def _rail(values: tuple[bytes | int, ...]) -> RailCounters:
    *texts, kind, state, cause, verdict, epoch, slow, carry, graceful_close, been_up = values[:12]
    *numbers, never_up, reserve, unit, drill, unheard_ms = values[12:]
    name, peer, device = (_text(text) for text in texts if isinstance(text, bytes))
    integers: list[Any] = [int(number) for number in numbers]
    counters = RailCounters(
        name,
        _name(RAIL_KINDS, int(kind)),
        peer,
        device,
        _name(RAIL_STATES, int(state)),
        _name(RAIL_CAUSES, int(cause)),
        _name(RAIL_VERDICTS, int(verdict)),
        bool(slow),
        int(epoch),
        bool(carry),
        bool(graceful_close),
        *integers,
    )
    return replace(
        counters,
        been_up=bool(been_up),
        never_up=_name(NEVER_UP_REASONS, int(never_up)),
        reserve=bool(reserve),
        unit=int(unit),
        drill=_drill(int(drill)) if drill else "",
        unheard_ms=int(unheard_ms),
    )


def _drill(number: int) -> str:
    return FAULTS[number] if number < len(FAULTS) else "unknown"


def _group(data: bytes, offset: int) -> Group:
    name, number, rank, ranks, began, failed, stalled, stalled_ns, call, closed, choice = (
        _GROUP.unpack_from(data, offset)
    )
    latencies = {}
    for index, collective in enumerate(COLLECTIVES):
        calls, total_ns, moved, *buckets = _LATENCY.unpack_from(
            data, offset + _GROUP.size + index * _LATENCY.size
        )
        if calls:
            latencies[collective] = Latency(calls, total_ns, moved, tuple(buckets))
    return Group(
        name=_text(name),
        id=number,
        rank=rank,
        ranks=ranks,
        call=_name(COLLECTIVES, call) if began else "",
        call_began_ns=began,
        failed_calls=failed,
        stalled_calls=stalled,
        stalled_ns=stalled_ns,
        closed=bool(closed),
        latencies=latencies,
        choice=Choice.parse(choice),
    )


def _event(values: tuple[int, ...], rails: list[RailCounters]) -> Event:
    sequence, time_ns, number, before, after, cause, rail, epoch, call, comm, value, detail = values
    kind = _name(EVENT_KINDS, number)
    text = ""
    if kind == "rail_state":
        text = f"{_name(RAIL_STATES, before)}->{_name(RAIL_STATES, after)}"
        if cause:
            text += f" {_name(RAIL_CAUSES, cause)}"
    elif kind == "verdict":
        text = _name(RAIL_VERDICTS, after)
    elif kind == "hedge":
        text = "withheld" if before else ""
    elif kind == "speed":
        text = "slow" if after else "no longer slow"
    elif kind == "short_of_cpu":
        text = f"the engine did not run for {value / 1e6:.0f} ms: short of CPU, or stopped"
    elif kind == "injected":
        text = _drill(after) + (" at the peer" if before else "")
    elif kind == "stall":
        text = _name(COLLECTIVES, before)
    known = rail < len(rails)
    return Event(
        time_ns=time_ns,
        kind=kind,
        rail=rails[rail].name if known else "",
        peer=rails[rail].peer if known else "",
        epoch=epoch,
        comm=comm,
        call=call,
        value=value,
        detail=detail,
        text=text,
        sequence=sequence,
        entry=rail if known else -1,
    )
