"""Multipath TCP (MPTCP) as a contender: Linux's own failover between two paths.

An all-reduce of two ranks is a single exchange over an MPTCP connection. Each rank sends its data
and adds the received data. The connection begins on rail 0. The kernel opens a subflow over rail 1
after the listening node has announced the address of rail 1.
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

IPPROTO_MPTCP = 262  # from <linux/in.h>; Python's socket module may lack the name
CONNECT_TIMEOUT_S = 20.0


class MptcpUnavailable(RuntimeError):
    """The kernel has no MPTCP or rejects the configuration; the message gives the reason."""


def configure(lab: Lab) -> None:
    """Configures MPTCP in a two-node lab to use every rail. Raises MptcpUnavailable.

    Only the listening node has MPTCP endpoints, and announces the endpoints to the other node.
    Rails are separate networks: a subflow between addresses of different rails has no path.
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
    """One end of the connection.

    ``store`` is ``ADDRESS:PORT`` of rank 0 on rail 0.
    """

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
            # The listener binds to every address: subflows of other rails use other addresses.
            self._listener.bind(("", self._address[1]))
            self._listener.listen(1)

    def bind(
        self, op: str, algorithm: str, data: torch.Tensor, output: torch.Tensor
    ) -> Callable[[], object]:
        """Returns the exchange as a function, over a new connection.

        An old connection may still suffer from an earlier fault. Raises ValueError for any op
        other than all_reduce, and RuntimeError when no connection is established.
        """
        del output
        if op != "all_reduce" or algorithm != "auto":
            raise ValueError("MPTCP supports all_reduce only, with the algorithm auto")
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
        """Returns name, state and bytes sent of each rail's network device.

        The state is always UP, because MPTCP does not report the state of a rail.
        """
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
    """Sends ``mine`` and receives ``theirs`` concurrently over a non-blocking connection.

    Raises RuntimeError when the connection ends before the exchange is complete.
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
