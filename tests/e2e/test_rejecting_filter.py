"""A packet filter that rejects everything looks like a dead process, but is an outage."""

from __future__ import annotations

import time
from typing import Any

import pytest
from real_rails import (
    PORT_UNREACHABLE,
    PROHIBITED,
    REJOIN_S,
    RESETS,
    Stream,
    moves_of,
    rejecting,
)

LATE_STEPS = 2  # a starved rank ends a step with data that arrived before


def goes_on(stream: Stream, eventually: Any) -> None:
    """Waits for further steps, and ends the stream; an error of a rank fails the test."""
    steps = stream.steps()
    eventually("further steps", lambda: stream.steps() > steps + 10, REJOIN_S)
    stream.finish()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("lasts_s", [2, 8])
def test_connections_reset_and_refused_by_a_filter_are_survived(
    jobs: Any, make_lab: Any, eventually: Any, lasts_s: int
) -> None:
    """Each connection ends with an RST and no FIN, and each new one is refused at once."""
    stream = Stream(jobs, make_lab(2), link_timeout_s=60.0)
    with rejecting(stream.lab.nodes[1], RESETS):

        def all_lost() -> bool:
            events = stream.ranks[0].ask({"do": "events"})
            return all(moves_of([events], "DOWN", rail) for rail in range(stream.lab.rails))

        eventually("all rails lost", all_lost)
        time.sleep(lasts_s)
    goes_on(stream, eventually)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("answer", "lasts_s"),
    [
        (PORT_UNREACHABLE, 2),
        pytest.param(PORT_UNREACHABLE, 8, marks=pytest.mark.long),
        pytest.param(PROHIBITED, 8, marks=pytest.mark.long),
    ],
)
def test_packets_rejected_by_icmp_are_survived(
    jobs: Any, make_lab: Any, eventually: Any, answer: str, lasts_s: int
) -> None:
    """ICMP ends no connection, so data stops; new connections are refused or fail at once."""
    stream = Stream(jobs, make_lab(2), link_timeout_s=60.0)
    with rejecting(stream.lab.nodes[1], answer) as rejected:
        steps = stream.steps_at_rest()
        before = rejected()
        time.sleep(lasts_s)
        assert stream.steps() <= steps + LATE_STEPS
        eventually("further packets rejected", lambda: rejected() > before)
    goes_on(stream, eventually)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", ["cut", "black_hole"])
def test_eight_seconds_without_any_nic_are_survived(
    jobs: Any, make_lab: Any, eventually: Any, fault: str
) -> None:
    """The management NIC is lost as well, so silence is all that the ranks hear of each other."""
    stream = Stream(jobs, make_lab(2), link_timeout_s=60.0)
    ports = [*range(stream.lab.rails), None]
    for port in ports:
        getattr(stream.lab, fault)(1, port)
    steps = stream.steps_at_rest()
    time.sleep(8)
    assert stream.steps() <= steps + LATE_STEPS
    for port in ports:
        stream.lab.heal(1, port)
    goes_on(stream, eventually)
