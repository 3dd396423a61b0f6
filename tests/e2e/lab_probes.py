"""Probes of a lab: which packets pass between the nodes, observed from the nodes."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Self

from timely import stop, timely

from r2serve.lab.holder import LabCommandError
from r2serve.lab.nodes import Node

ARRIVES_S = 10.0
SILENT_S = 0.4

# A refused connection is an answer of the other node's kernel. A black hole gives no answer.
PROBE = """
import socket, sys
with socket.socket() as sock:
    sock.settimeout(float(sys.argv[2]))
    try:
        sock.connect((sys.argv[1], 9))
    except ConnectionRefusedError:
        sys.exit(0)
    except OSError:
        sys.exit(1)
"""


def _answers(source: Node, address: str, within_s: float) -> bool:
    try:
        source.run(sys.executable, "-I", "-S", "-c", PROBE, address, str(within_s))
    except LabCommandError:
        return False
    return True


def reaches(source: Node, address: str) -> bool:
    """Whether the address answers within ARRIVES_S."""
    return _answers(source, address, ARRIVES_S)


def is_silent(source: Node, address: str) -> bool:
    """Whether the address does not answer within SILENT_S."""
    return not _answers(source, address, SILENT_S)


def becomes_reachable(source: Node, address: str, patience_s: float = 60.0) -> bool:
    return timely(
        lambda: _answers(source, address, SILENT_S), f"{address} is reachable", patience_s
    )


# Sends three datagrams of the given size; no listener is needed.
DATAGRAMS = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
    for _ in range(3):
        sock.sendto(bytes(int(sys.argv[2])), (sys.argv[1], 9))
"""


def datagrams_arrive(
    source: Node, target: Node, rail: int, size: int, within_s: float = ARRIVES_S
) -> bool:
    """Whether three datagrams of `size` bytes arrive at the port of `target`."""

    def received() -> int:
        return int(target.run("cat", f"/sys/class/net/rail{rail}/statistics/rx_bytes"))

    before = received()
    address = target.rail_address(rail)
    source.run(sys.executable, "-I", "-S", "-c", DATAGRAMS, address, str(size))
    deadline = time.monotonic() + within_s
    while received() - before < 3 * size:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def datagrams_vanish(source: Node, target: Node, rail: int, size: int) -> bool:
    """Whether three datagrams of `size` bytes do not arrive at the port of `target`."""
    return not datagrams_arrive(source, target, rail, size, within_s=0.15)


# Echo server: returns the bytes of every connection, with a thread per connection.
ECHO = """
import socket, sys, threading

def echo(connection):
    with connection:
        try:
            while data := connection.recv(1 << 16):
                connection.sendall(data)
        except OSError:
            return

with socket.create_server((sys.argv[1], 7)) as server:
    sys.stdout.write("ready\\n")
    sys.stdout.flush()
    while True:
        threading.Thread(target=echo, args=(server.accept()[0],), daemon=True).start()
"""

# Echo client: a line of input has the number of bytes to send, and the time limit of the echo in s.
# Prints the outcome of the echo and the time in s.
TALK = """
import socket, sys, threading, time
sock = socket.create_connection((sys.argv[1], 7), timeout=30)
sys.stdout.write("ready\\n")
sys.stdout.flush()
for line in sys.stdin:
    size, limit_s = line.split()
    sock.settimeout(float(limit_s))
    sent, got, began = bytes(int(size)), b"", time.monotonic()
    sender = threading.Thread(target=sock.sendall, args=(sent,), daemon=True)
    try:
        sender.start()
        while len(got) < len(sent):
            data = sock.recv(1 << 16)
            if not data:
                raise ConnectionResetError
            got += data
        word = "same" if got == sent else "changed"
    except TimeoutError:
        word = "silence"
    except OSError:
        word = "error"
    sys.stdout.write(f"{word} {time.monotonic() - began}\\n")
    sys.stdout.flush()
"""


# Client of the echo server. A line of input has the number of bytes to send, the number of bytes to
# read, and the longest silence of the echo in s. Prints the time in s until the other end
# acknowledged all bytes (-1: not within 10 s), and the number of bytes read.
ACKNOWLEDGED = """
import fcntl, socket, struct, sys, time
SIOCOUTQ = 0x5411
sock = socket.create_connection((sys.argv[1], 7), timeout=30)
sys.stdout.write("ready\\n")
sys.stdout.flush()
for line in sys.stdin:
    size, wanted, silence_s = line.split()
    got, began = 0, time.monotonic()
    sock.settimeout(float(silence_s))
    sock.sendall(bytes(int(size)))
    while left := struct.unpack("i", fcntl.ioctl(sock, SIOCOUTQ, bytes(4)))[0]:
        if time.monotonic() - began > 10:
            break
    seconds = -1 if left else time.monotonic() - began
    try:
        while got < max(1, int(wanted)):
            got += len(sock.recv(1 << 16))
    except TimeoutError:
        pass
    sys.stdout.write(f"{seconds} {got}\\n")
    sys.stdout.flush()
"""


class Talk:
    """A TCP connection between two nodes of a lab over a rail, for testing echoes.

    rail: None = over the management network.
    """

    script = TALK

    def __init__(self, near: Node, far: Node, rail: int | None) -> None:
        address = far.address(rail)
        self._server = self._start(far, ECHO, address)
        self._client = self._start(near, self.script, address)

    def _start(self, node: Node, script: str, *arguments: str) -> subprocess.Popen[bytes]:
        process = node.popen(
            [sys.executable, "-I", "-S", "-c", script, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        return process

    def say(self, size: int, within_s: float = ARRIVES_S) -> tuple[str, float]:
        """Sends `size` bytes; returns same, changed, silence or error, and the time in s.

        within_s: longest pause of the echo.
        """
        word, seconds = self._ask(f"{size} {within_s}")
        return word, float(seconds)

    def _ask(self, line: str) -> list[str]:
        assert self._client.stdin is not None
        assert self._client.stdout is not None
        self._client.stdin.write(line.encode() + b"\n")
        self._client.stdin.flush()
        return self._client.stdout.readline().decode().split()

    def close(self) -> None:
        for process in (self._client, self._server):
            process.terminate()
            stop(process, "a probe")
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Acknowledged(Talk):
    """A TCP connection for testing acknowledgements, apart from the echo."""

    script = ACKNOWLEDGED

    def send(self, size: int, echo: int | None = None) -> tuple[float, int]:
        """Sends `size` bytes, and waits for an echo.

        Returns the time until all bytes were acknowledged, in s (-1: not within 10 s), and the
        number of bytes of the echo. echo: awaited bytes; None = all; 0 = none within SILENT_S.
        """
        wanted = size if echo is None else echo
        seconds, got = self._ask(f"{size} {wanted} {ARRIVES_S if wanted else SILENT_S}")
        return float(seconds), int(got)


def connections(node: Node, rail: int) -> int:
    """Returns the number of established TCP connections of the node over the rail."""
    address = node.rail_address(rail)
    listing = node.run("ss", "--no-header", "--tcp", "--numeric", "state", "established")
    return sum(f" {address}:" in line for line in listing.splitlines())
