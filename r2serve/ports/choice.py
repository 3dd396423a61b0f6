"""Choice of rails among network interfaces, by the rule of ``R2CCL_RAILS``."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from r2serve.errors import ConfigError
from r2serve.ports.addresses import (
    PortAddress,
    awaited_address,
    binding_denied,
    borrowed_addresses,
    host_addresses,
    only_ipv6_link_local,
    own_addresses,
)
from r2serve.ports.explicit import Named, device_of, find, named_ports, wrong
from r2serve.ports.interfaces import Address, Interface, Route, list_interfaces
from r2serve.ports.later import waiting_ports
from r2serve.ports.rdma import RdmaPort, find_port, port_of_interface
from r2serve.ports.units import Unit, find_units, natural
from r2serve.ports.without_netlink import list_interfaces_by_ioctl

RESERVE_SHARE = 8
"""A port below this part of the fastest port's speed is a reserve.

Striped over both, a port with 1/8 of the speed would add at most 11 % of bandwidth. Failover to the
port multiplies the time of large messages by 9. A port with 1/4 (25 of 100 Gbit/s) adds 25 %.
"""
MOST_LATER = 8
"""Most ports of a node that wait for an address without being named."""
_OVERLAYS = {
    "erspan",
    "geneve",
    "gre",
    "gretap",
    "ip6gre",
    "ip6tnl",
    "ipip",
    "sit",
    "tun",
    "vti",
    "vxlan",
    "wireguard",
    "xfrm",
}
"""Kinds of interfaces with packets inside the packets of another port."""
_NOT_PORTS = {"bridge", "dummy", "ifb", "nlmon", "openvswitch", "vrf"}
"""Kinds of virtual interfaces that are not ports, because another interface carries the traffic."""
_WIRED = {"", "bond", "team", "vlan", "macvlan", "ipvlan"}
"""Kinds of interfaces whose absence among the rails deserves a warning."""


@dataclass(frozen=True)
class Port:
    """A rail's port on this node; ``name`` is ``rail<i>`` in rail order."""

    name: str
    device: str
    address: str
    """First address; ``0.0.0.0``: the device is absent or has no address so far."""
    family: socket.AddressFamily
    network: str = ""
    rdma: RdmaPort | None = None
    borrowed: bool = False
    """True: the address belongs to lo, not to the device (an unnumbered port)."""
    others: tuple[PortAddress, ...] = ()
    """Further addresses, each of another network."""
    mtu: int = 0
    """MTU in bytes; 0: unknown."""
    mbit_s: int = 0
    """Link speed in Mbit/s; 0: unknown."""
    carrier: bool = True
    shares_control: bool = False
    """True: the port carries the engine's control traffic, too."""
    reserve: str = ""
    """Reason why the port carries traffic only when nothing better is left; empty: it does not."""
    unit: Unit = Unit("")  # noqa: RUF009
    """Hardware of the port."""
    routes: tuple[Route, ...] | None = None
    """Routes through the device; None: unknown."""
    pci: str = ""
    """PCI address of the device; empty: unknown."""
    waits: str = ""
    """Reason why the port has no usable address so far; empty: it has one."""
    fading: str = ""
    """State of the first address that goes away soon: temporary or deprecated; empty: it stays."""

    @property
    def addresses(self) -> tuple[PortAddress, ...]:
        """All addresses, the first first."""
        return (PortAddress(self.address, self.network, self.borrowed), *self.others)


@dataclass(frozen=True)
class LeftOut:
    """An interface that is not a rail."""

    device: str
    why: str
    mbit_s: int
    faster: bool
    """True: the interface is faster than a port that was taken."""


@dataclass(frozen=True)
class Choice:
    """The ports of a node, and the other interfaces."""

    ports: tuple[Port, ...]
    left_out: tuple[LeftOut, ...] = ()
    warnings: tuple[str, ...] = ()
    later: tuple[Port, ...] = ()
    """Ports found by ``auto`` that wait for a usable address; not in ``ports``."""

    def why_not(self, device: str) -> str:
        """Returns the reason why an interface is not a rail."""
        return next((each.why for each in self.left_out if each.device == device), "")


Denied = Callable[[str], str]
"""Returns the reason why sockets cannot be bound to a device; empty: binding works."""


def select_ports(
    spec: str,
    management: str,
    management_address: str | None,
    rdma: Sequence[RdmaPort] = (),
    may_wait: bool = False,
) -> Choice:
    """Selects this node's rail ports by the rule of :func:`choose`.

    Args:
        may_wait: see :func:`choose`.
        rdma: RDMA ports of this node; ``spec`` may contain their names, as ``device`` or
            ``device:port``.

    Raises:
        ConfigError: see :func:`choose`; or ``spec`` is ``auto``, and this process may not open
            netlink sockets.
        OSError: the kernel does not list the interfaces in any way.
    """
    spec = ",".join(_interface_of(item.strip(), spec, rdma) for item in spec.split(","))
    entries = [management, *(spec.split(",") if spec.strip() != "auto" else ())]
    try:
        interfaces = list_interfaces([device_of(each) for each in entries if each])
    except OSError as error:
        interfaces = list_interfaces_by_ioctl()
        if spec.strip() == "auto":
            choice = choose(spec, management, management_address, interfaces, rdma)
            raise _needs_netlink(error, choice, interfaces) from error
    return choose(spec, management, management_address, interfaces, rdma, binding_denied, may_wait)


