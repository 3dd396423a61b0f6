"""A stopped peer and late acknowledgements make rails look bad; flipped bits corrupt data."""

from __future__ import annotations

import time
from typing import Any

import pytest
from real_rails import (
    KIB,
    MIB,
    REJOIN_S,
    Stream,
    check_bound,
    moves_of,
    stalls_of,
    summary,
)

from r2serve.lab.lab import Lab

STOPPED_S = 2.0
BACKLOG_S = 2.0
SIZES = pytest.mark.parametrize("size", [16 * KIB, MIB], ids=["16KiB", "1MiB"])


@pytest.fixture
def lab(make_lab) -> Lab:
    return make_lab(2)


@pytest.mark.parametrize(
    ("size", "stopped"), [(16 * KIB, (0, 1)), (MIB, (1,))], ids=["16KiB", "1MiB"]
)
@pytest.mark.timeout(300)
def test_a_stopped_peer_takes_no_rail_down(
    jobs, lab: Lab, eventually, show, size: int, stopped: tuple[int, ...]
) -> None:
    """A stopped peer answers late, so a rail may become SUSPECT, but no rail may go DOWN."""
    stream = Stream(jobs, lab, size=size)
    for number in stopped:
        rank, node = stream.ranks[number], lab.nodes[number]
        pid = str(rank.ask({"do": "pid"}))
        node.run("sh", "-c", f"kill -STOP {pid}")
        time.sleep(STOPPED_S)
        node.run("sh", "-c", f"kill -CONT {pid}")
        steps = stream.steps()
        eventually("further steps", lambda s=steps: stream.steps() > s + 100)
    events = stream.look()
    stream.finish()
    suspicions = len(moves_of(events, "SUSPECT"))
    show(
        f"peer stopped for {STOPPED_S:g} s, {size} bytes: {len(stopped)} faults, "
        f"{suspicions} suspicions"
    )
    assert moves_of(events, "DOWN") == []


@pytest.mark.long  # the simulator's fault ack_backlog tests the same rules
@SIZES
@pytest.mark.timeout(300)
def test_a_backlog_of_acknowledgements_takes_no_rail_down(
    jobs, lab: Lab, eventually, show, size: int
) -> None:
    """A rail with late acknowledgements may become SUSPECT; chunks may be hedged."""
    # Late acknowledgements raise the smoothed round trip; the deadline must stay below the delay.
    stream = Stream(jobs, lab, size=size, ack_deadline_factor=1)
    events: list[list[dict[str, Any]]] = [[], []]
    for node in (0, 1):
        rail = stream.busiest()
        lab.ack_backlog(node, rail)
        time.sleep(BACKLOG_S)
        steps = stream.steps()
        eventually("further steps", lambda s=steps: stream.steps() > s + 20)
        lab.heal(node, rail)
        events = [old + new for old, new in zip(events, stream.look(), strict=True)]
    stream.finish()
    hits = stalls_of(events)
    show(summary(f"late acknowledgements for {BACKLOG_S:g} s, {size} bytes", hits, 2))
    assert moves_of(events, "SUSPECT"), "no acknowledgement was late"
    assert moves_of(events, "DOWN") == []
    check_bound(hits)


@pytest.mark.timeout(300)
def test_flipped_bits_are_found_by_the_checksum(jobs, lab: Lab, eventually, show) -> None:
    """Bytes change where no checksum of the path detects this, like in a NIC with bad memory."""
    # Messages of 1 MiB use both rails; only one rail carries smaller messages, not always the same.
    stream = Stream(jobs, lab, size=MIB, checksum=True)
    hits: list[int] = []
    verdicts: list[str] = []
    for node in (0, 1):
        rail = stream.busiest()
        lab.flip(node, rail)
        events = stream.await_down(rail, eventually)
        lab.heal(node, rail)
        eventually(f"rail {rail} UP", lambda r=rail: stream.is_up(r), REJOIN_S)
        events = [old + new for old, new in zip(events, stream.look(), strict=True)]
        assert moves_of(events, "DOWN") == moves_of(events, "DOWN", rail), events
        hits += stalls_of(events)
        verdicts += [move["text"] for move in moves_of(events, "DOWN")]
    stream.finish()
    show(summary("flipped bits", hits, 2))
    assert sum("checksum" in verdict for verdict in verdicts) >= 2, verdicts
    check_bound(hits)


@pytest.mark.timeout(300)
def test_flipped_bits_reach_the_result_without_the_checksum(jobs, lab: Lab) -> None:
    """Without r2ccl's checksum, the lab's flipped bits reach the result."""
    stream = Stream(jobs, lab, size=MIB, checksum=False)
    lab.flip(0, stream.busiest())
    # The rank that sees the wrong bits ends, and the other rank may lose it as its peer.
    said = [rank.hear(60) for rank in stream.ranks]
    assert any("wrong" in each for each in said), said
