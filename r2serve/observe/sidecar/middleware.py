"""ASGI middleware of the sidecar: names of the host, HEAD, limits, compression and headers."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BODY_BYTES = 64 << 10
BODY_S = 10.0
"""Longest wait for the next part of a body, s."""
STREAM = "/v1/events/stream"
"""The only answer without an end."""

_SECURITY = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class OwnHosts:
    """Answers 400 to a request for a host of another name, against DNS rebinding.

    Starlette's TrustedHostMiddleware knows names alone; probes of Kubernetes name an address.

    A web page can direct its own name to this address, but it cannot make a browser send an
    address or ``localhost`` as the host. Requests without a host come from no browser.
    """

    def __init__(self, app: ASGIApp, names: frozenset[str]) -> None:
        """names: from :func:`own_names`."""
        self._app = app
        self._names = names
        self._ends = tuple(name[1:] for name in names if name.startswith("*."))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = _name(Headers(scope=scope).get("host", "")) if scope["type"] == "http" else ""
        if not host or _is_address(host) or self._allows(host):
            await self._app(scope, receive, send)
            return
        detail = f"host {host[:128]!r} is not allowed here: name it with --allowed-host"
        await JSONResponse({"detail": detail}, 400)(scope, receive, send)

    def _allows(self, host: str) -> bool:
        return host in self._names or host.endswith(self._ends) or "*" in self._names


def own_names(further: Iterable[str]) -> frozenset[str]:
    """Returns the names of this host in requests; ``*.example.com`` stands for many names.

    Raises:
        ValueError: a name has a wildcard elsewhere than as its first label.
    """
    names = {name.lower() for name in ("localhost", socket.gethostname(), *further) if name}
    for name in names:
        if "*" in name.removeprefix("*.") and name != "*":
            raise ValueError(f"allowed host {name!r}: a wildcard must be the whole first label")
    return frozenset(names)


def _name(host: str) -> str:
    """Returns the lower-case host of a header, without port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class Heads:
    """Answers HEAD like GET, without the body; FastAPI's routes know GET alone."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD" or scope["path"] == STREAM:
            await self._app(scope, receive, send)
            return

        async def without_body(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        await self._app({**scope, "method": "GET"}, receive, without_body)


class Compression(GZipMiddleware):
    """Compresses long answers, but no stream: older releases of starlette keep events back."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        inner: ASGIApp = self.app if scope.get("path") == STREAM else super().__call__
        await inner(scope, receive, send)


class BodyLimit:
    """Ends requests with a body above MAX_BODY_BYTES, and those whose body does not come."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "0")
        if not length.isdecimal() or int(length[:20]) > MAX_BODY_BYTES:
            detail = f"the body is longer than {MAX_BODY_BYTES} bytes"
            await JSONResponse({"detail": detail}, 413, {"Connection": "close"})(
                scope, receive, send
            )
            return
        taken, whole = 0, False

        async def limited() -> Message:
            nonlocal taken, whole
            if whole:  # the next message tells the end of the client, which may take for hours
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), BODY_S)
            except TimeoutError:
                raise _refused(408, f"the body did not come for {BODY_S:.0f} s") from None
            whole = not message.get("more_body", False)
            taken += len(message.get("body", b""))
            if taken > MAX_BODY_BYTES:
                raise _refused(413, f"the body is longer than {MAX_BODY_BYTES} bytes")
            return message

        await self._app(scope, limited, send)


def _refused(status: int, detail: str) -> HTTPException:
    return HTTPException(status, detail, {"Connection": "close"})


class SecurityHeaders:
    """Adds headers against misuse by other web pages to answers that lack them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _SECURITY.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, with_headers)
