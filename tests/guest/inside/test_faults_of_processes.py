"""Processes stopped or killed, and links without any rail beyond their time-out."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from rails import rails

if TYPE_CHECKING:
    from ranks import Job

pytestmark = pytest.mark.usefixtures("alone")

SMALL, LARGE = 4 * 1024, 256 * 1024  # floats: 16 KiB, 1 message; 1 MiB, striped
LINK_TIMEOUT_S = 3.0
DEAD_DEADLINE_S = 2.0
STOPPED_S = 3.0  # longer than a silent rail may stay up
CERTAINTY_S = 10.0  # allowance for the slow guest; 1 s on a real machine
CONFIG: dict[str, Any] = {
    "link_timeout_s": LINK_TIMEOUT_S,
    "dead_deadline_ms": int(1000 * DEAD_DEADLINE_S),
    "fallback": False,
}
# Rails of each node, and the commands to break and heal the rails of node 0.
OUTAGES = {
    "three RDMA rails go silent": ("r0 r1 r2", "mute", "unmute"),
    "two RDMA rails and one of TCP lose their cables": ("r0 r1 t", "unplug", "plug"),
}


def test_a_stopped_peer_costs_no_rail_and_a_dead_peer_is_a_typed_error(
    new_job: type[Job], show: Callable[[str], None]
) -> None:
    job = new_job(rails_of=lambda rank: f"n{rank}r0,n{rank}r1,n{rank}r2", **CONFIG)
    since = time.monotonic_ns()
    with job.over_verbs(), job.stream(SMALL) as stream:
        stream.more(5)
        for rank in job.ranks:
            with rank.paused():
                time.sleep(STOPPED_S)
            stream.more(20)
    stops = stream.longest_of  # a rank stopped between two calls makes only its peer wait
    assert min(stops) > 0.9e3 * STOPPED_S, "a stop had no effect"
    assert job.moves(since) == [], "a rail was charged"
    show(
        f"each end stopped for {STOPPED_S:g} s: {len(job.moves(since, to='SUSPECT'))} suspicions, "
        f"no rail DOWN; longest calls {stops[0]:.0f}, {stops[1]:.0f} ms"
    )
    with job.stream(SMALL) as stream:
        stream.more(5)
        killed = time.monotonic()
        job.ranks[1].kill()
        [said] = stream.failures()
    assert said["error"] == "PeerLostError", said
    assert "rank 1" in said["text"]
    late = said["at"] - killed
    show(f"peer killed: {said['error']} after {late:.1f} s, link_timeout_s = {LINK_TIMEOUT_S:g}")
    assert late < LINK_TIMEOUT_S + CERTAINTY_S
    job.stop()


@pytest.mark.parametrize("outage", OUTAGES)
def test_no_rail_for_too_long_is_a_typed_error_at_both_ends(
    new_job: type[Job], show: Callable[[str], None], outage: str
) -> None:
    nics, breaks, heals = OUTAGES[outage]
    config = CONFIG | {"rdma": "auto"}
    job = new_job(rails_of=lambda rank: ",".join(f"n{rank}{nic}" for nic in nics.split()), **config)
    with job.stream(LARGE) as stream:
        stream.more(10)
        assert all(sent["verbs"] > 0 for sent in job.sent())
        began = time.monotonic()
        for nic in nics.split():
            rails(breaks, f"n0{nic}")
        try:
            said = stream.failures()
        finally:
            for nic in nics.split():
                rails(heals, f"n0{nic}")
    assert [one["error"] for one in said] == ["PeerLostError"] * 2, said
    for rank, one in enumerate(said):
        assert f"rank {1 - rank}" in one["text"], one
    late = max(one["at"] for one in said) - began
    show(f"{outage}: PeerLostError at both ends within {late:.1f} s of the first break")
    assert late < DEAD_DEADLINE_S + LINK_TIMEOUT_S + CERTAINTY_S
    job.stop()
