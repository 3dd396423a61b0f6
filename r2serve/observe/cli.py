"""``r2serve journal``: shows and exports the journals of this node's workers."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from r2serve.journal_folder import believed_users, folder_option, journal_folder
from r2serve.observe import journal
from r2serve.observe.journal import Journal
from r2serve.observe.live import event_line
from r2serve.observe.tables import journal_table
from r2serve.observe.trace import chrome_trace
from r2serve.terminal import console, is_wide, result_option


def read(places: tuple[Path, ...], journal_dir: Path | None = None) -> list[Journal]:
    """Reads journal files and all journals of folders; default: the folder of all commands.

    A folder may hold unreadable journals, e.g. of another version or still in creation. Each is
    reported on standard error and skipped.

    Raises:
        click.ClickException: a named file or folder is unreadable, or no journal is readable.
    """
    places = places or (journal_folder(journal_dir),)
    found = []
    for place in places:
        if not place.exists():  # a default; click has checked the arguments
            raise click.ClickException(f"{place} is no folder with journals, and no file")
        try:
            owners = believed_users(place) if place.is_dir() else None  # a file is named by hand
        except PermissionError as error:
            raise click.ClickException(str(error)) from error
        for path in sorted(place.glob(journal.PATTERN)) if place.is_dir() else [place]:
            try:
                found.append(journal.read(path, owners=owners))
            except (OSError, journal.JournalError) as error:
                if path == place:
                    raise click.ClickException(f"{path}: {error}") from error
                click.echo(f"{path}: {error}", err=True)
    if not found:
        raise click.ClickException(
            f"no readable {journal.PATTERN} in {', '.join(map(str, places))}"
        )
    return found


def as_json(found: list[Journal]) -> str:
    return json.dumps([asdict(one) for one in found], indent=1)


_PLACES = click.argument(
    "places", nargs=-1, type=click.Path(exists=True, path_type=Path), metavar="[FILE|FOLDER]..."
)


@click.group()
def command() -> None:
    """Read the journals of running and ended workers."""


@command.command()
@_PLACES
@folder_option
@click.option("--last", default=20, show_default=True, help="Events to show per worker.")
@click.option("--json", "json_wanted", is_flag=True, help="Print all contents as JSON.")
def show(places: tuple[Path, ...], journal_dir: Path | None, last: int, json_wanted: bool) -> None:
    """Show the state of each rail, and the last events."""
    found = read(places, journal_dir)
    if json_wanted:
        click.echo(as_json(found))
        return
    shown = console()
    for one in found:
        shown.print(journal_table(one, wide=is_wide(shown)))
        for event in one.events[-last:] if last > 0 else []:
            click.echo(event_line(event, one.clock_ns(event.time_ns)))
        click.echo()


@command.command()
@_PLACES
@folder_option
@click.option("--json", "form", flag_value="json", help="Print rails and events as JSON (default).")
@click.option("--chrome-trace", "form", flag_value="trace", help="Print a trace for Perfetto.")
@result_option("-o", "--output", help="Write to this file instead of standard output.")
def dump(
    places: tuple[Path, ...], journal_dir: Path | None, form: str | None, output: Path | None
) -> None:
    """Print the full contents of the journals."""
    found = read(places, journal_dir)
    text = json.dumps(chrome_trace(found)) if form == "trace" else as_json(found)
    if output is None:
        click.echo(text)
    else:
        output.write_text(text + "\n", encoding="utf-8")
