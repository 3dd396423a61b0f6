"""Who may change anything through the sidecar: whoever has its token."""

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
    """The token cannot be used; the text says why."""


def read_token(file: Path | None) -> str | None:
    """The token of a file or else of the variable R2SERVE_TOKEN; None: there is none.

    Raises:
        TokenError: the file cannot be read, others may read it, or the token is too short.
    """
    if file is None:
        token = os.environ.get(TOKEN_VARIABLE)
        where = TOKEN_VARIABLE
    else:
        where = str(file)
        try:
            if file.stat().st_mode & 0o007:
                raise TokenError(f"{where} may be read by everybody: chmod 600 {where}")
            token = file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise TokenError(f"{where}: {error}") from error
    if token is None:
        return None
    if len(token) < SHORTEST_TOKEN or not token.isascii() or any(c.isspace() for c in token):
        raise TokenError(
            f"{where}: a token is at least {SHORTEST_TOKEN} ASCII letters without spaces, "
            f"not {len(token)} letters"
        )
    return token


class Guard:
    """Answers 401 to whoever wants to change something and has not the token.

    Before anything of the body is read.  Without a token nobody may.
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
            "this needs the sidecar's token: Authorization: Bearer ..."
            if self._expected
            else f"this sidecar has no token ({TOKEN_VARIABLE} or --token-file): it only reads"
        )
        # The connection is not kept: what follows on it is a body that nobody reads.
        headers = {"WWW-Authenticate": "Bearer", "Connection": "close"}
        await JSONResponse({"detail": detail}, 401, headers)(scope, receive, send)

    def _knows(self, headers: list[tuple[bytes, bytes]]) -> bool:
        said = [value for name, value in headers if name == b"authorization"]
        return (
            self._expected is not None
            and len(said) == 1
            and hmac.compare_digest(said[0], self._expected)
        )
