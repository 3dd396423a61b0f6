"""``r2serve rails``, ``r2serve events`` and ``r2serve top``: live views of this node's workers."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.live import Live
from rich.text import Text

from r2serve.journal_folder import folder_option, journal_folder
from r2serve.observe import choice, health
from r2serve.observe.journal import Event, RailCounters
from r2serve.observe.port_state import Wanted
from r2serve.observe.tables import groups_table, links_table, ports_table
from r2serve.observe.watch import NumberedEvent, Watch, Worker
from r2serve.terminal import console, ends_quietly, is_wide

FOLLOW_S = 0.05
REFRESH_S = 0.5

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


def clock(clock_ns: int) -> str:
    """Returns the local date and time with milliseconds."""
    return datetime.fromtimestamp(clock_ns / 1e9).isoformat(" ", "milliseconds")


def _choices(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options that choose rails and peers."""
    for option in (
        click.option(
            "--peer",
            "peers",
            multiple=True,
            help="Only towards this peer, as in `rank 1` or `1`; may be repeated.",
        ),
        click.option(
            "--rail",
            "names",
            multiple=True,
            help="Only this rail, by name (rail1@node0, rail1) or port; may be repeated.",
        ),
    ):
        function = option(function)
    return function


_DOWN = click.option("--down", is_flag=True, help="Only rails that are not UP.")


@click.command()
@folder_option
@_DOWN
@_choices
@click.option("--links", is_flag=True, help="A line per worker and peer, in place of one per port.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: an object per worker and peer.")
def rails(
    journal_dir: Path | None,
    down: bool,
    names: tuple[str, ...],
    peers: tuple[str, ...],
    links: bool,
    as_json: bool,
) -> None:
    """Show the rails of the running workers of this node, a line per port.

    Exit status 1 if requests cannot be served: no worker runs here, no rail to a peer is left, a
    peer is silent on all rails, or a process is stopped.
    """
    watch = _look(journal_dir)
    wanted = Wanted(down, names, peers)
    ends = list(_each_rail(watch, wanted))
    if as_json:
        click.echo(json.dumps([_rail_as_json(*one) for one in ends], indent=1))
    elif ends:
        shown = console()
        made = links_table if links else ports_table
        shown.print(f"rails of {watch.host}", markup=False)
        shown.print(made(watch.live(), wanted, wide=is_wide(shown)))
        for line in choice.lines(_all_reduces(watch)):
            shown.print(line, markup=False, highlight=False)
    elif watch.live():
        click.echo("no rail matches", err=True)
    found = health.examine(watch)
    for reason in (*found.reasons, *found.notes):
        click.echo(reason, err=True)
    if not found.ready:
        raise click.exceptions.Exit(1)


def _each_rail(watch: Watch, wanted: Wanted) -> Iterable[tuple[Worker, RailCounters]]:
    for worker in watch.live():
        for rail in worker.journal.rails:
            if rail in wanted:
                yield worker, rail


def _all_reduces(watch: Watch) -> Iterable[tuple[str, choice.Choice]]:
    for worker in watch.live():
        for group in worker.journal.groups:
            if not group.closed:
                yield group.name, group.choice


def _rail_as_json(worker: Worker, rail: RailCounters) -> dict[str, Any]:
    since = clock(worker.journal.clock_ns(rail.since_ns))
    said = {"worker": worker.key, "label": worker.label, "host": worker.host}
    return said | vars(rail) | {"since": since}


@click.command()
@folder_option
@click.option("-f", "--follow", is_flag=True, help="Keep printing new events.")
@click.option(
    "--last", default=20, show_default=True, type=click.IntRange(0), help="Past events to print."
)
@_choices
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object per event and line.")
@ends_quietly
def events(
    journal_dir: Path | None,
    follow: bool,
    last: int,
    names: tuple[str, ...],
    peers: tuple[str, ...],
    as_json: bool,
) -> None:
    """Show the rail events of this node's workers.

    Exit status 1 if no worker has a journal here, unless events are followed.
    """
    watch = _look(journal_dir)
    wanted = Wanted(False, names, peers)
    past = [told for told in watch.events if wanted.has_event(told.event.rail, told.event.peer)]
    for told in deque(past, maxlen=last):
        click.echo(_line(told, as_json))
    if not watch.known():
        for reason in health.examine(watch).reasons:
            click.echo(reason, err=True)
        if not follow:
            raise click.exceptions.Exit(1)
    while follow:
        time.sleep(FOLLOW_S)
        for told in watch.look():
            if wanted.has_event(told.event.rail, told.event.peer):
                click.echo(_line(told, as_json))


def _line(told: NumberedEvent, as_json: bool) -> str:
    event = told.event
    if as_json:
        said = vars(event) | {"id": told.id, "time": clock(told.clock_ns), "group": told.group}
        return json.dumps(said | {"worker": told.worker, "label": told.label, "host": told.host})
    return event_line(event, told.clock_ns, told.label, told.group)


def event_line(event: Event, clock_ns: int, label: str = "", group: str = "") -> str:
    """Returns a line about an event: time, worker, kind, rail or group, peer, and what it was."""
    words = (clock(clock_ns), label, event.kind, event.rail or group)
    towards = f"to {event.peer}:" if event.peer else ""
    return " ".join(word for word in (*words, towards, what(event)) if word)


@click.command()
@folder_option
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object per refresh.")
@click.option("--count", type=click.IntRange(1), help="Number of refreshes. Default: unlimited.")
@_DOWN
@_choices
@ends_quietly
def top(
    journal_dir: Path | None,
    as_json: bool,
    count: int | None,
    down: bool,
    names: tuple[str, ...],
    peers: tuple[str, ...],
) -> None:
    """Watch rails, collectives and events of this node's workers live, every 0.5 s."""
    watch = _look(journal_dir)
    wanted = Wanted(down, names, peers)
    shown = 0
    if as_json:
        while True:
            click.echo(json.dumps(_summary(watch, wanted)))
            shown += 1
            if shown == count:
                return
            _refresh(watch)
    shown_on = console()
    wide = is_wide(shown_on)
    with Live(
        _screen(watch, wanted, wide=wide),
        console=shown_on,
        auto_refresh=False,
        screen=count is None,
        vertical_overflow="crop",
    ) as live:
        while True:
            live.update(_screen(watch, wanted, wide=wide), refresh=True)
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


def _summary(watch: Watch, wanted: Wanted) -> dict[str, Any]:
    state = health.examine(watch)
    return {
        "status": state.status,
        "reasons": state.reasons,
        "notes": state.notes,
        "rails": [_rail_as_json(*one) for one in _each_rail(watch, wanted)],
        "last_event": watch.last_id,
    }


def _screen(watch: Watch, wanted: Wanted, *, wide: bool) -> RenderableType:
    state = health.examine(watch)
    colour = _HEALTH_COLOURS.get(state.status, "cyan")
    head = Text.assemble(
        (state.status, f"bold {colour}"),
        f"  {len(watch.live())} workers on {watch.host} in {watch.folder}",
    )
    reasons = [Text(f"  {reason}") for reason in (*state.reasons, *state.notes)[:5]]
    chosen = [one for one in watch.events if wanted.has_event(one.event.rail, one.event.peer)]
    told = [Text(_line(one, False)) for one in chosen[-12:]]
    ports = ports_table(watch.live(), wanted, wide=wide, rates=True)
    return Group(head, *reasons, "", ports, "", groups_table(watch.live()), "", *told)
