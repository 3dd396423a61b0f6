"""Free TCP ports of this machine, for the tests of all folders."""

from __future__ import annotations

import random
import socket


def free_port() -> int:
    """Returns a free port from below the kernel's range of ephemeral ports.

    The kernel could give an ephemeral port to a rail's connection before the test uses the port.
    """
    while True:
        port = random.randrange(12_000, 32_000)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
