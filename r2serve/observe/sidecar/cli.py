"""``r2serve sidecar``."""

from __future__ import annotations

from pathlib import Path

import click
import uvicorn

from r2serve.observe import health
from r2serve.observe.live import folder_option, journal_folder
from r2serve.observe.sidecar.app import make_app
from r2serve.observe.watch import Watch


@click.command(name="sidecar")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", default=8199, show_default=True, type=click.IntRange(0, 65535), help="0: any."
)
@folder_option
@click.option(
    "--stuck-after",
    default=health.STUCK_S,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    help="Seconds that a collective may take before /readyz answers 503.",
)
def command(host: str, port: int, journal_dir: Path | None, stuck_after: float) -> None:
    """Serve what the workers of this node recorded: probes, metrics, rails and events.

    It only reads, and needs no running engine: neither can harm the other.
    """
    folder = journal_folder(journal_dir)
    click.echo(f"journals: {folder}", err=True)
    uvicorn.run(
        make_app(Watch(folder), stuck_s=stuck_after),
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=2,
    )
