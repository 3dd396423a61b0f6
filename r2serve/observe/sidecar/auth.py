"""Authorization: drills need the sidecar's token; with a read token, reading needs a token, too.

Kubernetes' probes never need a token. Clients send a token as ``Authorization: Bearer``. Browsers
may send a token as the password of HTTP Basic, for reading only: a browser adds Basic credentials
to the requests of any page, so such credentials must change nothing.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import os
from pathlib import Path

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from r2serve.private_files import read_private

TOKEN_VARIABLE = "R2SERVE_TOKEN"
READ_TOKEN_VARIABLE = "R2SERVE_READ_TOKEN"
SHORTEST_TOKEN = 16
PROBES = ("/livez", "/readyz")
"""Paths that never need a token."""

_READING = ("GET", "HEAD", "OPTIONS")


class TokenError(ValueError):
    """The token is unusable; the text names the reason."""


def read_token(file: Path | None, variable: str = TOKEN_VARIABLE) -> str | None:
    """Returns the token of a file, or without a file, of the variable; None if unset.

    Raises:
        TokenError: the file is unreadable or open to other users, or the token is too short.
    """
    if file is None:
        token = os.environ.get(variable)
        where = variable
    else:
        where = str(file)
        try:
            token = read_private(file).decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise TokenError(f"{where}: {error}") from error
    if token is None:
        return None
    if len(token) < SHORTEST_TOKEN or not token.isascii() or any(c.isspace() for c in token):
        raise TokenError(
            f"{where}: the token has {len(token)} characters: must be at least {SHORTEST_TOKEN} "
            "ASCII characters without spaces"
        )
    return token


class Guard:
    """ASGI middleware: answers 401 to requests without the needed token.

    The check precedes any read of the body. Without a configured token, all state-changing
    requests are rejected.
    """

    def __init__(self, app: ASGIApp, token: str | None, read_token: str | None = None) -> None:
        """token: required to change state; allows reading, too. read_token: allows reading."""
        self._app = app
        self._token = token.encode() if token else None
        self._read_token = read_token.encode() if read_token else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._may(scope):
            await self._app(scope, receive, send)
            return
        reading = scope["method"] in _READING
        if reading:
            detail = "a token is required to read: Authorization: Bearer ..."
        elif self._token:
            detail = "the sidecar's token is required: Authorization: Bearer ..."
        else:
            detail = f"read-only: the sidecar has no token (set {TOKEN_VARIABLE} or --token-file)"
        # Close the connection, because the unread body would be parsed as the next request.
        answer = JSONResponse({"detail": detail}, 401, {"Connection": "close"})
        answer.headers.append("WWW-Authenticate", "Bearer")
        if reading:
            answer.headers.append("WWW-Authenticate", 'Basic realm="r2serve sidecar"')
        await answer(scope, receive, send)

    def _may(self, scope: Scope) -> bool:
        said = [value for name, value in scope.get("headers", ()) if name == b"authorization"]
        bearer = _credentials(said, b"bearer")
        if scope["method"] not in _READING:
            return _is(bearer, self._token)
        if self._read_token is None or scope["path"] in PROBES:
            return True
        _, _, password = _decoded(_credentials(said, b"basic")).partition(b":")
        return any(
            _is(given, known)
            for given in (bearer, password)
            for known in (self._token, self._read_token)
        )


def _credentials(said: list[bytes], scheme: bytes) -> bytes:
    """Returns the credentials of a scheme, whose name has no case; empty: none, or several."""
    if len(said) != 1:
        return b""
    named, _, rest = said[0].partition(b" ")
    return rest.strip() if named.lower() == scheme else b""


def _decoded(basic: bytes) -> bytes:
    try:
        return base64.b64decode(basic, validate=True)
    except binascii.Error:
        return b""


def _is(given: bytes, known: bytes | None) -> bool:
    return known is not None and hmac.compare_digest(given, known)
