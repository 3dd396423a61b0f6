"""The kernel's lists of network interfaces, addresses and routes, from rtnetlink(7).

On a host of containers, interfaces come and go during every read. A read that a change has
interrupted is repeated after a pause. What is still inconsistent at the end is the union of all
reads, without the interfaces that are gone.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

# Constants of linux/if.h, linux/if_link.h and linux/rtnetlink.h.
IFF_UP, IFF_LOOPBACK, IFF_LOWER_UP = 0x1, 0x8, 0x10000
_RTM_NEWLINK, _RTM_GETLINK, _RTM_NEWROUTE, _RTM_GETROUTE = 16, 18, 24, 26
_RTM_NEWADDR, _RTM_GETADDR = 20, 22
_NLM_F_REQUEST, _NLM_F_DUMP, _NLM_F_DUMP_INTR = 0x1, 0x300, 0x10
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_IFLA_IFNAME, _IFLA_MTU, _IFLA_LINK, _IFLA_MASTER, _IFLA_LINKINFO = 3, 4, 5, 10, 18
_IFLA_PHYS_PORT_ID, _IFLA_PHYS_SWITCH_ID, _IFLA_LINK_NETNSID, _IFLA_PHYS_PORT_NAME = 34, 36, 37, 38
_IFLA_PARENT_DEV_NAME, _IFLA_PARENT_DEV_BUS_NAME = 56, 57
_IFLA_INFO_KIND = 1
_RTA_DST, _RTA_OIF, _RTA_GATEWAY, _RTA_PREFSRC, _RTA_MULTIPATH, _RTA_VIA = 1, 4, 5, 7, 9, 18
_RTN_UNICAST = 1
_IFA_ADDRESS, _IFA_LOCAL, _IFA_FLAGS = 1, 2, 8
_IFA_F_TEMPORARY, _IFA_F_OPTIMISTIC, _IFA_F_DADFAILED = 0x01, 0x04, 0x08
_IFA_F_DEPRECATED, _IFA_F_TENTATIVE = 0x20, 0x40
_ATTRIBUTE_TYPE = 0x3FFF
_HEADER = struct.Struct("=IHHII")  # nlmsghdr
_LINK = struct.Struct("=BxHiII")  # ifinfomsg
_ROUTE = struct.Struct("=BBBBBBBBI")  # rtmsg
_ADDRESS = struct.Struct("=BBBBI")  # ifaddrmsg
_NEXT_HOP = struct.Struct("=HBBi")  # rtnexthop
_ATTRIBUTE = struct.Struct("=HH")  # rtattr
_PAUSES_S = (0.0, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64)
"""Pauses before the reads of a list, 1.3 s together."""
_MOST_ROUTES = 20_000
"""Longest routing table read; a table of a full-table BGP router would take seconds."""


@dataclass(frozen=True)
class LinkMessage:
    """An interface as listed by the kernel (``RTM_NEWLINK``)."""

    name: str
    index: int
    flags: int
    kind: str
    master: int
    mtu: int = 0
    lower: int = 0
    """Index of the interface below (VLAN, macvlan) or at the other end (veth); 0: none."""
    lower_namespace: int = -1
    """Id of the network namespace with the interface ``lower``; -1: this namespace."""
    port_id: str = ""
    switch_id: str = ""
    port_name: str = ""
    pci: str = ""
    """PCI address of the device; empty: no PCI device, or a kernel before 5.14."""


@dataclass(frozen=True)
class AddressMessage:
    """An address of an interface (``RTM_NEWADDR``)."""

    index: int
    """Index of the interface."""
    address: ipaddress.IPv4Address | ipaddress.IPv6Address
    network: str
    """Network, as ``10.0.0.0/24``."""
    state: str = ""
    """``tentative`` or ``duplicate``: not usable; ``temporary`` or ``deprecated``: goes away soon;
    empty: none of these."""


@dataclass(frozen=True)
class RouteMessage:
    """A next hop of a unicast route (``RTM_NEWROUTE``)."""

    index: int
    """Index of the interface."""
    destination: str
    """Network, as ``10.0.0.0/24``."""
    gateway: bool
    source: str
    """Preferred source address; empty: none."""


def dump_links(named: Collection[str] = ()) -> list[LinkMessage]:
    """Lists every interface of this network namespace.

    The list comes from netlink, because sysfs may show the interfaces of another network namespace.

    Args:
        named: interfaces to read by themselves if no read of the list is consistent.

    Raises:
        OSError: the kernel does not answer.
    """
    request = _LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
    with _open() as asking:
        payloads, consistent = _read_list(asking, _RTM_GETLINK, _RTM_NEWLINK, request)
        links = {link.index: link for link in map(_link, payloads)}  # the last read counts
        if consistent:
            return list(links.values())
        for name in named:
            if (link := _read_link(asking, name)) is not None:
                links[link.index] = link
    return [link for link in links.values() if _exists(link)]


def dump_addresses() -> list[AddressMessage]:
    """Lists the addresses of all interfaces of this network namespace.

    Raises:
        OSError: the kernel does not answer.
    """
    with _open() as asking:
        request = _ADDRESS.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
        payloads, _ = _read_list(asking, _RTM_GETADDR, _RTM_NEWADDR, request)
    found: dict[tuple[int, str], AddressMessage] = {}
    for payload in payloads:
        if (each := _address(payload)) is not None:
            found[each.index, str(each.address)] = each
    return list(found.values())


def dump_routes() -> list[RouteMessage] | None:
    """Lists the unicast routes of all tables; None: too many routes, or no answer."""
    found: list[RouteMessage] = []
    try:
        with _open() as asking:
            for sequence, family in enumerate((socket.AF_INET, socket.AF_INET6), 1):
                request = _ROUTE.pack(family, 0, 0, 0, 0, 0, 0, 0, 0)
                payloads, _ = _dump(asking, sequence, _RTM_GETROUTE, _RTM_NEWROUTE, request)
                for payload in payloads:
                    found += _route(payload)
    except (OSError, OverflowError):
        return None
    return found


def _open() -> socket.socket:
    asking = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
    asking.settimeout(5)
    return asking


def _read_list(
    asking: socket.socket,
    request: int,
    answer: int,
    body: bytes,
    pause: Callable[[float], None] = time.sleep,
) -> tuple[list[bytes], bool]:
    """Reads a list until a read is consistent; returns that read, or all reads and False."""
    seen: list[bytes] = []
    for sequence, pause_s in enumerate(_PAUSES_S, 1):
        pause(pause_s)
        payloads, consistent = _dump(asking, sequence, request, answer, body)
        if consistent:
            return payloads, True
        seen += payloads
    return seen, False


def _read_link(asking: socket.socket, name: str) -> LinkMessage | None:
    """Reads an interface by itself; None: no such interface."""
    raw = name.encode() + b"\0"
    attribute = _ATTRIBUTE.pack(_ATTRIBUTE.size + len(raw), _IFLA_IFNAME) + raw
    body = _LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0) + attribute
    header = _HEADER.pack(_HEADER.size + len(body), _RTM_GETLINK, _NLM_F_REQUEST, 0, 0)
    asking.sendto(header + body, (0, 0))
    for kind, _, payload in _messages(asking.recv(65536)):
        if kind == _RTM_NEWLINK:
            return _link(payload)
    return None


def _exists(link: LinkMessage) -> bool:
    try:
        return socket.if_nametoindex(link.name) == link.index
    except OSError:
        return False


def _dump(
    asking: socket.socket, sequence: int, request: int, answer: int, body: bytes
) -> tuple[list[bytes], bool]:
    """Requests and reads a dump; returns the payloads, and whether nothing changed meanwhile."""
    header = _HEADER.pack(
        _HEADER.size + len(body), request, _NLM_F_REQUEST | _NLM_F_DUMP, sequence, 0
    )
    asking.sendto(header + body, (0, 0))
    return _read_dump(asking, answer)


def _read_dump(asking: socket.socket, answer: int) -> tuple[list[bytes], bool]:
    payloads: list[bytes] = []
    complete = True
    while True:
        for kind, flags, payload in _messages(asking.recv(65536)):
            complete = complete and not flags & _NLM_F_DUMP_INTR
            if kind == _NLMSG_DONE:
                return payloads, complete
            if kind == _NLMSG_ERROR:
                code = -int.from_bytes(payload[:4], "little", signed=True)
                raise OSError(code, f"cannot list network interfaces: {os.strerror(code)}")
            if kind == answer:
                payloads.append(payload)
        if answer == _RTM_NEWROUTE and len(payloads) > _MOST_ROUTES:
            raise OverflowError("too many routes")


def _messages(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yields type, flags and payload of each message of a datagram."""
    while len(data) >= _HEADER.size:
        length, kind, flags, _, _ = _HEADER.unpack_from(data)
        if not _HEADER.size <= length <= len(data):
            return
        yield kind, flags, data[_HEADER.size : length]
        data = data[(length + 3) & ~3 :]


