"""A node's processes and the relay of their node: addresses, and SYNC."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from r2serve import _core
from r2serve.errors import ConfigError, R2cclError
from r2serve.variables import RELAY

SYNC_S = 60.0
"""Wait for the answer, which needs a link to every other node."""


class PortTakenError(R2cclError):
    """Another node cannot mirror a listener of this node, since the port is taken there."""


@dataclass(frozen=True)
class Carried:
    """The relay of this node, as seen by a process of the job."""

    prefix: str
    """Address prefix of the job: ``127.x.y.0``."""
    node: int

    @staticmethod
    def here() -> Carried | None:
        """Returns the relay named in the environment; None: no relay.

        Raises:
            ConfigError: the variable has another form.
        """
        text = os.environ.get(RELAY, "")
        if not text:
            return None
        prefix, _, node = text.partition("/")
        if not prefix.startswith("127.") or not prefix.endswith(".0") or not node.isdecimal():
            raise ConfigError(f"{RELAY} is {text!r}: must be 127.x.y.0/NODE, as r2serve sets it")
        return Carried(prefix, int(node))

    def __str__(self) -> str:
        return f"{self.prefix}/{self.node}"

    @property
    def address(self) -> str:
        """Virtual address of this node."""
        return self.address_of(self.node)

    def address_of(self, node: int) -> str:
        """Returns the virtual address of a node."""
        return f"{self.prefix.removesuffix('.0')}.{node + 1}"

    def has(self, address: str) -> bool:
        """Whether ``address`` is a virtual address of the job."""
        return address.startswith(self.prefix.removesuffix("0")) and address.count(".") == 3

    def sync(self) -> None:
        """Waits for the mirrors of this node's listeners; see :func:`sync`."""
        sync(self.prefix, self.node)


def sync(prefix: str, node: int, timeout_s: float = SYNC_S) -> None:
    """Waits until every listener of this user at the node's virtual address has its mirrors.

    A process that listens and then makes its port known calls this between both steps.

    Raises:
        PortTakenError: a port is taken on another node: listen at another port.
        OSError: no relay answers in time.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        connection.connect("\0" + _core.sync_socket_name(prefix, node))
        answer = b""
        while more := connection.recv(4096):
            answer += more
    if answer == b"ok\n":
        return
    if not answer:
        raise ConnectionResetError("the relay refused SYNC, or ended")
    taken = [line.split(" ", 2)[1:] for line in answer.decode().splitlines()]
    text = ", ".join(f"port {port} on {where}" for port, where in taken)
    raise PortTakenError(f"listeners without a mirror: {text} is taken; listen at another port")
