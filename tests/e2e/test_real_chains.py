"""Chains of faults without healing, with three and five rails: each failover meets a new fault."""

from __future__ import annotations

import pytest
from real_rails import (
    BLACK_HOLE,
    CABLE,
    KIB,
    LOST_FROM,
    LOST_TO,
    MIB,
    OWN_PORT,
    REJOIN_S,
    Fault,
    Stream,
    check_bound,
    moves_of,
    stalls_of,
    summary,
    until_hit,
)
from timely import timely

from r2serve.lab.lab import Lab

# Faults of a chain in order, with the node of each fault.
CHAIN: list[tuple[Fault, int]] = [
    (CABLE, 0),
    (BLACK_HOLE, 1),
    (OWN_PORT, 1),
    (LOST_TO, 0),
    (LOST_FROM, 1),
]


def lose(stream: Stream, fault: Fault, node: int, rail: int, eventually) -> list[int]:
    """Makes a fault without healing; returns the stalls, in ns.

    Steps must continue, and no other rail may go DOWN.
    """
    steps = stream.steps()
    fault[1](stream.lab, node, rail)
    events = stream.await_down(rail, eventually)
    eventually("further steps", lambda: stream.steps() > steps + 20)
    events = [old + new for old, new in zip(events, stream.look(), strict=True)]
    assert moves_of(events, "DOWN") == moves_of(events, "DOWN", rail), events
    return stalls_of(events)


def heal_all(stream: Stream, eventually) -> None:
    for node in (0, 1):
        for rail in range(stream.lab.rails):
            stream.lab.heal(node, rail)
    for rail in range(stream.lab.rails):
        eventually(f"rail {rail} UP", lambda r=rail: stream.is_up(r), REJOIN_S)
    stream.look()


@pytest.mark.parametrize(("rails", "size"), [(3, 16 * KIB), (3, MIB), (5, 16 * KIB)])
@pytest.mark.timeout(300)
def test_rails_fail_in_turn_until_no_rail_is_left(
    jobs, make_lab, eventually, show, rails: int, size: int
) -> None:
    """Each fault strikes the busiest rail; after the last rail, the management NIC carries data."""
    lab: Lab = make_lab(rails)
    stream = Stream(jobs, lab, size=size)

    def lose_all() -> list[int]:
        left = set(range(rails))
        by_control = stream.control_bytes()
        hits: list[int] = []
        for fault, node in CHAIN[:rails]:
            timely(
                lambda: stream.control_bytes() == by_control,
                "data on the management NIC with a rail left",
                within_s=0,
            )
            rail = stream.carried(left, 0.05).most_common(1)[0][0]
            hits += lose(stream, fault, node, rail, eventually)
            left.remove(rail)
        assert stream.control_bytes() > by_control
        heal_all(stream, eventually)
        eventually("no data on the management NIC", stream.leaves_control_alone)
        return hits

    # A starved machine may lose all rails for a moment.
    timely(lambda: stream.control_bytes() == 0, "data on the management NIC", within_s=0)
    hits = until_hit(lose_all)
    stream.finish()
    show(summary(f"{rails} of {rails} rails in turn, {size} bytes", hits, rails))
    check_bound(hits)


@pytest.mark.timeout(300)
def test_two_rails_of_three_fall_silent_at_once(jobs, make_lab, eventually, show) -> None:
    """Hedged chunks on the second rail are lost as well."""
    lab: Lab = make_lab(3)
    stream = Stream(jobs, lab)

    def silence_two(node: int) -> list[int]:
        steps = stream.steps()
        first = stream.busiest()
        second = (first + 1) % 3
        for rail in (first, second):
            lab.black_hole(node, rail)
        events = stream.await_down(first, eventually)
        eventually(f"rail {second} DOWN", lambda rail=second: stream.is_out(rail))
        eventually("further steps", lambda s=steps: stream.steps() > s + 20)
        events = [old + new for old, new in zip(events, stream.look(), strict=True)]
        assert not moves_of(events, "DOWN", 3 - first - second)
        heal_all(stream, eventually)
        return stalls_of(events)

    hits = until_hit(lambda: silence_two(0), [*silence_two(0), *silence_two(1)])
    stream.finish()
    show(summary("two of three rails silent at once", hits, 2))
    check_bound(hits)


@pytest.mark.parametrize("fault", [CABLE, BLACK_HOLE], ids=["cable", "black-hole"])
@pytest.mark.timeout(300)
def test_the_failure_of_an_idle_rail_is_detected_before_use(
    jobs, make_lab, eventually, show, fault: Fault
) -> None:
    lab: Lab = make_lab(3)
    stream = Stream(jobs, lab)

    def lose_idle_and_busy() -> list[int]:
        idle = stream.carried().most_common()[-1][0]
        fault[1](lab, 1, idle)
        events = stream.await_down(idle, eventually)
        assert moves_of(events, "DOWN") == moves_of(events, "DOWN", idle), events
        busy = stream.carried({0, 1, 2} - {idle}).most_common(1)[0][0]
        hits = lose(stream, BLACK_HOLE, 0, busy, eventually)
        assert stream.busiest() == 3 - busy - idle
        heal_all(stream, eventually)
        return hits

    hits = until_hit(lose_idle_and_busy)
    stream.finish()
    show(summary(f"black hole after an idle rail's {fault[0]}", hits, 1))
    check_bound(hits)
