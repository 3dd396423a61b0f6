"""Network interfaces of a process that may not open netlink sockets (seccomp, systemd).

The old interface of netdevice(7), ioctl on an IPv4 socket, and files of /proc/net tell names, flags
and addresses. They do not tell the kind of an interface or its master, so explicit rails work and
``auto`` does not.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from r2serve.ports.interfaces import Address, Interface
from r2serve.ports.netlink import address_state

# Constants of linux/sockios.h and linux/if.h.
_SIOCGIFCONF, _SIOCGIFFLAGS, _SIOCGIFNETMASK = 0x8912, 0x8913, 0x891B
_IFF_UP, _IFF_LOOPBACK, _IFF_RUNNING = 0x1, 0x8, 0x40
_NAME_BYTES, _REQUEST_BYTES = 16, 40  # ifreq
_SOCKADDR_IN = struct.Struct("=HH4s")
_MOST_ADDRESSES = 1024
_DEVICES, _IPV6 = Path("/proc/net/dev"), Path("/proc/net/if_inet6")


def list_interfaces_by_ioctl() -> list[Interface]:
    """Lists the interfaces of this network namespace, without kinds and masters.

    Raises:
        OSError: the kernel does not answer either.
    """
    addresses: defaultdict[str, list[tuple[Address, str]]] = defaultdict(list)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for name, address, network in (*_ipv4(asking), *_ipv6()):
            addresses[name].append((address, network))
        names = (line.split(":")[0].strip() for line in _lines(_DEVICES)[2:])
        found = [_interface(asking, name, addresses[name]) for name in names]
    return [each for each in found if each is not None]


def _interface(
    asking: socket.socket, name: str, found: list[tuple[Address, str]]
) -> Interface | None:
    """Describes an interface; None: the interface is gone already."""
    try:
        index = socket.if_nametoindex(name)
    except OSError:
        return None
    answer = fcntl.ioctl(asking, _SIOCGIFFLAGS, _request(name))
    (flags,) = struct.unpack_from("=H", answer, _NAME_BYTES)
    return Interface(
        name=name,
        index=index,
        up=bool(flags & _IFF_UP),
        carrier=bool(flags & _IFF_RUNNING),
        loopback=bool(flags & _IFF_LOOPBACK),
        addresses=tuple(address for address, _ in found),
        networks=tuple(network for _, network in found),
    )


def _request(name: str, more: bytes = b"") -> bytes:
    return name.encode().ljust(_NAME_BYTES, b"\0") + more.ljust(_REQUEST_BYTES - _NAME_BYTES, b"\0")


def _ipv4(asking: socket.socket) -> Iterator[tuple[str, Address, str]]:
    """Yields device, address and network; SIOCGIFCONF lists every IPv4 address."""
    space = array.array("B", bytes(_MOST_ADDRESSES * _REQUEST_BYTES))
    where, many = space.buffer_info()
    conf = fcntl.ioctl(asking, _SIOCGIFCONF, struct.pack("@iP", many, where))
    (used, _) = struct.unpack("@iP", conf)
    for start in range(0, used, _REQUEST_BYTES):
        entry = space[start : start + _REQUEST_BYTES].tobytes()
        label = entry[:_NAME_BYTES].split(b"\0")[0].decode()
        _, _, packed = _SOCKADDR_IN.unpack_from(entry, _NAME_BYTES)
        answer = fcntl.ioctl(asking, _SIOCGIFNETMASK, entry)
        _, _, mask = _SOCKADDR_IN.unpack_from(answer, _NAME_BYTES)
        address = ipaddress.IPv4Address(packed)
        bits = int.from_bytes(mask, "big").bit_count()
        # "eth0:1" is an address label of eth0, not an interface.
        yield label.split(":")[0], address, _network(address, bits)


def _ipv6() -> Iterator[tuple[str, Address, str]]:
    for line in _lines(_IPV6):
        packed, _, bits, _, flags, name = line.split()
        address = ipaddress.IPv6Address(bytes.fromhex(packed))
        if address_state(6, int(flags, 16)) not in ("tentative", "duplicate"):
            yield name, address, _network(address, int(bits, 16))


def _network(address: Address, bits: int) -> str:
    return str(ipaddress.ip_network(f"{address}/{bits}", strict=False))


def _lines(path: Path) -> list[str]:
    """Returns the lines of a file of /proc/net; none without the file (a kernel without IPv6)."""
    try:
        return path.read_text().splitlines()
    except FileNotFoundError:
        return []
