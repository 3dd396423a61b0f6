"""Addresses of a port for rails: scopes, addresses of the host on unnumbered ports, and names."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from r2serve.ports.interfaces import Address, Interface

UNSPECIFIED, UNSPECIFIED_V6 = "0.0.0.0", "::"
"""Address of a port that is absent or has no usable address so far."""
_MOST_ADDRESSES = 4
"""Most addresses of a port told to peers, because each needs a listener."""
_MOST_LISTED = 32
"""Most interfaces in the text of an error."""
_HOST_KINDS = {"", "dummy"}
"""Kinds of interfaces with addresses of the host: lo, and dummy interfaces used like lo."""


@dataclass(frozen=True)
class PortAddress:
    """An address for rails of a port."""

    address: str
    network: str = ""
    """Network, as ``10.0.0.0/24``; empty: unknown."""
    borrowed: bool = False
    """True: an address of the host (on lo), used by a port without an own address."""


def parse(text: str) -> Address | None:
    """Parses a numeric address; None: other text."""
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def socket_address(
    address: str, port: int, device: str
) -> tuple[str, int] | tuple[str, int, int, int]:
    """Returns an address for a socket; an IPv6 link-local address needs the device.

    Raises:
        OSError: the device is absent.
    """
    if family_of(address) == socket.AF_INET:
        return address, port
    scoped = device and ipaddress.IPv6Address(address).is_link_local
    return address, port, 0, socket.if_nametoindex(device) if scoped else 0


def is_global(address: Address) -> bool:
    """Whether packets for the address may pass a router; true for private networks, too."""
    return not (
        address.is_loopback
        or address.is_link_local
        or address.is_multicast
        or address.is_unspecified
    )


def own_addresses(interface: Interface) -> tuple[PortAddress, ...]:
    """Returns the addresses of a port for rails, IPv4 first, an address for each network.

    IPv4 link-local addresses count if no other IPv4 address exists. An IPv6 link-local address
    counts beside an IPv4 link-local address only, and may be the only address of an explicit port.
    """
    v4: list[Address] = [
        each for each in interface.addresses if each.version == 4 and is_global(each)
    ]
    v6: list[Address] = [
        each for each in interface.addresses if each.version == 6 and is_global(each)
    ]
    if not v4:
        v4 = _link_local(interface, 4)
    if not v6 and not any(is_global(each) for each in v4):
        v6 = _link_local(interface, 6)[:1]
    found: dict[str, PortAddress] = {}
    for each in (*v4, *v6):
        network = interface.network_of(each)
        found.setdefault(network or str(each), PortAddress(str(each), network))
    return tuple(found.values())[:_MOST_ADDRESSES]


def only_ipv6_link_local(addresses: Sequence[PortAddress]) -> bool:
    """Whether a port has no address that ``auto`` accepts: none, or IPv6 link-local alone."""
    parsed = [ipaddress.ip_address(each.address) for each in addresses]
    return all(each.version == 6 and each.is_link_local for each in parsed)


def host_addresses(interfaces: Sequence[Interface]) -> list[Address]:
    """Returns the addresses of the host itself: global addresses of lo and dummy interfaces."""
    return [
        address
        for interface in interfaces
        if interface.up and interface.kind in _HOST_KINDS
        if interface.loopback or interface.kind == "dummy"
        for address in interface.addresses
        if is_global(address)
    ]


def borrowed_addresses(
    interface: Interface, host: Sequence[Address], wanted: Address | None = None
) -> tuple[PortAddress, ...]:
    """Returns the host's addresses for an unnumbered port; none for other ports.

    An unnumbered port has no address except link-local, and carries routes through a gateway.
    A route without a gateway is no sign: each container of a host has such a route.

    Args:
        wanted: the only address that counts.
    """
    if not only_ipv6_link_local(own_addresses(interface)) or not interface.routes:
        return ()
    gateways = [route for route in interface.routes if route.gateway]
    families = {ipaddress.ip_network(route.destination).version for route in gateways}
    sources = {route.source for route in gateways}
    fitting = [
        each for each in host if each.version in families and (wanted is None or each == wanted)
    ]
    fitting.sort(key=lambda each: (str(each) not in sources, each.version))
    found: dict[int, PortAddress] = {}
    for each in fitting:
        text = str(each)
        bits = each.max_prefixlen
        found.setdefault(each.version, PortAddress(text, f"{text}/{bits}", borrowed=True))
    return tuple(found.values())


def _link_local(interface: Interface, version: int) -> list[Address]:
    return [each for each in interface.addresses if each.version == version and each.is_link_local]


def binding_denied(device: str) -> str:
    """Returns the reason why sockets cannot be bound to a device; empty: binding works.

    Before Linux 5.7, only processes with CAP_NET_RAW may bind a socket to a device.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device.encode())
    except OSError as error:
        return f"SO_BINDTODEVICE on {device}: {error.strerror}; needs Linux 5.7 or CAP_NET_RAW"
    return ""


def awaited_address(interface: Interface) -> PortAddress:
    """Returns the address of a port that waits: unspecified, with the network if it is known."""
    states = [address for address, _ in interface.states]
    known: list[Address] = [*interface.addresses, *states]
    first = next((each for each in known if is_global(each)), None)
    if first is None:
        return PortAddress(UNSPECIFIED)
    anywhere = UNSPECIFIED if first.version == 4 else UNSPECIFIED_V6
    return PortAddress(anywhere, interface.network_of(first))


def listing(interfaces: Sequence[Interface]) -> str:
    """Returns interfaces and addresses of a node, for errors; those with addresses first."""
    ordered = sorted(interfaces, key=lambda each: not (each.addresses or each.states))
    entries = [f"{each.name}={text}" for each in ordered[:_MOST_LISTED] for text in _shown(each)]
    if len(ordered) > _MOST_LISTED:
        entries.append(f"and {len(ordered) - _MOST_LISTED} more")
    return ", ".join(entries)


def _shown(interface: Interface) -> list[str]:
    unusable = [each for each in interface.states if each[0] not in interface.addresses]
    return [
        *map(str, interface.addresses),
        *(f"{address} ({state})" for address, state in unusable),
    ] or ["(no address)"]
