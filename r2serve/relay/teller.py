"""The values of a node without a relay, told to a node 0 that has one."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from r2serve.relay.lines import Line, NoRelayError, own_release

ANSWER_S = 5.0
"""Longest wait for a message of node 0."""
ZMQ_SIGNATURE = b"\xff"
"""First byte of ZMQ; a relay greets with text."""
GREETING_S = 5.0
"""Wait for the greeting of a relay, which speaks first. Torch's store waits for its client."""


def greets(connection: socket.socket) -> bool:
    """Whether a relay listens at the other end; sends nothing.

    Raises:
        OSError: the connection ended.
        NoRelayError: an engine's ZMQ socket listens there.
    """
    connection.settimeout(GREETING_S)
    try:
        greeting = connection.recv(1, socket.MSG_PEEK)
    except TimeoutError:
        return False
    if not greeting:
        raise ConnectionResetError("the other side closed the connection")
    if greeting == ZMQ_SIGNATURE:
        raise NoRelayError("an engine without a relay listens there")
    return True


def tell(
    connection: socket.socket, node: int, host: str, values: Mapping[str, str], key: bytes = b""
) -> str:
    """Tells the values of this node; returns the sentence about a difference, or an empty text.

    Raises:
        OSError: the connection ended, or was silent for too long.
        Refused: no relay with the same key is there.
    """
    connection.settimeout(ANSWER_S)
    line = Line(connection, key)
    line.exchange_challenges()
    line.receive()  # the offer of prefixes is for relays
    line.send({"release": own_release(), "node": node, "host": host, "values": dict(values)})
    answer = line.receive()
    return str(answer["refused"]) if answer.get("differs") else ""
