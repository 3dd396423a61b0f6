"""Traffic and states of rails, read from the journals of all workers and relays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from r2serve.faults import DATA_RAILS
from r2serve.lab.rails import rail_index
from r2serve.observe import journal

RELAY = "relay of "
"""Start of the label of a relay, whose rails have the names of the workers' rails."""


class Journals:
    """The journals of all workers and relays."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self._directories = list(directories)

    def read(self, *, events: bool = True) -> list[journal.Journal]:
        paths = [path for d in self._directories for path in sorted(d.glob("r2ccl-*.journal"))]
        return [journal.read(path, events=events) for path in paths]

    def sent_bytes(self) -> Counter[int]:
        """Returns the message bytes sent so far by all workers, per rail between nodes.

        A relay sends small messages over every rail, so its bytes do not tell the rail in use.
        """
        sent: Counter[int] = Counter()
        for rail in _rails(self._workers(events=False)):
            sent[rail_index(rail.name)] += rail.data_tx_bytes
        return sent

    def all_up(self) -> bool:
        return self.down() == set()

    def down(self) -> set[int] | None:
        """Returns the rails not UP for at least 1 process; None while no process has any rail."""
        rails = _rails(self.read(events=False))
        if not rails:
            return None
        return {rail_index(rail.name) for rail in rails if rail.state != "UP"}

    def events(self, begin_ns: int, end_ns: int) -> list[journal.Event]:
        """Returns the events of all workers in [begin_ns, end_ns)."""
        return [
            event
            for book in self._workers(events=True)
            for event in book.events
            if begin_ns <= event.time_ns < end_ns
        ]

    def _workers(self, *, events: bool) -> list[journal.Journal]:
        return [book for book in self.read(events=events) if not book.label.startswith(RELAY)]


def _rails(books: Sequence[journal.Journal]) -> list[journal.RailCounters]:
    return [rail for book in books for rail in book.rails if rail.kind in DATA_RAILS]
