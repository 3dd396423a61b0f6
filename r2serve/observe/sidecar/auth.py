"""Authorization: requests that change state need the sidecar's token."""

from __future__ import annotations

import hmac
import os
from pathlib import Path

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

TOKEN_VARIABLE = "R2SERVE_TOKEN"
SHORTEST_TOKEN = 16

_READING = ("GET", "HEAD", "OPTIONS")


class TokenError(ValueError):
    """The token is unusable; the text names the reason."""


def read_token(file: Path | None) -> str | None:
    """Returns the token of a file, or without a file, of R2SERVE_TOKEN; None if unset.

    Raises:
        TokenError: the file is unreadable or open to other users, or the token is too short.
    """
    if file is None:
        token = os.environ.get(TOKEN_VARIABLE)
        where = TOKEN_VARIABLE
    else:
        where = str(file)
        try:
            if file.stat().st_mode & 0o007:
                raise TokenError(f"{where} is accessible to other users: run chmod 600 {where}")
            token = file.read_text().strip()
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
    """ASGI middleware: answers 401 to state-changing requests without the token.

    The check precedes any read of the body. Without a configured token, all state-changing
    requests are rejected.
    """

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode() if token else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] != "http"
            or scope["method"] in _READING
            or self._knows(scope.get("headers", ()))
        ):
            await self._app(scope, receive, send)
            return
        detail = (
            "the sidecar's token is required: Authorization: Bearer ..."
            if self._expected
            else f"read-only: the sidecar has no token (set {TOKEN_VARIABLE} or --token-file)"
        )
        # Close the connection, because the unread body would be parsed as the next request.
        headers = {"WWW-Authenticate": "Bearer", "Connection": "close"}
        await JSONResponse({"detail": detail}, 401, headers)(scope, receive, send)

    def _knows(self, headers: list[tuple[bytes, bytes]]) -> bool:
        said = [value for name, value in headers if name == b"authorization"]
        return (
            self._expected is not None
            and len(said) == 1
            and hmac.compare_digest(said[0], self._expected)
        )
