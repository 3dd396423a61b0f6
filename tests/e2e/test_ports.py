"""Rails on machines as they are: link-local wires, crossed cables, unnumbered and late ports."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import machines
import pytest
from timely import timely

from r2serve.lab.faults import port_name
from r2serve.lab.lab import Lab

REJOIN_S = 60.0
STEPS = 20
NARROW_S = 15.0
"""A path with a small MTU is told within this time of the start."""


class Ranks:
    """A rank on each node of a lab, with a stream of all-reduces."""

    def __init__(
        self,
        jobs: Any,
        lab: Lab,
        rails: str = "auto",
        *,
        pause_s: float = 0.0005,
        **options: Any,
    ) -> None:
        """pause_s: pause after each all-reduce. options: options of r2ccl."""
        self.lab = lab
        self.ranks = jobs.start(
            "stream.py",
            len(lab.nodes),
            config={"rails": rails, "node": "", "rejoin_backoff_max_ms": 200, **options},
            nodes=lab.nodes,
            host=lab.nodes[0].management_address,
            bytes=16 * 1024,
            pause_s=pause_s,
        )
        for rank in self.ranks:
            rank.hear(120)
        every = range(len(self.ranks))
        machines.show(jobs.say, lab.nodes, lambda: [self.log(rank) for rank in every], rails)

    def rails(self, rank: int) -> list[dict[str, Any]]:
        return [rail for rail in self.ranks[rank].ask({"do": "rails"}) if rail["kind"] == "tcp"]

    def ends(self, rank: int) -> list[str]:
        """Returns device and addresses of each rail that is UP."""
        return [
            f"{rail['device']} {host(rail['local'])} {host(rail['remote'])}"
            for rail in self.rails(rank)
            if rail["state"] == "UP"
        ]

    def await_ends(self, rank: int, wanted: Iterable[str]) -> None:
        expected = sorted(wanted)
        timely(
            lambda: sorted(self.ends(rank)) == expected,
            f"rank {rank} has the rails {expected} UP",
            REJOIN_S,
        )

    def log(self, rank: int) -> list[str]:
        lines: list[str] = self.ranks[rank].ask({"do": "log"})
        return lines

    def more_steps(self) -> None:
        done = self.ranks[0].ask({"do": "steps"})
        timely(lambda: self.ranks[0].ask({"do": "steps"}) > done + STEPS, "further steps", REJOIN_S)

    def finish(self) -> None:
        self.ranks[0].ask({"do": "stop"})
        for rank in self.ranks:
            assert rank.hear(60)["steps"] > 0
            rank.wait(60)


def warnings(ranks: Ranks, rank: int, part: str) -> list[str]:
    """Returns the warnings of a rank with a text."""
    lines: list[str] = ranks.ranks[rank].ask({"do": "warnings"})
    return [line for line in lines if part in line]


def host(end: str) -> str:
    """Returns the address of an end, as in `10.0.0.1:7` or `[fe80::1]:7`."""
    return end.rpartition(":")[0].strip("[]")


def ip(lab: Lab, node: int, command: str) -> None:
    lab.nodes[node].run("ip", *command.split())


def give_link_local(lab: Lab) -> None:
    """Replaces the addresses of all rails by IPv4 link-local addresses."""
    for node in range(len(lab.nodes)):
        for rail in range(lab.rails):
            ip(lab, node, f"address flush dev rail{rail}")
            ip(lab, node, f"address add 169.254.{rail + 1}{node}.9/16 dev rail{rail}")


def plug(lab: Lab, node: int, rail: int, bridge: str) -> None:
    """Plugs the cable of a port into another network of the switch."""
    lab.run_in_switch("ip", "link", "set", port_name(node, rail), "master", bridge)


@pytest.fixture
def local_lab(make_lab: Callable[..., Lab]) -> Lab:
    """Two nodes whose rails have IPv4 link-local addresses alone."""
    lab = make_lab(rails=2)
    give_link_local(lab)
    return lab


MANAGED = "mgmt0 10.77.0.1 10.77.0.2"
LINK_LOCAL = "no rail over link-local addresses"
LATE_PORT = "no start while a port is missing or without a carrier"


@pytest.mark.case("01", LINK_LOCAL)
def test_link_local_ports_are_rails_and_fail_over(jobs: Any, local_lab: Lab) -> None:
    ranks = Ranks(jobs, local_lab)
    up = ["rail0 169.254.10.9 169.254.11.9", "rail1 169.254.20.9 169.254.21.9"]
    ranks.await_ends(0, [*up, MANAGED])
    local_lab.cut(1, 0)
    ranks.await_ends(0, [up[1], MANAGED])
    ranks.more_steps()
    local_lab.heal(1, 0)
    ranks.await_ends(0, [*up, MANAGED])
    ranks.finish()


@pytest.mark.case("01", LINK_LOCAL)
@pytest.mark.parametrize("rails", ["auto", "rail0,rail1"])
def test_crossed_link_local_cables_are_found(jobs: Any, local_lab: Lab, rails: str) -> None:
    for rail in (0, 1):
        plug(local_lab, 1, rail, f"rail{1 - rail}")
    ranks = Ranks(jobs, local_lab, rails)
    crossed = ["rail0 169.254.10.9 169.254.21.9", "rail1 169.254.20.9 169.254.11.9"]
    ranks.await_ends(0, crossed + ([MANAGED] if rails == "auto" else []))
    ranks.finish()


@pytest.mark.case("01", LINK_LOCAL)
def test_three_nodes_in_a_triangle_find_their_cables(
    jobs: Any, make_lab: Callable[..., Lab]
) -> None:
    """Each cable has a network of its own, and addresses do not tell the networks apart."""
    lab = make_lab(rails=2, nodes=3)
    give_link_local(lab)
    lab.run_in_switch("ip", "link", "add", "cable2", "type", "bridge", "mcast_snooping", "0")
    lab.run_in_switch("ip", "link", "set", "cable2", "addrgenmode", "none", "up")
    plug(lab, 2, 0, "rail1")
    for node in (1, 2):
        plug(lab, node, 1, "cable2")
    ranks = Ranks(jobs, lab, "rail0,rail1")
    ranks.await_ends(0, ["rail0 169.254.10.9 169.254.11.9", "rail1 169.254.20.9 169.254.12.9"])
    ranks.await_ends(1, ["rail0 169.254.11.9 169.254.10.9", "rail1 169.254.21.9 169.254.22.9"])
    ranks.finish()


@pytest.mark.case("06", "no rail over ports without addresses of their own")
def test_a_host_address_on_two_unnumbered_ports_makes_two_rails(
    jobs: Any, make_lab: Callable[..., Lab]
) -> None:
    lab = make_lab(rails=2)
    for node in (0, 1):
        ip(lab, node, f"address add 10.9.0.{node + 1}/32 dev lo")
        for rail in (0, 1):
            ip(lab, node, f"address flush dev rail{rail}")
            ip(lab, node, f"address add fe80::{rail + 1}{node + 1}/64 dev rail{rail} nodad")
        hops = " ".join(f"nexthop via inet6 fe80::{r + 1}{2 - node} dev rail{r}" for r in (0, 1))
        ip(lab, node, f"route add 10.9.0.{2 - node}/32 src 10.9.0.{node + 1} {hops}")
    ranks = Ranks(jobs, lab)
    up = ["rail0 10.9.0.1 10.9.0.2", "rail1 10.9.0.1 10.9.0.2"]
    ranks.await_ends(0, [*up, MANAGED])
    lab.cut(0, 1)
    ranks.await_ends(0, [up[0], MANAGED])
    ranks.more_steps()
    lab.heal(0, 1)
    ranks.await_ends(0, [*up, MANAGED])
    ranks.finish()


def test_ports_with_ipv6_link_local_addresses_alone_are_rails_by_name(
    jobs: Any, make_lab: Callable[..., Lab]
) -> None:
    lab = make_lab(rails=2)
    for node in (0, 1):
        for rail in (0, 1):
            ip(lab, node, f"address flush dev rail{rail}")
            ip(lab, node, f"address add fe80::{rail + 1}{node + 1}/64 dev rail{rail} nodad")
    ranks = Ranks(jobs, lab, "rail0,rail1")
    ranks.await_ends(0, ["rail0 fe80::11 fe80::12", "rail1 fe80::21 fe80::22"])
    ranks.finish()


@pytest.mark.case("20", LATE_PORT)
@pytest.mark.parametrize("node", [0, 1])
def test_a_port_that_comes_after_the_start_joins(
    jobs: Any, make_lab: Callable[..., Lab], node: int
) -> None:
    lab = make_lab(rails=2)
    address = lab.nodes[node].rail_address(1)
    ip(lab, node, f"address del {address}/24 dev rail1")
    ip(lab, node, "link set dev rail1 name later1")
    ranks = Ranks(jobs, lab, "rail0,rail1")
    ranks.await_ends(0, ["rail0 10.77.1.1 10.77.1.2"])
    told = [line for line in ranks.log(node) if "'rail1', but this node has no such" in line]
    assert len(told) == 1, ranks.log(node)
    ip(lab, node, "link set dev later1 down")
    ip(lab, node, "link set dev later1 name rail1 up")
    ip(lab, node, f"address add {address}/24 dev rail1")
    ranks.await_ends(0, ["rail0 10.77.1.1 10.77.1.2", "rail1 10.77.2.1 10.77.2.2"])
    ranks.finish()


@pytest.mark.case("20", LATE_PORT)
def test_a_port_without_a_carrier_at_the_start_joins(
    jobs: Any, make_lab: Callable[..., Lab]
) -> None:
    lab = make_lab(rails=1)
    lab.cut(0, 0)
    ranks = Ranks(jobs, lab, connect_timeout_s=2)
    ranks.await_ends(0, [MANAGED])
    for rank in (0, 1):  # half of the timeout has passed, or passes soon
        timely(
            lambda rank=rank: warnings(ranks, rank, "rail0"), f"a warning of rank {rank}", REJOIN_S
        )
    lab.heal(0, 0)
    ranks.await_ends(0, ["rail0 10.77.1.1 10.77.1.2", MANAGED])
    for rank in (0, 1):
        assert len(warnings(ranks, rank, "rail0")) == 1, ranks.log(rank)
    ranks.finish()


@pytest.mark.case("20", LATE_PORT)
@pytest.mark.parametrize("node", [0, 1])
def test_ports_without_an_address_at_the_start_join_by_their_networks(
    jobs: Any, make_lab: Callable[..., Lab], node: int
) -> None:
    """The addresses come after the start, and cross the pairs that the start has guessed."""
    lab = make_lab(rails=3)
    late = {rail: lab.nodes[node].rail_address(rail) for rail in (1, 2)}
    for rail, address in late.items():
        ip(lab, node, f"address del {address}/24 dev rail{rail}")
    plug(lab, node, 1, "rail2")
    plug(lab, node, 2, "rail1")
    ranks = Ranks(jobs, lab)
    first = ["rail0 10.77.1.1 10.77.1.2", MANAGED]
    ranks.await_ends(0, first)
    for rail in (1, 2):
        told = [line for line in ranks.log(node) if f"rail{rail} is no rail yet" in line]
        assert len(told) == 1, ranks.log(node)
    names = [rail["name"] for rail in ranks.rails(0)]
    assert len(names) == len(first), "rails without an address are not listed"
    ip(lab, node, f"address add {late[2]}/24 dev rail1")
    ip(lab, node, f"address add {late[1]}/24 dev rail2")
    here = {1: "rail2", 2: "rail1"} if node == 0 else {1: "rail1", 2: "rail2"}
    up = [f"{here[rail]} 10.77.{rail + 1}.1 10.77.{rail + 1}.2" for rail in (1, 2)]
    ranks.await_ends(0, [*first, *up])
    ranks.more_steps()
    ranks.finish()


def test_crossed_wires_of_one_network_are_found(jobs: Any, make_lab: Callable[..., Lab]) -> None:
    """Two switches have the same network, so that addresses do not tell the wires apart."""
    lab = make_lab(rails=3)
    for node in (0, 1):
        for rail in (1, 2):
            ip(lab, node, f"address flush dev rail{rail}")
            ip(lab, node, f"address add 10.9.0.{2 * node + rail}/24 dev rail{rail}")
    plug(lab, 1, 1, "rail2")
    plug(lab, 1, 2, "rail1")
    ranks = Ranks(jobs, lab, "rail0,rail1,rail2")
    up = ["rail0 10.77.1.1 10.77.1.2", "rail1 10.9.0.1 10.9.0.4", "rail2 10.9.0.2 10.9.0.3"]
    ranks.await_ends(0, up)
    ranks.more_steps()
    ranks.finish()


@pytest.mark.case("30", "no rail over a path that drops large packets, and no word of it")
@pytest.mark.parametrize("rails", [2, 1], ids=["a second rail", "the only rail"])
def test_a_path_with_a_small_mtu_at_the_start_carries_smaller_segments(
    jobs: Any, make_lab: Callable[..., Lab], rails: int
) -> None:
    """The hole is in the last rail; the management NIC carries no collective."""
    lab = make_lab(rails=rails)
    lab.mtu_hole(1, rails - 1)
    began_s = time.monotonic()
    ranks = Ranks(jobs, lab, ",".join(f"rail{rail}" for rail in range(rails)), fallback=False)

    def told() -> list[str]:
        part = "uses segments of 516 bytes"
        return [text for rank in (0, 1) for text in warnings(ranks, rank, part)]

    timely(told, "a warning of the connecting end", REJOIN_S)
    took_s = time.monotonic() - began_s
    timely(lambda: took_s < NARROW_S, f"the warning came after {took_s:.1f} s", 0)
    ranks.await_ends(0, [f"rail{n} 10.77.{n + 1}.1 10.77.{n + 1}.2" for n in range(rails)])
    (text,) = told()  # the connecting end alone tells it
    vanish = f"packets of 1500 bytes vanish between rail{rails - 1} and 10.77.{rails}."
    assert vanish in text
    ranks.more_steps()
    ranks.finish()


@pytest.mark.case("20", LATE_PORT)
def test_a_start_without_a_data_port_uses_the_management_nic(
    jobs: Any, make_lab: Callable[..., Lab]
) -> None:
    lab = make_lab(rails=1)
    lab.cut(0, 0)
    ranks = Ranks(jobs, lab, management="mgmt0", connect_timeout_s=20)
    assert ranks.ends(0) == []
    ranks.more_steps()
    lab.heal(0, 0)
    ranks.await_ends(0, ["rail0 10.77.1.1 10.77.1.2"])
    ranks.finish()


@pytest.mark.case("03", "two rails of one port told as independent")
def test_rails_over_one_physical_port_are_told_as_one_unit(
    jobs: Any, make_lab: Callable[..., Lab]
) -> None:
    lab = make_lab(rails=1)
    for node in (0, 1):
        ip(lab, node, "address flush dev rail0")
        for number in (1, 2):
            ip(lab, node, f"link add mv{number} link rail0 type macvlan mode bridge")
            ip(lab, node, f"address add 10.{number}.0.{node + 1}/24 dev mv{number}")
            ip(lab, node, f"link set mv{number} up")
    ranks = Ranks(jobs, lab)
    ranks.await_ends(0, ["mv1 10.1.0.1 10.1.0.2", "mv2 10.2.0.1 10.2.0.2", MANAGED])
    for rank in (0, 1):
        told = "mv1 and mv2 share the physical port rail0: one unit of redundancy"
        assert told in ranks.log(rank)
        units = {rail["device"]: rail["unit"] for rail in ranks.rails(rank)}
        assert units == {"mv1": "rail0", "mv2": "rail0", "mgmt0": ""}
    ranks.finish()