def _needs_netlink(error: OSError, choice: Choice, interfaces: Sequence[Interface]) -> ConfigError:
    """Returns the error for ``auto`` without netlink; proposes entries for an explicit list."""
    ports = [port for port in choice.ports if not port.shares_control] or choice.ports
    entries = ",".join(f"{port.device}={port.address}" for port in ports)
    return wrong(
        "rails",
        "auto",
        f"needs the kernel's list of interfaces by netlink, refused here ({error.strerror}); set "
        f"device=address entries, such as R2CCL_RAILS={entries or 'eth0=10.0.0.1'}, or allow "
        "AF_NETLINK for this process",
        interfaces,
    )


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


def choose(
    spec: str,
    management: str,
    management_address: str | None,
    interfaces: Sequence[Interface],
    rdma: Sequence[RdmaPort] = (),
    denied: Denied = lambda _: "",
    may_wait: bool = False,
) -> Choice:
    """Chooses rail ports among interfaces, by the rule of ``R2CCL_RAILS``.

    Args:
        spec: ``auto``: every usable port, the fastest first; of equally fast ports, the port with
            the engine's control traffic last. Otherwise a comma-separated list in rail order:
            devices, addresses (also any of 127.0.0.0/8), or ``device=address``.
        management: device or address excluded from rails; empty: none.
        management_address: numeric address of the engine's control traffic, if known.
        interfaces: interfaces of this node.
        rdma: RDMA ports of this node.
        denied: test of the right to bind sockets to a device.
        may_wait: a start is possible although no entry of an explicit list works so far.

    Returns:
        The ports; none if ``auto`` finds no usable port.

    Raises:
        ConfigError: names ``R2CCL_RAILS`` or ``R2CCL_MANAGEMENT``, the value, and all interfaces.
    """
    kept_free = find(management, interfaces) if management else None
    if management and kept_free is None:
        raise wrong("management", management, "is no device or address here", interfaces)
    control = find(management_address, interfaces) if management_address else None
    described = _Describer(interfaces, rdma, control)
    host = host_addresses(interfaces)
    warnings: list[str] = []
    later: list[Port] = []
    if spec.strip() == "auto":
        ports = [
            described.port(each.name, each, addresses)
            for each in interfaces
            if each is not kept_free and (addresses := _auto_addresses(each, interfaces, host))
        ]
        ports = _with_reserves(ports)
        ports.sort(key=_rank)
        taken = {port.device for port in ports}
        later = [
            described.port(each.name, each, (awaited_address(each),), why)
            for each, why in waiting_ports(interfaces)
            if each is not kept_free and each.name not in taken
        ]
    else:
        named = named_ports(spec, interfaces, management, may_wait)
        warnings += [_named_warning(each, spec) for each in named if each.warning]
        ports = [
            described.port(
                each.device, each.interface, each.addresses, each.warning if each.waits else ""
            )
            for each in named
        ]
        ports = _with_reserves(ports)
    ports, problems = _separable(ports, denied)
    warnings += problems
    ports = [replace(port, name=f"rail{index}") for index, port in enumerate(ports)]
    left_out = _left_out(ports, interfaces, kept_free) if spec.strip() == "auto" else ()
    further = enumerate(later[:MOST_LATER], len(ports))
    later = [replace(port, name=f"rail{index}") for index, port in further]
    return Choice(tuple(ports), tuple(left_out), tuple(warnings), tuple(later))


def _named_warning(port: Named, spec: str) -> str:
    if not port.waits:
        return port.warning
    return f"rails (R2CCL_RAILS) is {spec!r}: it {port.warning}; a rail once it has an address"


def unusable(interface: Interface, interfaces: Sequence[Interface] = ()) -> str:
    """Returns the reason why ``auto`` skips an interface; empty: ``auto`` uses the interface."""
    if interface.loopback:
        return "loopback"
    if interface.kind in _NOT_PORTS and not _has_physical_member(interface, interfaces):
        return f"a {interface.kind} interface"
    # A VRF groups interfaces for routing only; a bridge, bond or team carries their traffic itself.
    if interface.master and interface.master_kind != "vrf":
        return f"belongs to {interface.master}"
    if not interface.up:
        return "down"
    addresses = own_addresses(interface)
    if not addresses:
        return "no address" if interface.carrier else "no carrier"
    if only_ipv6_link_local(addresses):
        return "no address except IPv6 link-local; R2CCL_RAILS may name the interface"
    return ""


