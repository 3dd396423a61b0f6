"""What two ports have in common: the best pair of their addresses for a rail."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache

from r2serve.ports.addresses import is_global, parse
from r2serve.ports.info import PortInfo
from r2serve.ports.interfaces import Address

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Way(IntEnum):
    """How packets get from a port to a port; small is better."""

    NETWORK = 0
    """Through a common network."""
    WIRE = 1
    """Over a wire that joins both ports: link-local addresses, or addresses of the hosts."""
    ROUTE = 2
    """Through routers, or unknown."""
    LATER = 3
    """Perhaps, once a port has an address or a carrier."""


@dataclass(frozen=True)
class Common:
    """A pair of addresses of two ports."""

    way: Way
    low: PortInfo
    high: PortInfo

    @property
    def unequal(self) -> bool:
        """Whether the ports differ in speed or in rank."""
        speeds = {self.low.mbit_s, self.high.mbit_s} - {0}
        return len(speeds) > 1 or self.low.reserve != self.high.reserve

    @property
    def verbs(self) -> bool:
        """Whether the rail can use verbs."""
        return bool(self.low.fabric) and self.low.fabric == self.high.fabric

    def order(self) -> tuple[Way, bool, int]:
        """Returns the sort key among the pairs of addresses of two ports."""
        return self.way, not self.verbs, 6 if ":" in self.low.address else 4


def common(low: PortInfo, high: PortInfo) -> Common | None:
    """Returns the best pair of addresses of two ports; None: a rail cannot work."""
    return min(_pairs(low, high), key=Common.order, default=None)


def all_common(low: Sequence[PortInfo], high: Sequence[PortInfo]) -> dict[tuple[int, int], Common]:
    """Returns what each pair of ports has in common, by both places; only pairs that can work."""
    return {
        (mine, theirs): found
        for mine, port in enumerate(low)
        for theirs, other in enumerate(high)
        if (found := common(port, other)) is not None
    }


def why_nothing(low: PortInfo, high: PortInfo) -> str:
    """Returns the reason why two ports have nothing in common."""
    if {each.address for each in low.views()} == {each.address for each in high.views()}:
        return f"both ends have the address {low.address}"
    if not {*_families(low)} & {*_families(high)}:
        return "no common address family"
    here, there = (
        ", ".join(each.network or each.address for each in port.views()) for port in (low, high)
    )
    return f"no common network ({here} and {there}), and no route"


def _families(port: PortInfo) -> Iterator[int]:
    for each in port.views():
        address = parse(each.address)
        if address is not None:
            yield address.version


def _pairs(low: PortInfo, high: PortInfo) -> Iterator[Common]:
    for mine in low.views():
        for theirs in high.views():
            way = _way(mine, theirs)
            if way is not None:
                yield Common(way, mine, theirs)


def _way(low: PortInfo, high: PortInfo) -> Way | None:
    if low.waits or high.waits:
        return _later_way(low, high)
    mine, theirs = parse(low.address), parse(high.address)
    if mine is None or theirs is None:
        return Way.ROUTE  # a name of a test or a later release: the core decides
    if mine.version != theirs.version:
        return None
    if mine.is_loopback or theirs.is_loopback:
        return Way.NETWORK if mine.is_loopback and theirs.is_loopback else None
    if mine == theirs:
        return None
    if mine.is_link_local or theirs.is_link_local:
        return Way.WIRE if mine.is_link_local and theirs.is_link_local else None
    if low.borrowed and high.borrowed:
        return Way.WIRE
    if low.network and low.network == high.network:
        return Way.NETWORK
    if _within(mine, high.network) and _within(theirs, low.network):
        return Way.NETWORK
    return Way.ROUTE if _routed(low, theirs) and _routed(high, mine) else None


def _later_way(low: PortInfo, high: PortInfo) -> Way | None:
    """Returns the way of two ports, one of which has no usable address so far."""
    mine, theirs = _network(low.network), _network(high.network)
    if mine is None or theirs is None or mine.is_link_local or theirs.is_link_local:
        return Way.LATER
    return Way.NETWORK if mine == theirs else None


def _within(address: Address, network: str) -> bool:
    known = _network(network)
    return known is not None and address in known


def _routed(port: PortInfo, address: Address) -> bool:
    """Whether the port has a route to an address, or its routes are unknown."""
    if port.routes is None or not is_global(address):
        return port.routes is None
    return any(_within(address, route) for route in port.routes)


@cache
def _network(text: str) -> Network | None:
    """Parses a network; None: other text."""
    try:
        return ipaddress.ip_network(text)
    except ValueError:
        return None
