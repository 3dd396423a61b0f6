"""``r2serve journal``: what happened to the rails of this node's workers."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from r2serve.config import Config
from r2serve.errors import ConfigError
from r2serve.observe import journal
from r2serve.observe.journal import Event, Journal
from r2serve.observe.trace import chrome_trace

_STATE_COLOURS = {"UP": "green", "SUSPECT": "yellow", "DOWN": "red", "FENCING": "red"}


def read(places: tuple[Path, ...]) -> list[Journal]:
    """The journals at these places, files or folders; by default in ``R2CCL_JOURNAL_DIR``.

    One of a folder that cannot be read (of another version, or just being made) is named on
    standard error.
    """
    if not places:
        try:
            folder = Config.from_env().journal_dir
        except ConfigError as error:
            raise click.ClickException(str(error)) from error
        if not folder:
            raise click.ClickException(
                "no journal: name a file or folder, or set journal_dir (R2CCL_JOURNAL_DIR)"
            )
        places = (Path(folder),)
    found = []
    for place in places:
        for path in sorted(place.glob("r2ccl-*.journal")) if place.is_dir() else [place]:
            try:
                found.append(journal.read(path))
            except (OSError, journal.JournalError) as error:
                if path == place:
                    raise click.ClickException(f"{path}: {error}") from error
                click.echo(f"{path}: {error}", err=True)
    if not found:
        raise click.ClickException(f"no readable r2ccl-*.journal in {', '.join(map(str, places))}")
    return found


def as_json(found: list[Journal]) -> str:
    return json.dumps([asdict(one) for one in found], indent=1)


_PLACES = click.argument(
    "places", nargs=-1, type=click.Path(exists=True, path_type=Path), metavar="[FILE|FOLDER]..."
)


@click.group()
def command() -> None:
    """Read the journals of workers, running or dead."""


@command.command()
@_PLACES
@click.option("--last", default=20, show_default=True, help="So many events of each worker.")
@click.option("--json", "json_wanted", is_flag=True, help="Print JSON: everything.")
def show(places: tuple[Path, ...], last: int, json_wanted: bool) -> None:
    """Show rails as they are, and the last events."""
    found = read(places)
    if json_wanted:
        click.echo(as_json(found))
        return
    console = Console()
    for one in found:
        console.print(_rails(one))
        console.print(_events(one.events[-last:] if last > 0 else []))


@command.command()
@_PLACES
@click.option("--json", "form", flag_value="json", help="Rails and events (the default).")
@click.option(
    "--chrome-trace", "form", flag_value="trace", help="For Perfetto and chrome://tracing."
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Write it there.",
)
def dump(places: tuple[Path, ...], form: str | None, output: Path | None) -> None:
    """Print all that the journals hold."""
    found = read(places)
    text = json.dumps(chrome_trace(found)) if form == "trace" else as_json(found)
    if output is None:
        click.echo(text)
    else:
        output.write_text(text + "\n", encoding="utf-8")


def _rails(one: Journal) -> Table:
    table = Table(title=f"process {one.process}: rails", box=box.SIMPLE_HEAD)
    for column in ("rail", "peer", "kind", "state", "cause", "epoch", "sent", "received"):
        table.add_column(column)
    for column in ("replayed", "hedged", "round trip us"):
        table.add_column(column, justify="right")
    for rail in one.rails:
        colour = _STATE_COLOURS.get(rail.state, "cyan")
        cause = "" if rail.cause == "none" else rail.cause
        verdict = "" if rail.verdict == "none" else f" ({rail.verdict})"
        table.add_row(
            rail.name,
            rail.peer,
            rail.kind,
            f"[{colour}]{rail.state}[/]",
            cause + verdict,
            str(rail.epoch),
            decimal(rail.tx_bytes),
            decimal(rail.rx_bytes),
            str(rail.replayed_chunks),
            str(rail.hedged_chunks),
            f"{rail.round_trip_ns / 1e3:.0f}",
        )
    return table


def _events(events: list[Event]) -> Table:
    table = Table(title="last events", box=box.SIMPLE_HEAD)
    for column in ("before the last", "event", "rail", "peer", "what"):
        table.add_column(column)
    for event in events:
        before = (events[-1].time_ns - event.time_ns) / 1e9
        table.add_row(f"{before:.3f} s", event.kind, event.rail, event.peer, _what(event))
    return table


def _what(event: Event) -> str:
    if event.kind == "stall":
        return f"{event.value / 1e6:.2f} ms in call {event.call} of {decimal(event.detail)}"
    if event.kind in ("replay", "hedge"):
        return f"{event.value} chunks"
    if event.kind == "speed":
        return f"{event.text}: {decimal(event.value)}/s"
    return event.text
