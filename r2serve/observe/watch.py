"""Follows the journals of a folder: what workers are now, and every event in one order.

A :class:`Watch` is looked at by one thread, again and again; memory is bounded by its limits.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path

from r2serve.observe import files, journal
from r2serve.observe.journal import Event, Journal, RailCounters

_LOG = logging.getLogger("r2serve.observe")

SILENT_S = 5.0
"""A process that has not looked after its links for so long is stopped or stuck."""
SCAN_S = 0.5
MAX_JOURNALS = 256
MAX_EVENTS = 10_000

RUNNING, SILENT, CLOSED, ENDED = "running", "silent", "closed", "ended"
"""CLOSED: it closed its links in order; ENDED: it did not."""

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
    inode: int
    journal: Journal = field(default_factory=lambda: Journal(process=0))
    written: bool = True
    """Its process lives."""
    rates: list[Rates] = field(default_factory=list)
    """Of each of the journal's rails; empty: not known yet."""
    held: list[Event] = field(default_factory=list)
    """Read, but not told yet."""
    _sampled_ns: int = 0
    _sample: list[RailCounters] = field(default_factory=list)

    @property
    def status(self) -> str:
        """What has become of it by now."""
        heartbeat_ns = self.journal.heartbeat_ns
        if not heartbeat_ns:
            return CLOSED
        if not self.written:
            return ENDED
        return SILENT if time.monotonic_ns() - heartbeat_ns > SILENT_S * 1e9 else RUNNING

    @property
    def over(self) -> bool:
        """Nothing will change any more."""
        return self.status in (CLOSED, ENDED)

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

    def rate(self, entry: int) -> Rates:
        """Of the rail at that place of the journal."""
        return self.rates[entry] if entry < len(self.rates) else Rates()

    def take(self, new: Journal) -> None:
        self.journal = new
        now_ns = time.monotonic_ns()
        passed_s = (now_ns - self._sampled_ns) / 1e9
        if passed_s < _RATE_S:
            return
        # Rails are only ever added.
        self.rates = [
            Rates(
                (rail.tx_bytes - before.tx_bytes) / passed_s,
                (rail.rx_bytes - before.rx_bytes) / passed_s,
            )
            for rail, before in zip(new.rails, self._sample, strict=False)
        ]
        self._sampled_ns, self._sample = now_ns, new.rails


@dataclass(frozen=True)
class NumberedEvent:
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
        self.events: deque[NumberedEvent] = deque(maxlen=max_events)
        self.last_id = 0
        self.unreadable: dict[str, str] = {}
        """Why, of journals that cannot be read, by file name."""
        self._scanned_ns = 0
        self._max_events = max_events

    def look(self) -> list[NumberedEvent]:
        """Read what is new; returns the new events."""
        now_ns = time.monotonic_ns()
        if now_ns - self._scanned_ns >= SCAN_S * 1e9:
            self._scanned_ns = now_ns
            self._scan()
        new: list[NumberedEvent] = []
        for worker in self.workers.values():
            self._read(worker)
            # What happens while journals are read waits for the next look: others that happened
            # before it may be in journals that were read already.
            told = [event for event in worker.held if event.time_ns < now_ns]
            worker.held = worker.held[len(told) :]
            new.extend(self._told(worker, event) for event in told)
            if len(new) > 2 * self._max_events:
                new = sorted(new, key=_clock)[-self._max_events :]
        new.sort(key=_clock)
        for place, one in enumerate(new):
            # The same after a restart, so that whoever followed can go on where he was.
            self.last_id = max(self.last_id + 1, one.clock_ns // 1000)
            new[place] = replace(one, id=self.last_id)
        self.events.extend(new)
        return new

    def after(self, last: int) -> list[NumberedEvent]:
        """Events after that one, oldest first, as far as they are kept."""
        found = list(takewhile(lambda told: told.id > last, reversed(self.events)))
        return found[::-1]

    def known(self) -> list[Worker]:
        """Workers whose journals could be read, also those that have ended."""
        return [worker for worker in self.workers.values() if worker.journal.opened_ns]

    def live(self) -> list[Worker]:
        """Workers whose processes live and have not closed their links."""
        return [worker for worker in self.workers.values() if not worker.over]

    def _scan(self) -> None:
        """Finds journals that came and forgets those that went, and the oldest of too many."""
        found: dict[str, tuple[float, int, Path]] = {}
        for path in self._paths():
            try:
                status = path.stat()
            except OSError:
                continue  # it went just now
            key = path.name.removeprefix("r2ccl-").removesuffix(".journal")
            found[key] = (status.st_mtime, status.st_ino, path)
        kept = set(sorted(found, key=lambda key: found[key][0], reverse=True)[:MAX_JOURNALS])
        kept |= {worker.key for worker in self.live()} & set(found)
        self.workers = {key: one for key, one in self.workers.items() if key in kept}
        self.unreadable = {}
        for key in sorted(kept):
            _, inode, path = found[key]
            if key not in self.workers or self.workers[key].inode != inode:
                self.workers[key] = Worker(key, path, inode)

    def _paths(self) -> Iterator[Path]:
        try:
            yield from self.folder.glob(journal.PATTERN)
        except OSError as error:
            _LOG.warning("%s cannot be read: %s", self.folder, error)

    def _read(self, worker: Worker) -> None:
        known = worker.journal.record_count
        if known and worker.over:
            return
        try:
            # In this order: what it wrote before it ended is there when it is known to have ended.
            written = files.is_written(worker.path)
            read = journal.read(worker.path, after=known)
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
        )


def _clock(told: NumberedEvent) -> int:
    return told.clock_ns
