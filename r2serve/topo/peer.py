"""Rails between this node and another node, from the other node's ``topo`` output."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_type_hints

from r2serve.errors import ConfigError
from r2serve.ports.pairing import PortInfo, pair_ports, why_tcp


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

    def info(self) -> PortInfo:
        """Returns the port as announced to peers by the engine."""
        return PortInfo(
            device=self.device,
            address=self.address,
            port=0,
            verbs_device=self.verbs_device,
            verbs_port=self.verbs_port,
            network=self.network,
            fabric=self.fabric,
        )

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
        if not isinstance(told[name], (int, float) if kind is float else kind):
            raise TypeError(f"{name} is {told[name]!r}")
    return End(**told)


def pairs(own: Sequence[End], other: Sequence[End]) -> tuple[PortPair, ...]:
    """Returns the rails between two nodes; no rails if a node has no port."""
    if not own or not other:
        return ()
    mine, theirs = ({end.info(): end for end in ends} for ends in (own, other))
    return tuple(
        _pair(mine[near], theirs[far]) for near, far in pair_ports(list(mine), list(theirs))
    )


def _pair(own: End, other: End) -> PortPair:
    why = why_tcp(own.info(), other.info())
    return PortPair(own, other, "tcp" if why else "verbs", why, min(own.gbit_s, other.gbit_s))
