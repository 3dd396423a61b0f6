"""Rails between this node and another node, from the other node's ``topo`` output."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

from r2serve.errors import ConfigError
from r2serve.ports.info import AddressInfo, PortInfo
from r2serve.ports.pairing import pair_ports, why_tcp


@dataclass(frozen=True)
class End:
    """A rail port of a node, with the information needed by a peer."""

    rail: str
    device: str
    address: str
    network: str
    """Network of the address; empty: unknown."""
    verbs_device: str
    """RDMA device of the rails; empty: rails use TCP."""
    verbs_port: int
    fabric: str
    """``InfiniBand``, ``RoCE v1`` or ``RoCE v2``; empty: TCP."""
    gbit_s: float
    """Link speed in Gbit/s; 0: unknown."""
    mtu: int
    """MTU in bytes; 0: unknown."""
    gid: str = ""
    """GID of verbs rails; empty: none."""
    borrowed: bool = False
    """True: the address belongs to lo (an unnumbered port)."""
    others: tuple[AddressInfo, ...] = ()
    """Further addresses of the port."""
    carrier: bool = True
    reserve: bool = False
    """True: the port carries traffic only when nothing better is left."""
    unit: str = ""
    """Hardware of the port; ports with the same unit fail together. Empty: unknown."""
    routes: tuple[str, ...] | None = None
    """Networks with a route through the port; None: unknown."""

    @classmethod
    def of(cls, rail: str, info: PortInfo) -> End:
        """Describes a port as announced to peers by the engine."""
        common = {each.name for each in fields(cls)} & {each.name for each in fields(info)}
        values = {name: getattr(info, name) for name in common}
        return cls(rail=rail, gbit_s=info.mbit_s / 1000, **values)

    def info(self) -> PortInfo:
        """Returns the port as announced to peers by the engine, without a listener."""
        common = {each.name for each in fields(self)} & {each.name for each in fields(PortInfo)}
        values = {name: getattr(self, name) for name in common}
        return PortInfo(port=0, mbit_s=round(self.gbit_s * 1000), **values)

    def __str__(self) -> str:
        return str(self.info())


@dataclass(frozen=True)
class Peer:
    """Another node."""

    host: str
    ports: tuple[End, ...]


@dataclass(frozen=True)
class PortPair:
    """A local port and a peer's port that form a rail."""

    own: End
    other: End
    kind: str
    """``verbs`` or ``tcp``."""
    why_tcp: str
    gbit_s: float
    """Speed of the slower port in Gbit/s; 0: unknown for either port."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read(path: Path) -> Peer:
    """Reads a peer from a file with the output of ``r2serve topo --json``.

    Raises:
        ConfigError: the file has other content.
    """
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        return Peer(str(told["host"]), tuple(_end(port) for port in told["ports"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--peer: {path} must be the output of `r2serve topo --json` of this version: {error!r}"
        ) from error


def _end(told: Mapping[str, Any]) -> End:
    for name, kind in get_type_hints(End).items():
        plain = kind in (str, int, bool, float)
        if plain and not isinstance(told[name], (int, float) if kind is float else kind):
            raise TypeError(f"{name} is {told[name]!r}")
    others = tuple(AddressInfo(**each) for each in told["others"])
    routes = None if told["routes"] is None else tuple(map(str, told["routes"]))
    return End(**{**told, "others": others, "routes": routes})


def pairs(own: Sequence[End], other: Sequence[End]) -> tuple[PortPair, ...]:
    """Returns the rails between two nodes; no rails if a node has no port."""
    if not own or not other:
        return ()
    near, far = ([end.info() for end in ends] for ends in (own, other))
    return tuple(
        _pair(_end_of(mine, own), _end_of(theirs, other))
        for mine, theirs in pair_ports(near, far, None)
    )


def _end_of(info: PortInfo, ends: Sequence[End]) -> End:
    """Returns the end with the addresses of a rail."""
    own = next(
        end
        for end in ends
        if any(
            (view.device, view.address) == (info.device, info.address)
            for view in end.info().views()
        )
    )
    return End.of(own.rail, info)


def _pair(own: End, other: End) -> PortPair:
    why = why_tcp(own.info(), other.info())
    return PortPair(own, other, "tcp" if why else "verbs", why, min(own.gbit_s, other.gbit_s))
