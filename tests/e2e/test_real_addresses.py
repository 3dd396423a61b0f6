"""Ports that return with another address, in a lab, under a stream whose bits are compared."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from r2serve.lab.holder import LabUnavailableError
from r2serve.lab.lab import Lab

REJOIN_S = 20.0
EVENT_S = 1.5  # the kernel may hold a carrier event back for a second


@pytest.fixture
def lab() -> Iterator[Lab]:
    try:
        with Lab(nodes=2, rails=2) as built:
            yield built
    except LabUnavailableError as error:
        pytest.skip(f"no lab on this machine: {error}")


def given(node: int, rail: int) -> str:
    return f"10.77.{rail + 1}.{node + 1}"


def other(node: int, rail: int) -> str:
    return f"10.77.{rail + 1}.{node + 100}"


def given_v6(node: int, rail: int) -> str:
    return f"fd77:{rail + 1}::{node + 1}"


def other_v6(node: int, rail: int) -> str:
    return f"fd77:{rail + 1}::1:{node + 1}"


class Stream:
    """Two ranks, one in each node, and the addresses that their rails' ports have."""

    def __init__(self, jobs, lab: Lab, eventually, *, ip_version: int = 4) -> None:
        self.lab = lab
        self.eventually = eventually
        self.given, self.other = (given, other) if ip_version == 4 else (given_v6, other_v6)
        self.at = {(node, rail): self.given(node, rail) for node in (0, 1) for rail in (0, 1)}
        if ip_version == 6:
            for (node, rail), address in self.at.items():
                self._ip(node, "add", address, rail)
        self.ranks = jobs.start(
            "stream.py",
            2,
            config={"node": "", "rejoin_backoff_max_ms": 200, "handshake_timeout_ms": 500},
            per_rank=lambda rank: {
                "rails": ",".join(f"rail{rail}={self.at[rank, rail]}" for rail in (0, 1))
            },
            nodes=lab.nodes,
            host=lab.nodes[0].management_address,
            bytes=16 * 1024,
            pause_s=0.0005,
        )
        for rank in self.ranks:
            rank.hear(60)
        for rail in (0, 1):
            self.joined(rail)

    def _ip(self, node: int, action: str, address: str, rail: int) -> None:
        width = ["64", "nodad"] if ":" in address else ["24"]
        self.lab.nodes[node].run(
            *f"ip address {action} {address}/{width[0]} dev rail{rail}".split(),
            *(width[1:] if action == "add" else []),
        )

    def replace(self, node: int, rail: int, address: str) -> None:
        self._ip(node, "del", self.at[node, rail], rail)
        self._ip(node, "add", address, rail)
        self.at[node, rail] = address

    def rail(self, node: int, rail: int) -> dict:
        rails = self.ranks[node].ask({"do": "rails"})
        return [entry for entry in rails if entry["kind"] == "tcp"][rail]

    def steps(self) -> int:
        return int(self.ranks[0].ask({"do": "steps"}))

    def down(self, rail: int) -> None:
        self.eventually(
            f"rail {rail} DOWN at both ends",
            lambda: not {"UP", "SUSPECT"} & {self.rail(node, rail)["state"] for node in (0, 1)},
        )

    def joined(self, rail: int) -> None:
        """The rail is UP at both ends, between the addresses that its ports have."""

        def right() -> bool:
            ends = [self.rail(node, rail) for node in (0, 1)]
            return all(
                end["state"] == "UP"
                and _host(end["local"]) == self.at[node, rail]
                and _host(end["remote"]) == self.at[1 - node, rail]
                for node, end in enumerate(ends)
            )

        self.eventually(f"rail {rail} UP, with its ports' addresses", right, REJOIN_S)
        steps = self.steps()
        self.eventually("further steps", lambda: self.steps() > steps + 20)

    def finish(self) -> None:
        self.ranks[0].ask({"do": "stop"})
        for rank in self.ranks:
            said = rank.hear(30)
            assert "steps" in said, said
            rank.wait(30)


def _host(text: str) -> str:
    return text.rpartition(":")[0].strip("[]")


def returns_elsewhere(
    stream: Stream, nodes: tuple[int, ...], rail: int, new: Callable[[int, int], str]
) -> None:
    """The rail is cut at each of the nodes, whose ports return with another address."""
    for node in nodes:
        stream.lab.cut(node, rail)
    stream.down(rail)
    for node in nodes:
        stream.replace(node, rail, new(node, rail))
    for node in nodes:
        stream.lab.heal(node, rail)
    stream.joined(rail)


def own_port_is_watched(stream: Stream, node: int, rail: int) -> None:
    """By its new address, too: the events say at once what deadlines would say later."""
    stream.lab.cut(node, rail, at_switch=False)
    began = time.monotonic()
    stream.eventually(
        f"rail {rail} DOWN (carrier_loss) at node {node}",
        lambda: stream.rail(node, rail)["cause"] == "carrier_loss",
        EVENT_S,
    )
    assert time.monotonic() - began < EVENT_S
    stream.lab.heal(node, rail)
    if ":" in stream.at[node, rail]:  # the kernel forgets these with the port
        stream._ip(node, "add", stream.at[node, rail], rail)
    stream.joined(rail)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ip_version", [4, 6])
def test_a_port_that_returns_with_another_address_rejoins(
    jobs, lab: Lab, eventually, ip_version: int
) -> None:
    """Of the node that accepts, of the one that connects, of both at once; and back again."""
    stream = Stream(jobs, lab, eventually, ip_version=ip_version)
    for nodes in ((0,), (1,), (0, 1)):
        for new in (stream.other, stream.given):
            for rail in (0, 1):
                returns_elsewhere(stream, nodes, rail, new)
        own_port_is_watched(stream, nodes[0], 0)
    returns_elsewhere(stream, (0, 1), 0, stream.other)
    for node in (0, 1):
        own_port_is_watched(stream, node, 0)
    # One end returns to what it had while the other does not.
    returns_elsewhere(stream, (0,), 0, stream.given)
    stream.finish()


@pytest.mark.timeout(120)
def test_an_address_that_is_replaced_on_a_port_in_use(jobs, lab: Lab, eventually) -> None:
    """No cable is pulled: the address goes, another one comes, and nothing else says so."""
    stream = Stream(jobs, lab, eventually)
    for new in (stream.other, stream.given):
        for node in (0, 1):
            for rail in (0, 1):
                stream.replace(node, rail, new(node, rail))
                stream.joined(rail)
    stream.finish()


@pytest.mark.timeout(120)
def test_all_rails_return_elsewhere_and_the_management_nic_tells(
    jobs, lab: Lab, eventually
) -> None:
    """No rail is left to say where the others are now, but the control rail is."""
    stream = Stream(jobs, lab, eventually)
    for new in (stream.other, stream.given):
        for node in (0, 1):
            for rail in (0, 1):
                lab.cut(node, rail)
        for rail in (0, 1):
            stream.down(rail)
        for node in (0, 1):
            for rail in (0, 1):
                stream.replace(node, rail, new(node, rail))
                lab.heal(node, rail)
        for rail in (0, 1):
            stream.joined(rail)
    stream.finish()
