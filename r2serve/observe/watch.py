"""Follows the journals of a folder: what workers are now, and every event in one order.

A :class:`Watch` is looked at by one thread, again and again; memory is bounded by its limits.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path

from r2serve.observe import journal
from r2serve.observe.journal import Event, Journal, RailCounters

SILENT_S = 5.0
"""A process that has not looked after its links for so long is stopped, stuck or gone."""
SCAN_S = 0.5
MAX_JOURNALS = 256
MAX_EVENTS = 10_000

RUNNING, SILENT, CLOSED = "running", "silent", "closed"

_RATE_S = 1.0  # rates are over at least so long


@dataclass(frozen=True)
class Rates:
    """What a rail carries, in bytes per second."""

    tx: float = 0.0
    rx: float = 0.0


@dataclass
class Worker:
    """A process that writes, or wrote, a journal."""

    key: str
    """Unique: of the file's name."""
    path: Path
    journal: Journal
    status: str = RUNNING
    rates: dict[tuple[str, str], Rates] = field(default_factory=dict)
    """By rail and peer."""
    _inode: int = 0
    _sampled_ns: int = 0
    _sample: dict[tuple[str, str], RailCounters] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return self.journal.label or f"process {self.journal.process}"

    @property
    def node(self) -> str:
        """Of its rails' names; empty: it has no rails to other nodes."""
        for rail in self.journal.rails:
            if at := rail.name.partition("@")[2]:
                return at
        return ""

    def group_name(self, comm: int) -> str:
        """The name of a communicator, by the number that events have."""
        return next((group.name for group in self.journal.groups if group.id == comm), "")

    def take(self, new: Journal, now_ns: int) -> None:
        self.journal = new
        if not new.heartbeat_ns:
            self.status = CLOSED
        else:
            silent = now_ns - new.heartbeat_ns > SILENT_S * 1e9
            self.status = SILENT if silent else RUNNING
        passed_s = (now_ns - self._sampled_ns) / 1e9
        if passed_s < _RATE_S:
            return
        rails = {(rail.name, rail.peer): rail for rail in new.rails}
        self.rates = {
            key: Rates(
                max(0, rail.tx_bytes - before.tx_bytes) / passed_s,
                max(0, rail.rx_bytes - before.rx_bytes) / passed_s,
            )
            for key, rail in rails.items()
            if (before := self._sample.get(key))
        }
        self._sampled_ns, self._sample = now_ns, rails


@dataclass(frozen=True)
class Told:
    """An event, and whose it is."""

    id: int
    """Rises with every event: its time in us since 1970, or one more than the event before."""
    worker: str
    """Key of the worker."""
    label: str
    node: str
    process: int
    group: str
    """Name of the communicator; empty: it is of none."""
    clock_ns: int
    """CLOCK_REALTIME."""
    event: Event


class Watch:
    """The workers of a folder, and their events in the order in which they were seen."""

    def __init__(self, folder: str | Path, *, max_events: int = MAX_EVENTS) -> None:
        """folder: need not be there yet."""
        self.folder = Path(folder)
        self.workers: dict[str, Worker] = {}
        """By key."""
        self.events: deque[Told] = deque(maxlen=max_events)
        self.last_id = 0
        self.unreadable: dict[str, str] = {}
        """Why, of journals that cannot be read, by file name."""
        self._scanned_s = 0.0

    def look(self) -> list[Told]:
        """Read what is new; returns the new events."""
        now_s = time.monotonic()
        if not self._scanned_s or now_s - self._scanned_s >= SCAN_S:
            self._scanned_s = now_s
            self._scan()
        new: list[Told] = []
        for worker in list(self.workers.values()):
            new.extend(self._read(worker))
        new.sort(key=lambda told: told.clock_ns)
        for place, told in enumerate(new):
            # The same after a restart, so that whoever followed can go on where he was.
            self.last_id = max(self.last_id + 1, told.clock_ns // 1000)
            new[place] = replace(told, id=self.last_id)
        self.events.extend(new)
        return new

    def after(self, last: int) -> list[Told]:
        """Events after that one, oldest first, as far as they are kept."""
        found = list(takewhile(lambda told: told.id > last, reversed(self.events)))
        return found[::-1]

    def live(self) -> list[Worker]:
        """Workers that have not closed their links: running ones and silent ones."""
        return [worker for worker in self.workers.values() if worker.status != CLOSED]

    def _scan(self) -> None:
        """Finds journals that came and forgets those that went, the newest ones first."""
        found: dict[str, tuple[float, int, Path]] = {}
        for path in self._paths():
            try:
                status = path.stat()
            except FileNotFoundError:
                continue  # it went just now
            key = path.name.removeprefix("r2ccl-").removesuffix(".journal")
            found[key] = (status.st_mtime, status.st_ino, path)
        newest = sorted(found, key=lambda key: found[key][0], reverse=True)[:MAX_JOURNALS]
        for key in [key for key in self.workers if key not in newest]:
            del self.workers[key]
        self.unreadable = {}
        for key in newest:
            _, inode, path = found[key]
            worker = self.workers.get(key)
            if worker is None or worker._inode != inode:
                self.workers[key] = Worker(key, path, Journal(process=0), _inode=inode)

    def _paths(self) -> Iterator[Path]:
        try:
            yield from self.folder.glob(journal.PATTERN)
        except FileNotFoundError:
            return

    def _read(self, worker: Worker) -> list[Told]:
        try:
            read = journal.read(worker.path, after=worker.journal.record_count)
        except (OSError, journal.JournalError) as error:
            # Being made just now, of another version, or gone.
            self.unreadable[worker.path.name] = str(error)
            if not worker.journal.record_count:
                del self.workers[worker.key]
            return []
        worker.take(read, time.monotonic_ns())
        return [
            Told(
                id=0,
                worker=worker.key,
                label=worker.label,
                node=worker.node,
                process=read.process,
                group=worker.group_name(event.comm) if event.comm else "",
                clock_ns=read.clock_ns(event.time_ns),
                event=event,
            )
            for event in read.events
        ]


def default_folder() -> Path:
    """Where the engine plugins keep journals unless told otherwise: in memory, for this user."""
    return Path(f"/dev/shm/r2serve-{os.getuid()}")
