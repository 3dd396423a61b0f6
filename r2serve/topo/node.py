"""NICs of this node: properties, rails, and the failover chain of each rank."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from r2serve import _core
from r2serve.config import Config
from r2serve.ports import pci
from r2serve.ports.choice import Choice, Port, select_ports
from r2serve.ports.info import PortInfo
from r2serve.ports.interfaces import Interface, list_interfaces
from r2serve.ports.pci import Distance, Function
from r2serve.ports.rdma import RdmaPort, Transport, list_ports, port_of_interface, transport_of
from r2serve.ports.telling import faster, shared_fate
from r2serve.ports.without_netlink import list_interfaces_by_ioctl
from r2serve.topo import gpus, verbs
from r2serve.topo.gpus import Gpu
from r2serve.topo.peer import End

_NET = Path("/sys/class/net")


@dataclass(frozen=True)
class Nic:
    """A network interface: a rail, or a possible rail."""

    name: str
    addresses: tuple[str, ...]
    network: str
    up: bool
    carrier: bool
    mtu: int
    gbit_s: float
    """Link speed in Gbit/s; 0: not reported by the driver."""
    driver: str
    pci: str
    numa_node: int
    rdma: str
    """RDMA port of the NIC, as ``mlx5_0:1``; empty: none."""
    rdma_state: str
    gid: str
    """GID of the verbs rails, with index and type; empty: no GID."""
    verbs: dict[str, Any] | None
    """Device properties from pyverbs; None: pyverbs is missing or cannot open the device."""
    rail: str
    """``rail0``, …; empty: the NIC is not a rail."""
    kind: str
    """Kind of the rail as decided by this node alone: ``verbs`` or ``tcp``."""
    why_not: str
    """Reason why the NIC is not a rail."""
    why_tcp: str = ""
    """Reason why rails of the NIC use TCP."""
    soft_rdma: bool = False
    """True: the RDMA device is software (Soft-RoCE); packets pass through the packet filter."""
    reserve: str = ""
    """Reason why the rail carries traffic only when nothing better is left; empty: it does not."""
    unit: str = ""
    """Hardware of the NIC; rails of the same unit fail together."""


@dataclass(frozen=True)
class ChainHop:
    """A rail in a failover chain."""

    rail: str
    nic: str
    distance: str


@dataclass(frozen=True)
class Chain:
    """The order of rails in a rank's failover: near rails first, then fast rails.

    The order is an estimate; at run time the core chooses rails by measured round trips and rates.
    """

    rank: str
    numa_node: int
    steps: tuple[ChainHop, ...]


@dataclass(frozen=True)
class NodeReport:
    """The description of this node that ``r2serve topo`` shows."""

    host: str
    nics: tuple[Nic, ...]
    chains: tuple[Chain, ...]
    libibverbs: str
    """``ok``, or the reason why libibverbs cannot be used."""
    gpus: tuple[Gpu, ...] = ()
    cuda: str = ""
    """``ok``, or the reason why there is no CUDA driver."""
    ports: tuple[End, ...] = ()
    """Ports of the rails in rail order, with the information needed by a peer."""
    warnings: tuple[str, ...] = ()
    """Warnings about the choice of rails, as the engine logs them."""
    shared: tuple[str, ...] = ()
    """Sentences about rails that fail together."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def look(config: Config, management_address: str | None = None) -> NodeReport:
    """Describes this node under a configuration.

    Args:
        management_address: see ``Communicator.from_group``.

    Raises:
        ConfigError: ``R2CCL_RAILS`` or ``R2CCL_MANAGEMENT`` does not fit this node.
    """
    all_rdma = list_ports()
    rdma = all_rdma if config.rdma != "off" else []
    try:
        interfaces = list_interfaces()
    except OSError:  # no netlink here; for explicit rails the old interface suffices
        interfaces = list_interfaces_by_ioctl()
    choice = select_ports(config.rails, config.management, management_address, all_rdma)
    ports = choice.ports
    carried = list(zip(ports, _transports(ports, config), strict=True))
    nics = tuple(
        _nic(
            interface, [each for each in carried if each[0].device == interface.name], rdma, choice
        )
        for interface in interfaces
        if not interface.loopback and (not interface.kind or _is_rail(interface, ports))
    )
    own_rdma = {
        each.port.device
        for _, transports in carried
        for each in transports
        if each.port and not each.why_tcp
    }
    found, cuda = gpus.look(config, sorted(own_rdma))
    return NodeReport(
        socket.gethostname(),
        nics,
        _chains(nics),
        verbs.library_state(),
        found,
        cuda,
        tuple(End.of(port.name, PortInfo.of(port, transports)) for port, transports in carried),
        (*choice.warnings, *(faster(each) for each in choice.left_out if each.faster)),
        tuple(shared_fate(ports)),
    )


