"""This node's NICs: what each is, whether it is a rail, and the failover chain of each rank."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from r2serve import _core
from r2serve.config import Config
from r2serve.errors import R2cclError
from r2serve.interfaces import Interface, Port, list_interfaces, select_ports, unusable
from r2serve.rdma import RdmaPort, list_ports, port_of_interface
from r2serve.topo import gpus, pci, verbs
from r2serve.topo.gpus import Gpu
from r2serve.topo.pci import Distance, Function
from r2serve.topology import engine_address

_NET = Path("/sys/class/net")


@dataclass(frozen=True)
class Nic:
    """A network interface that could be or is a rail."""

    name: str
    addresses: tuple[str, ...]
    network: str
    up: bool
    carrier: bool
    mtu: int
    gbit_s: float
    """0: the driver does not tell."""
    driver: str
    pci: str
    numa_node: int
    rdma: str
    """Its RDMA port, as ``mlx5_0:1``; empty: none."""
    rdma_state: str
    gid: str
    """The GID that its verbs rails use, with index and type."""
    verbs: dict[str, Any] | None
    """What pyverbs knows of the device; None: pyverbs is not here, or cannot open it."""
    rail: str
    """``rail0``, …; empty: it is none."""
    kind: str
    """Of the rail: ``verbs`` or ``tcp``."""
    why_not: str


@dataclass(frozen=True)
class Step:
    """A rail in a failover chain."""

    rail: str
    nic: str
    distance: str


@dataclass(frozen=True)
class Chain:
    """The rails as a rank would leave one for the next: nearer first, then faster."""

    rank: str
    numa_node: int
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Node:
    host: str
    nics: tuple[Nic, ...]
    chains: tuple[Chain, ...]
    libibverbs: str
    """``ok``, or why it cannot be used."""
    gpus: tuple[Gpu, ...] = ()
    cuda: str = ""
    """``ok``, or why there is no driver."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def look(config: Config) -> Node:
    """This node under this configuration.

    Raises:
        ConfigError: ``R2CCL_RAILS`` or ``R2CCL_MANAGEMENT`` does not fit it.
    """
    rdma = list_ports() if config.rdma != "off" else []
    interfaces = list_interfaces()
    ports = select_ports(config.rails, config.management, engine_address(), list_ports())
    nics = tuple(
        _nic(interface, ports, rdma, config)
        for interface in interfaces
        if not interface.loopback and (not interface.kind or _is_rail(interface, ports))
    )
    found, cuda = gpus.look(config)
    return Node(socket.gethostname(), nics, _chains(nics), verbs.library_state(), found, cuda)


def _is_rail(interface: Interface, ports: Sequence[Port]) -> bool:
    return any(port.device == interface.name for port in ports)


def _nic(
    interface: Interface, ports: Sequence[Port], rdma: Sequence[RdmaPort], config: Config
) -> Nic:
    own = [port for port in ports if port.device == interface.name]
    port = port_of_interface(rdma, interface.name)
    directory = _NET / interface.name
    function = directory / "device"
    address = function.resolve().name if (function / "vendor").exists() else ""
    megabit = _number(directory / "speed")
    placed = pci.function(address)
    return Nic(
        name=interface.name,
        addresses=tuple(str(each) for each in interface.addresses),
        network=own[0].network if own else "",
        up=interface.up,
        carrier=interface.carrier,
        mtu=_number(directory / "mtu"),
        gbit_s=megabit / 1000 if megabit > 0 else (port.gbit_s if port else 0.0),
        driver=(function / "driver").resolve().name if (function / "driver").exists() else "",
        pci=address,
        numa_node=placed.numa_node if placed else -1,
        rdma=port.name if port else "",
        rdma_state=port.state if port else "",
        gid=_gid(port, own, config),
        verbs=verbs.describe(port.device, port.port) if port else None,
        rail=", ".join(each.name for each in own),
        kind=("verbs" if port else "tcp") if own else "",
        why_not="" if own else unusable(interface) or "not chosen",
    )


def _gid(port: RdmaPort | None, own: Sequence[Port], config: Config) -> str:
    if port is None or not own:
        return ""
    try:
        chosen = _core.gid_index(
            ethernet=port.link_layer == "Ethernet",
            gids=[(g.index, g.kind, g.address.packed) for g in port.gids if g.index < 256],
            local=own[0].address,
            wanted=config.gid_index,
        )
    except R2cclError:
        return ""  # doctor says why
    [gid] = [gid for gid in port.gids if gid.index == chosen]
    return f"{gid.index} ({gid.kind}, {gid.address.ipv4_mapped or gid.address})"


def _chains(nics: Sequence[Nic]) -> tuple[Chain, ...]:
    """Of each GPU; of each NUMA node with a NIC where there is no GPU."""
    rails = [nic for nic in nics if nic.rail]
    functions = pci.gpus()
    if functions:
        return tuple(
            _chain(f"gpu{index} ({gpu.address})", gpu, gpu.numa_node, rails)
            for index, gpu in enumerate(functions)
        )
    nodes = sorted({nic.numa_node for nic in rails})
    return tuple(
        _chain("any rank" if node < 0 else f"ranks on NUMA node {node}", None, node, rails)
        for node in nodes
    )


def _chain(rank: str, at: Function | None, numa_node: int, rails: Sequence[Nic]) -> Chain:
    def away(nic: Nic) -> Distance:
        if at is not None:
            return pci.distance(at, pci.function(nic.pci))
        near = nic.numa_node == numa_node
        return Distance.NODE if near else Distance.SYS

    ordered = sorted(rails, key=lambda nic: (away(nic), -nic.gbit_s, rails.index(nic)))
    return Chain(
        rank, numa_node, tuple(Step(nic.rail, nic.name, away(nic).name) for nic in ordered)
    )


def _number(path: Path) -> int:
    """An attribute; 0 where the driver has none."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0
