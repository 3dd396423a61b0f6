"""Nodes that join a job after its start, as told by node 0 to all relays.

The relay of node 0 listens at its virtual address, so the connections of the other relays are
carried, too, and survive the loss of NICs.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable

from r2serve.ports.info import ProcessInfo

PORT = 29498
"""Port of the roster at the virtual address of node 0."""
RETRY_S = 0.5

_LOG = logging.getLogger("r2serve.relay")

Joined = Callable[[int, ProcessInfo], None]


class Roster:
    """The list of late nodes at node 0."""

    def __init__(self, address: str) -> None:
        self._lines: list[bytes] = []
        self._changed = threading.Condition()
        self._listener = socket.create_server((address, PORT), backlog=256)
        threading.Thread(target=self._accept, name="relay-roster", daemon=True).start()

    def add(self, node: int, info: ProcessInfo) -> None:
        """Tells every relay of a node."""
        with self._changed:
            self._lines.append(json.dumps({"node": node, "info": info.to_wire()}).encode() + b"\n")
            self._changed.notify_all()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(
                target=self._tell, args=(connection,), name="relay-roster", daemon=True
            ).start()

    def _after(self, told: int) -> list[bytes]:
        with self._changed:
            self._changed.wait_for(lambda: len(self._lines) > told)
            return self._lines[told:]

    def _tell(self, connection: socket.socket) -> None:
        told = 0
        with connection:
            try:
                while True:
                    lines = self._after(told)
                    for line in lines:
                        connection.sendall(line)
                    told += len(lines)
            except OSError as error:
                _LOG.info("a relay left the roster: %s", error)


def follow(address: str, joined: Joined) -> None:
    """Calls ``joined`` with each late node, in a daemon thread, until the process ends.

    ``address``: the virtual address of node 0.
    """
    threading.Thread(
        target=_follow, args=(address, joined), name="relay-roster", daemon=True
    ).start()


def _follow(address: str, joined: Joined) -> None:
    known: set[int] = set()
    while True:
        try:
            with socket.create_connection((address, PORT)) as connection:
                for line in connection.makefile("rb"):
                    entry = json.loads(line)
                    node = int(entry["node"])
                    if node not in known:
                        known.add(node)
                        joined(node, ProcessInfo.from_wire(entry["info"]))
        except OSError as error:
            _LOG.debug("the roster of node 0 is not there yet: %s", error)
        time.sleep(RETRY_S)
