"""Choice of rails among network interfaces, by the rule of ``R2CCL_RAILS``."""

from __future__ import annotations

import ipaddress
import itertools
import logging
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace

from r2serve.errors import ConfigError
from r2serve.ports.interfaces import Address, Interface, list_interfaces
from r2serve.ports.rdma import RdmaPort, find_port, port_of_interface

logger = logging.getLogger(__name__)


# Kinds of virtual interfaces that are not ports, because another interface carries the traffic.
_NOT_PORTS = {
    "bridge",
    "dummy",
    "erspan",
    "geneve",
    "gre",
    "gretap",
    "ifb",
    "ip6gre",
    "ip6tnl",
    "ipip",
    "nlmon",
    "openvswitch",
    "sit",
    "tun",
    "vrf",
    "vti",
    "vxlan",
    "wireguard",
    "xfrm",
}
_LOOPBACK = ipaddress.IPv4Address("127.0.0.1")


@dataclass(frozen=True)
class Port:
    """A rail's port on this node; ``name`` is ``rail<i>`` in rail order."""

    name: str
    device: str
    address: str
    family: socket.AddressFamily
    network: str = ""
    rdma: RdmaPort | None = None


def select_ports(
    spec: str, management: str, engine_address: str | None, rdma: Sequence[RdmaPort] = ()
) -> list[Port]:
    """Selects this node's rail ports by the rule of :func:`choose_ports`.

    Args:
        rdma: RDMA ports of this node; ``spec`` may contain their names, as ``device`` or
            ``device:port``.

    Raises:
        ConfigError: see :func:`choose_ports`.
        OSError: the kernel does not list the interfaces.
    """
    spec = ",".join(_interface_of(item.strip(), spec, rdma) for item in spec.split(","))
    ports = choose_ports(spec, management, engine_address, list_interfaces())
    return [replace(port, rdma=port_of_interface(rdma, port.device)) for port in ports]


def _interface_of(item: str, spec: str, rdma: Sequence[RdmaPort]) -> str:
    """Converts the name of an RDMA port into the name of its network interface."""
    port = find_port(rdma, item)
    if port is None:
        return item
    if not port.netdev:
        raise ConfigError(
            f"rails (R2CCL_RAILS) is {spec!r}: {port.name} has no network interface, but needs an "
            "interface to connect queue pairs; add an interface (InfiniBand: IPoIB)"
        )
    return port.netdev


def choose_ports(
    spec: str, management: str, engine_address: str | None, interfaces: Sequence[Interface]
) -> list[Port]:
    """Chooses rail ports among interfaces, by the rule of ``R2CCL_RAILS``.

    Args:
        spec: ``auto``: every usable NIC, ordered by name, without the management NIC. Otherwise a
            comma-separated list in rail order: devices, addresses (also any of 127.0.0.0/8), or
            ``device=address``.
        management: device or address excluded from rails. Empty: ``auto`` excludes the NIC with
            ``engine_address``, if another NIC is usable.
        engine_address: numeric address of the engine's own traffic, if known.
        interfaces: interfaces of this node.

    Returns:
        The ports; none if ``auto`` finds no usable NIC.

    Raises:
        ConfigError: names ``R2CCL_RAILS`` or ``R2CCL_MANAGEMENT``, the value, and all interfaces.
    """
    kept_free = _find(management, interfaces) if management else None
    if management and kept_free is None:
        raise _wrong("management", management, "is no device or address here", interfaces)
    if spec.strip() == "auto":
        found = _usable(interfaces, kept_free, engine_address)
    else:
        found = [_explicit(item.strip(), spec, interfaces) for item in spec.split(",")]
        _check_explicit(spec, found, management)
    return [
        Port(
            name=f"rail{index}",
            device=interface.name,
            address=str(address),
            family=socket.AF_INET if address.version == 4 else socket.AF_INET6,
            network=interface.network_of(address),
        )
        for index, (interface, address) in enumerate(found)
    ]


def unusable(interface: Interface) -> str:
    """Returns the reason why ``auto`` skips an interface; empty: ``auto`` uses the interface."""
    if interface.loopback:
        return "loopback"
    if interface.kind in _NOT_PORTS:
        return f"a {interface.kind} interface"
    # A VRF groups interfaces for routing only; a bridge, bond or team carries their traffic itself.
    if interface.master and interface.master_kind != "vrf":
        return f"belongs to {interface.master}"
    if not interface.up:
        return "down"
    if not interface.carrier:
        return "no carrier"
    if _address_of(interface) is None:
        return "no unicast address except link-local"
    return ""


