"""Real faults on real rails: two nodes in network namespaces, with ports, bridges and a switch.

Faults are made at the same places as in a data centre, under a stream of checked all-reduces of
16 KiB. The journals give the stalls.
"""

from __future__ import annotations

import json
import time
from collections import Counter

import pytest
from real_rails import (
    ADDRESS,
    BLACK_HOLE,
    CABLE,
    OWN_PORT,
    REJOIN_S,
    Stream,
    check_bound,
    stalls_of,
    strike,
    summary,
    until_hit,
)
from timely import timely

from r2serve.lab.lab import Lab


@pytest.fixture
def lab(make_lab) -> Lab:
    return make_lab(2)


@pytest.mark.timeout(300)
def test_no_rail_fault_changes_a_bit(jobs, lab: Lab, eventually, show) -> None:
    """Makes each fault at both ends of both rails, in sequence, the rail in use first."""
    stream = Stream(jobs, lab)
    stalls: dict[str, list[int]] = {}
    faults = Counter[str]()
    for fault in (CABLE, OWN_PORT, BLACK_HOLE, ADDRESS):
        hits = stalls.setdefault(fault[0], [])
        for node in (0, 1):
            first = stream.busiest()
            for rail in (first, 1 - first):
                hits += strike(stream, fault, node, rail, eventually)
                faults[fault[0]] += 1
        stalls[fault[0]] = until_hit(
            lambda fault=fault: strike(stream, fault, 0, stream.busiest(), eventually), hits
        )
    stream.finish()
    for kind, hits in stalls.items():
        show(summary(kind, hits, faults[kind]))
        check_bound(hits)


@pytest.mark.timeout(300)
def test_a_rail_whose_device_is_removed_and_plugged_in_again_rejoins(
    jobs, lab: Lab, eventually
) -> None:
    stream = Stream(jobs, lab)
    rail = stream.busiest()

    def unplug(lab: Lab, node: int, rail: int) -> object:
        return lab.run_in_switch("ip", "link", "delete", lab.port(node, rail))

    def plug(lab: Lab, node: int, rail: int) -> object:
        there = lab.nodes[node]
        lab._plug(there, rail)
        # The same hardware address: the ARP cache of the other node stays valid.
        return there.run("ip", "link", "set", f"rail{rail}", "address", hardware[node])

    hardware = [
        json.loads(node.run("ip", "-json", "link", "show", "dev", f"rail{rail}"))[0]["address"]
        for node in lab.nodes
    ]
    for node in (0, 1):  # node 0 listens, node 1 connects
        strike(stream, ("device", unplug, plug), node, rail, eventually)
        # The new device is watched like the old one.
        strike(stream, OWN_PORT, node, rail, eventually)
    stream.finish()


@pytest.mark.timeout(300)
def test_the_stream_continues_after_the_first_of_two_lost_rails_heals(
    jobs, lab: Lab, eventually
) -> None:
    """A second fault strikes during the first; the step waits, and continues on the healed rail."""
    stream = Stream(jobs, lab, fallback=False)
    lab.cut(0, 0)
    eventually("rail 0 DOWN", lambda: stream.is_out(0))
    lab.black_hole(1, 1)
    time.sleep(1)
    steps = stream.steps_at_rest()
    lab.heal(0, 0)
    eventually("further steps", lambda: stream.steps() > steps + 100, REJOIN_S)
    lab.heal(1, 1)
    eventually("rail 1 UP", lambda: stream.is_up(1), REJOIN_S)
    stream.finish()


@pytest.mark.timeout(300)
def test_the_management_nic_carries_data_while_no_rail_is_left(
    jobs, lab: Lab, eventually, show
) -> None:
    """Both rails of a node are cut for 3 s; the stream continues, then returns to the rails."""
    stream = Stream(jobs, lab)

    # A starved machine may lose all rails for a moment.
    timely(lambda: stream.control_bytes() == 0, "data on the management NIC", within_s=0)
    for rail in (0, 1):
        lab.cut(1, rail)
    eventually("both rails DOWN", lambda: "UP" not in stream.states(0) + stream.states(1))
    steps = stream.steps()
    time.sleep(3.0)
    eventually("further steps", lambda: stream.steps() > steps + 10, REJOIN_S)
    served = stream.steps() - steps
    assert stream.control_bytes() > 0
    for rail in (0, 1):
        lab.heal(1, rail)
    for rail in (0, 1):
        eventually(f"rail {rail} UP", lambda r=rail: stream.is_up(r), REJOIN_S)
    stalls = stalls_of(stream.look())
    eventually("no data on the management NIC", stream.leaves_control_alone, REJOIN_S)
    stream.finish()
    worst = max(stalls, default=0) / 1e6
    show(
        f"no rail for 3 s: {served} all-reduces over the management NIC, worst stall {worst:.1f} ms"
    )
    check_bound(stalls)