def _attributes(data: bytes) -> dict[int, bytes]:
    found = {}
    while len(data) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(data)
        if not _ATTRIBUTE.size <= length <= len(data):
            break
        found[kind & _ATTRIBUTE_TYPE] = data[_ATTRIBUTE.size : length]
        data = data[(length + 3) & ~3 :]
    return found


def _link(payload: bytes) -> LinkMessage:
    _, _, index, flags, _ = _LINK.unpack_from(payload)
    attributes = _attributes(payload[_LINK.size :])
    details = _attributes(attributes.get(_IFLA_LINKINFO, b""))

    def text(attribute: int, among: dict[int, bytes] = attributes) -> str:
        return among.get(attribute, b"").rstrip(b"\0").decode(errors="replace")

    def number(attribute: int) -> int:
        return int.from_bytes(attributes.get(attribute, b""), "little")

    # A namespace id of the kernel is signed; -1 stands for a namespace without an id.
    elsewhere = _IFLA_LINK_NETNSID in attributes
    return LinkMessage(
        name=text(_IFLA_IFNAME),
        index=index,
        flags=flags,
        kind=text(_IFLA_INFO_KIND, details),
        master=number(_IFLA_MASTER),
        mtu=number(_IFLA_MTU),
        lower=number(_IFLA_LINK),
        lower_namespace=number(_IFLA_LINK_NETNSID) if elsewhere else -1,
        port_id=attributes.get(_IFLA_PHYS_PORT_ID, b"").hex(),
        switch_id=attributes.get(_IFLA_PHYS_SWITCH_ID, b"").hex(),
        port_name=text(_IFLA_PHYS_PORT_NAME),
        pci=text(_IFLA_PARENT_DEV_NAME) if text(_IFLA_PARENT_DEV_BUS_NAME) == "pci" else "",
    )


