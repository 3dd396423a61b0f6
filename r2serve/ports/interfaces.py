"""The network interfaces of this network namespace."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

import psutil

from r2serve.ports.netlink import IFF_LOOPBACK, IFF_LOWER_UP, IFF_UP, dump_links

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


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
    networks: tuple[str, ...] = ()
    """Network of each address, as ``10.0.0.0/24``; empty: unknown."""

    def network_of(self, address: Address) -> str:
        """Returns the network of an address; empty: unknown."""
        return dict(zip(self.addresses, self.networks, strict=False)).get(address, "")


def list_interfaces() -> list[Interface]:
    """Lists the interfaces of this network namespace, by index.

    Raises:
        OSError: the kernel does not list the interfaces.
    """
    links = dump_links()
    names = {link.index: link for link in links}
    addresses: dict[str, list[tuple[Address, str]]] = {}
    for name, entries in psutil.net_if_addrs().items():
        # "eth0:1" is an address label of eth0, not an interface.
        device = addresses.setdefault(name.split(":")[0], [])
        for entry in entries:
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                address = ipaddress.ip_address(entry.address.split("%")[0])
                device.append((address, _network(address, entry.netmask)))
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
            addresses=tuple(address for address, _ in addresses.get(link.name, ())),
            networks=tuple(network for _, network in addresses.get(link.name, ())),
        )
        for link in sorted(links, key=lambda link: link.index)
    ]


def _network(address: Address, netmask: str | None) -> str:
    if not netmask:
        return ""
    bits = int(ipaddress.ip_address(netmask.split("%")[0])).bit_count()
    return str(ipaddress.ip_network(f"{address}/{bits}", strict=False))
