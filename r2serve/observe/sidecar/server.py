"""The sidecar's listening socket, and the server's limits of connections in time and number.

uvicorn sets no limit to the wait for the rest of a request, nor to the wait for a client without
reads. Its TLS handshakes may take 60 s, and no limit counts them. A client without a token could
so keep every connection that the process may have.
"""

from __future__ import annotations

import errno
import functools
import os
import socket
import ssl
import stat
import time
from pathlib import Path
from typing import Any

import click
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from r2serve.observe.port_owner import owner_of
from r2serve.observe.sidecar.middleware import STREAM

MAX_CONNECTIONS = 256
REQUEST_S = 10.0
"""Longest wait for a whole head of a request, s; over TLS, for the handshake and a whole head."""
ANSWER_S = 60.0
"""Longest time of an answer, s; streams have a limit of their own for each part."""
MAX_HEAD_BYTES = 16 << 10
_CHECK_S = 1.0
_AGAIN_S = 1.0
_BACKLOG = 128


class Connection(H11Protocol):
    """A connection that ends with a request or an answer that takes too long.

    Beyond MAX_CONNECTIONS, the connection that has been idle for longest ends for the new one.
    """

    def connection_made(self, transport: Any) -> None:
        self._known: Any = None
        self._since_s = self.loop.time()
        self._timer = self.loop.call_later(_CHECK_S, self._check)
        super().connection_made(transport)
        # A loop makes many connections in a turn, and ends none before the next turn.
        others = [
            each
            for each in self.connections
            if isinstance(each, Connection) and each is not self and not each.transport.is_closing()
        ]
        if len(others) >= MAX_CONNECTIONS:
            min(others, key=lambda each: (each.doing, each._since_s)).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    @property
    def doing(self) -> int:
        """0: no request is under way. 1: an answer. 2: a stream."""
        if self.cycle is None or self.cycle.response_complete:
            return 0
        return 2 if self.cycle.scope["path"].endswith(STREAM) else 1

    def _check(self) -> None:
        doing, now_s = self.doing, self.loop.time()
        state = self.cycle, doing
        if state != self._known:
            self._known, self._since_s = state, now_s
        waited_s = now_s - self._since_s
        if waited_s > (REQUEST_S, ANSWER_S, float("inf"))[doing]:
            self.transport.abort()
            return
        self._timer = self.loop.call_later(_CHECK_S, self._check)


class TlsConnection(Connection):
    """A connection over TLS. During the handshake, the limits count it as an idle connection."""

    def __init__(self, context: ssl.SSLContext, **options: Any) -> None:
        super().__init__(**options)
        self._context = context
        self._early: bytes | None = b""
        """Bytes that came with the end of the handshake; None: the handshake is over."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._handshake = self.loop.create_task(self._shake_hands(transport))

    def connection_lost(self, exc: Exception | None) -> None:
        self._handshake.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._early is None:
            super().data_received(data)
        else:
            self._early += data

    async def _shake_hands(self, plain: Any) -> None:
        try:
            over_tls = await self.loop.start_tls(plain, self, self._context, server_side=True)
        except OSError:  # a failed handshake, too
            over_tls = None
        if over_tls is None:
            self.connection_lost(None)
            return
        H11Protocol.connection_made(self, over_tls)
        early, self._early = self._early, None
        if early:
            self.data_received(early)


def server_of(
    app: FastAPI, *, certificate: Path | None = None, key: Path | None = None
) -> uvicorn.Server:
    """Returns the server of an application; with a certificate and its key, over TLS.

    Raises:
        OSError: the certificate or the key is unusable; an SSLError is one.
    """
    protocol: Any = Connection
    if certificate is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate, key)
        protocol = functools.partial(TlsConnection, context)
    config = uvicorn.Config(
        app,
        http=protocol,
        loop="asyncio",  # uvloop, if there, may read before a handshake has begun
        ws="none",
        log_level="error",  # at "warning", any stranger's bytes would make a line
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        backlog=_BACKLOG,
        timeout_graceful_shutdown=2,
    )
    config.load()
    return uvicorn.Server(config)


def bound(host: str, port: int, patience_s: float) -> socket.socket:
    """Listens on the port, after waiting for the sidecar of a previous engine to release the port.

    Raises:
        click.ClickException: the port is still in use after ``patience_s``; names its owner.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    deadline = time.monotonic() + patience_s
    told = False
    while True:
        try:
            return socket.create_server((host, port), family=family, backlog=_BACKLOG)
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
            time.sleep(_AGAIN_S)


def bound_to(path: Path) -> socket.socket:
    """Listens on a unix socket that this user and root can use.

    Raises:
        click.ClickException: the path is unusable, or another process listens there.
    """
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_leftover(path)
        os.fchmod(made.fileno(), 0o600)  # bind() creates the file with this mode
        made.bind(str(path))
        made.listen(_BACKLOG)
    except OSError as error:
        made.close()
        raise click.ClickException(f"{path}: {error.strerror or error}") from error
    return made


def _remove_leftover(path: Path) -> None:
    """Removes the socket of a killed sidecar; raises OSError if a process listens there."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return  # bind() says that the path is taken
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        try:
            asking.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise OSError(errno.EADDRINUSE, "another process listens here")


def place_of(listening: socket.socket, *, tls: bool) -> str:
    """Returns the address of a listening socket, as clients write it."""
    name = listening.getsockname()
    if listening.family == socket.AF_UNIX:
        return f"unix:{name}"
    host = f"[{name[0]}]" if ":" in name[0] else name[0]
    return f"{'https' if tls else 'http'}://{host}:{name[1]}"
