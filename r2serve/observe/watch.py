"""Follows the journals of a folder: current state of workers, and all events in time order.

A single thread polls a :class:`Watch`. The module's limits bound the memory.
"""

from __future__ import annotations

import logging
import socket
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path

from r2serve.journal_folder import believed_users
from r2serve.observe import files, journal
from r2serve.observe.journal import Event, Journal, RailCounters
from r2serve.observe.names import printable
from r2serve.observe.unobserved import Note, Notes

_LOG = logging.getLogger("r2serve.observe")

SILENT_S = 5.0
"""A process without a heartbeat for this time counts as stopped or stuck, s."""
SCAN_S = 0.5
MAX_JOURNALS = 256
MAX_STRANGERS = 16
"""Journals of other users that are named as unreadable."""
MAX_EVENTS = 10_000

RUNNING, SILENT, CLOSED, ENDED = "running", "silent", "closed", "ended"
"""CLOSED: all links closed gracefully; ENDED: the process ended without a graceful close."""

_RATE_S = 1.0  # shortest averaging interval of a rate
_SHORT_S = 10.0  # shortest averaging interval of a shortage of CPU


@dataclass(frozen=True)
class Rates:
    """Traffic of a rail, bytes/s."""

    tx: float = 0.0
    rx: float = 0.0


@dataclass
class Worker:
    """A process with a journal, running or ended."""

    key: str
    """Unique key, taken from the file name."""
    path: Path
    inode: int
    journal: Journal = field(default_factory=lambda: Journal(process=0))
    written: bool = True
    """The process is alive."""
    rates: list[Rates] = field(default_factory=list)
    """Rate of each rail of the journal; empty until a full interval was measured."""
    short_of_cpu: float = 0.0
    """Share of the last 10 s in which the worker was ready to run and did not run."""
    held: list[Event] = field(default_factory=list)
    """Events read and not yet returned by :meth:`Watch.look`."""
    host: str = ""
    """Name of the worker's host, by its journal; before the first read: of the reader's host."""
    _sampled_ns: int = 0
    _sample: list[RailCounters] = field(default_factory=list)
    _short_sample: tuple[int, int] = (0, 0)
    _lost_ns: dict[int, int] = field(default_factory=dict)
    _slow_ns: dict[int, int] = field(default_factory=dict)

    @property
    def status(self) -> str:
        """RUNNING, SILENT, CLOSED or ENDED."""
        heartbeat_ns = self.journal.heartbeat_ns
        if not heartbeat_ns:
            return CLOSED
        if not self.written:
            return ENDED
        return SILENT if time.monotonic_ns() - heartbeat_ns > SILENT_S * 1e9 else RUNNING

    @property
    def over(self) -> bool:
        """True once the worker has closed or ended; the journal is then final."""
        return self.status in (CLOSED, ENDED)

    @property
    def label(self) -> str:
        return self.journal.label or f"process {self.journal.process}"

    @property
    def node(self) -> str:
        """Node name, taken from the rails' names; empty without rails to other nodes."""
        for rail in self.journal.rails:
            if at := rail.name.partition("@")[2]:
                return at
        return ""

    def group_name(self, comm: int) -> str:
        """Returns the name of the communicator with the id of :attr:`Event.comm`."""
        return next((group.name for group in self.journal.groups if group.id == comm), "")

    def rate(self, entry: int) -> Rates:
        """Returns the traffic of the rail at this index of the journal; 0 if unknown."""
        return self.rates[entry] if entry < len(self.rates) else Rates()

    def since_ns(self, entry: int) -> int:
        """Returns the begin of a rail's present state, CLOCK_MONOTONIC; 0 = unknown.

        entry: index of the rail in the journal. A lost rail has been lost since the loss, not since
        its last attempt to connect. A slow rail has been slow since it was found to be.
        """
        rail = self.journal.rails[entry]
        if rail.presence == "lost":
            return self._lost_ns.get(entry, rail.since_ns)
        if rail.state == "UP" and rail.slow:
            return self._slow_ns.get(entry, 0)
        return rail.since_ns

    def take(self, new: Journal) -> None:
        self.journal = new
        self.host = new.host or self.host
        now_ns = time.monotonic_ns()
        for event in new.events:
            if event.kind == "rail_state" and event.value:
                self._lost_ns[event.entry] = event.time_ns
                self._slow_ns.pop(event.entry, None)
            elif event.kind == "rail_state" and event.text.startswith("PROBATION->UP"):
                self._lost_ns.pop(event.entry, None)  # an idle reserve may be lost without a value
            elif event.kind == "speed" and event.text == "slow":
                self._slow_ns.setdefault(event.entry, event.time_ns)
            elif event.kind == "speed":
                self._slow_ns.pop(event.entry, None)
        self._take_shortage(now_ns, new.short_of_cpu_ns)
        passed_s = (now_ns - self._sampled_ns) / 1e9
        if passed_s < _RATE_S:
            return
        # Indices match: the journal only appends rails.
        self.rates = [
            Rates(
                (rail.tx_bytes - before.tx_bytes) / passed_s,
                (rail.rx_bytes - before.rx_bytes) / passed_s,
            )
            for rail, before in zip(new.rails, self._sample, strict=False)
        ]
        self._sampled_ns, self._sample = now_ns, new.rails

    def _take_shortage(self, now_ns: int, short_ns: int) -> None:
        sampled_ns, before_ns = self._short_sample
        if now_ns - sampled_ns < _SHORT_S * 1e9:
            return
        if sampled_ns:
            self.short_of_cpu = (short_ns - before_ns) / (now_ns - sampled_ns)
        self._short_sample = now_ns, short_ns


