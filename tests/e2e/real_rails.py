"""What the tests of real faults share: a stream of all-reduces over a lab, and faults by name."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from r2serve.lab.lab import Lab

KIB = 1024
MIB = 1024 * 1024
REJOIN_S = 20.0
# No stall comes near it; on a machine with many more runnable threads than cores some reach 1 s.
BOUND_S = 5.0

# Name, what happens to the rail of a node, and what undoes it.
Fault = tuple[str, Callable[[Lab, int, int], object], Callable[[Lab, int, int], object]]


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
RESET: Fault = ("reset", lambda lab, node, rail: lab.reset(node, rail), _heal)
HALF_OPEN: Fault = ("half-open", lambda lab, node, rail: lab.half_open(node, rail), _heal)
STALE: Fault = ("stale connection", lambda lab, node, rail: lab.stale(node, rail), _heal)


class Stream:
    """The two ranks, one in each node of a lab, and what has been read of their journals."""

    def __init__(
        self,
        jobs: Any,
        lab: Lab,
        *,
        size: int = 16 * KIB,
        per_rank: Callable[[int], Mapping[str, Any]] | None = None,
        **config: str | int | float | bool,
    ) -> None:
        """size: bytes of an all-reduce; config: options of r2ccl, on top of quick rejoining.

        per_rank: more of them by rank.
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
        deadline = time.monotonic() + REJOIN_S
        while not all(map(self.is_up, range(lab.rails))):
            assert time.monotonic() < deadline, [self.rails(0), self.rails(1)]
            time.sleep(0.02)
        self.seen = [0, 0]
        self.look()

    def look(self) -> list[list[dict[str, Any]]]:
        """New events of both ranks."""
        new = []
        for rank in self.ranks:
            events = rank.ask({"do": "events"})
            new.append([e for e in events if e["time_ns"] > self.seen[rank.number]])
            self.seen[rank.number] = max([self.seen[rank.number], *(e["time_ns"] for e in events)])
        return new

    def await_down(self, rail: int, eventually: Any) -> list[list[dict[str, Any]]]:
        """New events of both ranks, up to the moment when both have seen the rail go DOWN."""
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
        """Bytes that each rail (by default: every one) carries for the first rank in that time."""
        before = [rail["data_tx_bytes"] for rail in self.rails(0)]
        time.sleep(for_s)
        after = [rail["data_tx_bytes"] for rail in self.rails(0)]
        rails = range(self.lab.rails) if among is None else among
        return Counter({rail: after[rail] - before[rail] for rail in rails})

    def busiest(self) -> int:
        """The rail that carries the most of the stream right now."""
        return self.carried().most_common(1)[0][0]

    def control_bytes(self) -> int:
        rails = self.ranks[0].ask({"do": "rails"})
        return sum(rail["data_tx_bytes"] for rail in rails if rail["kind"] == "control")

    def steps(self) -> int:
        return int(self.ranks[0].ask({"do": "steps"}))

    def states(self, rail: int) -> list[str]:
        return [self.rails(number)[rail]["state"] for number in (0, 1)]

    def is_up(self, rail: int) -> bool:
        return self.states(rail) == ["UP", "UP"]

    def is_out(self, rail: int) -> bool:
        """Whether neither end has it in use or under suspicion."""
        return not {"UP", "SUSPECT"} & set(self.states(rail))

    def finish(self) -> None:
        """Ends the stream after the same step of both ranks, all of them right."""
        self.ranks[0].ask({"do": "stop"})
        for rank in self.ranks:
            said = rank.hear(30)
            assert "steps" in said, said
            rank.wait(30)


def stalls_of(events: Iterable[Iterable[Mapping[str, Any]]]) -> list[int]:
    """The stalls, in ns, among what Stream.look returned."""
    return [event["value"] for of_rank in events for event in of_rank if event["kind"] == "stall"]


def moves_of(
    events: Iterable[Iterable[Mapping[str, Any]]], to: str, rail: int | None = None
) -> list[Mapping[str, Any]]:
    """The moves of a rail (by default: of any) to the state `to`, of both ranks."""
    return [
        event
        for of_rank in events
        for event in of_rank
        if f"->{to}" in event["text"] and (rail is None or event["rail"].startswith(f"rail{rail}@"))
    ]


def strike(
    stream: Stream, fault: Fault, node: int, rail: int, eventually: Any, *, passes: bool = False
) -> list[int]:
    """One fault and its end; returns the stalls that it caused, in ns.

    The rail goes DOWN at both ends, no other does, steps go on meanwhile, and it comes back:
    once the fault is undone or, where it `passes` (only what was connected is hit), before.
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


def summary(kind: str, hits: list[int], faults: int) -> str:
    """A line on the stalls, in ns, that so many faults of a kind caused."""
    worst = f"worst {max(hits) / 1e6:.1f} ms" if hits else "none"
    return f"{kind}: {faults} faults, {len(hits)} stalls, {worst}"
