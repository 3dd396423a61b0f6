"""The kernel's list of network interfaces, from rtnetlink(7)."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

# Constants of linux/if.h and linux/rtnetlink.h.
IFF_UP, IFF_LOOPBACK, IFF_LOWER_UP = 0x1, 0x8, 0x10000
_RTM_NEWLINK, _RTM_GETLINK = 16, 18
_NLM_F_REQUEST, _NLM_F_DUMP, _NLM_F_DUMP_INTR = 0x1, 0x300, 0x10
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_IFLA_IFNAME, _IFLA_MASTER, _IFLA_LINKINFO, _IFLA_INFO_KIND = 3, 10, 18, 1
_ATTRIBUTE_TYPE = 0x3FFF
_HEADER = struct.Struct("=IHHII")  # nlmsghdr
_LINK = struct.Struct("=BxHiII")  # ifinfomsg
_ATTRIBUTE = struct.Struct("=HH")  # rtattr
_DUMP_ATTEMPTS = 5


@dataclass(frozen=True)
class LinkMessage:
    """An interface as listed by the kernel (``RTM_NEWLINK``)."""

    name: str
    index: int
    flags: int
    kind: str
    master: int


def dump_links() -> list[LinkMessage]:
    """Lists every interface of this network namespace.

    The list comes from netlink, because sysfs may show the interfaces of another network namespace.

    Raises:
        OSError: the kernel does not answer, or the list changes during every read.
    """
    request = _LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as asking:
        asking.settimeout(5)
        for sequence in range(1, _DUMP_ATTEMPTS + 1):
            header = _HEADER.pack(
                _HEADER.size + len(request), _RTM_GETLINK, _NLM_F_REQUEST | _NLM_F_DUMP, sequence, 0
            )
            asking.sendto(header + request, (0, 0))
            links = _read_dump(asking)
            if links is not None:
                return links
    raise OSError("the list of network interfaces changes faster than it can be read")


def _read_dump(asking: socket.socket) -> list[LinkMessage] | None:
    """Reads a complete answer; None: the interfaces changed during the dump."""
    links: list[LinkMessage] = []
    consistent = True
    while True:
        for kind, flags, payload in _messages(asking.recv(65536)):
            consistent = consistent and not flags & _NLM_F_DUMP_INTR
            if kind == _NLMSG_DONE:
                return links if consistent else None
            if kind == _NLMSG_ERROR:
                code = -int.from_bytes(payload[:4], "little", signed=True)
                raise OSError(code, f"cannot list network interfaces: {os.strerror(code)}")
            if kind == _RTM_NEWLINK:
                links.append(_link(payload))


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
    return LinkMessage(
        name=attributes[_IFLA_IFNAME].rstrip(b"\0").decode(),
        index=index,
        flags=flags,
        kind=details.get(_IFLA_INFO_KIND, b"").rstrip(b"\0").decode(),
        master=int.from_bytes(attributes.get(_IFLA_MASTER, b""), "little"),
    )
