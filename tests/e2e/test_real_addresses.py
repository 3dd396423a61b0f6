"""Ports that return with another address, in a lab, under a stream of checked all-reduces."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from r2serve.lab.holder import LabUnavailableError
from r2serve.lab.lab import Lab

REJOIN_S = 60.0


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
    """Two ranks on separate nodes, and the current address of each port."""

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
        """Waits until the rail is UP at both ends, with the current addresses of both ports."""

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
            said = rank.hear(60)
            assert "steps" in said, said
            rank.wait(60)


def _host(text: str) -> str:
    return text.rpartition(":")[0].strip("[]")


def returns_elsewhere(
    stream: Stream, nodes: tuple[int, ...], rail: int, new: Callable[[int, int], str]
) -> None:
    """Cuts the rail at each of the nodes; the ports return with another address."""
    for node in nodes:
        stream.lab.cut(node, rail)
    stream.down(rail)
    for node in nodes:
        stream.replace(node, rail, new(node, rail))
    for node in nodes:
        stream.lab.heal(node, rail)
    stream.joined(rail)


def own_port_is_watched(stream: Stream, node: int, rail: int) -> None:
    """Checks that the port is watched under the new address: carrier events arrive."""
    stream.lab.cut(node, rail, at_switch=False)
    # Without the event, the rail would go DOWN by silence, with another cause.
    stream.eventually(
        f"rail {rail} DOWN (carrier_loss) at node {node}",
        lambda: stream.rail(node, rail)["cause"] == "carrier_loss",
    )
    stream.lab.heal(node, rail)
    if ":" in stream.at[node, rail]:  # the kernel removes IPv6 addresses when a port goes down
        stream._ip(node, "add", stream.at[node, rail], rail)
    stream.joined(rail)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ip_version", [4, 6])
def test_a_port_that_returns_with_another_address_rejoins(
    jobs, lab: Lab, eventually, ip_version: int
) -> None:
    """The address changes at the accepting node, the connecting node or both nodes, and back."""
    stream = Stream(jobs, lab, eventually, ip_version=ip_version)
    for nodes in ((0,), (1,), (0, 1)):
        for new in (stream.other, stream.given):
            for rail in (0, 1):
                returns_elsewhere(stream, nodes, rail, new)
        own_port_is_watched(stream, nodes[0], 0)
    returns_elsewhere(stream, (0, 1), 0, stream.other)
    for node in (0, 1):
        own_port_is_watched(stream, node, 0)
    # Node 0 returns to the old address, and node 1 keeps the new address.
    returns_elsewhere(stream, (0,), 0, stream.given)
    stream.finish()


@pytest.mark.timeout(300)
def test_a_rail_rejoins_after_its_address_is_replaced(jobs, lab: Lab, eventually) -> None:
    """The address is replaced while the carrier stays up; there is no carrier event."""
    stream = Stream(jobs, lab, eventually)
    for new in (stream.other, stream.given):
        for node in (0, 1):
            for rail in (0, 1):
                stream.replace(node, rail, new(node, rail))
                stream.joined(rail)
    stream.finish()


@pytest.mark.timeout(300)
def test_the_control_rail_announces_new_addresses_of_all_rails(jobs, lab: Lab, eventually) -> None:
    """Without any rail UP, only the control rail can carry the new addresses."""
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
