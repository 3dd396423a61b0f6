"""The ports of this node: all ends of a rail together, of every worker and towards every peer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from r2serve.observe.journal import RailCounters
from r2serve.observe.watch import Rates, Worker

UP, SLOW, SUSPECT, NEVER_UP, DOWN = "UP", "UP, slow", "SUSPECT", "never up", "DOWN"
FROM_BEST_TO_WORST = (UP, SLOW, SUSPECT, NEVER_UP, DOWN)


def state_of(rail: RailCounters) -> str:
    """Returns the state of a rail's end in the words of all commands.

    A lost rail is DOWN until it is back, although its state is mostly CONNECTING.
    """
    if rail.presence == "lost":
        return DOWN
    if rail.presence == "never up":
        return NEVER_UP
    return SLOW if rail.state == UP and rail.slow else rail.state


def why_of(rail: RailCounters) -> str:
    """Returns why a rail's end is not UP, with the location of the fault, and a drill at it.

    Empty: not known, and no drill.
    """
    drill = [f"drill: {rail.drill}"] if rail.drill else []
    if rail.presence == "never up":
        return ", ".join([rail.never_up.replace("_", " "), *drill])
    if rail.state == UP:
        return "".join(drill)
    return ", ".join([*(one for one in (rail.cause, rail.verdict) if one != "none"), *drill])


@dataclass
class PortState:
    """A port of this node, in the worst state of its rail's ends."""

    name: str
    """Name of the rail, e.g. rail0@node0."""
    device: str
    kind: str
    reserve: bool
    state: str = UP
    whys: dict[str, None] = field(default_factory=dict)
    """Reasons of the ends that are not UP, each once."""
    links: int = 0
    up: int = 0
    """Ends in state UP, slow ones included."""
    workers: set[str] = field(default_factory=set)
    peers: set[str] = field(default_factory=set)
    tx: float = 0.0
    rx: float = 0.0
    """Traffic of all ends, bytes/s."""
    round_trip_ns: int = 0
    """Longest of the ends."""

    def take(self, worker: str, rail: RailCounters, rates: Rates) -> None:
        """Adds an end."""
        state = state_of(rail)
        self.state = max(self.state, state, key=FROM_BEST_TO_WORST.index)
        if why := why_of(rail):
            self.whys[why] = None
        self.links += 1
        self.up += rail.state == UP
        self.workers.add(worker)
        self.peers.add(rail.peer)
        self.tx += rates.tx
        self.rx += rates.rx
        self.round_trip_ns = max(self.round_trip_ns, rail.round_trip_ns)


@dataclass(frozen=True)
class Wanted:
    """A choice of rails: every condition that is set holds."""

    down: bool = False
    """Only ends that are not UP."""
    rails: tuple[str, ...] = ()
    """Only these, by name (rail0@node0 or rail0), interface or RDMA device."""
    peers: tuple[str, ...] = ()
    """Only towards these, as in ``rank 1`` or ``1``."""

    def __contains__(self, rail: RailCounters) -> bool:
        parts = rail.device.split("/")  # an RDMA device may be named without its port
        short = [part.partition(":")[0] for part in parts]
        names = (rail.name, rail.name.partition("@")[0], rail.device, *parts, *short)
        return (
            not (self.down and rail.state == UP)
            and (not self.rails or any(name in self.rails for name in names))
            and (not self.peers or self._is_peer(rail.peer))
        )

    def has_event(self, rail: str, peer: str) -> bool:
        """Whether an event at this rail is wanted; events without a rail are, unless chosen out."""
        chosen = not self.rails or rail in self.rails or rail.partition("@")[0] in self.rails
        return chosen and (not self.peers or self._is_peer(peer))

    def _is_peer(self, peer: str) -> bool:
        return peer in self.peers or peer.removeprefix("rank ") in self.peers


EVERYTHING = Wanted()


def ports_of(workers: Iterable[Worker], wanted: Wanted = EVERYTHING) -> list[PortState]:
    """Returns the ports with wanted ends, in the order of the first worker that has them."""
    found: dict[tuple[str, str, str], PortState] = {}
    for worker in workers:
        for entry, rail in enumerate(worker.journal.rails):
            if rail in wanted:
                key = rail.name, rail.device, rail.kind
                port = found.setdefault(key, PortState(*key, rail.reserve))
                port.take(worker.key, rail, worker.rate(entry))
    return list(found.values())
