"""``r2serve sidecar``: runs the sidecar's HTTP server."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import sys
import threading
import time
from pathlib import Path

import click
import psutil
import uvicorn

from r2serve.journal_folder import folder_option, journal_folder
from r2serve.observe.port_owner import owner_of
from r2serve.observe.sidecar.app import make_app
from r2serve.observe.sidecar.auth import TOKEN_VARIABLE, TokenError, read_token
from r2serve.observe.sidecar.peers import PeerError
from r2serve.observe.watch import Watch

IDLE_S = 60.0
PATIENCE_S = 30.0
LOOK_S = 1.0
LOG_S = 10.0
LOG_BYTES = 256 << 10
"""Longest log of a sidecar that an engine started; the log lies among the journals."""


@click.command(name="sidecar")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    default=8199,
    show_default=True,
    type=click.IntRange(0, 65535),
    help="Port to listen on; 0 = any free port.",
)
@folder_option
@click.option(
    "--stuck-after",
    type=click.FloatRange(0, min_open=True),
    help="Longest collective, in seconds; a longer collective makes /readyz answer 503. Default: "
    "no limit, because a rank may wait for a rank that computes.",
)
@click.option(
    "--token-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help=f"File with the token for drills. Default: {TOKEN_VARIABLE}; no token disables drills.",
)
@click.option(
    "--peers",
    default="",
    help="Comma-separated sidecars of other nodes: http://node1:8199,node2:8199.",
)
@click.option(
    "--engine",
    "serving_engine",
    default="",
    help="Show the workers of this serving engine only, by name (R2CCL_SERVING_ENGINE). Default: "
    "all engines of the node; /readyz?engine=NAME judges one of them.",
)
@click.option(
    "--until",
    "engine",
    type=click.IntRange(1),
    help="Exit after the end of this process and 60 s without a running worker.",
)
def command(
    host: str,
    port: int,
    journal_dir: Path | None,
    stuck_after: float | None,
    token_file: Path | None,
    peers: str,
    serving_engine: str,
    engine: int | None,
) -> None:
    """Serve probes, metrics, rails and events of this node's workers over HTTP.

    Read-only except for drills. Needs no running engine; sidecar and engine cannot harm each other.
    """
    folder = journal_folder(journal_dir)
    watch = Watch(folder, engine=serving_engine)
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
    listening = _bound(host, port, patience_s=0 if engine is None else IDLE_S + PATIENCE_S)
    if engine is not None:
        threading.Thread(target=_end_after, args=(engine, watch, server), daemon=True).start()
        threading.Thread(target=_keep_log_short, daemon=True).start()
    server.run([listening])
    if not server.started:
        raise click.exceptions.Exit(3)  # uvicorn has logged the reason


def _bound(host: str, port: int, patience_s: float) -> socket.socket:
    """Listens on the port, after waiting for the sidecar of a previous engine to release the port.

    Raises:
        click.ClickException: the port is still in use after ``patience_s``; names its owner.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    deadline = time.monotonic() + patience_s
    told = False
    while True:
        try:
            return socket.create_server((host, port), family=family)
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            why = f"{host}:{port}: {error.strerror}"
            if taken:
                why = f"{host}:{port} is taken by {owner_of(host, port)}; use another port"
            if not taken or time.monotonic() >= deadline:
                raise click.ClickException(why) from error
            if not told:
                click.echo(f"{why}, or wait: tries again for {patience_s:.0f} s", err=True)
                told = True
            time.sleep(LOOK_S)


def _keep_log_short() -> None:
    """Empties the log of a sidecar that an engine started, whenever the log is long."""
    while True:
        cut_log(sys.stderr.fileno())
        time.sleep(LOG_S)


def cut_log(file: int) -> None:
    """Empties a regular file opened for appending if it has more than LOG_BYTES."""
    status = os.fstat(file)
    if stat.S_ISREG(status.st_mode) and status.st_size > LOG_BYTES:
        os.ftruncate(file, 0)
        os.write(file, b"earlier lines are dropped: the log was longer than 256 KiB\n")


def _end_after(engine: int, watch: Watch, server: uvicorn.Server) -> None:
    """Stops the server after the engine process has ended and no worker ran for IDLE_S."""
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(engine).wait()
    idle_since = time.monotonic()
    while time.monotonic() - idle_since < IDLE_S:
        time.sleep(LOOK_S)
        # Iterate over a copy: the server's thread updates the workers concurrently.
        if any(not worker.over for worker in list(watch.workers.values())):
            idle_since = time.monotonic()
    server.should_exit = True
