"""Calls of a node's processes to the relay of their node."""

from __future__ import annotations

import socket

from r2serve import _core
from r2serve.errors import R2cclError

SYNC_S = 60.0
"""Wait for the answer, which needs a link to every other node."""


class PortTakenError(R2cclError):
    """Another node cannot mirror a listener of this node, since the port is taken there."""


def sync(prefix: str, node: int, timeout_s: float = SYNC_S) -> None:
    """Waits until every listener of this user at the node's virtual address has its mirrors.

    A process that listens and then makes its port known calls this between both steps.

    Raises:
        PortTakenError: a port is taken on another node: listen at another port.
        OSError: no relay answers in time.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        connection.connect("\0" + _core.sync_socket_name(prefix, node))
        answer = b""
        while more := connection.recv(4096):
            answer += more
    if answer == b"ok\n":
        return
    if not answer:
        raise ConnectionResetError("the relay refused SYNC, or ended")
    taken = [line.split(" ", 2)[1:] for line in answer.decode().splitlines()]
    text = ", ".join(f"port {port} on {where}" for port, where in taken)
    raise PortTakenError(f"listeners without a mirror: {text} is taken; listen at another port")
