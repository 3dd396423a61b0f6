"""Processes of the measurement: two ranks, a flooder, and a listener that is not r2ccl's.

Requests are lines of JSON on the standard input; answers are lines of JSON on the standard output.
"""

from __future__ import annotations

import contextlib
import json
import logging
import selectors
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

HELD = 512
"""Connections that the flooder keeps open."""
IN_PROGRESS = 64
"""Connects of the flooder at the same time."""
BYTES = 16 * 1024
"""Size of an all-reduce."""
KINDS = ("hold", "garbage")
"""Connections that stay silent, and connections that send eight bytes and end."""

Address = tuple[str, int]


def say(answer: Any) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def requests() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


class _Lines(logging.Handler):
    """Counts lines of the log, as an operator would see them."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += 1


def rank(number: int, port: int) -> None:
    """Runs all-reduces on request; answers with latencies in us and lines of the log."""
    import torch

    from r2serve.communicator import Communicator
    from r2serve.config import Config

    lines = _Lines()
    logging.getLogger("r2serve").addHandler(lines)
    logging.getLogger("r2serve").setLevel(logging.INFO)
    config = Config(rails="127.0.0.1,127.0.0.2", node=f"flood{number}")
    communicator = Communicator.standalone(
        "127.0.0.1", port, number, 2, name="flood", config=config
    )
    data = torch.zeros(BYTES // 4)
    out = torch.empty_like(data)
    say([rail.remote for rail in communicator.rails() if rail.kind == "tcp"])
    for request in requests():
        before, times = lines.count, []
        until = time.monotonic() + request["seconds"]
        stop = False
        while not stop:
            data[0] = float(number == 0 and time.monotonic() > until)
            began = time.perf_counter_ns()
            communicator.all_reduce(data, out=out)
            times.append(time.perf_counter_ns() - began)
            stop = bool(out[0])
        times.sort()
        at = {name: times[int(share * (len(times) - 1))] for name, share in _SHARES.items()}
        answer: dict[str, float] = {name: value / 1e3 for name, value in at.items()}
        say(answer | {"calls": len(times), "lines": lines.count - before})
    communicator.close()


_SHARES = {"p50_us": 0.5, "p99_us": 0.99, "max_us": 1.0}


def elsewhere() -> None:
    """Accepts connections without an effect on r2ccl, and keeps as many as a flooder does."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as server:
        say(server.getsockname())
        kept: deque[socket.socket] = deque(maxlen=HELD)
        while True:
            kept.append(server.accept()[0])


def flooder() -> None:
    """Connects as fast as it can to the addresses of a request; answers with the connections."""
    for request in requests():
        addresses = [(host, port) for host, port in request["addresses"]]
        say({"connections": flood(addresses, request["kind"], request["seconds"])})


def flood(addresses: list[Address], kind: str, seconds: float) -> int:
    """Connects to each address in turn for some seconds; returns the number of connections."""
    until = time.monotonic() + seconds
    begun = connected = 0
    held: deque[socket.socket] = deque()
    with selectors.DefaultSelector() as selector:
        while time.monotonic() < until:
            while len(selector.get_map()) < IN_PROGRESS:
                client = socket.socket()
                client.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    client.connect(addresses[begun % len(addresses)])
                begun += 1
                selector.register(client, selectors.EVENT_WRITE)
            for key, _ in selector.select(0.1):
                client = key.fileobj  # type: ignore[assignment]
                selector.unregister(client)
                if client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    client.close()
                    continue
                connected += 1
                if kind == "garbage":
                    with contextlib.suppress(OSError):  # closed by the other end already
                        client.send(b"flooding")
                    client.close()
                    continue
                held.append(client)
                if len(held) > HELD:
                    held.popleft().close()
        for key in list(selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
    for client in held:
        client.close()
    return connected


ROLES: dict[str, Callable[..., None]] = {"rank": rank, "elsewhere": elsewhere, "flooder": flooder}

if __name__ == "__main__":
    ROLES[sys.argv[1]](*map(int, sys.argv[2:]))
