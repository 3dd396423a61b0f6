"""Faults with the carrier up: one-way loss, MTU holes, and connections that end or go silent."""

from __future__ import annotations

import itertools
import time

import pytest
from real_rails import (
    HALF_OPEN,
    KIB,
    LOST_FROM,
    LOST_TO,
    MIB,
    MTU_HOLE,
    REFUSED,
    REJOIN_S,
    RESET,
    STALE,
    Stream,
    check_bound,
    moves_of,
    stalls_of,
    strike,
    summary,
    until_hit,
)
from timely import timely

from r2serve.lab.lab import Lab

ATTEMPTS = 4  # to rejoin during an MTU hole
HELD_S = 2.0
REFUSED_BOUND_S = 0.15
WITHHELD_BOUND_S = 0.3
SIZES = pytest.mark.parametrize("size", [16 * KIB, MIB], ids=["16KiB", "1MiB"])


@pytest.fixture
def lab(make_lab) -> Lab:
    return make_lab(2)


def check_shortest(hits: list[int], bound_s: float) -> None:
    """Checks the shortest stall: a starved machine delays some steps, the defect delays all."""
    best_s = min(hits) / 1e9
    timely(lambda: best_s < bound_s, f"no stall below {bound_s:g} s; shortest {best_s:.2f} s", 0)


@SIZES
@pytest.mark.timeout(300)
def test_loss_in_one_direction_changes_no_bit(jobs, lab: Lab, eventually, show, size: int) -> None:
    """Both directions are tested at both ends of the rail in use."""
    stream = Stream(jobs, lab, size=size)
    for fault in (LOST_FROM, LOST_TO):
        hits = []
        for node in (0, 1):
            hits += strike(stream, fault, node, stream.busiest(), eventually)
        hits = until_hit(
            lambda fault=fault: strike(stream, fault, 0, stream.busiest(), eventually), hits
        )
        show(summary(f"{fault[0]}, {size} bytes", hits, 2))
        check_bound(hits)
    stream.finish()


@pytest.mark.timeout(300)
def test_packets_refused_by_the_own_host_are_silence(jobs, lab: Lab, eventually, show) -> None:
    """If the drop is taken for a closed window, the deadline waits for probes: 200 ms and more."""
    stream = Stream(jobs, lab, size=16 * KIB)
    hits = []
    for _ in range(4):
        for node in (0, 1):
            hits += strike(stream, REFUSED, node, stream.busiest(), eventually)
    hits = until_hit(lambda: strike(stream, REFUSED, 0, stream.busiest(), eventually), hits)
    show(summary(REFUSED[0], hits, 8))
    stream.finish()
    check_shortest(hits, REFUSED_BOUND_S)


@SIZES
@pytest.mark.timeout(300)
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
        check_bound(hits)
    stream.finish()


@pytest.mark.alone
@SIZES
@pytest.mark.timeout(300)
def test_an_mtu_hole_keeps_a_rail_out_until_healed(
    jobs, lab: Lab, eventually, show, size: int
) -> None:
    """Small frames pass, so attempts to rejoin fail at the full-size probe, with growing pauses."""
    stream = Stream(jobs, lab, size=size, rejoin_backoff_max_ms=1500)
    rail = stream.busiest()
    lab.mtu_hole(1, rail)
    events = stream.await_down(rail, eventually)
    steps = stream.steps()

    def attempts() -> list[float]:
        for old, new in zip(events, stream.look(), strict=True):
            old += new
        return [move["time_ns"] / 1e9 for move in moves_of([events[1]], "PROBATION", rail)]

    eventually("attempts to rejoin", lambda: len(attempts()) >= ATTEMPTS, REJOIN_S)
    eventually("further steps", lambda: stream.steps() > steps + 10, REJOIN_S)
    tried = attempts()
    # A suspicion that clears is a move to UP as well.
    rejoins = [move for move in moves_of(events, "UP", rail) if "PROBATION" in move["text"]]
    assert not rejoins, "the rail rejoined despite the MTU hole"
    assert moves_of(events, "DOWN") == moves_of(events, "DOWN", rail)
    pauses = [after - before for before, after in itertools.pairwise(tried)]
    timely(lambda: max(pauses) > 1.25 * pauses[0], f"pauses that do not grow: {pauses} s", 0)
    lab.heal(1, rail)
    eventually(f"rail {rail} UP", lambda: stream.is_up(rail), REJOIN_S)
    hits = until_hit(
        lambda: strike(stream, MTU_HOLE, 1, stream.busiest(), eventually), stalls_of(events)
    )
    stream.finish()
    show(
        summary(f"MTU hole, {size} bytes", hits, 1)
        + f", {len(tried)} attempts in {tried[-1] - tried[0]:.1f} s"
    )
    check_bound(hits)


@SIZES
@pytest.mark.timeout(300)
def test_bytes_that_a_middlebox_acknowledges_and_withholds_are_sent_elsewhere(
    jobs, lab: Lab, eventually, show, size: int
) -> None:
    """Without a question to the peer, an unanswered probe ends the stall after 1.2 s."""
    stream = Stream(jobs, lab, size=size)

    def withhold(node: int) -> list[int]:
        rail = stream.busiest()
        lab.middlebox_ack(node, rail)
        time.sleep(HELD_S)
        steps = stream.steps()
        eventually("further steps", lambda s=steps: stream.steps() > s + 20)
        lab.heal(node, rail)
        eventually(f"rail {rail} UP", lambda r=rail: stream.is_up(r), REJOIN_S)
        return stalls_of(stream.look())

    hits = until_hit(lambda: withhold(0), [*withhold(0), *withhold(1)])
    stream.finish()
    show(summary(f"acknowledged by a middlebox for {HELD_S:g} s, {size} bytes", hits, 2))
    check_shortest(hits, WITHHELD_BOUND_S)
    check_bound(hits)