def _usable(
    interfaces: Sequence[Interface], kept_free: Interface | None, engine_address: str | None
) -> list[tuple[Interface, Address]]:
    skipped = {interface.name: why for interface in interfaces if (why := unusable(interface))}
    taken = [interface for interface in interfaces if interface.name not in skipped]
    if kept_free is None and engine_address and len(taken) > 1:
        kept_free = _find(engine_address, taken)
    if kept_free in taken:
        taken.remove(kept_free)
        skipped[kept_free.name] = "management"
    logger.info(
        "rails: %s; not used: %s",
        ", ".join(interface.name for interface in taken) or "none",
        ", ".join(f"{name} ({why})" for name, why in skipped.items()) or "none",
    )
    taken.sort(key=lambda interface: _natural(interface.name))
    return [(interface, address) for interface in taken if (address := _address_of(interface))]


def _natural(name: str) -> list[tuple[int, str]]:
    """Returns a sort key with eth2 before eth10, equal on every node."""
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)
    ]


def _address_of(interface: Interface) -> Address | None:
    """Returns the address for a device's rail: the first IPv4 address, else the first IPv6."""
    good = [address for address in interface.addresses if _reaches_beyond(address)]
    return next(iter(sorted(good, key=lambda address: address.version)), None)


def _reaches_beyond(address: Address) -> bool:
    return not (
        address.is_loopback
        or address.is_link_local
        or address.is_multicast
        or address.is_unspecified
    )


def _parse(text: str) -> Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _find(text: str, interfaces: Sequence[Interface]) -> Interface | None:
    """Finds an interface by name or by address."""
    address = _parse(text)
    for interface in interfaces:
        if interface.name == text or (address is not None and _carries(interface, address)):
            return interface
    return None


def _carries(interface: Interface, address: Address) -> bool:
    # Linux answers on all of 127.0.0.0/8 without listing the addresses.
    everywhere = interface.loopback and address.version == 4 and address.is_loopback
    return everywhere or address in interface.addresses


def _explicit(item: str, spec: str, interfaces: Sequence[Interface]) -> tuple[Interface, Address]:
    """Resolves an entry of an explicit list into interface and address."""

    def wrong(why: str) -> ConfigError:
        return _wrong("rails", spec, why, interfaces)

    if not item:
        raise wrong("has an empty entry")
    device, _, address_text = item.rpartition("=") if "=" in item else ("", "", item)
    if "=" in item and not device:
        raise wrong(f"has {item!r}, without a device before the =")
    address = _parse(address_text)
    if address is None and device:
        raise wrong(f"has {item!r}, but {address_text!r} is no address")
    interface = _find(device or item, interfaces)
    if interface is None:
        raise wrong(f"has {item!r}, but this node has no such device or address")
    if address is None:
        address = _address_of(interface) or (_LOOPBACK if interface.loopback else None)
        if address is None:
            raise wrong(f"has {item!r}, which has no unicast address except link-local")
    elif not _carries(interface, address):
        raise wrong(f"has {item!r}, but {device} does not carry {address}")
    if address.version == 6 and address.is_link_local:
        # A link-local address needs a scope, the name of the peer's own device, unknown here.
        raise wrong(f"has {item!r}, a link-local IPv6 address, unreachable for peers")
    if not (interface.up and interface.carrier):
        logger.warning("rail port %s is down; traffic uses the rail once the port is up", item)
    return interface, address


def _check_explicit(spec: str, found: Sequence[tuple[Interface, Address]], management: str) -> None:
    for (_, first), (_, second) in itertools.combinations(found, 2):
        if first == second:
            raise _wrong("rails", spec, f"has {first} twice", [])
    for interface, address in found:
        if management and (management == interface.name or _parse(management) == address):
            why = f"has {interface.name}={address}, the management NIC by R2CCL_MANAGEMENT"
            raise _wrong("rails", spec, why, [])


def _wrong(field: str, value: str, why: str, interfaces: Sequence[Interface]) -> ConfigError:
    there = ", ".join(
        f"{interface.name}={address}"
        for interface in interfaces
        for address in interface.addresses or ("(no address)",)
    )
    text = f"{field} (R2CCL_{field.upper()}) is {value!r}: it {why}"
    return ConfigError(f"{text}; this node has: {there}" if interfaces else text)
