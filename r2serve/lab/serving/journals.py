"""Traffic and states of rails, read from the journals of all workers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from r2serve.faults import DATA_RAILS
from r2serve.observe import journal

_RAIL_NAME = re.compile(r"rail(\d+)@node(\d+)")


class Journals:
    """The journals of all workers."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self._directories = list(directories)

    def read(self, *, events: bool = True) -> list[journal.Journal]:
        paths = [path for d in self._directories for path in sorted(d.glob("r2ccl-*.journal"))]
        return [journal.read(path, events=events) for path in paths]

    def sent_bytes(self) -> Counter[int]:
        """Returns the message bytes sent so far by all workers, per rail between nodes."""
        sent: Counter[int] = Counter()
        for rail in self._rails():
            sent[rail_index(rail.name)] += rail.data_tx_bytes
        return sent

    def all_up(self) -> bool:
        return self.down() == set()

    def down(self) -> set[int] | None:
        """Returns the rails not UP for at least 1 worker; None while no worker has any rail."""
        rails = self._rails()
        if not rails:
            return None
        return {rail_index(rail.name) for rail in rails if rail.state != "UP"}

    def _rails(self) -> list[journal.RailCounters]:
        books = self.read(events=False)
        return [rail for book in books for rail in book.rails if rail.kind in DATA_RAILS]

    def events(self, begin_ns: int, end_ns: int) -> list[journal.Event]:
        return [
            event
            for book in self.read()
            for event in book.events
            if begin_ns <= event.time_ns < end_ns
        ]


def rail_index(name: str) -> int:
    """Returns i of `rail<i>@node<j>`."""
    match = _RAIL_NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"name: {name!r} must be rail<i>@node<j>")
    return int(match[1])


def rail_in_use(before: Counter[int], after: Counter[int]) -> tuple[int, int] | None:
    """Returns the busiest rail between two readings and the bytes; None without traffic."""
    moved = {rail: after[rail] - before[rail] for rail in after}
    rail = max(moved, key=lambda key: moved[key], default=None)
    if rail is None or moved[rail] <= 0:
        return None
    return rail, moved[rail]
