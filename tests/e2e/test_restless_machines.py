"""Rails on machines that change: two ports in a network, interfaces that churn, half-dead paths."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from real_rails import stalls_of
from test_ports import MANAGED, REJOIN_S, Ranks, ip, plug, warnings
from timely import timely

from r2serve.lab.faults import port_name
from r2serve.lab.lab import Lab

MANY = 400
"""Pairs of interfaces that a host of containers has beside its ports."""
NAMED = 16
"""Most interfaces without a rail that a line names."""
STARTS = 10
HEALTHY_S = 600.0
BIT = 1
"""Flows are told apart by this bit of their ports."""
SINGLE_BACK_S = 2.0
LONGEST_STOP_MS = 50.0
IDLE_PAUSE_S = 0.2
"""Pause between calls of ranks whose other threads are measured."""
MEASURED_S = 5.0
MOST_OF_A_CORE = 0.05
"""Share of a core for all threads but the one with the calls."""
CARRIER_MS = 200.0
"""Longest time from the loss of a carrier to its event."""

ADD_MANY = f"seq {MANY} | sed 's/.*/link add many& type veth peer name ynam&/' | ip -batch -"
CHURN = (
    "while :; do "
    "seq 10 | sed 's/.*/link add come& type veth peer name emoc&/' | ip -batch -; "
    "seq 10 | sed 's/.*/link del come&/' | ip -batch -; "
    "sleep 0.05; done"
)


@pytest.mark.case("21", "no start in one of three, and only doctor named the setting")
def test_two_ports_in_one_network_work_or_name_the_setting(
    jobs: Any, make_lab: Callable[..., Lab]
) -> None:
    """Both ports of both nodes are in one network on one switch, as the kernel is set by itself."""
    lab = make_lab(rails=2)
    for node in (0, 1):
        plug(lab, node, 1, "rail0")
        for rail in (0, 1):
            ip(lab, node, f"address flush dev rail{rail}")
            ip(lab, node, f"address add 10.9.0.{2 * node + rail + 1}/24 dev rail{rail}")
    ranks = Ranks(jobs, lab, "rail0,rail1")
    if not all(warnings(ranks, rank, "arp_ignore") for rank in (0, 1)):
        timely(lambda: len(ranks.ends(0)) == 2, "two rails without a warning", REJOIN_S)
    lab.cut(0, 0)
    timely(
        lambda: all(not end.startswith("rail0 ") for end in ranks.ends(0)),
        "the loss of rail0's port",
        REJOIN_S,
    )
    ranks.more_steps()
    ranks.finish()


@pytest.fixture
def crowded_lab(make_lab: Callable[..., Lab]) -> Lab:
    """Node 0 has 800 further interfaces, and others come and go all the time."""
    lab = make_lab(rails=2)
    lab.nodes[0].run("sh", "-c", ADD_MANY)
    lab.nodes[0].popen(["sh", "-c", CHURN])
    return lab


UP = [MANAGED, "rail0 10.77.1.1 10.77.1.2", "rail1 10.77.2.1 10.77.2.2"]


def threads_share(ranks: Ranks, rank: int) -> float:
    """Returns the share of a core that all threads but the one with the calls take."""
    before_s, began_s = ranks.ranks[rank].ask({"do": "threads_s"}), time.monotonic()
    time.sleep(MEASURED_S)
    used_s = ranks.ranks[rank].ask({"do": "threads_s"}) - before_s
    return float(used_s / (time.monotonic() - began_s))


def carrier_loss_ns(ranks: Ranks, after_ns: int) -> int:
    """Returns when rank 0 knew that a rail lost its carrier, CLOCK_MONOTONIC in ns; 0: unknown."""
    times = [
        event["time_ns"]
        for event in ranks.ranks[0].ask({"do": "events"})
        if event["kind"] == "rail_state"
        and "->DOWN" in event["text"]
        and "carrier" in event["text"]
        and event["time_ns"] > after_ns
    ]
    return min(times, default=0)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.case("23", "seven of ten starts failed while interfaces came and went")
def test_every_start_succeeds_while_interfaces_come_and_go(
    jobs: Any, crowded_lab: Lab, show: Callable[[str], None]
) -> None:
    """The threads of the core stay cheap meanwhile, and a lost carrier is known at once."""
    for _ in range(STARTS):
        ranks = Ranks(jobs, crowded_lab)
        ranks.await_ends(0, UP)
        for line in ranks.log(0):
            named = line.count("many") + line.count("ynam")
            assert named <= NAMED, "a line names a few interfaces, not each"
            assert len(line) < 1000
        ranks.finish()
    ranks = Ranks(jobs, crowded_lab, pause_s=IDLE_PAUSE_S)
    ranks.await_ends(0, UP)
    share, quiet = threads_share(ranks, 0), threads_share(ranks, 1)
    before_ns = time.monotonic_ns()
    cut_ns = crowded_lab.cut(0, 0)
    known_ns = timely(
        lambda: carrier_loss_ns(ranks, before_ns), "the carrier loss of rail0", REJOIN_S
    )
    late_ms = (known_ns - cut_ns) / 1e6
    ranks.more_steps()
    ranks.finish()
    used = f"{share:.1%} of a core for threads without calls ({quiet:.1%} without churn)"
    show(f"{used}, carrier loss known after {late_ms:.1f} ms")
    timely(lambda: share < MOST_OF_A_CORE, used, 0)
    timely(lambda: late_ms <= CARRIER_MS, f"carrier loss known after {late_ms:.1f} ms", 0)


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.timeout(1500)
def test_ten_healthy_minutes_among_restless_interfaces_have_no_warning(
    jobs: Any, crowded_lab: Lab, show: Callable[[str], None]
) -> None:
    ranks = Ranks(jobs, crowded_lab)
    ranks.await_ends(0, UP)
    before = [warnings(ranks, rank, "") for rank in (0, 1)]
    until_s = time.monotonic() + HEALTHY_S
    while time.monotonic() < until_s:
        time.sleep(5.0)
        ranks.more_steps()
    after = [warnings(ranks, rank, "") for rank in (0, 1)]
    lost = [
        event["text"]
        for rank in ranks.ranks
        for event in rank.ask({"do": "events"})
        if event["kind"] == "rail_state" and "->DOWN" in event["text"]
    ]
    show(f"{ranks.ranks[0].ask({'do': 'steps'})} steps, {len(lost)} lost rails")
    assert after == before
    assert lost == []
    ranks.finish()


def kill_flows(lab: Lab, rail: int) -> int:
    """Drops the packets of half of all flows between two nodes, those of the open flow included.

    Returns the time, CLOCK_MONOTONIC in ns. The carrier stays, as with a dead member of a bond.
    """
    address = lab.nodes[0].rail_address(rail)
    line = lab.nodes[0].run("ss", "-Htn", "state", "established", "src", address).splitlines()[0]
    here, there = (int(end.rpartition(":")[2]) & BIT for end in line.split()[2:4])
    table = f"netdev member_{rail}"
    script = [f"add table {table}"]
    for hook, source, target in (("ingress", here, there), ("egress", there, here)):
        chain = f"type filter hook {hook} device {port_name(0, rail)} priority 0;"
        script.append(f"add chain {table} {hook} {{ {chain} }}")
        flows = f"tcp sport & {BIT} == {source} tcp dport & {BIT} == {target}"
        script.append(f"add rule {table} {hook} {flows} drop")
    lab.run_in_switch("nft", "; ".join(script))
    return time.monotonic_ns()


def back_after_s(ranks: Ranks, at_ns: int) -> float:
    """Returns the time until a rail of rank 0 was UP again."""

    def times() -> list[int]:
        return [
            event["time_ns"]
            for event in ranks.ranks[0].ask({"do": "events"})
            if event["kind"] == "rail_state"
            and event["time_ns"] > at_ns
            and event["text"].startswith("PROBATION->UP")
        ]

    return (min(timely(times, "the rail is UP again", REJOIN_S)) - at_ns) / 1e9


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.parametrize("rails", [1, 2])
def test_a_path_of_which_half_of_the_flows_die_is_found_again(
    jobs: Any, make_lab: Callable[..., Lab], show: Callable[[str], None], rails: int
) -> None:
    """Several connections are tried at once, each from another source port."""
    lab = make_lab(rails=rails)
    ranks = Ranks(jobs, lab, ",".join(f"rail{rail}" for rail in range(rails)))
    timely(lambda: len(ranks.ends(0)) == rails, "all rails are UP", REJOIN_S)
    ranks.more_steps()
    at_ns = kill_flows(lab, 0)
    back_s = back_after_s(ranks, at_ns)
    ranks.more_steps()
    events = [rank.ask({"do": "events"}) for rank in ranks.ranks]
    worst_ms = max((ns / 1e6 for ns in stalls_of(events)), default=0.0)
    show(f"{rails} rails: back after {back_s:.3f} s, longest stop {worst_ms:.1f} ms")
    ranks.finish()
    if rails == 1:
        assert back_s <= SINGLE_BACK_S
    else:
        assert worst_ms <= LONGEST_STOP_MS
