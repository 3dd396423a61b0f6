"""The kernel's lists of network interfaces and routes, from rtnetlink(7)."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

# Constants of linux/if.h, linux/if_link.h and linux/rtnetlink.h.
IFF_UP, IFF_LOOPBACK, IFF_LOWER_UP = 0x1, 0x8, 0x10000
_RTM_NEWLINK, _RTM_GETLINK, _RTM_NEWROUTE, _RTM_GETROUTE = 16, 18, 24, 26
_NLM_F_REQUEST, _NLM_F_DUMP, _NLM_F_DUMP_INTR = 0x1, 0x300, 0x10
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_IFLA_IFNAME, _IFLA_MTU, _IFLA_LINK, _IFLA_MASTER, _IFLA_LINKINFO = 3, 4, 5, 10, 18
_IFLA_PHYS_PORT_ID, _IFLA_PHYS_SWITCH_ID, _IFLA_LINK_NETNSID, _IFLA_PHYS_PORT_NAME = 34, 36, 37, 38
_IFLA_PARENT_DEV_NAME, _IFLA_PARENT_DEV_BUS_NAME = 56, 57
_IFLA_INFO_KIND = 1
_RTA_DST, _RTA_OIF, _RTA_GATEWAY, _RTA_PREFSRC, _RTA_MULTIPATH, _RTA_VIA = 1, 4, 5, 7, 9, 18
_RTN_UNICAST = 1
_ATTRIBUTE_TYPE = 0x3FFF
_HEADER = struct.Struct("=IHHII")  # nlmsghdr
_LINK = struct.Struct("=BxHiII")  # ifinfomsg
_ROUTE = struct.Struct("=BBBBBBBBI")  # rtmsg
_NEXT_HOP = struct.Struct("=HBBi")  # rtnexthop
_ATTRIBUTE = struct.Struct("=HH")  # rtattr
_DUMP_ATTEMPTS = 5
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
class RouteMessage:
    """A next hop of a unicast route (``RTM_NEWROUTE``)."""

    index: int
    """Index of the interface."""
    destination: str
    """Network, as ``10.0.0.0/24``."""
    gateway: bool
    source: str
    """Preferred source address; empty: none."""


def dump_links() -> list[LinkMessage]:
    """Lists every interface of this network namespace.

    The list comes from netlink, because sysfs may show the interfaces of another network namespace.
    If interfaces come and go during every read, the list contains all interfaces that are in any
    of the reads and still exist.

    Raises:
        OSError: the kernel does not answer.
    """
    seen: dict[int, LinkMessage] = {}
    request = _LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
    with _open() as asking:
        for sequence in range(1, _DUMP_ATTEMPTS + 1):
            payloads, complete = _dump(asking, sequence, _RTM_GETLINK, _RTM_NEWLINK, request)
            links = [_link(payload) for payload in payloads]
            if complete:
                return links
            seen.update({link.index: link for link in links})
    return [link for link in seen.values() if _exists(link)]


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
