"""Faults with the carrier up: one-way loss, MTU holes, and connections that end or go silent."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
from real_rails import (
    BOUND_S,
    HALF_OPEN,
    KIB,
    LOST_FROM,
    LOST_TO,
    MIB,
    REFUSED,
    REJOIN_S,
    RESET,
    STALE,
    Stream,
    moves_of,
    stalls_of,
    strike,
    summary,
)

from r2serve.lab.lab import Lab

HOLE_S = 8.0
HELD_S = 2.0
WITHHELD_BOUND_S = 0.3
SIZES = pytest.mark.parametrize("size", [16 * KIB, MIB], ids=["16KiB", "1MiB"])


@pytest.fixture
def lab(make_lab) -> Lab:
    return make_lab(2)


@SIZES
@pytest.mark.timeout(120)
def test_loss_in_one_direction_changes_no_bit(jobs, lab: Lab, eventually, show, size: int) -> None:
    """Both directions are tested at both ends of the rail in use."""
    stream = Stream(jobs, lab, size=size)
    for fault in (LOST_FROM, LOST_TO):
        hits = []
        for node in (0, 1):
            hits += strike(stream, fault, node, stream.busiest(), eventually)
        show(summary(f"{fault[0]}, {size} bytes", hits, 2))
        assert hits, "no fault hit a step"
        assert max(hits) < BOUND_S * 1e9
    stream.finish()


@pytest.mark.timeout(120)
def test_packets_refused_by_the_own_host_are_silence(jobs, lab: Lab, eventually, show) -> None:
    """If the drop is taken for a closed window, the deadline waits for probes: 200 ms and more."""
    stream = Stream(jobs, lab, size=16 * KIB)
    hits = []
    for _ in range(4):
        for node in (0, 1):
            hits += strike(stream, REFUSED, node, stream.busiest(), eventually)
    show(summary(REFUSED[0], hits, 8))
    assert hits, "no fault hit a step"
    assert min(hits) < 150e6  # a starved machine delays some, the defect delays all
    stream.finish()


@SIZES
@pytest.mark.timeout(120)
def test_connections_that_end_or_go_silent_change_no_bit(
    jobs, lab: Lab, eventually, show, size: int
) -> None:
    """Faults at both ends of the rail in use. The path works, so the rail rejoins at once."""
    stream = Stream(jobs, lab, size=size)
    for fault in (RESET, HALF_OPEN, STALE):
        hits = []
        for node in (0, 1):
            hits += strike(stream, fault, node, stream.busiest(), eventually, passes=True)
        show(summary(f"{fault[0]}, {size} bytes", hits, 2))
        assert max(hits, default=0) < BOUND_S * 1e9
    stream.finish()


@pytest.mark.alone
@SIZES
@pytest.mark.timeout(120)
def test_an_mtu_hole_keeps_a_rail_out_until_healed(
    jobs, lab: Lab, eventually, show, size: int
) -> None:
    """Small frames pass, so attempts to rejoin fail at the full-size probe, with growing pauses."""
    stream = Stream(jobs, lab, size=size, rejoin_backoff_max_ms=1500)
    rail = stream.busiest()
    lab.mtu_hole(1, rail)
    events = stream.await_down(rail, eventually)
    steps = stream.steps()
    time.sleep(HOLE_S)
    assert stream.steps() > steps + 10
    events = [old + new for old, new in zip(events, stream.look(), strict=True)]
    # A suspicion that clears is a move to UP as well.
    rejoins = [move for move in moves_of(events, "UP", rail) if "PROBATION" in move["text"]]
    assert not rejoins, "the rail rejoined despite the MTU hole"
    assert moves_of(events, "DOWN") == moves_of(events, "DOWN", rail)
    attempts = [move["time_ns"] / 1e9 for move in moves_of([events[1]], "PROBATION", rail)]
    pauses = [after - before for before, after in itertools.pairwise(attempts)]
    assert len(attempts) > 3, attempts
    assert pauses[-1] > 1.25 * pauses[0], pauses
    lab.heal(1, rail)
    eventually(f"rail {rail} UP", lambda: stream.is_up(rail), REJOIN_S)
    stream.finish()
    hits = stalls_of(events)
    show(
        summary(f"MTU hole, {size} bytes", hits, 1) + f", {len(attempts)} attempts in {HOLE_S:g} s"
    )
    assert hits
    assert max(hits) < BOUND_S * 1e9


@SIZES
@pytest.mark.timeout(120)
def test_bytes_that_a_middlebox_acknowledges_and_withholds_are_sent_elsewhere(
    jobs, lab: Lab, eventually, show, size: int
) -> None:
    """Without a question to the peer, an unanswered probe ends the stall after 1.2 s."""
    stream = Stream(jobs, lab, size=size)
    events: list[list[dict[str, Any]]] = [[], []]
    for node in (0, 1):
        rail = stream.busiest()
        lab.middlebox_ack(node, rail)
        time.sleep(HELD_S)
        steps = stream.steps()
        eventually("further steps", lambda s=steps: stream.steps() > s + 20)
        lab.heal(node, rail)
        eventually(f"rail {rail} UP", lambda r=rail: stream.is_up(r), REJOIN_S)
        events = [old + new for old, new in zip(events, stream.look(), strict=True)]
    stream.finish()
    hits = stalls_of(events)
    show(summary(f"acknowledged by a middlebox for {HELD_S:g} s, {size} bytes", hits, 2))
    assert hits, "no fault hit a step"
    assert min(hits) < WITHHELD_BOUND_S * 1e9
    assert max(hits) < BOUND_S * 1e9
