"""Lines of JSON between the nodes of a job that has no link yet, and what else may answer there.

With a pre-shared key, every message carries an HMAC over the other side's challenge.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
from importlib.metadata import version
from typing import Any

from r2serve import _core
from r2serve.errors import ConfigError

LONGEST_LINE = 1 << 20
"""Bytes of a message, at most."""
STORE_GREETING = b"\x00" + 0x3C85F7CE.to_bytes(4, "little")
"""First bytes of a client of torch's TCPStore."""
NO_RELAY = (
    "it runs without a relay: --distributed-backend and R2CCL_CONTROL must be the same on every "
    "node"
)
"""Words about a node at which another socket of its engine answers."""
ZMQ_GREETING_BYTES = 10
"""Length of the first message of ZMQ, as of a data-parallel engine: 0xFF, 8 bytes, 0x7F."""


class Refused(ConfigError):
    """The other side refuses the meeting for good; the text has the reason."""


class NoRelayError(Refused):
    """The other node has a socket of its engine at the port of the meeting, and no relay."""


class Line:
    """A connection with lines of JSON, authenticated if there is a key."""

    def __init__(self, connection: socket.socket, key: bytes) -> None:
        self._connection = connection
        self._key = key
        self._rest = b""
        self.own_challenge = secrets.token_hex(16)
        self.peer_challenge = ""

    def send(self, body: dict[str, Any]) -> None:
        text = json.dumps(body)
        line = json.dumps({"body": text, "mac": self._mac(self.peer_challenge, text)})
        self._connection.sendall(line.encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        """Returns the next message.

        Raises:
            OSError: the connection ended, or was silent for too long.
            Refused: the message is malformed, or the HMAC is wrong.
        """
        while b"\n" not in self._rest:
            if len(self._rest) > LONGEST_LINE:
                raise Refused(f"the message has more than {LONGEST_LINE} bytes")
            more = self._connection.recv(65536)
            if not more:
                raise ConnectionResetError("the other side closed the connection")
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        try:
            outer = json.loads(line)
            text, mac = str(outer["body"]), str(outer["mac"])
            body = json.loads(text)
            if not isinstance(body, dict):
                raise TypeError("no object")
        except (ValueError, KeyError, TypeError) as error:
            raise Refused("the message is malformed: no relay of r2serve is there") from error
        if not hmac.compare_digest(mac.encode(), self._mac(self.own_challenge, text).encode()):
            raise Refused(
                "secret_file (R2CCL_SECRET_FILE): the nodes have different keys, or one has none; "
                "must be the same key on every node"
            )
        return body

    def _mac(self, challenge: str, text: str) -> str:
        if not self._key:
            return ""
        return hmac.new(self._key, f"{challenge} {text}".encode(), hashlib.sha256).hexdigest()

    # The first line of each side is its challenge, without an HMAC.
    def exchange_challenges(self) -> None:
        self._connection.sendall(self.own_challenge.encode() + b"\n")
        while b"\n" not in self._rest:
            if len(self._rest) > 64:
                raise Refused("the greeting is malformed: no relay of r2serve is there")
            more = self._connection.recv(64)
            if not more:
                raise ConnectionResetError("the other side closed the connection")
            self._rest += more
            if _is_of_engine(self._rest):
                raise NoRelayError(NO_RELAY)
        greeting, _, self._rest = self._rest.partition(b"\n")
        self.peer_challenge = greeting.decode("ascii", "replace")


def _is_of_engine(greeting: bytes) -> bool:
    """Whether a client of an engine greets; the numbers after its greeting may be a line feed."""
    of_zmq = greeting[:1] == b"\xff" and greeting[ZMQ_GREETING_BYTES - 1 :][:1] == b"\x7f"
    return of_zmq or greeting.startswith(STORE_GREETING)


def own_release() -> str:
    return f"r2serve {version('r2serve')} (wire version {_core.wire_version})"
