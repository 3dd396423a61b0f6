"""Shared fate of ports: network interfaces on one physical port, or on one card.

A unit is the hardware behind a port. Ports of one unit fail together, so a second port of a unit
adds bandwidth, perhaps, but no redundancy. The kernel tells the hardware in several ways, by
driver: the interface below a VLAN, the id and name of a physical port, the PCI function, the system
image GUID of an RDMA device. Missing facts never join ports.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from r2serve.ports.interfaces import Interface
from r2serve.ports.rdma import RdmaPort

_SPLIT = re.compile(r"(?<=\d)s\d+$")
"""Suffix of a port behind a breakout cable, as in ``p1s2``: several ports of one transceiver."""


@dataclass(frozen=True)
class Unit:
    """The hardware behind an interface."""

    name: str
    """Name of the lowest interface, or of the card."""
    why: str = ""
    """Reason why interfaces share the unit, as ``the physical port eth0``; empty: not shared."""
    card: str = ""
    """Card with further units, which have cables of their own; empty: none."""


def find_units(interfaces: Sequence[Interface], rdma: Sequence[RdmaPort] = ()) -> dict[str, Unit]:
    """Returns the unit of each interface, by name; loopback has none.

    Interfaces share a unit if the kernel shows one physical port for both. Interfaces of one card
    share a unit, too, unless the driver names their ports, and the names differ.
    """
    known = {each.name: each for each in interfaces if not each.loopback}
    roots = {name: root_of(each, known) for name, each in known.items()}
    guids = {port.netdev: port.system_image_guid for port in rdma if port.system_image_guid}
    own = [known[name] for name in sorted({*roots.values()} & {*known}, key=natural)]
    shared: dict[str, str] = {}
    groups = _joined(own, lambda each: _port_facts(each, own))
    cards = _joined(own, lambda each: _card_facts(each, guids))
    for card in cards:
        parts = [group for group in groups if group[0] in card]
        names = [{_port_name(known[each]) for each in part} - {""} for part in parts]
        if len(parts) > 1 and not all(names):
            _merge(groups, card)
            shared.update(dict.fromkeys(card, f"one card ({_card_name(card, known)})"))
        elif len(parts) > 1:
            for wanted in set().union(*names):
                same = [part[0] for part, own in zip(parts, names, strict=True) if wanted in own]
                _merge(groups, same)
    units = {}
    for group in groups:
        card = next(names for names in cards if group[0] in names)
        why = shared.get(group[0], f"the physical port {group[0]}")
        units.update(dict.fromkeys(group, Unit(group[0], why, _beside(group, card, known))))
    users: dict[str, int] = defaultdict(int)
    for root in roots.values():
        users[units[root].name if root in units else root] += 1
    found = {}
    for name, root in roots.items():
        unit = units.get(root, Unit(root, f"the physical port below {root}"))
        alone = users[unit.name] == 1
        found[name] = Unit(unit.name, "" if alone else unit.why, unit.card)
    return found


def root_of(own: Interface, known: dict[str, Interface]) -> str:
    """Returns the name of the lowest interface below a VLAN, macvlan or tunnel, or its own name."""
    seen = {own.name}
    while own.lower and own.lower not in seen:
        seen.add(own.lower)
        if own.lower not in known:
            return own.lower
        own = known[own.lower]
    return own.name


def natural(name: str) -> list[tuple[int, str]]:
    """Returns a sort key with eth2 before eth10, equal on every node."""
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)
    ]


def _port_facts(own: Interface, among: Sequence[Interface]) -> Iterator[str]:
    """Yields facts about the physical port; interfaces with an equal fact share the port."""
    if own.port_id:
        yield f"id {own.port_id}"
    if own.switch_id and own.port_name:
        yield f"port {_port_name(own)} of {own.switch_id}"
    function = own.parent_pci or own.pci
    # A function with several interfaces has several ports, or representors of ports.
    if function and (own.parent_pci or sum(each.pci == function for each in among) == 1):
        yield f"function {function}"


def _card_facts(own: Interface, guids: dict[str, str]) -> Iterator[str]:
    function = own.parent_pci or own.pci
    if _slot(function):
        yield f"slot {_slot(function)}"
    if own.name in guids:
        yield f"GUID {guids[own.name]}"


def _port_name(own: Interface) -> str:
    return _SPLIT.sub("", own.port_name)


def _slot(function: str) -> str:
    return function.rpartition(".")[0]


def _joined(
    interfaces: Sequence[Interface], facts: Callable[[Interface], Iterable[str]]
) -> list[list[str]]:
    """Returns the groups of interfaces with common facts, each in natural order."""
    groups = [[each.name] for each in interfaces]
    by_fact: dict[str, list[str]] = defaultdict(list)
    for each in interfaces:
        for fact in facts(each):
            by_fact[fact].append(each.name)
    for members in by_fact.values():
        _merge(groups, members)
    return groups


def _merge(groups: list[list[str]], members: Sequence[str]) -> None:
    """Merges the groups of all members."""
    merged = [group for group in groups if not {*group}.isdisjoint(members)]
    for group in merged:
        groups.remove(group)
    groups.append(sorted(itertools.chain(*merged), key=natural))


def _card_name(card: Sequence[str], known: dict[str, Interface]) -> str:
    slots = {_slot(known[name].parent_pci or known[name].pci) for name in card} - {""}
    return "PCI " + " and ".join(sorted(slots)) if slots else "equal system image GUID"


def _beside(group: Sequence[str], card: Sequence[str], known: dict[str, Interface]) -> str:
    return _card_name(card, known) if len(card) > len(group) else ""
