"""Each fault of the lab has the documented effect on a single port, and heal removes the fault."""

from __future__ import annotations

from typing import Any

import pytest
from lab_probes import (
    SILENT_S,
    Acknowledged,
    Talk,
    becomes_reachable,
    connections,
    datagrams_arrive,
    datagrams_vanish,
    is_silent,
    reaches,
)
from timely import timely

from r2serve.lab.holder import LabCommandError
from r2serve.lab.injector import LabInjector
from r2serve.lab.kinds import KINDS
from r2serve.lab.lab import Lab
from r2serve.lab.middleboxes import Middlebox

SMALL, LARGE = 200, 1400


def healed(lab: Lab) -> bool:
    """Whether rail 0 carries frames of all sizes in both directions again."""
    first, second = lab.nodes
    return becomes_reachable(first, second.rail_address(0)) and all(
        datagrams_arrive(one, other, 0, LARGE) for one, other in ((first, second), (second, first))
    )


@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize("direction", ["from", "to"])
def test_one_way_loss_affects_a_single_direction(lab: Lab, node: int, direction: Any) -> None:
    assert healed(lab)
    near, far = lab.nodes[node], lab.nodes[1 - node]
    source, target = (near, far) if direction == "from" else (far, near)
    lab.one_way(node, 0, direction)
    try:
        assert datagrams_vanish(source, target, 0, SMALL)
        assert datagrams_arrive(target, source, 0, SMALL)
        assert is_silent(near, far.rail_address(0))
        assert reaches(near, far.rail_address(1))
        assert lab.carrier(0, 0)
        assert lab.carrier(1, 0)
    finally:
        lab.heal(node, 0)
    assert healed(lab)


def test_an_mtu_hole_drops_only_large_packets(lab: Lab) -> None:
    assert healed(lab)
    first, second = lab.nodes
    lab.mtu_hole(0, 0, 1000)
    try:
        for source, target in ((first, second), (second, first)):
            assert datagrams_arrive(source, target, 0, SMALL)
            assert datagrams_vanish(source, target, 0, LARGE)
            assert datagrams_arrive(source, target, 1, LARGE)
    finally:
        lab.heal(0, 0)
    assert healed(lab)


@pytest.mark.parametrize("node", [0, 1])
def test_a_reset_ends_the_connections_of_one_rail_at_both_ends(lab: Lab, node: int) -> None:
    first, second = lab.nodes
    with Talk(first, second, 0) as struck, Talk(first, second, 1) as other:
        assert struck.say(1000)[0] == "same"
        lab.reset(node, 0)
        assert struck.say(1000)[0] == "error"
        assert (connections(first, 0), connections(second, 0)) == (0, 0)
        assert other.say(1000)[0] == "same"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_fault_strikes_the_management_port_alone(lab: Lab, kind: str) -> None:
    first, second = lab.nodes
    injector = LabInjector(lab)
    with Talk(first, second, None) as talk, Talk(first, second, 0) as other:
        assert talk.say(1000)[0] == "same"
        injector.make(kind, 1, None)
        try:
            if KINDS[kind].leaves_up:
                assert is_silent(first, second.management_address)
            elif kind == "reset":
                assert talk.say(1000)[0] == "error"
            elif kind in ("middlebox_ack", "mtu_hole"):
                assert talk.say(5000, SILENT_S)[0] == "silence"
            assert other.say(1000)[0] == "same"
        finally:
            injector.undo(kind, 1, None)
    assert becomes_reachable(first, second.management_address)


@pytest.mark.parametrize("node", [0, 1])
def test_the_other_end_of_a_half_open_connection_is_not_notified(lab: Lab, node: int) -> None:
    near, far = lab.nodes[node], lab.nodes[1 - node]
    with Talk(far, near, 0) as talk:
        assert talk.say(1000)[0] == "same"
        lab.half_open(node, 0)
        try:
            assert talk.say(1000, SILENT_S)[0] == "silence"
            assert (connections(near, 0), connections(far, 0)) == (0, 1)
        finally:
            lab.heal(node, 0)
    assert healed(lab)


def test_a_stale_connection_is_silent_and_a_new_one_is_not(lab: Lab) -> None:
    first, second = lab.nodes
    with Talk(first, second, 0) as old:
        assert old.say(1000)[0] == "same"
        lab.stale(0, 0)
        try:
            assert old.say(1000, SILENT_S)[0] == "silence"
            assert reaches(first, second.rail_address(0))
        finally:
            lab.heal(0, 0)
    with pytest.raises(ValueError, match="node 0 has no connection over rail 1"):
        lab.stale(0, 1)


def test_flipped_bytes_arrive_without_an_error(lab: Lab) -> None:
    first, second = lab.nodes
    with Talk(first, second, 0) as talk:
        assert talk.say(200_000)[0] == "same"
        lab.flip(0, 0, offset=1000, every=1)
        try:
            assert talk.say(200_000)[0] == "changed"
            assert talk.say(500)[0] == "same"
        finally:
            lab.heal(0, 0)
        assert talk.say(200_000)[0] == "same"


