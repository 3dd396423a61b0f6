"""What each process tells the others about itself, and which ports make a rail."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from r2serve.errors import ConfigError
from r2serve.ports.choice import Port
from r2serve.ports.rdma import Carrier


@dataclass(frozen=True)
class PortInfo:
    """A port that listens for rails."""

    device: str
    address: str
    port: int
    verbs_device: str = ""
    """The RDMA device that carries rails of this port; empty: they go over TCP."""
    verbs_port: int = 0
    network: str = ""
    """What its address is in, as ``10.0.0.0/24``; empty: not known."""
    fabric: str = ""
    """Of its verbs rails: ``InfiniBand``, ``RoCE v1`` or ``RoCE v2``, which do not mix."""

    @classmethod
    def of(cls, port: Port, carrier: Carrier, number: int = 0) -> PortInfo:
        """What peers are told of a port of this node that listens as ``number``."""
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

    def __str__(self) -> str:
        verbs = f"{self.verbs_device}:{self.verbs_port}" if self.verbs_device else "no verbs"
        words = [self.address, verbs, self.fabric]
        return f"{self.device or 'lo'} ({', '.join(word for word in words if word)})"


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


def rails_between(
    own: ProcessInfo, peer: ProcessInfo, own_node: int, *, require_verbs: bool = False
) -> list[dict[str, Any]]:
    """The rails of the link from ``own`` to ``peer``, in the order that both ends agree on.

    Which ports it joins says :func:`pair_ports`, and which rails go over TCP :func:`why_tcp`.

    Raises:
        ConfigError: they are on different nodes and one of them has no port, or a rail would go
            over TCP and verbs are required.
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
    """Why the rail between two ports goes over TCP; empty: it goes over verbs.

    InfiniBand, RoCE v1 and RoCE v2 are different packets: a queue pair has the same at both ends.
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
    """Which ports of two processes make rails, in rail order.

    Ports of one network make rails with each other: the i-th with the i-th, and where one side has
    fewer, its ports take turns.  So do those that are left, which may reach each other through a
    router; they take turns with all ports of a side that has none left.  Every port has a rail.

    Args:
        lower, higher: of the process with the lower and of that with the higher number, which makes
            the answer the same at both ends.
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
