"""``r2serve sidecar``."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from pathlib import Path

import click
import psutil
import uvicorn

from r2serve.journal_folder import folder_option, journal_folder
from r2serve.observe import health
from r2serve.observe.sidecar.app import make_app
from r2serve.observe.sidecar.auth import TOKEN_VARIABLE, TokenError, read_token
from r2serve.observe.sidecar.peers import PeerError
from r2serve.observe.watch import Watch

IDLE_S = 60.0
PATIENCE_S = 30.0
LOOK_S = 1.0


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
@click.option(
    "--token-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help=f"File with the token that drills need.  Default: {TOKEN_VARIABLE}; else nobody may.",
)
@click.option(
    "--peers",
    default="",
    help="Sidecars of other nodes, separated by commas: http://node1:8199,node2:8199.",
)
@click.option(
    "--until",
    "engine",
    type=click.IntRange(1),
    help="End when this process has, and no worker has run for a minute since.",
)
def command(
    host: str,
    port: int,
    journal_dir: Path | None,
    stuck_after: float,
    token_file: Path | None,
    peers: str,
    engine: int | None,
) -> None:
    """Serve what the workers of this node recorded: probes, metrics, rails and events.

    It only reads, but for drills, and needs no running engine: neither can harm the other.
    """
    folder = journal_folder(journal_dir)
    watch = Watch(folder)
    urls = [url.strip() for url in peers.split(",") if url.strip()]
    try:
        app = make_app(watch, stuck_s=stuck_after, token=read_token(token_file), peers=urls)
    except (TokenError, PeerError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"journals: {folder}", err=True)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            host=host,
            port=port,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=2,
        )
    )
    sockets = None
    if engine is not None:
        sockets = [_bound(host, port)]
        threading.Thread(target=_end_after, args=(engine, watch, server), daemon=True).start()
    server.run(sockets)
    if not server.started:
        raise click.exceptions.Exit(3)  # uvicorn has said why


def _bound(host: str, port: int) -> socket.socket:
    """As soon as the sidecar of an engine that ran before has left the port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    deadline = time.monotonic() + IDLE_S + PATIENCE_S
    while True:
        try:
            return socket.create_server((host, port), family=family)
        except OSError as error:
            if time.monotonic() > deadline:
                raise click.ClickException(f"{host}:{port}: {error}") from error
            time.sleep(LOOK_S)


def _end_after(engine: int, watch: Watch, server: uvicorn.Server) -> None:
    """Ends the server when it has nothing to tell of any more."""
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(engine).wait()
    idle_since = time.monotonic()
    while time.monotonic() - idle_since < IDLE_S:
        time.sleep(LOOK_S)
        # A copy: the server's own thread looks for journals meanwhile.
        if any(not worker.over for worker in list(watch.workers.values())):
            idle_since = time.monotonic()
    server.should_exit = True