def _address(payload: bytes) -> AddressMessage | None:
    """Reads an address; None: of another family."""
    family, bits, flags, _, index = _ADDRESS.unpack_from(payload)
    if family not in (socket.AF_INET, socket.AF_INET6):
        return None
    attributes = _attributes(payload[_ADDRESS.size :])
    # On a point-to-point interface, IFA_ADDRESS is the address of the other end.
    raw = attributes.get(_IFA_LOCAL) or attributes.get(_IFA_ADDRESS)
    if raw is None:
        return None
    if _IFA_FLAGS in attributes:
        flags = int.from_bytes(attributes[_IFA_FLAGS], "little")
    address = ipaddress.ip_address(raw)
    network = str(ipaddress.ip_network(f"{address}/{bits}", strict=False))
    return AddressMessage(index, address, network, address_state(address.version, flags))


def address_state(version: int, flags: int) -> str:
    """Returns the state of an address, as in :class:`AddressMessage`, from the kernel's flags."""
    if flags & _IFA_F_DADFAILED:
        return "duplicate"
    if flags & _IFA_F_TENTATIVE and not flags & _IFA_F_OPTIMISTIC:
        return "tentative"
    if flags & _IFA_F_DEPRECATED:
        return "deprecated"
    # The flag of a secondary IPv4 address has the same value.
    return "temporary" if version == 6 and flags & _IFA_F_TEMPORARY else ""


def _route(payload: bytes) -> Iterator[RouteMessage]:
    """Yields the next hops of a route; none for other types than unicast."""
    family, bits, _, _, _, _, _, kind, _ = _ROUTE.unpack_from(payload)
    if kind != _RTN_UNICAST or family not in (socket.AF_INET, socket.AF_INET6):
        return
    attributes = _attributes(payload[_ROUTE.size :])
    size = 4 if family == socket.AF_INET else 16
    raw = attributes.get(_RTA_DST, bytes(size))
    destination = f"{ipaddress.ip_address(raw)}/{bits}"
    source = attributes.get(_RTA_PREFSRC)
    preferred = str(ipaddress.ip_address(source)) if source else ""
    if _RTA_OIF in attributes:
        index = int.from_bytes(attributes[_RTA_OIF], "little")
        yield RouteMessage(index, destination, _has_gateway(attributes), preferred)
    hops = attributes.get(_RTA_MULTIPATH, b"")
    while len(hops) >= _NEXT_HOP.size:
        length, _, _, index = _NEXT_HOP.unpack_from(hops)
        if not _NEXT_HOP.size <= length <= len(hops):
            return
        gateway = _has_gateway(_attributes(hops[_NEXT_HOP.size : length]))
        yield RouteMessage(index, destination, gateway, preferred)
        hops = hops[(length + 3) & ~3 :]


def _has_gateway(attributes: dict[int, bytes]) -> bool:
    return _RTA_GATEWAY in attributes or _RTA_VIA in attributes
