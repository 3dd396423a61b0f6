"""``r2serve rails``, ``r2serve events`` and ``r2serve top``: live views of this node's workers."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.live import Live
from rich.table import Table
from rich.text import Text

from r2serve.journal_folder import folder_option, journal_folder
from r2serve.observe import health
from r2serve.observe.journal import Event, RailCounters
from r2serve.observe.watch import NumberedEvent, Watch, Worker

FOLLOW_S = 0.05
REFRESH_S = 0.5

_COLOURS = {"UP": "green", "SUSPECT": "yellow", "DOWN": "red", "FENCING": "red"}
_HEALTH_COLOURS = {health.OK: "green", health.DEGRADED: "yellow", health.FAILING: "red"}


def what(event: Event) -> str:
    """Returns a short description of an event."""
    drill = " (drill)" if event.in_drill and event.kind != "injected" else ""
    if event.kind == "stall":
        step = f", step {event.step}" if event.step else ""
        call = f"{event.text} {event.call} of {decimal(event.detail)}"
        return f"{event.value / 1e6:.2f} ms in {call}{step}"
    if event.kind in ("replay", "hedge"):
        return f"{event.value} chunks"
    if event.kind == "speed":
        return f"{event.text}: {decimal(event.value)}/s{drill}"
    return event.text + drill


def rail_columns() -> tuple[str, ...]:
    return ("rail", "peer", "device", "kind", "state", "cause", "epoch")


def rail_cells(rail: RailCounters) -> tuple[str, ...]:
    """Returns the cells for :func:`rail_columns`, in rich markup."""
    cause = "" if rail.cause == "none" else rail.cause
    verdict = "" if rail.verdict == "none" else f" ({rail.verdict})"
    drill = f" drill: {rail.drill}" if rail.drill else ""
    state = f"[{_COLOURS.get(rail.state, 'cyan')}]{rail.state}[/]" + (" slow" if rail.slow else "")
    if rail.presence == "never up":
        cause = rail.never_up
        state += " never up"
    if rail.reserve:
        state += " reserve"
    return (
        rail.name,
        rail.peer,
        rail.device,
        rail.kind,
        state,
        (cause + verdict + drill).strip(),
        str(rail.epoch),
    )


def clock(clock_ns: int) -> str:
    """Returns the local date and time with milliseconds."""
    return datetime.fromtimestamp(clock_ns / 1e9).isoformat(" ", "milliseconds")


@click.command()
@folder_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def rails(journal_dir: Path | None, as_json: bool) -> None:
    """Show the rails of the running workers of this node.

    Exit status 1 if requests cannot be served: no worker runs here, no rail to a peer is left, a
    collective is stuck, or a process is stopped.
    """
    watch = _look(journal_dir)
    if as_json:
        click.echo(json.dumps([_rail_as_json(*one) for one in _each_rail(watch)], indent=1))
    else:
        Console().print(rails_table(watch.live()))
    found = health.examine(watch)
    for reason in (*found.reasons, *found.notes):
        click.echo(reason, err=True)
    if not found.ready:
        raise click.exceptions.Exit(1)


def _each_rail(watch: Watch) -> Iterable[tuple[Worker, RailCounters]]:
    for worker in watch.live():
        for rail in worker.journal.rails:
            yield worker, rail


def _rail_as_json(worker: Worker, rail: RailCounters) -> dict[str, Any]:
    since = clock(worker.journal.clock_ns(rail.since_ns))
    return {"worker": worker.key, "label": worker.label, **vars(rail), "since": since}


def rails_table(workers: Iterable[Worker]) -> Table:
    """Returns a table with a row per rail; rates appear 1 s after the start of the watch."""
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("worker", *rail_columns()):
        table.add_column(column)
    for column in ("sent/s", "received/s", "round trip us"):
        table.add_column(column, justify="right")
    for worker in workers:
        for entry, rail in enumerate(worker.journal.rails):
            rates = worker.rate(entry)
            table.add_row(
                worker.label,
                *rail_cells(rail),
                decimal(int(rates.tx)),
                decimal(int(rates.rx)),
                f"{rail.round_trip_ns / 1e3:.0f}",
            )
    return table


@click.command()
@folder_option
@click.option("-f", "--follow", is_flag=True, help="Keep printing new events.")
@click.option(
    "--last", default=20, show_default=True, type=click.IntRange(0), help="Past events to print."
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object per event and line.")
def events(journal_dir: Path | None, follow: bool, last: int, as_json: bool) -> None:
    """Show the rail events of this node's workers."""
    watch = _look(journal_dir)
    for told in deque(watch.events, maxlen=last):
        click.echo(_line(told, as_json))
    while follow:
        time.sleep(FOLLOW_S)
        for told in watch.look():
            click.echo(_line(told, as_json))


def _line(told: NumberedEvent, as_json: bool) -> str:
    event = told.event
    if as_json:
        said = vars(event) | {"id": told.id, "time": clock(told.clock_ns), "group": told.group}
        return json.dumps(said | {"worker": told.worker, "label": told.label})
    words = (clock(told.clock_ns), told.label, event.kind, event.rail or told.group)
    towards = f"to {event.peer}:" if event.peer else ""
    return " ".join(word for word in (*words, towards, what(event)) if word)


@click.command()
@folder_option
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object per refresh.")
@click.option("--count", type=click.IntRange(1), help="Number of refreshes. Default: unlimited.")
def top(journal_dir: Path | None, as_json: bool, count: int | None) -> None:
    """Watch rails, collectives and events of this node's workers live, every 0.5 s."""
    watch = _look(journal_dir)
    shown = 0
    if as_json:
        while True:
            click.echo(json.dumps(_summary(watch)))
            shown += 1
            if shown == count:
                return
            _refresh(watch)
    with Live(_screen(watch), auto_refresh=False, screen=count is None) as live:
        while True:
            live.update(_screen(watch), refresh=True)
            shown += 1
            if shown == count:
                return
            _refresh(watch)


def _look(journal_dir: Path | None) -> Watch:
    watch = Watch(journal_folder(journal_dir))
    watch.look()
    return watch


def _refresh(watch: Watch) -> None:
    time.sleep(REFRESH_S)
    watch.look()


def _summary(watch: Watch) -> dict[str, Any]:
    state = health.examine(watch)
    return {
        "status": state.status,
        "reasons": state.reasons,
        "notes": state.notes,
        "rails": [_rail_as_json(*one) for one in _each_rail(watch)],
        "last_event": watch.last_id,
    }


def _screen(watch: Watch) -> RenderableType:
    state = health.examine(watch)
    colour = _HEALTH_COLOURS.get(state.status, "cyan")
    head = Text.assemble(
        (state.status, f"bold {colour}"), f"  {len(watch.live())} workers in {watch.folder}"
    )
    reasons = [Text(f"  {reason}") for reason in (*state.reasons, *state.notes)[:5]]
    told = [Text(_line(one, False)) for one in deque(watch.events, maxlen=12)]
    return Group(head, *reasons, rails_table(watch.live()), _groups(watch), *told)


def _groups(watch: Watch) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("worker", "group", "collective"):
        table.add_column(column)
    for column in ("calls", "mean us", "stalled ms"):
        table.add_column(column, justify="right")
    for worker in watch.live():
        for group in worker.journal.groups:
            for collective, latency in group.latencies.items():
                table.add_row(
                    worker.label,
                    group.name,
                    collective,
                    str(latency.calls),
                    f"{latency.total_ns / latency.calls / 1e3:.0f}",
                    f"{group.stalled_ns / 1e6:.1f}",
                )
    return table
