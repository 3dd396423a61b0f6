"""Flapping rails, and outages of all rails of a job: steps wait and continue."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from real_rails import (
    KIB,
    MIB,
    REJOIN_S,
    Stream,
    check_bound,
    check_whole_stall,
    moves_of,
    stalls_of,
    summary,
    until_hit,
)

from r2serve.lab.lab import Lab

FLAPS = 20
FLAPS_OF_ALL = 5
OUTAGE_S = 8.0
LATE_STEPS = 2  # far more steps end in 8 s with a rail

Events = list[list[dict[str, Any]]]


def flap(stream: Stream, rails: list[int], times: int) -> Events:
    """Cuts rails together for 50 to 300 ms, at the nodes in turn; returns the events."""
    chance = random.Random(7)
    events: Events = [[], []]
    for number in range(times):
        for rail in rails:
            stream.lab.cut(number % 2, rail)
        time.sleep(chance.uniform(0.05, 0.3))
        for rail in rails:
            stream.lab.heal(number % 2, rail)
        time.sleep(chance.uniform(0.05, 0.3))
        events = [old + new for old, new in zip(events, stream.look(), strict=True)]
    return events


@pytest.mark.parametrize(
    ("size", "flaps"), [(16 * KIB, FLAPS), (MIB, FLAPS // 2)], ids=["16KiB", "1MiB"]
)
@pytest.mark.timeout(300)
def test_a_flapping_rail_stalls_at_most_once_per_down(
    jobs, make_lab, eventually, show, size: int, flaps: int
) -> None:
    """Back-off and damping have default values. A flap of a rail out of use causes no stall."""
    lab: Lab = make_lab(2)
    stream = Stream(jobs, lab, size=size, rejoin_backoff_max_ms=5000)
    rail = stream.busiest()
    steps = stream.steps()
    events = flap(stream, [rail], flaps)
    eventually("further steps", lambda: stream.steps() > steps + 100)
    eventually(f"rail {rail} UP", lambda: stream.is_up(rail), REJOIN_S)
    events = [old + new for old, new in zip(events, stream.look(), strict=True)]
    stream.finish()
    lost = moves_of(events, "DOWN")
    assert lost == moves_of(events, "DOWN", rail)
    assert lost
    for of_rank, of_peer in zip(events, reversed(events), strict=True):
        hit = [event["call"] for event in of_rank if event["kind"] == "stall"]
        assert len(hit) == len(set(hit))
        # The two ends may notice a fault in two successive steps.
        faults = [call for call in hit if call - 1 not in hit]
        # On a busy machine, a merely suspected rail stalls a step, too. A suspicion of the peer
        # alone shows here as a message completed by a replay.
        lost_or_suspected = [event for event in of_rank if event["text"].startswith("UP->")]
        lost_or_suspected.extend(map(dict, moves_of([of_peer], "SUSPECT")))
        assert len(faults) <= len(lost_or_suspected)
    hits = stalls_of(events)
    show(summary(f"flaps of one rail, {size} bytes", hits, flaps) + f", {len(lost) // 2} DOWN")
    check_bound(hits)


@pytest.mark.timeout(300)
def test_flaps_of_all_rails_at_once_lose_no_step(jobs, make_lab, eventually, show) -> None:
    stream = Stream(jobs, make_lab(2), fallback=False)

    def flap_all() -> list[int]:
        events = flap(stream, [0, 1], FLAPS_OF_ALL)
        steps = stream.steps()
        eventually("further steps", lambda: stream.steps() > steps + 100, REJOIN_S)
        for rail in (0, 1):
            eventually(f"rail {rail} UP", lambda r=rail: stream.is_up(r), REJOIN_S)
        events = [old + new for old, new in zip(events, stream.look(), strict=True)]
        assert not [event for of_rank in events for event in of_rank if event["kind"] == "abort"]
        return stalls_of(events)

    hits = until_hit(flap_all)
    stream.finish()
    show(summary("flaps of all rails", hits, FLAPS_OF_ALL))


@pytest.mark.timeout(300)
def test_steps_wait_for_the_end_of_an_outage_of_all_rails(jobs, make_lab, eventually, show) -> None:
    """All rails are lost for 8 s, without fallback to the management NIC, with default back-off.

    A job with a single rail and a job with two rails run at the same time.
    """
    streams = [
        Stream(jobs, make_lab(rails), fallback=False, rejoin_backoff_max_ms=5000)
        for rails in (1, 2)
    ]
    every = [(stream, rail) for stream in streams for rail in range(stream.lab.rails)]
    for stream, rail in every:
        stream.lab.cut(1, rail)
    for stream, rail in every:
        eventually(f"rail {rail} DOWN", lambda s=stream, r=rail: s.is_out(r))
    steps = [stream.steps_at_rest() for stream in streams]
    paused = [stream.short_of_cpu_ns() for stream in streams]
    time.sleep(OUTAGE_S)
    # A starved rank may end a step late, with data that arrived before the outage.
    late = [stream.steps() - before for stream, before in zip(streams, steps, strict=True)]
    assert max(late) <= LATE_STEPS
    for stream, rail in every:
        stream.lab.heal(1, rail)
    healed = time.monotonic()
    for stream, before in zip(streams, steps, strict=True):
        enough = before + LATE_STEPS
        eventually("further steps", lambda s=stream, e=enough: s.steps() > e + 1, REJOIN_S)
    after_s = time.monotonic() - healed
    for stream, rail in every:
        eventually(f"rail {rail} UP", lambda s=stream, r=rail: s.is_up(r), REJOIN_S)
    for stream, spent in zip(streams, paused, strict=True):
        short = [now - then for now, then in zip(stream.short_of_cpu_ns(), spent, strict=True)]
        # Probes on the management NIC succeed during the outage, but the step still waits.
        check_whole_stall(stream.look(), short, OUTAGE_S - 1)
        stream.finish()
    show(f"{OUTAGE_S:g} s without any rail: both jobs go on {after_s * 1e3:.0f} ms after the end")
