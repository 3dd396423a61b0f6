"""Talks over a carried connection: `serve PREFIX NODE` echoes, `ask ADDRESS PORT` asks.

Each answer is checked. Lines of JSON go to standard output. The asking side ends with the line
`end` on its standard input.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time

from r2serve.relay.client import sync

MESSAGE_BYTES = 500


def say(what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def receive(connection: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        more = connection.recv(count - len(received))
        if not more:
            break
        received += more
    return received


def serve(prefix: str, node: int) -> None:
    address = f"{prefix.removesuffix('.0')}.{node + 1}"
    with socket.create_server((address, 0)) as listener:
        sync(prefix, node)
        say({"port": listener.getsockname()[1]})
        connection, _ = listener.accept()
        with connection:
            while message := receive(connection, MESSAGE_BYTES):
                connection.sendall(message)


def ask(address: str, port: int) -> None:
    with socket.create_connection((address, port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        count, worst_s = 0, 0.0
        while not select.select([sys.stdin], [], [], 0.002)[0]:
            message = (count.to_bytes(4, "big") * MESSAGE_BYTES)[:MESSAGE_BYTES]
            asked = time.monotonic()
            connection.sendall(message)
            answer = receive(connection, MESSAGE_BYTES)
            if answer != message:
                say({"failed": f"answer {count} is wrong or missing: {len(answer)} bytes"})
                return
            worst_s = max(worst_s, time.monotonic() - asked)
            count += 1
            if count % 50 == 0:
                say({"count": count})
    say({"end": count, "worst_ms": round(worst_s * 1000, 1)})


if __name__ == "__main__":
    what, *arguments = sys.argv[1:]
    if what == "serve":
        serve(arguments[0], int(arguments[1]))
    else:
        ask(arguments[0], int(arguments[1]))
