"""Verdicts on faults: with separate rails, with connected rails, and with a third node."""

from __future__ import annotations

import itertools
import time

import pytest
from real_rails import BLACK_HOLE, CABLE, OWN_PORT, REJOIN_S, RESET, Fault, Stream, wait_until_up

from r2serve.lab.lab import Lab

KNOWN_S = 2.0  # until the ranks know the reachable pairs of ports


def verdicts(events: list[list[dict]], rail: int) -> list[list[str]]:
    """Returns the verdicts on the rail by rank, in order."""
    found = []
    for of_rank in events:
        about = [event for event in of_rank if event["rail"].startswith(f"rail{rail}@")]
        found.append([event["text"] for event in about if event["kind"] == "verdict"])
    return found


def locate(
    stream: Stream,
    fault: Fault,
    node: int,
    rail: int,
    eventually,
    *,
    near: str,
    far: str,
    others: bool = False,
) -> None:
    """Makes a fault, waits for the last verdicts of both ranks, and heals.

    near, far: verdicts of the rank at the node, and of the other rank. others: a rank may first
    record another verdict, until the other rank's message arrives.
    """
    _, make, undo = fault
    stream.look()
    make(stream.lab, node, rail)
    events: list[list[dict]] = [[], []]
    expected = [near, far] if node == 0 else [far, near]

    def located() -> bool:
        for old, new in zip(events, stream.look(), strict=True):
            old += new
        return [found[-1:] for found in verdicts(events, rail)] == [[text] for text in expected]

    eventually(f"verdicts on rail {rail}: {near}; at the other end {far}", located)
    if not others:
        assert [set(found) for found in verdicts(events, rail)] == [{text} for text in expected]
    undo(stream.lab, node, rail)
    eventually(f"rail {rail} UP", lambda: stream.is_up(rail), REJOIN_S)


def join_rails(lab: Lab) -> None:
    """Connects the switches of both rails, so that every NIC can reach every other NIC."""
    lab.run_in_switch("ip", "link", "add", "cross0", "type", "veth", "peer", "name", "cross1")
    for rail in (0, 1):
        lab.run_in_switch("ip", "link", "set", f"cross{rail}", "master", f"rail{rail}", "up")
    for node in lab.nodes:
        # Each NIC answers ARP requests only for its own address.
        node.run("sysctl", "-qw", "net.ipv4.conf.all.arp_ignore=1")
        node.run("sysctl", "-qw", "net.ipv4.conf.all.arp_announce=2")
        for own, other in ((0, 1), (1, 0)):
            network = node.rail_address(other).rpartition(".")[0] + ".0/24"
            route = ["ip", "route", "add", network, "dev", f"rail{own}", "metric", "100"]
            node.run(*route, "src", node.rail_address(own))


@pytest.mark.timeout(300)
def test_the_verdict_is_a_nic_after_carrier_loss_and_the_path_after_silence(
    jobs, make_lab, eventually
) -> None:
    stream = Stream(jobs, make_lab(2))
    for fault, node in itertools.product((CABLE, OWN_PORT), (0, 1)):
        locate(stream, fault, node, 0, eventually, near="local NIC", far="remote NIC")
    locate(stream, BLACK_HOLE, 0, 1, eventually, near="path", far="path")
    locate(stream, RESET, 1, 1, eventually, near="transient", far="transient")
    stream.finish()


@pytest.mark.timeout(300)
def test_connected_rails_allow_a_verdict_on_each_port(jobs, make_lab, eventually) -> None:
    lab = make_lab(2)
    join_rails(lab)
    stream = Stream(jobs, lab)
    time.sleep(KNOWN_S)
    for node, rail in itertools.product((0, 1), (0, 1)):
        locate(
            stream,
            BLACK_HOLE,
            node,
            rail,
            eventually,
            near="local NIC",
            far="remote NIC",
            others=True,
        )
    stream.finish()


@pytest.mark.timeout(300)
def test_a_third_node_helps_locate_a_silent_port(jobs, make_lab, eventually) -> None:
    lab = make_lab(2, nodes=3)
    ranks = jobs.start(
        "stream.py",
        3,
        config={"rails": "rail0,rail1", "node": ""},
        nodes=lab.nodes,
        host=lab.nodes[0].management_address,
        pause_s=0.001,
    )
    for rank in ranks:
        rank.hear(60)
    wait_until_up(ranks)
    time.sleep(KNOWN_S)
    lab.black_hole(1, 0)

    def of(number: int, peer: int) -> str:
        found = [
            event["text"]
            for event in ranks[number].ask({"do": "events"})
            if event["kind"] == "verdict" and event["peer"] == f"rank {peer}"
        ]
        return found[-1] if found else ""

    for other in (0, 2):
        eventually("local NIC", lambda o=other: of(1, o) == "local NIC")
        eventually("remote NIC", lambda o=other: of(o, 1) == "remote NIC")
    for number, peer in ((0, 2), (2, 0)):
        assert of(number, peer) == ""
    ranks[0].ask({"do": "stop"})
    for rank in ranks:
        assert "steps" in rank.hear(60)
        rank.wait(60)
