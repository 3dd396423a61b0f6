"""``r2serve sidecar``: runs the sidecar's HTTP server."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import threading
import time
from pathlib import Path

import click
import psutil
import uvicorn

from r2serve.journal_folder import folder_option, journal_folder
from r2serve.observe.files import SIDECAR_LOG
from r2serve.observe.health import STUCK_S
from r2serve.observe.sidecar.app import make_app
from r2serve.observe.sidecar.auth import (
    READ_TOKEN_VARIABLE,
    TOKEN_VARIABLE,
    TokenError,
    read_token,
)
from r2serve.observe.sidecar.peers import PeerError
from r2serve.observe.sidecar.server import bound, bound_to, place_of, server_of
from r2serve.observe.watch import Watch
from r2serve.terminal import FiniteRange, ends_quietly

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
    help="Port to listen on; 0 = any free port, which the first lines name.",
)
@click.option(
    "--unix-socket",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Listen on this unix socket, for this user and root, instead of an address and port.",
)
@click.option(
    "--allowed-host",
    "hosts",
    multiple=True,
    envvar="R2SERVE_ALLOWED_HOSTS",
    metavar="NAME",
    help="Name of this host in requests, as in node1.example.com or *.example.com; may be repeated "
    "(R2SERVE_ALLOWED_HOSTS: names between spaces). Addresses, localhost, the name of this host "
    "and --host are always allowed. Requests for other hosts get 400, against DNS rebinding.",
)
@folder_option
@click.option(
    "--stuck-after",
    type=FiniteRange(0, min_open=True),
    default=STUCK_S,
    show_default=True,
    help="Longest silence of a peer's process on all rails, in seconds; a longer silence makes "
    "/readyz answer 503. A long wait for a peer that computes does not: its threads answer.",
)
@click.option(
    "--token-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File with the token for drills, closed to users outside its group. Default: "
    f"{TOKEN_VARIABLE}; no token disables drills.",
)
@click.option(
    "--read-token-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File with a token that reading needs, too, except /livez and /readyz; also sent to "
    f"--peers. Default: {READ_TOKEN_VARIABLE}; no token: every client may read.",
)
@click.option(
    "--tls-cert",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Certificate chain for TLS, in PEM. Default: plain HTTP.",
)
@click.option(
    "--tls-key",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Private key of --tls-cert, in PEM.",
)
@click.option(
    "--peers-ca",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Certificates of the authorities of https --peers, in PEM. Default: the system's.",
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
@ends_quietly
def command(
    host: str,
    port: int,
    unix_socket: Path | None,
    hosts: tuple[str, ...],
    journal_dir: Path | None,
    stuck_after: float,
    token_file: Path | None,
    read_token_file: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    peers_ca: Path | None,
    peers: str,
    serving_engine: str,
    engine: int | None,
) -> None:
    """Serve probes, metrics, rails and events of this node's workers over HTTP.

    Read-only except for drills. Needs no running engine; sidecar and engine cannot harm each other.
    """
    if (tls_cert is None) != (tls_key is None):
        raise click.UsageError("--tls-cert and --tls-key belong together: one is missing")
    folder = journal_folder(journal_dir)
    watch = Watch(folder, engine=serving_engine)
    urls = [url.strip() for url in peers.split(",") if url.strip()]
    try:
        app = make_app(
            watch,
            stuck_s=stuck_after,
            token=read_token(token_file),
            read_token=read_token(read_token_file, READ_TOKEN_VARIABLE),
            peers=urls,
            peers_ca=peers_ca,
            hosts=(host, *hosts),
        )
        server = server_of(app, certificate=tls_cert, key=tls_key)
    except (TokenError, PeerError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        raise click.ClickException(f"{tls_cert}, {tls_key}: {error}") from error
    if unix_socket is not None:
        listening = bound_to(unix_socket)
    else:
        listening = bound(host, port, patience_s=0 if engine is None else IDLE_S + PATIENCE_S)
    place = place_of(listening, tls=tls_cert is not None)
    click.echo(f"journals: {folder}\nlistening: {place}", err=True)
    if engine is not None:
        threading.Thread(target=_end_after, args=(engine, watch, server), daemon=True).start()
        log = folder / SIDECAR_LOG
        threading.Thread(target=_keep_log_short, args=(log,), daemon=True).start()
    try:
        server.run([listening])
    finally:
        if unix_socket is not None:
            unix_socket.unlink(missing_ok=True)
    if not server.started:
        raise click.exceptions.Exit(3)  # uvicorn has logged the reason


def _keep_log_short(log: Path) -> None:
    """Empties the log of a sidecar that an engine started, whenever the log is long."""
    while True:
        cut_log(sys.stderr.fileno(), log)
        time.sleep(LOG_S)


def cut_log(file: int, log: Path) -> None:
    """Empties the sidecar's log, opened for appending, if it has more than LOG_BYTES.

    A sidecar without a log of its own writes to the engine's messages, which stay whole.
    """
    status = os.fstat(file)
    try:
        own = os.path.samestat(status, log.lstat())
    except OSError:
        return  # no log at this path
    if own and stat.S_ISREG(status.st_mode) and status.st_size > LOG_BYTES:
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
