"""The rule of ``R2CCL_RAILS``: which network interfaces become rails."""

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


# Kinds of interface that stand for no port of their own: what they carry goes through another one.
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
    """This node's end of a rail; ``name`` is ``rail<i>``, in the order of the rails."""

    name: str
    device: str
    address: str
    family: socket.AddressFamily
    network: str = ""
    rdma: RdmaPort | None = None


def select_ports(
    spec: str, management: str, engine_address: str | None, rdma: Sequence[RdmaPort] = ()
) -> list[Port]:
    """The ports that become rails, by the rule of :func:`choose_ports`, on this machine.

    Args:
        rdma: what RDMA ports there are.  ``spec`` may name them, too: ``device`` or
            ``device:port``.

    Raises:
        ConfigError: as :func:`choose_ports`.
        OSError: the system does not tell its interfaces.
    """
    spec = ",".join(_interface_of(item.strip(), spec, rdma) for item in spec.split(","))
    ports = choose_ports(spec, management, engine_address, list_interfaces())
    return [replace(port, rdma=port_of_interface(rdma, port.device)) for port in ports]


def _interface_of(item: str, spec: str, rdma: Sequence[RdmaPort]) -> str:
    """What names an RDMA port becomes the name of its network interface."""
    port = find_port(rdma, item)
    if port is None:
        return item
    if not port.netdev:
        raise ConfigError(
            f"rails (R2CCL_RAILS) is {spec!r}: {port.name} has no network interface, over which "
            "its queue pairs are arranged; give it one (InfiniBand: IPoIB)"
        )
    return port.netdev


def choose_ports(
    spec: str, management: str, engine_address: str | None, interfaces: Sequence[Interface]
) -> list[Port]:
    """The rule that makes ports of ``R2CCL_RAILS``.

    Args:
        spec: ``auto``: every usable NIC, by name, but not the management NIC. Otherwise, separated
            by commas and in rail order: devices, addresses (also any of 127.0.0.0/8), or
            ``device=address``.
        management: device or address that is never a rail. Empty: the NIC that carries
            ``engine_address``, unless it is the only usable one.
        engine_address: the numeric address that the engine uses for its own traffic, if known.
        interfaces: what there is.

    Returns:
        The ports; none if ``auto`` finds no usable NIC.

    Raises:
        ConfigError: names ``R2CCL_RAILS`` or ``R2CCL_MANAGEMENT``, the value, and what there is.
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
    """Why ``auto`` does not take an interface; empty if it does."""
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
        return "no unicast address beyond its own link"
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
    """Sorts eth2 before eth10, alike on every node."""
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)
    ]


def _address_of(interface: Interface) -> Address | None:
    """The address that a device's rail uses: the first IPv4 one, else the first IPv6 one."""
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
    """The interface of that name or with that address."""
    address = _parse(text)
    for interface in interfaces:
        if interface.name == text or (address is not None and _carries(interface, address)):
            return interface
    return None


def _carries(interface: Interface, address: Address) -> bool:
    # Linux answers on all of 127.0.0.0/8 without listing it.
    everywhere = interface.loopback and address.version == 4 and address.is_loopback
    return everywhere or address in interface.addresses


def _explicit(item: str, spec: str, interfaces: Sequence[Interface]) -> tuple[Interface, Address]:
    """The interface and address that one entry of an explicit list names."""

    def wrong(why: str) -> ConfigError:
        return _wrong("rails", spec, why, interfaces)

    if not item:
        raise wrong("has an empty entry")
    device, _, address_text = item.rpartition("=") if "=" in item else ("", "", item)
    if "=" in item and not device:
        raise wrong(f"has {item!r}, which names no device before the =")
    address = _parse(address_text)
    if address is None and device:
        raise wrong(f"has {item!r}, and {address_text!r} is no address")
    interface = _find(device or item, interfaces)
    if interface is None:
        raise wrong(f"has {item!r}, which is not here")
    if address is None:
        address = _address_of(interface) or (_LOOPBACK if interface.loopback else None)
        if address is None:
            raise wrong(f"has {item!r}, which has no unicast address beyond its own link")
    elif not _carries(interface, address):
        raise wrong(f"has {item!r}, but {device} does not carry {address}")
    if address.version == 6 and address.is_link_local:
        # The peer would need to know which of its own devices leads here.
        raise wrong(f"has {item!r}, a link-local IPv6 address, which no peer can reach by itself")
    if not (interface.up and interface.carrier):
        logger.warning("rail port %s is down; it is used as soon as it is up", item)
    return interface, address


def _check_explicit(spec: str, found: Sequence[tuple[Interface, Address]], management: str) -> None:
    for (_, first), (_, second) in itertools.combinations(found, 2):
        if first == second:
            raise _wrong("rails", spec, f"has {first} twice", [])
    for interface, address in found:
        if management and (management == interface.name or _parse(management) == address):
            why = f"has {interface.name}={address}, which R2CCL_MANAGEMENT keeps for the engine"
            raise _wrong("rails", spec, why, [])


def _wrong(field: str, value: str, why: str, interfaces: Sequence[Interface]) -> ConfigError:
    there = ", ".join(
        f"{interface.name}={address}"
        for interface in interfaces
        for address in interface.addresses or ("(no address)",)
    )
    text = f"{field} (R2CCL_{field.upper()}) is {value!r}: it {why}"
    return ConfigError(f"{text}; there is: {there}" if interfaces else text)
