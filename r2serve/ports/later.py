"""Ports that ``auto`` finds although they have no usable address so far."""

from __future__ import annotations

from collections.abc import Sequence

from r2serve.ports.addresses import is_global
from r2serve.ports.interfaces import Interface

_KINDS = {"", "bond", "team", "vlan", "macvlan", "ipvlan"}
"""Kinds of interfaces that may get an address later."""


def waiting_ports(interfaces: Sequence[Interface]) -> list[tuple[Interface, str]]:
    """Returns the interfaces that are no rails so far and may become rails, with the reasons."""
    # A veth is a port in a container, and the way to a container on a host with physical ports.
    host = any(not each.kind and not each.loopback for each in interfaces)
    kinds = _KINDS if host else _KINDS | {"veth"}
    lower = {each.lower for each in interfaces}
    return [
        (each, why)
        for each in interfaces
        if each.kind in kinds and each.name not in lower and not _serves_others(each)
        if (why := _reason(each))
    ]


def _serves_others(interface: Interface) -> bool:
    """Whether another interface carries the traffic, or both ends are in this namespace."""
    enslaved = interface.master and interface.master_kind != "vrf"
    return interface.loopback or interface.inner or bool(enslaved)


def _reason(interface: Interface) -> str:
    """Returns why an interface has no usable address so far; empty: it has one, or never will."""
    own = [each for each in interface.addresses if is_global(each)]
    if not interface.up:
        return f"down, although it has {own[0]}" if own else ""
    if own or any(each.version == 4 for each in interface.addresses):
        return ""
    unready = [f"{each} is {state}" for each, state in interface.states if is_global(each)]
    if unready:
        return ", ".join(unready)
    return "no address so far" if interface.carrier else NOTHING


NOTHING = "no carrier and no address so far"
"""Reason of a port that is probably not in use."""
