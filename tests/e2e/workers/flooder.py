"""Connects again and again, and sends nothing. The argument is JSON: addresses, and `pause_s`.

The last connections stay open, so that a listener cannot tell them from slow handshakes.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time
from collections import deque

HELD = 512


def main() -> None:
    asked = json.loads(sys.argv[1])
    addresses = [(host, int(port)) for host, port in asked["addresses"]]
    held: deque[socket.socket] = deque()
    begun = 0
    while True:
        client = socket.socket()
        client.setblocking(False)
        with contextlib.suppress(OSError):  # the connect goes on, or fails
            client.connect(addresses[begun % len(addresses)])
        begun += 1
        held.append(client)
        if len(held) > HELD:
            held.popleft().close()
        time.sleep(asked["pause_s"])


if __name__ == "__main__":
    main()
