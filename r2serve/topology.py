"""Who is where: what each process tells the others about itself, and which ports make a rail."""

from __future__ import annotations

import hashlib
import logging
import os
import socket
from dataclasses import asdict, dataclass
from typing import Any

from r2serve.errors import ConfigError

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class PortInfo:
    """A port that listens for rails."""

    device: str
    address: str
    port: int


@dataclass(frozen=True)
class ProcessInfo:
    """What a process tells the others of its group, over the engine's store.

    ``secret`` never leaves the job: it goes into the keys that rail connections authenticate with.
    """

    process: int
    secret: bytes
    node: str
    host: str
    ports: tuple[PortInfo, ...]
    control: PortInfo | None
    unix_name: str

    def to_wire(self) -> dict[str, Any]:
        """Plain values only, for a store."""
        return asdict(self) | {"secret": self.secret.hex()}

    @classmethod
    def from_wire(cls, values: dict[str, Any]) -> ProcessInfo:
        """The inverse of :meth:`to_wire`."""
        return cls(
            process=values["process"],
            secret=bytes.fromhex(values["secret"]),
            node=values["node"],
            host=values["host"],
            ports=tuple(PortInfo(**port) for port in values["ports"]),
            control=PortInfo(**values["control"]) if values["control"] else None,
            unix_name=values["unix_name"],
        )


def pair_secret(one: ProcessInfo, other: ProcessInfo) -> bytes:
    """The secret that two processes share, the same from both ends."""
    low, high = sorted((one, other), key=lambda info: info.process)
    return hashlib.sha256(low.secret + high.secret).digest()


def local_address_towards(host: str) -> str | None:
    """This machine's address on the way to ``host``; nothing is sent."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        _LOG.debug("no route towards %s: %s", host, error)
        return None


def engine_address() -> str | None:
    """The address that the serving engine uses for its own traffic, if it is known."""
    named = os.environ.get("VLLM_HOST_IP")
    if named:
        return named
    master = os.environ.get("MASTER_ADDR")
    return local_address_towards(master) if master else None


def rails_between(own: ProcessInfo, peer: ProcessInfo, own_node: int) -> list[dict[str, Any]]:
    """The rails of the link from ``own`` to ``peer``, in the order that both ends agree on.

    Rail i joins port i of both; where one side has fewer ports, its ports take turns.

    Raises:
        ConfigError: they are on different nodes and one of them has no port.
    """
    if own.node == peer.node:
        return [_rail("shm", f"shm@node{own_node}", None, PortInfo("", peer.unix_name, 0))]
    for info in (own, peer):
        if not info.ports:
            raise ConfigError(
                f"R2CCL_RAILS: no usable NIC on {info.host} (node {info.node}), but ranks are on "
                "different nodes; name devices or addresses"
            )
    rails = []
    for index in range(max(len(own.ports), len(peer.ports))):
        local = own.ports[index % len(own.ports)]
        remote = peer.ports[index % len(peer.ports)]
        rails.append(_rail("tcp", f"rail{index}@node{own_node}", local, remote))
    if own.control is not None and peer.control is not None:
        rails.append(_rail("control", f"control@node{own_node}", own.control, peer.control))
    return rails


def _rail(kind: str, name: str, local: PortInfo | None, remote: PortInfo) -> dict[str, Any]:
    return {
        "kind": kind,
        "name": name,
        "device": local.device if local else "",
        "local_address": local.address if local else "",
        "remote_address": remote.address,
        "remote_port": remote.port,
    }