def _has_physical_member(bridge: Interface, interfaces: Sequence[Interface]) -> bool:
    return bridge.kind == "bridge" and any(
        each.master == bridge.name and not each.kind for each in interfaces
    )


def _auto_addresses(
    interface: Interface, interfaces: Sequence[Interface], host: Sequence[Address]
) -> tuple[PortAddress, ...]:
    """Returns the addresses of a port that ``auto`` takes; empty: ``auto`` skips the interface."""
    why = unusable(interface, interfaces)
    if not why:
        return own_addresses(interface)
    if why.startswith("no address"):
        borrowed = borrowed_addresses(interface, host)
        return (*borrowed, *own_addresses(interface)) if borrowed else ()
    return ()


class _Describer:
    """Makes ports of interfaces, with the facts that do not depend on other ports."""

    def __init__(
        self,
        interfaces: Sequence[Interface],
        rdma: Sequence[RdmaPort],
        control: Interface | None,
    ) -> None:
        self._units = find_units(interfaces, rdma)
        self._rdma = rdma
        self._control = control

    def port(
        self,
        device: str,
        interface: Interface | None,
        addresses: Sequence[PortAddress],
        waits: str = "",
    ) -> Port:
        first, *others = addresses
        family = socket.AF_INET6 if ":" in first.address else socket.AF_INET
        port = Port("", device, first.address, family, first.network, None, first.borrowed)
        unit = self._units.get(device, Unit(""))
        port = replace(port, others=tuple(others), unit=unit, waits=waits)
        if interface is None:
            return replace(port, carrier=False, unit=Unit(device))
        rdma = port_of_interface(self._rdma, device)
        return replace(
            port,
            rdma=rdma,
            mtu=interface.mtu,
            mbit_s=interface.mbit_s or (int(rdma.gbit_s * 1000) if rdma else 0),
            carrier=interface.up and interface.carrier,
            fading=interface.state_of(ipaddress.ip_address(first.address)),
            shares_control=interface is self._control,
            reserve=_slow_kind(interface),
            routes=interface.routes,
            pci=interface.pci or (rdma.pci if rdma else ""),
        )


def _slow_kind(interface: Interface) -> str:
    if interface.wireless:
        return "Wi-Fi"
    if interface.inner:
        return "a veth pair inside this node"
    return f"a {interface.kind} overlay" if interface.kind in _OVERLAYS else ""


def _with_reserves(ports: Sequence[Port]) -> list[Port]:
    """Marks ports that are much slower than the fastest port as reserves."""
    fastest = max((port.mbit_s for port in ports if not port.reserve), default=0)
    return [
        replace(port, reserve=f"below 1/{RESERVE_SHARE} of the fastest port")
        if not port.reserve and 0 < port.mbit_s * RESERVE_SHARE < fastest
        else port
        for port in ports
    ]


def _rank(port: Port) -> tuple[bool, int, bool, list[tuple[int, str]]]:
    """Returns the sort key of ``auto``.

    An unknown speed counts as fast, but as slow on the port with control traffic.
    """
    unknown = 0 if port.shares_control else -(10**9)
    slowness = -port.mbit_s if port.mbit_s else unknown
    return bool(port.reserve), slowness, port.shares_control, natural(port.device)


def _separable(ports: Sequence[Port], denied: Denied) -> tuple[list[Port], list[str]]:
    """Joins ports that only a bound socket tells apart, if sockets cannot be bound to devices."""
    kept: list[Port] = []
    warnings: list[str] = []
    for port in ports:
        same = [each for each in kept if port.borrowed and each.address == port.address]
        link_local = [each for each in kept if _link_local(port) and _link_local(each)]
        why = denied(port.device) if same or link_local else ""
        if why and same:
            kept[kept.index(same[0])] = replace(same[0], device="")
            warnings.append(
                f"{port.device} is no rail of its own: it shares {port.address} with other ports, "
                f"and {why}"
            )
            continue
        if why:
            warnings.append(f"rails over {port.device} may use another port: {why}")
        kept.append(port)
    return kept, warnings


def _link_local(port: Port) -> bool:
    return port.address.startswith(("169.254.", "fe8", "fe9", "fea", "feb"))


def _left_out(
    ports: Sequence[Port], interfaces: Sequence[Interface], kept_free: Interface | None
) -> Iterator[LeftOut]:
    taken = {port.device for port in ports}
    speeds = [port.mbit_s for port in ports if port.mbit_s and not port.reserve]
    below = {each.lower for each in interfaces if each.name in taken}
    for each in interfaces:
        if each.name in taken:
            continue
        kept = each is kept_free
        why = "management (R2CCL_MANAGEMENT)" if kept else unusable(each, interfaces)
        works = each.up and each.carrier and each.kind in _WIRED and not each.master
        counts = kept or (works and each.name not in below)
        faster = bool(counts and speeds and each.mbit_s > min(speeds))
        yield LeftOut(each.name, why, each.mbit_s, faster)
