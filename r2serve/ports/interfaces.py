"""The network interfaces of this network namespace."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import re
import socket
import struct
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from r2serve.ports.netlink import (
    IFF_LOOPBACK,
    IFF_LOWER_UP,
    IFF_UP,
    AddressMessage,
    LinkMessage,
    dump_addresses,
    dump_links,
    dump_routes,
)

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_SYSFS = Path("/sys/class/net")
_PCI = Path("/sys/bus/pci/devices")
# Kinds of interfaces whose packets leave through the interface below.  The other end of a veth
# pair is no such interface, although the kernel lists both in the same attribute.
_STACKED = {
    "gre",
    "gretap",
    "ip6gre",
    "ip6tnl",
    "ipip",
    "ipvlan",
    "ipvtap",
    "macsec",
    "macvlan",
    "macvtap",
    "sit",
    "vlan",
    "vti",
    "xfrm",
}
_PCI_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_SIOCETHTOOL, _SIOCGIWNAME, _ETHTOOL_GSET = 0x8946, 0x8B01, 0x1
_ETHTOOL_COMMAND = struct.Struct("=IIIHBBBBBBIIHBBIII")  # ethtool_cmd
_UNKNOWN_SPEEDS = {0, 0xFFFF, 0xFFFFFFFF}


@dataclass(frozen=True)
class Route:
    """A unicast route through an interface."""

    destination: str
    """Network, as ``10.0.0.0/24``."""
    gateway: bool = False
    source: str = ""
    """Preferred source address; empty: none."""


@dataclass(frozen=True)
class Interface:
    """A network interface of this network namespace.

    ``kind`` is the kernel's name for the kind of a virtual interface, empty for a physical
    interface. ``master`` is the enclosing bridge, bond or VRF; ``master_kind`` is its kind.
    """

    name: str
    index: int
    up: bool = True
    carrier: bool = True
    loopback: bool = False
    kind: str = ""
    master: str = ""
    master_kind: str = ""
    addresses: tuple[Address, ...] = ()
    """Usable addresses; temporary and deprecated addresses come last."""
    networks: tuple[str, ...] = ()
    """Network of each address, as ``10.0.0.0/24``; empty: unknown."""
    states: tuple[tuple[Address, str], ...] = ()
    """Addresses in a state of :class:`AddressMessage`: ``tentative`` and ``duplicate`` addresses
    are not usable, and not in ``addresses``."""
    mtu: int = 0
    """MTU in bytes; 0: unknown."""
    mbit_s: int = 0
    """Link speed in Mbit/s; 0: unknown."""
    wireless: bool = False
    lower: str = ""
    """Interface that carries the packets of a VLAN, macvlan or tunnel; empty: none, or unknown. An
    interface of another network namespace is written ``interface 7 of namespace 0``."""
    inner: bool = False
    """True: a veth with the other end in this network namespace, too."""
    port_id: str = ""
    """The driver's id of the physical port; empty: not provided. The same holds for
    ``switch_id``, the id of the card or switch, and ``port_name``, the name of the port in it."""
    switch_id: str = ""
    port_name: str = ""
    pci: str = ""
    """PCI address; empty: no PCI device."""
    parent_pci: str = ""
    """PCI address of the physical function of a virtual function; empty: no virtual function."""
    routes: tuple[Route, ...] | None = None
    """Unicast routes through the interface; None: unknown."""

    def state_of(self, address: Address) -> str:
        """Returns the state of an address, as in ``states``; empty: ready, or unknown."""
        return dict(self.states).get(address, "")

    def network_of(self, address: Address) -> str:
        """Returns the network of an address; empty: unknown.

        Linux answers on all of 127.0.0.0/8 without listing the addresses.
        """
        networks = dict(zip(self.addresses, self.networks, strict=False))
        if address in networks or not self.loopback:
            return networks.get(address, "")
        around = (each for each in self.networks if each)
        return next((each for each in around if address in ipaddress.ip_network(each)), "")


def list_interfaces(named: Collection[str] = ()) -> list[Interface]:
    """Lists the interfaces of this network namespace, by index.

    Args:
        named: interfaces that must not be missing where the list changes during every read.

    Raises:
        OSError: the kernel does not list the interfaces.
    """
    links = dump_links(named)
    names = {link.index: link for link in links}
    told: dict[int, list[AddressMessage]] = defaultdict(list)
    for each in dump_addresses():
        told[each.index].append(each)
    addresses = {index: _usable(each) for index, each in told.items()}
    routes = _routes()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        return [
            Interface(
                name=link.name,
                index=link.index,
                up=bool(link.flags & IFF_UP),
                carrier=bool(link.flags & IFF_LOWER_UP),
                loopback=bool(link.flags & IFF_LOOPBACK),
                kind=link.kind,
                master=names[link.master].name if link.master in names else "",
                master_kind=names[link.master].kind if link.master in names else "",
                addresses=tuple(each.address for each in addresses.get(link.index, ())),
                networks=tuple(each.network for each in addresses.get(link.index, ())),
                states=tuple((each.address, each.state) for each in told[link.index] if each.state),
                mtu=link.mtu,
                # Only ports with an address can be rails; a host of containers has hundreds more.
                mbit_s=_speed(asking, link.name) if _may_have_speed(link, addresses) else 0,
                wireless=_is_wireless(asking, link.name),
                lower=_lower(link, names),
                inner=link.kind == "veth" and link.lower_namespace < 0 and link.lower in names,
                port_id=link.port_id,
                switch_id=link.switch_id,
                port_name=link.port_name,
                pci=(pci := link.pci or ("" if link.kind else _pci_of(link))),
                parent_pci=_parent_pci(pci),
                routes=None if routes is None else tuple(routes[link.index]),
            )
            for link in sorted(links, key=lambda link: link.index)
        ]


def _usable(addresses: list[AddressMessage]) -> list[AddressMessage]:
    """Returns the usable addresses of an interface, those that go away soon last."""
    order = ("", "temporary", "deprecated")
    usable = [each for each in addresses if each.state in order]
    return sorted(usable, key=lambda each: order.index(each.state))


def _routes() -> dict[int, list[Route]] | None:
    """Returns the routes through each interface, by index; None: unknown."""
    told = dump_routes()
    if told is None:
        return None
    found: dict[int, list[Route]] = defaultdict(list)
    for route in told:
        found[route.index].append(Route(route.destination, route.gateway, route.source))
    return found


def _lower(link: LinkMessage, names: dict[int, LinkMessage]) -> str:
    if link.kind not in _STACKED or not link.lower:
        return ""
    if link.lower_namespace >= 0:
        return f"interface {link.lower} of namespace {link.lower_namespace}"
    return names[link.lower].name if link.lower in names else ""


def _may_have_speed(link: LinkMessage, addresses: dict[int, list[AddressMessage]]) -> bool:
    return bool(link.flags & IFF_UP) and (bool(addresses.get(link.index)) or not link.kind)


def _speed(asking: socket.socket, name: str) -> int:
    """Returns the link speed in Mbit/s; 0: unknown.

    The request sees the network namespace of the process; sysfs may show another namespace.
    """
    command = array.array("B", _ETHTOOL_COMMAND.pack(_ETHTOOL_GSET, *[0] * 17))
    address, _ = command.buffer_info()
    try:
        fcntl.ioctl(asking, _SIOCETHTOOL, struct.pack("16sP16x", name.encode(), address))
    except OSError:
        return 0
    fields = _ETHTOOL_COMMAND.unpack(command.tobytes())
    speed: int = fields[3] | fields[12] << 16
    return 0 if speed in _UNKNOWN_SPEEDS else speed


def _is_wireless(asking: socket.socket, name: str) -> bool:
    try:
        fcntl.ioctl(asking, _SIOCGIWNAME, struct.pack("16s16x", name.encode()))
    except OSError:
        return (_SYSFS / name / "phy80211").exists()
    return True


def _pci_of(link: LinkMessage) -> str:
    """Returns the PCI address from sysfs, unless sysfs shows another network namespace."""
    directory = _SYSFS / link.name
    try:
        if int((directory / "ifindex").read_text()) != link.index:
            return ""
    except (OSError, ValueError):
        return ""
    # The device of a virtio NIC is no PCI function: "virtio2".
    name = (directory / "device").resolve().name
    return name if _PCI_ADDRESS.fullmatch(name) else ""


def _parent_pci(pci: str) -> str:
    parent = _PCI / pci / "physfn"
    return parent.resolve().name if pci and parent.exists() else ""