def test_a_backlog_acknowledges_late_and_loses_nothing(lab: Lab) -> None:
    first, second = lab.nodes
    with Acknowledged(first, second, 0) as late, Acknowledged(first, second, 1) as other:
        assert late.send(1000)[1] == 1000
        with pytest.raises(ValueError, match="not 100 and 100"):
            lab.ack_backlog(1, 0, hold_ms=100)
        lab.ack_backlog(1, 0, hold_ms=150, period_ms=200)
        try:
            sent = [late.send(1000) for _ in range(20)]

            def was_late() -> bool:
                sent.append(late.send(1000))
                return max(seconds for seconds, _ in sent) > 0.1

            timely(was_late, "a late acknowledgement")
            assert min(seconds for seconds, _ in sent) >= 0
            assert {got for _, got in sent} == {1000}
            assert other.send(1000)[1] == 1000
        finally:
            lab.heal(1, 0)
        assert late.send(200_000)[1] == 200_000


@pytest.mark.parametrize("size", [1000, 60_000])
def test_a_middlebox_acknowledges_bytes_and_delivers_them_when_healed(lab: Lab, size: int) -> None:
    first, second = lab.nodes
    with Acknowledged(first, second, 0) as struck, Acknowledged(second, first, 0) as back:
        assert struck.send(size)[1] == size
        lab.middlebox_ack(0, 0)
        try:
            seconds, got = struck.send(size, echo=0)
            assert seconds >= 0
            assert got == 0
            # Data in the other direction is acknowledged by the node itself; its echo is held.
            seconds, got = back.send(10, echo=0)
            assert seconds >= 0
            assert got == 0
            assert reaches(first, second.rail_address(0))
        finally:
            lab.heal(0, 0)
        assert struck.send(0, echo=size)[1] == size
        assert struck.send(size)[1] == size


def test_a_middlebox_ends_with_its_fault(lab: Lab) -> None:
    first, second = lab.nodes
    with Acknowledged(first, second, 0) as talk:
        lab.middlebox_ack(0, 0)
        lab.ack_backlog(0, 0)
        lab.one_way(0, 0, "to")
        assert lab._boxes == {}
        lab.heal(0, 0)
        assert talk.send(1000)[1] == 1000
    lab.middlebox_ack(0, 0)
    lab._boxes[0, 0]._process.kill()
    with pytest.raises(LabCommandError, match="a middlebox ended with status -9"):
        lab.heal(0, 0)
    assert healed(lab)
    with pytest.raises(LabCommandError, match=r"middlebox at n0r9: .*No such device"):
        Middlebox(lab._require_switch().pid, lab.rootless, "n0r9", "rail0", "acknowledge")


def test_a_limited_port_has_the_configured_rate(lab: Lab) -> None:
    """1 MB takes at least 80 ms at 100 Mbit/s; the test allows for an initial burst."""
    first, second = lab.nodes
    with Talk(first, second, 0) as slow, Talk(first, second, 1) as fast:
        lab.limit(0, 0, 1000)
        lab.limit(0, 0, 100)
        try:
            word, seconds = slow.say(1_000_000)
            assert word == "same"
            assert seconds > 0.07
            assert fast.say(1_000_000)[0] == "same"
        finally:
            lab.heal(0, 0)
        for node, run in ((first, first.run), (None, lab.run_in_switch)):
            device = "rail0" if node else lab.port(0, 0)
            assert "tbf" not in run("tc", "qdisc", "show", "dev", device)


def test_a_new_filter_replaces_the_old_filter_and_heal_removes_all(lab: Lab) -> None:
    assert healed(lab)
    first, second = lab.nodes
    lab.one_way(0, 0, "from")
    lab.mtu_hole(0, 0)
    try:
        assert datagrams_arrive(first, second, 0, SMALL)
    finally:
        lab.limit(0, 0, 10)
        lab.cut(0, 0)
        lab.heal(0, 0)
    assert healed(lab)
    assert "faults" not in lab.run_in_switch("nft", "list", "tables")
    lab.heal(0, 0)


@pytest.mark.parametrize(
    ("fault", "arguments", "said"),
    [
        ("one_way", ("both",), "direction must be 'from' or 'to', not 'both'"),
        ("mtu_hole", (67,), "mtu must be 68 to 65535 bytes, not 67"),
        ("mtu_hole", (65536,), "not 65536"),
        ("limit", (0,), "mbit must be 1 to 100000 Mbit/s, not 0"),
        ("limit", (100_001,), "not 100001"),
    ],
)
def test_invalid_parameters_of_faults_are_refused(
    lab: Lab, fault: str, arguments: tuple[Any, ...], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        getattr(lab, fault)(0, 0, *arguments)


@pytest.mark.parametrize(
    "fault", ["reset", "half_open", "stale", "flip", "mtu_hole", "ack_backlog", "heal"]
)
def test_faults_of_a_missing_port_are_refused(lab: Lab, fault: str) -> None:
    with pytest.raises(ValueError, match="node 2 is not one of the lab's 2 nodes"):
        getattr(lab, fault)(2, 0)
    with pytest.raises(ValueError, match="rail 2 is not one of the lab's 2 rails"):
        getattr(lab, fault)(0, 2)


@pytest.mark.parametrize(("offset", "every"), [(59, 1), (60001, 1), (60, 0), (60, 1_000_001)])
def test_invalid_parameters_of_flips_are_refused(lab: Lab, offset: int, every: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        lab.flip(0, 0, offset=offset, every=every)
