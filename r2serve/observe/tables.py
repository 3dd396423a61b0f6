"""Tables of rails, ports and collectives for a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from r2serve.observe.journal import Journal, RailCounters
from r2serve.observe.port_state import (
    DOWN,
    EVERYTHING,
    NEVER_UP,
    SLOW,
    SUSPECT,
    UP,
    Wanted,
    ports_of,
    state_of,
    why_of,
)
from r2serve.observe.watch import Worker
from r2serve.terminal import table

_COLOURS = {UP: "green", SLOW: "yellow", SUSPECT: "yellow", NEVER_UP: "red", DOWN: "red"}


def _state(state: str, *, reserve: bool) -> Text:
    return Text(state + (", reserve" if reserve else ""), _COLOURS.get(state, "cyan"))


def _microseconds(ns: int) -> str:
    return f"{ns / 1e3:.0f}"


def ports_table(
    workers: Iterable[Worker], wanted: Wanted = EVERYTHING, *, wide: bool, rates: bool = False
) -> Table:
    """Returns a line per port of this node; rates appear 1 s after the start of the watch."""
    numbers = ["links up", *(["sent/s", "received/s"] if rates else []), *(["us"] if wide else [])]
    further = ["kind", "workers", "peers"] if wide else []
    made = table("rail", "port", "state", *numbers, *further, "cause", numbers=numbers)
    for port in ports_of(workers, wanted):
        cells: list[Text | str] = [
            Text(port.name),
            Text(port.device or port.kind),
            _state(port.state, reserve=port.reserve),
            f"{port.up} of {port.links}",
        ]
        if rates:
            cells += [decimal(int(port.tx)), decimal(int(port.rx))]
        if wide:
            cells += [_microseconds(port.round_trip_ns), port.kind]
            cells += [str(len(port.workers)), str(len(port.peers))]
        made.add_row(*cells, Text("; ".join(port.whys)))
    return made


def links_table(workers: Iterable[Worker], wanted: Wanted = EVERYTHING, *, wide: bool) -> Table:
    """Returns a line per worker, rail and peer."""
    numbers = ["us", *(["epoch"] if wide else [])]
    columns = ["worker", *_END, *numbers, "cause"]
    made = table(*columns, numbers=numbers)
    for worker in workers:
        for rail in worker.journal.rails:
            if rail in wanted:
                cells: list[Text | str] = [Text(worker.label), *_end(rail)]
                cells += [_microseconds(rail.round_trip_ns)]
                cells += [str(rail.epoch)] if wide else []
                made.add_row(*cells, Text(why_of(rail)))
    return made


_END = ("rail", "peer", "port", "kind", "state")


def _end(rail: RailCounters) -> tuple[Text | str, ...]:
    return (
        Text(rail.name),
        Text(rail.peer),
        Text(rail.device),
        rail.kind,
        _state(state_of(rail), reserve=rail.reserve),
    )


def journal_table(read: Journal, *, wide: bool) -> Table:
    """Returns a line per rail of a journal, with its counters."""
    title = f"{read.label}, process {read.process}" if read.label else f"process {read.process}"
    title += f" on host {read.host}" if read.host else ""
    further = ["epoch", "sent", "received", "us"] if wide else []
    numbers = ["replayed", "hedged", *further]
    made = table(*_END, *numbers, "cause", numbers=numbers, title=f"{title}: rails")
    for rail in read.rails:
        counters = [str(rail.replayed_chunks), str(rail.hedged_chunks)]
        if wide:
            counters += [str(rail.epoch), decimal(rail.tx_bytes), decimal(rail.rx_bytes)]
            counters += [_microseconds(rail.round_trip_ns)]
        made.add_row(*_end(rail), *counters, Text(why_of(rail)))
    return made


def groups_table(workers: Iterable[Worker]) -> Table:
    """Returns a line per worker, communicator and kind of collective."""
    numbers = ("calls", "mean us", "stalled ms")
    made = table("worker", "group", "collective", *numbers, numbers=numbers)
    for worker in workers:
        for group in worker.journal.groups:
            for collective, latency in group.latencies.items():
                made.add_row(
                    Text(worker.label),
                    Text(group.name),
                    collective,
                    str(latency.calls),
                    f"{latency.total_ns / latency.calls / 1e3:.0f}",
                    f"{group.stalled_ns / 1e6:.1f}",
                )
    return made
