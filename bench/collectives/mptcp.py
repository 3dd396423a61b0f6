"""Multipath TCP as a peer: what Linux itself does when one of two paths fails.

An all-reduce of two ranks as one exchange over one MPTCP connection: each sends its data and adds
what comes. The connection begins on rail 0; the kernel opens its subflow over rail 1 once the
listening node has announced that address.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable
from pathlib import Path

import torch

from r2serve.lab.holder import LabCommandError
from r2serve.lab.lab import Lab

IPPROTO_MPTCP = 262  # <linux/in.h>; Python names it from 3.12 on only where libc does
CONNECT_TIMEOUT_S = 20.0


class MptcpUnavailable(RuntimeError):
    """This kernel has no MPTCP, or lets nobody configure it; says why."""


def configure(lab: Lab) -> None:
    """Lets connections of a two-node lab use every rail. Raises MptcpUnavailable.

    Only the listening node has endpoints, announced to the other one: rails are networks of their
    own, so a subflow from one rail's address to another's has no path.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM, IPPROTO_MPTCP):
            listener = lab.nodes[0]
        rails = str(lab.rails)
        for node in lab.nodes:
            node.run("ip", "mptcp", "limits", "set", "subflow", rails, "add_addr_accepted", rails)
        for rail in range(1, lab.rails):
            endpoint = [listener.rail_address(rail), "dev", f"rail{rail}", "signal"]
            listener.run("ip", "mptcp", "endpoint", "add", *endpoint)
    except (OSError, LabCommandError) as error:
        raise MptcpUnavailable(f"no MPTCP: {error}") from error


class Mptcp:
    """One end of the connection; ``store`` is the address and port of rank 0's rail 0."""

    def __init__(self, rank: int, ranks: int, store: str) -> None:
        if ranks != 2:
            raise ValueError("the exchange over MPTCP is between two ranks")
        host, _, port = store.rpartition(":")
        self._address = (host, int(port))
        self._listener: socket.socket | None = None
        self._connection: socket.socket | None = None
        if rank == 0:
            self._listener = _socket()
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # On every address: the subflows of other rails come to those.
            self._listener.bind(("", self._address[1]))
            self._listener.listen(1)

    def bind(
        self, op: str, algorithm: str, data: torch.Tensor, output: torch.Tensor
    ) -> Callable[[], object]:
        """The exchange as a call, over a new connection: an old one may still suffer from a fault.

        Raises ValueError for another op than all_reduce, RuntimeError where no connection comes.
        """
        del output
        if op != "all_reduce" or algorithm != "auto":
            raise ValueError("MPTCP does all_reduce only, by one algorithm")
        try:
            connection = self._renew()
        except OSError as error:
            raise RuntimeError(f"no MPTCP connection: {error}") from error
        theirs = torch.empty_like(data)

        def once() -> None:
            exchange(connection, data, theirs)
            data.add_(theirs)

        return once

    def _renew(self) -> socket.socket:
        if self._connection is not None:
            self._connection.close()
        if self._listener is not None:
            self._listener.settimeout(CONNECT_TIMEOUT_S)
            self._connection, _ = self._listener.accept()
        else:
            self._connection = _connect(self._address)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection.setblocking(False)
        return self._connection

    def rails(self) -> list[str]:
        """Of MPTCP nobody knows a rail's state: what the device has sent, called UP."""
        devices = sorted(Path("/sys/class/net").glob("rail*"))
        sent = {path.name: (path / "statistics/tx_bytes").read_text().strip() for path in devices}
        return [f"{name},UP,{count}" for name, count in sent.items()]

    def fault(self, rail: int, kind: str, bytes_per_s: float) -> None:
        raise ValueError("MPTCP takes no injected faults; the lab makes real ones")

    def close(self) -> None:
        for one in (self._connection, self._listener):
            if one is not None:
                one.close()


def exchange(connection: socket.socket, mine: torch.Tensor, theirs: torch.Tensor) -> None:
    """Sends ``mine`` over a non-blocking connection and fills ``theirs``, both at the same time.

    Raises RuntimeError when the connection ends before.
    """
    outgoing = memoryview(mine.numpy().data).cast("B")
    incoming = memoryview(theirs.numpy().data).cast("B")
    waiting = select.poll()
    waiting.register(connection, select.POLLIN)
    sent = received = 0
    while sent < len(outgoing) or received < len(incoming):
        moved = 0
        try:
            if sent < len(outgoing):
                moved = connection.send(outgoing[sent:])
                sent += moved
        except BlockingIOError:
            moved = 0
        except OSError as error:
            raise RuntimeError(f"MPTCP connection lost: {error}") from error
        try:
            if received < len(incoming):
                got = connection.recv_into(incoming[received:])
                if got == 0:
                    raise RuntimeError("the peer closed its MPTCP connection")
                received += got
                moved += got
        except BlockingIOError:
            if moved == 0:
                wanted = select.POLLIN if received < len(incoming) else 0
                wanted |= select.POLLOUT if sent < len(outgoing) else 0
                waiting.modify(connection, wanted)
                waiting.poll()
        except OSError as error:
            raise RuntimeError(f"MPTCP connection lost: {error}") from error


def _socket() -> socket.socket:
    return socket.socket(socket.AF_INET, socket.SOCK_STREAM, IPPROTO_MPTCP)


def _connect(address: tuple[str, int]) -> socket.socket:
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    while True:
        connection = _socket()
        connection.settimeout(1.0)
        try:
            connection.connect(address)
        except OSError:
            connection.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
            continue
        return connection
