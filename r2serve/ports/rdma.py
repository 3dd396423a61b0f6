"""RDMA devices and the network interface of each RDMA port, from sysfs.

The layout is described in the kernel's Documentation/ABI/stable/sysfs-class-infiniband.
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
"""Attribute of Soft-RoCE devices only: the name of the underlying interface."""
_NO_GUIDS = {"", "0000:0000:0000:0000"}


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
    """State in the kernel's words: ``ACTIVE``, ``DOWN``, ``INIT``, …"""
    link_layer: str
    """``Ethernet`` (RoCE) or ``InfiniBand``."""
    gbit_s: float
    lid: int
    gids: tuple[Gid, ...]
    netdev: str
    """Network interface of the port; empty: none."""
    numa_node: int
    """NUMA node; -1: unknown."""
    pci: str
    """PCI address; empty: not a PCI device."""
    software: bool = False
    """True: Soft-RoCE, with packets sent by the kernel."""
    system_image_guid: str = ""
    """GUID of the card, equal on all devices of a card; empty: not provided."""

    @property
    def active(self) -> bool:
        return self.state == "ACTIVE"

    @property
    def name(self) -> str:
        return f"{self.device}:{self.port}"

    def answers_to(self, address: str) -> bool:
        """Whether rails of this address can use the port; always True for InfiniBand.

        InfiniBand does not use IP addresses. RoCE needs a GID with the address. A container may
        see an RDMA device whose host interface has the same name as the container's interface; only
        the GIDs differ.
        """
        wanted = ipaddress.ip_address(address)
        return self.link_layer != "Ethernet" or any(
            wanted in (gid.address, gid.address.ipv4_mapped) for gid in self.gids
        )


@dataclass(frozen=True)
class Transport:
    """Transport of the rails of a local port."""

    port: RdmaPort | None = None
    """RDMA port; None: rails use TCP."""
    gid: Gid | None = None
    why_tcp: str = ""
    """Reason for TCP; empty: rails use verbs."""

    @property
    def fabric(self) -> str:
        """Packet format: ``InfiniBand``, ``RoCE v1`` or ``RoCE v2``; empty: TCP."""
        if self.port is None or self.gid is None:
            return ""
        if self.port.link_layer != "Ethernet":
            return "InfiniBand"
        return "RoCE v2" if self.gid.kind == "RoCE v2" else "RoCE v1"


def transport_of(
    port: RdmaPort | None, address: str, config: Config, open_port: Callable[[str, int], None]
) -> Transport:
    """Decides between verbs and TCP for the rails of a port, for the engine and for ``topo``.

    Args:
        port: RDMA port of the interface, if any.
        address: address of the rail's port.
        open_port: function of an engine; raises if the device cannot be used.
    """
    if config.rdma == "off":
        return Transport(why_tcp="R2CCL_RDMA is 'off'")
    if port is None:
        return Transport(why_tcp="the port has no RDMA device")
    if config.gid_index < 0 and not port.answers_to(address):
        return Transport(why_tcp=f"{port.name} has no GID for {address}")
    try:
        gid = _choose_gid(port, address, config.gid_index)
        open_port(port.device, port.port)
    except R2cclError as error:
        return Transport(why_tcp=f"{port.name} cannot be used: {error}")
    return Transport(port, gid)


def _choose_gid(port: RdmaPort, address: str, wanted: int) -> Gid:
    """Returns the GID that the core will use; raises R2cclError if no GID fits."""
    index = _core.gid_index(
        ethernet=port.link_layer == "Ethernet",
        gids=[(gid.index, gid.kind, gid.address.packed) for gid in port.gids if gid.index < 256],
        local=address,
        wanted=wanted,
    )
    return next(gid for gid in port.gids if gid.index == index)


def list_ports(sysfs: Path = SYSFS) -> list[RdmaPort]:
    """Lists all ports of all RDMA devices, ordered by name; empty without RDMA devices."""
    if not sysfs.is_dir():
        return []
    return [
        _port(device, directory)
        for device in sorted(sysfs.iterdir())
        for directory in sorted((device / "ports").glob("[0-9]*"), key=lambda path: int(path.name))
    ]


def find_port(ports: Sequence[RdmaPort], name: str) -> RdmaPort | None:
    """Finds a port by name: ``device:port``, or a device name for the device's first port."""
    for port in ports:
        if name in (port.name, port.device):
            return port
    return None


def port_of_interface(ports: Sequence[RdmaPort], netdev: str) -> RdmaPort | None:
    """Returns the RDMA port of a network interface; active ports take precedence."""
    own = [port for port in ports if port.netdev == netdev]
    return min(own, key=lambda port: not port.active, default=None)


def _port(device: Path, directory: Path) -> RdmaPort:
    gids = _gids(directory)
    netdevs = [gid.netdev for gid in gids if gid.netdev] or _netdevs(device, directory)
    pci = device / "device"
    guid = _read(device / "sys_image_guid")
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
        system_image_guid="" if guid in _NO_GUIDS else guid,
    )


def _netdevs(device: Path, directory: Path) -> list[str]:
    """Returns interfaces of the same PCI function, because InfiniBand GIDs name no interface."""
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
        # Most of the table's thousands of entries are unused; an unused entry has no type.
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
    """Reads an attribute; empty if the kernel has no value (an unused GID gives EINVAL)."""
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
