"""Connections to the meeting that have not shown to be of a node of the job.

Each connection has a thread of node 0. Without a limit, a stranger that connects again and again
would take all threads of the host. A relay introduces itself at once, so the oldest connection goes
first.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading

_LOG = logging.getLogger("r2serve.relay")


class Strangers:
    """The open connections without an introduction, in order of arrival."""

    def __init__(self, most: int) -> None:
        """``most``: connections at the same time."""
        self._most = most
        self._open: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        self._told = False

    def __len__(self) -> int:
        with self._lock:
            return len(self._open)

    def admit(self, connection: socket.socket) -> None:
        """Enters a connection; ends the oldest one if there are too many.

        The thread of the ended connection reads its end, and closes it.
        """
        with self._lock:
            self._open[connection] = None
            if len(self._open) <= self._most:
                return
            oldest = next(iter(self._open))
            del self._open[oldest]
            # Under the lock, so that no other connection has the oldest one's descriptor yet.
            with contextlib.suppress(OSError):  # the other side has ended it
                oldest.shutdown(socket.SHUT_RDWR)
            first, self._told = not self._told, True
        if first:
            _LOG.warning(
                "more than %d connections to the meeting of the relays say nothing: the oldest one "
                "is ended each time",
                self._most,
            )

    def leave(self, connection: socket.socket) -> None:
        """Removes a connection, before it is closed or once its node is known."""
        with self._lock:
            self._open.pop(connection, None)