@dataclass(frozen=True)
class NumberedEvent:
    """An event with an id and the worker of origin."""

    id: int
    """Strictly increasing: time in us since 1970, or the previous id plus 1."""
    worker: str
    """Key of the worker."""
    label: str
    node: str
    process: int
    group: str
    """Name of the communicator; empty for events without a communicator."""
    clock_ns: int
    """Time of the event, CLOCK_REALTIME in ns."""
    event: Event
    host: str = ""


class Watch:
    """The workers of a folder, and the events of all workers in order of arrival."""

    def __init__(
        self, folder: str | Path, *, max_events: int = MAX_EVENTS, engine: str = ""
    ) -> None:
        """folder: need not exist yet. max_events: number of most recent events to keep.

        engine: only the workers of the serving engine of this name; empty = all workers.
        """
        self.folder = Path(folder)
        self.host = socket.gethostname()
        self.engine = engine
        self.unobserved: list[Note] = []
        """Running workers whose journal is missing."""
        self.unprotected: list[Note] = []
        """Running engines without rails, which need no journal."""
        self._notes = Notes(folder)
        self._of_others: dict[str, int] = {}
        """Inodes of journals of other serving engines, by key."""
        self.workers: dict[str, Worker] = {}
        """Workers by key."""
        self.events: deque[NumberedEvent] = deque(maxlen=max_events)
        self.last_id = 0
        self.unreadable: dict[str, str] = {}
        """Error per unreadable journal, by file name."""
        self._complaint = ""
        self._believed: frozenset[int] = frozenset()
        """Users whose journals are read."""
        self._scanned_ns = 0
        self._max_events = max_events

    def look(self) -> list[NumberedEvent]:
        """Reads all journals; returns the new events, oldest first."""
        now_ns = time.monotonic_ns()
        if now_ns - self._scanned_ns >= SCAN_S * 1e9:
            self._scanned_ns = now_ns
            self._scan()
        new: list[NumberedEvent] = []
        for worker in list(self.workers.values()):
            self._read(worker)
            if self._is_of_another(worker):
                continue
            # Events newer than this look wait for the next look. A journal read earlier in the
            # loop may contain an older event, and events must be numbered in time order.
            told = [event for event in worker.held if event.time_ns < now_ns]
            worker.held = worker.held[len(told) :]
            new.extend(self._told(worker, event) for event in told)
            if len(new) > 2 * self._max_events:
                new = sorted(new, key=_clock)[-self._max_events :]
        new.sort(key=_clock)
        for place, one in enumerate(new):
            # Ids come from timestamps, so clients can resume after a restart of the sidecar.
            self.last_id = max(self.last_id + 1, one.clock_ns // 1000)
            new[place] = replace(one, id=self.last_id)
        self.events.extend(new)
        return new

    def after(self, last: int) -> list[NumberedEvent]:
        """Returns the kept events with ids above `last`, oldest first."""
        found = list(takewhile(lambda told: told.id > last, reversed(self.events)))
        return found[::-1]

    def known(self) -> list[Worker]:
        """Returns all workers with a readable journal, running or ended."""
        return [worker for worker in self.workers.values() if worker.journal.opened_ns]

    def live(self) -> list[Worker]:
        """Returns the workers neither closed nor ended."""
        return [worker for worker in self.workers.values() if not worker.over]

    def _scan(self) -> None:
        """Adds new journals; drops deleted journals, and the oldest beyond MAX_JOURNALS.

        Journals of live workers are always kept.
        """
        found: dict[str, tuple[float, int, Path]] = {}
        self.unreadable = {}
        for path in self._paths():
            try:
                status = path.stat()
            except OSError:
                continue  # deleted since the listing
            if status.st_uid not in self._believed:  # else strangers' files could crowd out ours
                if len(self.unreadable) < MAX_STRANGERS:
                    why = f"belongs to user {status.st_uid}: not believed"
                    self.unreadable[printable(path.name)] = why
                continue
            key = path.name.removeprefix("r2ccl-").removesuffix(".journal")
            found[key] = (status.st_mtime, status.st_ino, path)
        self._of_others = {
            key: inode
            for key, inode in self._of_others.items()
            if key in found and found[key][1] == inode
        }
        found = {key: one for key, one in found.items() if key not in self._of_others}
        kept = set(sorted(found, key=lambda key: found[key][0], reverse=True)[:MAX_JOURNALS])
        kept |= {worker.key for worker in self.live()} & set(found)
        self.workers = {key: one for key, one in self.workers.items() if key in kept}
        for key in sorted(kept):
            _, inode, path = found[key]
            if key not in self.workers or self.workers[key].inode != inode:
                self.workers[key] = Worker(key, path, inode, host=self.host)
        notes = [note for note in self._notes.look() if self._is_ours(note)]
        self.unobserved = [note for note in notes if note.has_rails]
        self.unprotected = [note for note in notes if not note.has_rails]

    def _is_ours(self, one: Note | Journal) -> bool:
        return not self.engine or one.serving_engine == self.engine

    def _is_of_another(self, worker: Worker) -> bool:
        """Drops a worker of another serving engine; the label is written after the engine."""
        if not worker.journal.label or self._is_ours(worker.journal):
            return False
        self._of_others[worker.key] = worker.inode
        del self.workers[worker.key]
        return True

    def _paths(self) -> Iterator[Path]:
        try:
            self._believed = believed_users(self.folder)
            yield from self.folder.glob(journal.PATTERN)
        except OSError as error:
            self.unreadable[self.folder.name] = str(error)
            if str(error) != self._complaint:
                _LOG.warning("%s cannot be read: %s; no worker is shown", self.folder, error)
                self._complaint = str(error)

    def _read(self, worker: Worker) -> None:
        known = worker.journal.record_count
        if known and worker.over:
            return
        try:
            # The lock is tested before the read. The last read of an ended worker is then complete.
            written = files.is_written(worker.path, self._believed)
            read = journal.read(worker.path, after=known, owners=self._believed)
        except (OSError, journal.JournalError) as error:
            self.unreadable[worker.path.name] = str(error)
            return
        worker.written = written
        worker.take(read)
        worker.held += read.events

    def _told(self, worker: Worker, event: Event) -> NumberedEvent:
        return NumberedEvent(
            id=0,
            worker=worker.key,
            label=worker.label,
            node=worker.node,
            process=worker.journal.process,
            group=worker.group_name(event.comm) if event.comm else "",
            clock_ns=worker.journal.clock_ns(event.time_ns),
            event=event,
            host=worker.host,
        )


def _clock(told: NumberedEvent) -> int:
    return told.clock_ns
