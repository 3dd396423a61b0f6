"""Information about a process for its peers, and the pairing of ports into rails."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from r2serve.errors import ConfigError
from r2serve.ports.choice import Port
from r2serve.ports.rdma import Carrier


@dataclass(frozen=True)
class PortInfo:
    """A port with a listener for rails."""

    device: str
    address: str
    port: int
    verbs_device: str = ""
    """RDMA device of this port's rails; empty: rails use TCP."""
    verbs_port: int = 0
    network: str = ""
    """Network of the address, as ``10.0.0.0/24``; empty: unknown."""
    fabric: str = ""
    """Fabric of verbs rails: ``InfiniBand``, ``RoCE v1`` or ``RoCE v2``; both ends must match."""

    @classmethod
    def of(cls, port: Port, carrier: Carrier, number: int = 0) -> PortInfo:
        """Describes a port of this node for peers; ``number`` is the listening TCP port."""
        verbs = carrier.port
        return cls(
            device="" if port.device == "lo" else port.device,
            address=port.address,
            port=number,
            verbs_device=verbs.device if verbs else "",
            verbs_port=verbs.port if verbs else 0,
            network=port.network,
            fabric=carrier.fabric,
        )

    @classmethod
    def from_wire(cls, values: dict[str, Any]) -> PortInfo:
        """Makes a port of plain values; ignores unknown fields."""
        known = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})

    def __str__(self) -> str:
        verbs = f"{self.verbs_device}:{self.verbs_port}" if self.verbs_device else "no verbs"
        words = [self.address, verbs, self.fabric]
        return f"{self.device or 'lo'} ({', '.join(word for word in words if word)})"


@dataclass(frozen=True)
class ProcessInfo:
    """Information about a process for the other processes of its group, via the engine's store.

    ``process`` is the number of the r2ccl engine, ``unix_name`` the socket of the shm rail.
    ``secret`` never leaves the job; keys for the authentication of rail connections derive from it.
    """

    process: int
    secret: bytes
    node: str
    host: str
    ports: tuple[PortInfo, ...]
    control: PortInfo | None
    unix_name: str

    def to_wire(self) -> dict[str, Any]:
        """Returns plain values for a store."""
        return asdict(self) | {"secret": self.secret.hex()}

    @classmethod
    def from_wire(cls, values: dict[str, Any]) -> ProcessInfo:
        """Inverts :meth:`to_wire`; ignores unknown fields."""
        return cls(
            process=values["process"],
            secret=bytes.fromhex(values["secret"]),
            node=values["node"],
            host=values["host"],
            ports=tuple(PortInfo.from_wire(port) for port in values["ports"]),
            control=PortInfo.from_wire(values["control"]) if values["control"] else None,
            unix_name=values["unix_name"],
        )


def pair_secret(one: ProcessInfo, other: ProcessInfo) -> bytes:
    """Returns the secret of a pair of processes, equal at both ends."""
    low, high = sorted((one, other), key=lambda info: info.process)
    return hashlib.sha256(low.secret + high.secret).digest()


def rails_between(
    own: ProcessInfo, peer: ProcessInfo, own_node: int, *, require_verbs: bool = False
) -> list[dict[str, Any]]:
    """Returns the rails of the link from ``own`` to ``peer``, in the same order at both ends.

    :func:`pair_ports` joins ports; :func:`why_tcp` decides between verbs and TCP.

    Raises:
        ConfigError: the processes are on different nodes and a node has no port, or a rail would
            use TCP although verbs are required.
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
    own_is_lower = own.process < peer.process
    lower, higher = (own, peer) if own_is_lower else (peer, own)
    for index, (low, high) in enumerate(pair_ports(lower.ports, higher.ports)):
        local, remote = (low, high) if own_is_lower else (high, low)
        why = why_tcp(local, remote)
        if why and require_verbs:
            raise ConfigError(
                f"rdma (R2CCL_RDMA) is 'require', but {local} of {own.host} and {remote} of "
                f"{peer.host} would make a TCP rail: {why}"
            )
        rails.append(_rail("tcp" if why else "verbs", f"rail{index}@node{own_node}", local, remote))
    if own.control is not None and peer.control is not None:
        rails.append(_rail("control", f"control@node{own_node}", own.control, peer.control))
    return rails


def why_tcp(local: PortInfo, remote: PortInfo) -> str:
    """Returns the reason why a rail between two ports uses TCP; empty: the rail uses verbs.

    InfiniBand, RoCE v1 and RoCE v2 have different packets, so both ends of a queue pair must match.
    """
    without = [port.address for port in (local, remote) if not port.verbs_device]
    if without:
        return f"{' and '.join(without)} {'has' if len(without) == 1 else 'have'} no verbs"
    if local.fabric != remote.fabric:
        return f"{local.fabric or 'unknown'} does not reach {remote.fabric or 'unknown'}"
    return ""


def pair_ports(
    lower: Sequence[PortInfo], higher: Sequence[PortInfo]
) -> list[tuple[PortInfo, PortInfo]]:
    """Pairs the ports of two processes into rails, in rail order.

    Ports in a common network are paired: the i-th port with the i-th port. The side with fewer
    ports uses its ports in rotation. Ports without a common network are paired in the same way,
    because a router may connect the ports; a side without such ports uses all its ports in
    rotation. Every port gets a rail.

    Args:
        lower, higher: ports of the process with the lower and with the higher number, so that both
            ends compute the same pairs.
    """
    common = {port.network for port in lower} & {port.network for port in higher} - {""}
    pairs: list[tuple[int, int]] = []

    def join(low: list[int], high: list[int]) -> None:
        for index in range(max(len(low), len(high))):
            pairs.append((low[index % len(low)], high[index % len(high)]))

    def places(ports: Sequence[PortInfo], wanted: Callable[[str], bool]) -> list[int]:
        return [place for place, port in enumerate(ports) if wanted(port.network)]

    for network in sorted(common):
        join(places(lower, network.__eq__), places(higher, network.__eq__))
    low_left = places(lower, lambda network: network not in common)
    high_left = places(higher, lambda network: network not in common)
    if low_left or high_left:
        join(low_left or list(range(len(lower))), high_left or list(range(len(higher))))
    pairs.sort(key=lambda pair: (max(pair), pair))
    return [(lower[low], higher[high]) for low, high in pairs]


def _rail(kind: str, name: str, local: PortInfo | None, remote: PortInfo) -> dict[str, Any]:
    return {
        "kind": kind,
        "name": name,
        "device": local.device if local else "",
        "local_address": local.address if local else "",
        "remote_address": remote.address,
        "remote_port": remote.port,
        "verbs_device": local.verbs_device if local else "",
        "verbs_port": local.verbs_port if local else 0,
    }