def _is_rail(interface: Interface, ports: Sequence[Port]) -> bool:
    return any(port.device == interface.name for port in ports)


def _transports(ports: Sequence[Port], config: Config) -> list[list[Transport]]:
    """Returns the transport of each port's addresses; a temporary engine tests RDMA devices."""
    unseen = replace(config, journal_dir="", fault_file="", drills=False)
    with ExitStack() as afterwards:

        @cache
        def engine() -> _core.Engine:
            made = _core.Engine(unseen.core_fields(), 1)
            afterwards.callback(made.close, 0.0)
            return made

        def open_port(device: str, number: int) -> None:
            engine().open_verbs(device, number)

        return [
            [transport_of(port.rdma, each.address, config, open_port) for each in port.addresses]
            for port in ports
        ]


def _nic(
    interface: Interface,
    own: Sequence[tuple[Port, list[Transport]]],
    rdma: Sequence[RdmaPort],
    choice: Choice,
) -> Nic:
    port = port_of_interface(rdma, interface.name)
    # A port uses verbs if any of its addresses can.
    transports = [min(transports, key=lambda each: bool(each.why_tcp)) for _, transports in own]
    directory = _NET / interface.name
    function = directory / "device"
    address = interface.pci
    megabit = interface.mbit_s
    placed = pci.function(address)
    return Nic(
        name=interface.name,
        addresses=tuple(str(each) for each in interface.addresses),
        network=own[0][0].network if own else "",
        up=interface.up,
        carrier=interface.carrier,
        mtu=interface.mtu or _number(directory / "mtu"),
        gbit_s=megabit / 1000 if megabit > 0 else (port.gbit_s if port else 0.0),
        driver=(function / "driver").resolve().name if (function / "driver").exists() else "",
        pci=address,
        numa_node=placed.numa_node if placed else -1,
        rdma=port.name if port else "",
        rdma_state=port.state if port else "",
        gid=next((_gid(transport) for transport in transports if transport.gid), ""),
        verbs=verbs.describe(port.device, port.port) if port else None,
        rail=", ".join(each.name for each, _ in own),
        kind=", ".join(dict.fromkeys("verbs" if each.port else "tcp" for each in transports)),
        why_not="" if own else choice.why_not(interface.name) or "not chosen",
        why_tcp="; ".join(dict.fromkeys(each.why_tcp for each in transports if each.why_tcp)),
        soft_rdma=port is not None and port.software,
        reserve=own[0][0].reserve if own else "",
        unit=own[0][0].unit.name if own else "",
    )


def _gid(transport: Transport) -> str:
    gid = transport.gid
    return f"{gid.index} ({gid.kind}, {gid.address.ipv4_mapped or gid.address})" if gid else ""


def _chains(nics: Sequence[Nic]) -> tuple[Chain, ...]:
    """Makes a chain for each GPU, or without GPUs for each NUMA node with a NIC."""
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

    ordered = sorted(
        rails, key=lambda nic: (bool(nic.reserve), away(nic), -nic.gbit_s, rails.index(nic))
    )
    return Chain(
        rank, numa_node, tuple(ChainHop(nic.rail, nic.name, away(nic).name) for nic in ordered)
    )


def _number(path: Path) -> int:
    """Reads a numeric attribute; returns 0 if the driver does not provide the attribute."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0
