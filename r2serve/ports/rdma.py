"""Which RDMA devices there are and which network interface each port belongs to, from sysfs.

Layout: Documentation/ABI/stable/sysfs-class-infiniband of the kernel.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from r2serve import _core
from r2serve.config import Config
from r2serve.errors import R2cclError

SYSFS = Path("/sys/class/infiniband")
_OF_SOFT_ROCE = "parent"
"""An attribute that only Soft-RoCE has: the interface below it."""


@dataclass(frozen=True)
class Gid:
    """An entry of a port's GID table; ``kind``: ``IB``, ``RoCE v1`` or ``RoCE v2``."""

    index: int
    address: ipaddress.IPv6Address
    kind: str
    netdev: str


@dataclass(frozen=True)
class RdmaPort:
    """A port of an RDMA device."""

    device: str
    port: int
    state: str
    """As the kernel says it: ``ACTIVE``, ``DOWN``, ``INIT``, …"""
    link_layer: str
    """``Ethernet`` (RoCE) or ``InfiniBand``."""
    gbit_s: float
    lid: int
    gids: tuple[Gid, ...]
    netdev: str
    """Empty: the port belongs to no network interface."""
    numa_node: int
    """-1: not known."""
    pci: str
    """Empty: no PCI device."""
    software: bool = False
    """Soft-RoCE, whose packets are the kernel's."""

    @property
    def active(self) -> bool:
        return self.state == "ACTIVE"

    @property
    def name(self) -> str:
        return f"{self.device}:{self.port}"

    def answers_to(self, address: str) -> bool:
        """Whether RoCE would use this address; of InfiniBand, which has its own, always.

        A container may see RDMA devices of its host beside an interface of its own that has the
        name of one of the host's.
        """
        wanted = ipaddress.ip_address(address)
        return self.link_layer != "Ethernet" or any(
            wanted in (gid.address, gid.address.ipv4_mapped) for gid in self.gids
        )


@dataclass(frozen=True)
class Carrier:
    """What carries the rails of one port of this node."""

    port: RdmaPort | None = None
    """None: they go over TCP."""
    gid: Gid | None = None
    why_tcp: str = ""
    """Empty: they go over verbs."""

    @property
    def fabric(self) -> str:
        """What its packets are: ``InfiniBand``, ``RoCE v1`` or ``RoCE v2``; empty: TCP."""
        if self.port is None or self.gid is None:
            return ""
        if self.port.link_layer != "Ethernet":
            return "InfiniBand"
        return "RoCE v2" if self.gid.kind == "RoCE v2" else "RoCE v1"


def carrier_of(
    port: RdmaPort | None, address: str, config: Config, open_port: Callable[[str, int], None]
) -> Carrier:
    """Whether the rails of a port go over verbs: what the engine does, and ``topo`` shows.

    Args:
        port: the RDMA port of its interface, if there is one.
        address: the port's own.
        open_port: of an engine, which raises if it cannot use the device.
    """
    if config.rdma == "off":
        return Carrier(why_tcp="R2CCL_RDMA is 'off'")
    if port is None:
        return Carrier(why_tcp="it has no RDMA device")
    if config.gid_index < 0 and not port.answers_to(address):
        return Carrier(why_tcp=f"{port.name} has no GID that is {address}")
    try:
        gid = _choose_gid(port, address, config.gid_index)
        open_port(port.device, port.port)
    except R2cclError as error:
        return Carrier(why_tcp=f"{port.name} cannot be used: {error}")
    return Carrier(port, gid)


def _choose_gid(port: RdmaPort, address: str, wanted: int) -> Gid:
    """The one that the core takes."""
    index = _core.gid_index(
        ethernet=port.link_layer == "Ethernet",
        gids=[(gid.index, gid.kind, gid.address.packed) for gid in port.gids if gid.index < 256],
        local=address,
        wanted=wanted,
    )
    return next(gid for gid in port.gids if gid.index == index)


def list_ports(sysfs: Path = SYSFS) -> list[RdmaPort]:
    """All ports of all RDMA devices, in the order of their names; none where there are none."""
    if not sysfs.is_dir():
        return []
    return [
        _port(device, directory)
        for device in sorted(sysfs.iterdir())
        for directory in sorted((device / "ports").glob("[0-9]*"), key=lambda path: int(path.name))
    ]


def find_port(ports: Sequence[RdmaPort], name: str) -> RdmaPort | None:
    """The port of that name: ``device:port``, or a device, whose first port is meant."""
    for port in ports:
        if name in (port.name, port.device):
            return port
    return None


def port_of_interface(ports: Sequence[RdmaPort], netdev: str) -> RdmaPort | None:
    """The port that belongs to a network interface, an active one before others."""
    own = [port for port in ports if port.netdev == netdev]
    return min(own, key=lambda port: not port.active, default=None)


def _port(device: Path, directory: Path) -> RdmaPort:
    gids = _gids(directory)
    netdevs = [gid.netdev for gid in gids if gid.netdev] or _netdevs(device, directory)
    pci = device / "device"
    return RdmaPort(
        device=device.name,
        port=int(directory.name),
        state=_read(directory / "state").partition(": ")[2],
        link_layer=_read(directory / "link_layer"),
        gbit_s=_leading_number(_read(directory / "rate")),
        lid=int(_read(directory / "lid") or "0", 0),
        gids=gids,
        netdev=netdevs[0] if netdevs else "",
        numa_node=int(_read(pci / "numa_node") or -1),
        pci=pci.resolve().name if (pci / "vendor").exists() else "",
        software=(device / _OF_SOFT_ROCE).exists(),
    )


def _netdevs(device: Path, directory: Path) -> list[str]:
    """The interfaces of the same PCI function (InfiniBand has no GID table that names them)."""
    named = _read(device / _OF_SOFT_ROCE)
    if named:
        return [named]
    number = int(directory.name) - 1
    found = []
    for interface in sorted((device / "device" / "net").glob("*")):
        if int(_read(interface / "dev_port") or "0", 0) == number:
            found.append(interface.name)
    return found


def _gids(directory: Path) -> tuple[Gid, ...]:
    found = []
    for index in sorted(map(int, os.listdir(directory / "gids"))):
        # Most of some thousand entries are unused, which reading the type tells.
        kind = _read(f"{directory}/gid_attrs/types/{index}")
        text = _read(f"{directory}/gids/{index}") if kind else ""
        if not text or int(address := ipaddress.IPv6Address(text)) == 0:
            continue
        netdev = _read(f"{directory}/gid_attrs/ndevs/{index}")
        kind = "IB" if kind == "IB/RoCE v1" and not netdev else kind.removeprefix("IB/")
        found.append(Gid(index, address, kind, netdev))
    return tuple(found)


def _leading_number(text: str) -> float:
    try:
        return float(text.split()[0])
    except (IndexError, ValueError):
        return 0.0


def _read(path: Path | str) -> str:
    """The text of an attribute; empty where the kernel has none (an unused GID is EINVAL)."""
    try:
        attribute = os.open(path, os.O_RDONLY)
    except OSError:
        return ""
    try:
        return os.read(attribute, 4096).decode().strip()
    except OSError:
        return ""
    finally:
        os.close(attribute)
