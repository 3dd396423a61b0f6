"""Free TCP ports of this machine, for the tests of all folders."""

from __future__ import annotations

import os
import random
import socket
from collections import deque

WORKERS = 8
"""Most workers of pytest-xdist with ports of their own."""
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_given: deque[int] = deque(maxlen=500)


def free_port() -> int:
    """Returns a free port from below the kernel's range of ephemeral ports.

    The kernel could give an ephemeral port to a rail's connection before the test uses the port.
    A process listens on the port only later. So each worker of pytest-xdist has ports of its own,
    and gives none of the last ones again.
    """
    while True:
        port = random.randrange(12_000 + _worker % WORKERS, 32_000, WORKERS)
        if port in _given:
            continue
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        _given.append(port)
        return port
