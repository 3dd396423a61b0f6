"""Common parts of the tests with real faults: a stream of all-reduces over a lab, and faults."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from timely import timely

from r2serve.lab.faults import nic_name
from r2serve.lab.lab import Lab
from r2serve.lab.nodes import Node

KIB = 1024
MIB = 1024 * 1024
REJOIN_S = 60.0
# Upper bound of any stall. Stalls reach up to 1 s with many more runnable threads than cores.
BOUND_S = 5.0
MOST_TRIES = 20  # faults of a kind until a fault stalls a step

# Name of the fault, function that makes the fault at a node's rail, function that heals the rail.
Fault = tuple[str, Callable[[Lab, int, int], object], Callable[[Lab, int, int], object]]


RESETS = "tcp reset"
PORT_UNREACHABLE = "icmp type port-unreachable"
PROHIBITED = "icmp type admin-prohibited"
_REJECTS = "inet rejects"
_TRANSLATES = "ip translates"


@contextmanager
def rejecting(node: Node, answer: str = RESETS) -> Iterator[Callable[[], int]]:
    """A filter of the node rejects all TCP packets from outside; no end of a connection sees a FIN.

    RESETS ends connections and refuses new ones. PORT_UNREACHABLE only refuses new ones, and
    PROHIBITED lets them fail with another error. Yields a function for the number of rejected
    packets.
    """
    rules = (
        f"add table {_REJECTS}; "
        f"add chain {_REJECTS} input {{ type filter hook input priority 0; }}; "
        f'add rule {_REJECTS} input iifname != "lo" meta l4proto tcp counter reject with {answer}'
    )
    node.run("nft", rules)

    def rejected() -> int:
        found = re.search(r"counter packets (\d+)", node.run("nft", f"list table {_REJECTS}"))
        assert found is not None
        return int(found[1])

    try:
        yield rejected
    finally:
        node.run("nft", f"delete table {_REJECTS}")


@contextmanager
def translating(lab: Lab, node: int, rail: int, address: str) -> Iterator[None]:
    """A NAT of the node sends its connections over a rail from another source address.

    No NIC carries the address, so the other nodes get a fixed entry for it.

    Raises:
        LabCommandError: the kernel has no NAT.
    """
    device = nic_name(rail)
    rules = (
        f"add table {_TRANSLATES}; "
        f"add chain {_TRANSLATES} out {{ type nat hook postrouting priority 100; }}; "
        f'add rule {_TRANSLATES} out oifname "{device}" meta l4proto tcp snat to {address}'
    )
    lab.nodes[node].run("nft", rules)
    try:
        (link,) = json.loads(lab.nodes[node].run("ip", "-json", "link", "show", "dev", device))
        entry = ["lladdr", link["address"], "dev", device, "nud", "permanent"]
        for other in lab.nodes:
            if other.index != node:
                other.run("ip", "neigh", "replace", address, *entry)
        yield
    finally:
        lab.nodes[node].run("nft", f"delete table {_TRANSLATES}")


def _heal(lab: Lab, node: int, rail: int) -> object:
    return lab.heal(node, rail)


def _take_address(lab: Lab, node: int, rail: int) -> object:
    address = f"{lab.nodes[node].rail_address(rail)}/24"
    return lab.nodes[node].run("ip", "address", "del", address, "dev", f"rail{rail}")


def _give_address(lab: Lab, node: int, rail: int) -> object:
    address = f"{lab.nodes[node].rail_address(rail)}/24"
    return lab.nodes[node].run("ip", "address", "add", address, "dev", f"rail{rail}")


CABLE: Fault = ("carrier", lambda lab, node, rail: lab.cut(node, rail), _heal)
OWN_PORT: Fault = (
    "carrier",
    lambda lab, node, rail: lab.cut(node, rail, at_switch=False),
    _heal,
)
BLACK_HOLE: Fault = ("black hole", lambda lab, node, rail: lab.black_hole(node, rail), _heal)
ADDRESS: Fault = ("address", _take_address, _give_address)
LOST_FROM: Fault = (
    "one-way loss, from the node",
    lambda lab, node, rail: lab.one_way(node, rail, "from"),
    _heal,
)
LOST_TO: Fault = (
    "one-way loss, to the node",
    lambda lab, node, rail: lab.one_way(node, rail, "to"),
    _heal,
)
REFUSED: Fault = (
    "egress refused by the own host",
    lambda lab, node, rail: lab.egress_refused(node, rail),
    _heal,
)
RESET: Fault = ("reset", lambda lab, node, rail: lab.reset(node, rail), _heal)
HALF_OPEN: Fault = ("half-open", lambda lab, node, rail: lab.half_open(node, rail), _heal)
STALE: Fault = ("stale connection", lambda lab, node, rail: lab.stale(node, rail), _heal)
MTU_HOLE: Fault = ("MTU hole", lambda lab, node, rail: lab.mtu_hole(node, rail), _heal)


class Stream:
    """A stream of all-reduces between two ranks, on separate nodes of a lab."""

    def __init__(
        self,
        jobs: Any,
        lab: Lab,
        *,
        size: int = 16 * KIB,
        per_rank: Callable[[int], Mapping[str, Any]] | None = None,
        **config: str | int | float | bool,
    ) -> None:
        """Starts both ranks, and waits until all rails are UP.

        size: bytes of an all-reduce. config: options of r2ccl, in addition to options for fast
        rejoining. per_rank: further options by rank.
        """
        self.lab = lab
        options: dict[str, Any] = {
            "rails": ",".join(f"rail{rail}" for rail in range(lab.rails)),
            "node": "",
            "rejoin_backoff_max_ms": 200,
            "handshake_timeout_ms": 500,
        }
        self.ranks = jobs.start(
            "stream.py",
            2,
            config=options | config,
            per_rank=per_rank,
            nodes=lab.nodes,
            host=lab.nodes[0].management_address,
            bytes=size,
            pause_s=0.0005,
        )
        for rank in self.ranks:
            rank.hear(60)
        timely(lambda: all(map(self.is_up, range(lab.rails))), "all rails UP", REJOIN_S)
        self.seen = [0, 0]
        self.look()

    def look(self) -> list[list[dict[str, Any]]]:
        """Returns the events of both ranks since the last call."""
        new = []
        for rank in self.ranks:
            events = rank.ask({"do": "events"})
            new.append([e for e in events if e["time_ns"] > self.seen[rank.number]])
            self.seen[rank.number] = max([self.seen[rank.number], *(e["time_ns"] for e in events)])
        return new

    def await_down(self, rail: int, eventually: Any) -> list[list[dict[str, Any]]]:
        """Waits until the rail is DOWN at both ranks; returns the new events of both ranks."""
        events: list[list[dict[str, Any]]] = [[], []]

        def down() -> bool:
            for old, new in zip(events, self.look(), strict=True):
                old += new
            return all(moves_of([of_rank], "DOWN", rail) for of_rank in events)

        eventually(f"rail {rail} DOWN at both ends", down)
        return events

    def rails(self, number: int) -> list[dict[str, Any]]:
        rails = self.ranks[number].ask({"do": "rails"})
        return [rail for rail in rails if rail["kind"] == "tcp"]

    def carried(self, among: Iterable[int] | None = None, for_s: float = 0.1) -> Counter[int]:
        """Returns the bytes carried by each rail for rank 0 during `for_s`.

        Measures longer while no rail carries bytes: a starved stream has pauses. among: rails to
        measure; None: all rails.
        """
        rails = list(range(self.lab.rails) if among is None else among)
        before = [rail["data_tx_bytes"] for rail in self.rails(0)]

        def measured() -> Counter[int] | None:
            time.sleep(for_s)
            after = [rail["data_tx_bytes"] for rail in self.rails(0)]
            found = Counter({rail: after[rail] - before[rail] for rail in rails})
            return found if found.total() > 0 else None

        found = timely(measured, f"bytes on one of the rails {rails}", REJOIN_S)
        assert found is not None
        return found

    def busiest(self) -> int:
        """Returns the rail with the most bytes of the stream at the moment."""
        return self.carried().most_common(1)[0][0]

    def control_bytes(self) -> int:
        rails = self.ranks[0].ask({"do": "rails"})
        return sum(rail["data_tx_bytes"] for rail in rails if rail["kind"] == "control")

    def leaves_control_alone(self) -> bool:
        """Whether the management NIC carries no data during further steps."""
        carried, steps = self.control_bytes(), self.steps()
        timely(lambda: self.steps() > steps + 100, "further steps", REJOIN_S)
        return self.control_bytes() == carried

    def short_of_cpu_ns(self) -> list[int]:
        """Returns the time in which each rank was ready to run and did not run."""
        return [int(rank.ask({"do": "short_of_cpu"})) for rank in self.ranks]

    def steps(self) -> int:
        return int(self.ranks[0].ask({"do": "steps"}))

    def steps_at_rest(self) -> int:
        """Waits until no step ends any more; returns the number of steps.

        After the loss of all rails, data that arrived before may still end a step or two.
        """

        def resting() -> list[int]:
            before = self.steps()
            time.sleep(0.5)
            return [before] if self.steps() == before else []

        return timely(resting, "no further steps", REJOIN_S)[0]

    def states(self, rail: int) -> list[str]:
        return [self.rails(number)[rail]["state"] for number in (0, 1)]

    def is_up(self, rail: int) -> bool:
        return self.states(rail) == ["UP", "UP"]

    def is_out(self, rail: int) -> bool:
        """Whether the rail is neither UP nor SUSPECT at both ends."""
        return not {"UP", "SUSPECT"} & set(self.states(rail))

    def finish(self) -> None:
        """Ends the stream after the same step at both ranks; fails after a wrong step."""
        self.ranks[0].ask({"do": "stop"})
        for rank in self.ranks:
            said = rank.hear(60)
            assert "steps" in said, said
            rank.wait(60)


def wait_until_up(ranks: list[Any]) -> None:
    """Waits until all rails of ranks of stream.py are UP: a start waits for the first rail only."""
    timely(
        lambda: all(rail["state"] == "UP" for rank in ranks for rail in rank.ask({"do": "rails"})),
        "all rails UP",
        REJOIN_S,
    )


def stalls_of(events: Iterable[Iterable[Mapping[str, Any]]]) -> list[int]:
    """Returns the stalls in the events of Stream.look, in ns."""
    return [event["value"] for of_rank in events for event in of_rank if event["kind"] == "stall"]


def moves_of(
    events: Iterable[Iterable[Mapping[str, Any]]], to: str, rail: int | None = None
) -> list[Mapping[str, Any]]:
    """Returns the transitions of a rail (None: of any rail) to the state `to`, of both ranks."""
    return [
        event
        for of_rank in events
        for event in of_rank
        if f"->{to}" in event["text"] and (rail is None or event["rail"].startswith(f"rail{rail}@"))
    ]


def strike(
    stream: Stream, fault: Fault, node: int, rail: int, eventually: Any, *, passes: bool = False
) -> list[int]:
    """Makes a fault and heals the rail; returns the stalls caused by the fault, in ns.

    The rail must go DOWN at both ends, no other rail may go DOWN, and steps must continue. The rail
    must rejoin after healing. A fault that `passes` affects only existing connections: the rail
    must rejoin before healing.
    """
    _, make, undo = fault
    steps = stream.steps()
    make(stream.lab, node, rail)
    events = stream.await_down(rail, eventually)
    eventually("further steps", lambda: stream.steps() > steps + 20)
    if not passes:
        undo(stream.lab, node, rail)
    eventually(f"rail {rail} UP", lambda: stream.is_up(rail), REJOIN_S)
    if passes:
        undo(stream.lab, node, rail)
    events = [old + new for old, new in zip(events, stream.look(), strict=True)]
    assert moves_of(events, "DOWN") == moves_of(events, "DOWN", rail), events
    return stalls_of(events)


def until_hit(strike_once: Callable[[], list[int]], hits: Iterable[int] = ()) -> list[int]:
    """Repeats a fault until a step stalls; returns all stalls, in ns.

    A fault between two steps stalls no step. hits: stalls so far.
    """
    found = list(hits)
    for _ in range(MOST_TRIES):
        if found:
            return found
        found += strike_once()
    assert found, f"none of {MOST_TRIES} faults stalled a step"
    return found


def check_bound(hits: Iterable[int], bound_s: float = BOUND_S) -> None:
    """Checks that no stall (in ns) is longer than the bound."""
    worst_s = max(hits, default=0) / 1e9
    timely(lambda: worst_s < bound_s, f"a stall of {worst_s:.2f} s, not below {bound_s:g} s", 0)


def check_whole_stall(
    events: Iterable[Iterable[Mapping[str, Any]]], short_ns: Iterable[int], outage_s: float
) -> float:
    """Checks that a rank's journal has the whole outage as a stall; returns the stall in s.

    A stall has no pauses of the waiting thread. The engine's background thread measures similar
    pauses, not equal ones. short_ns: pauses of each rank during the outage.
    """
    longest = [max(stalls_of([of_rank]), default=0) for of_rank in events]
    whole_s = max(stall + short for stall, short in zip(longest, short_ns, strict=True)) / 1e9
    # A stall that began again with each control frame or probe would be far below half.
    assert whole_s >= outage_s / 2
    timely(lambda: whole_s >= outage_s, f"{whole_s:.2f} s of an outage of {outage_s:g} s", 0)
    return max(longest) / 1e9


def summary(kind: str, hits: list[int], faults: int) -> str:
    """Formats a summary of the stalls (in ns) caused by a number of faults of a kind."""
    worst = f"worst {max(hits) / 1e6:.1f} ms" if hits else "none"
    return f"{kind}: {faults} faults, {len(hits)} stalls, {worst}"
