"""Ports of an explicit list in ``R2CCL_RAILS``."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from r2serve.errors import ConfigError
from r2serve.ports.addresses import (
    UNSPECIFIED,
    UNSPECIFIED_V6,
    PortAddress,
    awaited_address,
    borrowed_addresses,
    host_addresses,
    listing,
    own_addresses,
    parse,
)
from r2serve.ports.interfaces import Address, Interface

_DEVICE = re.compile(r"[^\s/:=,]{1,15}")
"""Name of a network interface."""
_NO_FILTER = (
    "filters as in NCCL_SOCKET_IFNAME are unknown here: right are whole names, or auto, which "
    "leaves out docker0"
)


@dataclass(frozen=True)
class Named:
    """A port of the list."""

    device: str
    interface: Interface | None
    """None: the device is absent."""
    addresses: tuple[PortAddress, ...]
    warning: str = ""
    """Text of a warning; empty: none."""

    @property
    def waits(self) -> bool:
        """Whether the port has no usable address so far."""
        return self.addresses[0].address in (UNSPECIFIED, UNSPECIFIED_V6)


def find(text: str, interfaces: Sequence[Interface]) -> Interface | None:
    """Finds an interface by name or by address."""
    address = parse(text)
    for interface in interfaces:
        if interface.name == text or (address is not None and _carries(interface, address)):
            return interface
    unready = (each for each in interfaces if address and each.state_of(address))
    return next(unready, None)


def device_of(entry: str) -> str:
    """Returns the name of a device in an entry of the list; an address stays an address."""
    return entry.strip().partition("=")[0]


def named_ports(
    spec: str, interfaces: Sequence[Interface], management: str, may_wait: bool = False
) -> list[Named]:
    """Returns the ports of an explicit list, in order.

    A device without a usable address, or an absent device, is a port that waits for its address,
    unless no other entry works.

    Args:
        may_wait: a start is possible although every entry waits.

    Raises:
        ConfigError: names ``R2CCL_RAILS``, the value, and all interfaces.
    """
    found = [port for item in spec.split(",") for port in _entry(item.strip(), spec, interfaces)]
    waiting = [port for port in found if port.waits]
    if len(waiting) == len(found) and not may_wait:
        why = "; it ".join(dict.fromkeys(port.warning for port in waiting))
        raise wrong("rails", spec, why, interfaces)
    _check(spec, found, management)
    return [replace(port, addresses=_without(port.addresses, management)) for port in found]


def _without(addresses: tuple[PortAddress, ...], management: str) -> tuple[PortAddress, ...]:
    """Returns the addresses of a port without the management address."""
    kept = parse(management)
    return tuple(each for each in addresses if kept is None or parse(each.address) != kept)


def _entry(item: str, spec: str, interfaces: Sequence[Interface]) -> list[Named]:
    """Resolves an entry of the list."""

    def refused(why: str) -> ConfigError:
        return wrong("rails", spec, why, interfaces)

    if not item:
        raise refused("has an empty entry")
    if item == "auto":
        raise refused("has 'auto' among other entries")
    device, _, address_text = item.rpartition("=") if "=" in item else ("", "", item)
    address = parse(address_text)
    if item.startswith("^") or (item.startswith("=") and address is None):
        raise refused(f"has {item!r}; {_NO_FILTER}")
    if "=" in item and not device:
        raise refused(f"has {item!r}, without a device before the =")
    if address is None and device:
        raise refused(f"has {item!r}, but {address_text!r} is no address")
    interface = find(device or item, interfaces)
    if interface is None:
        absent = device or item
        why = f"has {item!r}, but this node has no such device or address"
        if parse(absent) is not None or not _DEVICE.fullmatch(absent):
            raise refused(why)
        # A later device has a number, so this is no name of one.
        begun = [each.name for each in interfaces if _is_numbered(each.name, absent)]
        if begun:
            raise refused(f"has {item!r}, the begin of {', '.join(begun)}; {_NO_FILTER}")
        return [Named(absent, None, (PortAddress(UNSPECIFIED),), why)]
    if address is None:
        return _device(item, interface, interfaces)
    if address.is_link_local and not device:
        owners = [each.name for each in interfaces if address in each.addresses]
        if len(owners) > 1:
            raise refused(f"has {item!r}, an address of {', '.join(owners)}: name the device, too")
    if not _carries(interface, address):
        if state := interface.state_of(address):
            why = f"has {item!r}, and {address} is {state}"
            return [Named(interface.name, interface, (awaited_address(interface),), why)]
        return [_moved(item, interface, address, refused)]
    over = _borrowers(address, interface, interfaces)
    if over:
        return over
    own = PortAddress(str(address), interface.network_of(address))
    return [Named(interface.name, interface, (own,))]


def _is_numbered(name: str, begin: str) -> bool:
    """Whether a name is this begin, without digits at its end, and a number."""
    return name.startswith(begin) and not begin[-1].isdigit() and name[len(begin) :].isdigit()


def _device(item: str, interface: Interface, interfaces: Sequence[Interface]) -> list[Named]:
    """Returns the port of a device, with all addresses."""
    if interface.loopback:
        own = host_addresses([interface])
        over = _borrowers(own[0], interface, interfaces) if own else []
        text = str(own[0]) if own else "127.0.0.1"
        return over or [Named(interface.name, interface, (PortAddress(text),))]
    borrowed = borrowed_addresses(interface, host_addresses(interfaces))
    addresses = (*borrowed, *own_addresses(interface))
    if not addresses:
        why = f"has {item!r}, which has {no_address(interface)}"
        return [Named(interface.name, interface, (awaited_address(interface),), why)]
    return [Named(interface.name, interface, addresses)]


def no_address(interface: Interface) -> str:
    """Says that a port has no usable address, and why, if the kernel tells."""
    why = ", ".join(f"{address} is {state}" for address, state in interface.states)
    return "no unicast address" + (f" ({why})" if why else "")


def _moved(
    item: str, interface: Interface, wanted: Address, refused: Callable[[str], ConfigError]
) -> Named:
    """Returns the port with its present link-local address, which changes with each boot."""
    if wanted.is_link_local:
        for own in own_addresses(interface):
            address = parse(own.address)
            if address and address.is_link_local and address.version == wanted.version:
                why = f"rail port {item} has {address} now; link-local addresses may change"
                return Named(interface.name, interface, (own,), why)
    raise refused(f"has {item!r}, but {interface.name} does not carry {wanted}")


def _borrowers(address: Address, owner: Interface, interfaces: Sequence[Interface]) -> list[Named]:
    """Returns a port for each unnumbered interface that carries packets of a host's address."""
    if address not in host_addresses([owner]):
        return []
    return [
        Named(interface.name, interface, borrowed)
        for interface in interfaces
        if interface.up and (borrowed := borrowed_addresses(interface, [address]))
    ]


def _carries(interface: Interface, address: Address) -> bool:
    # Linux answers on all of 127.0.0.0/8 without listing the addresses.
    everywhere = interface.loopback and address.version == 4 and address.is_loopback
    return everywhere or address in interface.addresses


def _check(spec: str, found: Sequence[Named], management: str) -> None:
    """Refuses duplicates and the management NIC."""
    for one, other in itertools.combinations(found, 2):
        first = one.addresses[0]
        if one.device == other.device and first == other.addresses[0]:
            text = one.device if one.waits else first.address
            raise wrong("rails", spec, f"has {text} twice", [])
    for port in found:
        address = port.addresses[0].address
        if management and (management == port.device or parse(management) == parse(address)):
            why = f"has {port.device}={address}, the management NIC by R2CCL_MANAGEMENT"
            raise wrong("rails", spec, why, [])


def wrong(field: str, value: str, why: str, interfaces: Sequence[Interface]) -> ConfigError:
    """Returns an error with the field, the value, the reason, and all interfaces."""
    text = f"{field} (R2CCL_{field.upper()}) is {value!r}: it {why}"
    there = listing(interfaces)
    return ConfigError(f"{text}; this node has: {there}" if there else text)
