"""A slow rail: both rails have a rate limit, then rail 0 gets a tenth of the rate of rail 1."""

from __future__ import annotations

import time
from typing import Any

import pytest
from real_rails import KIB, MIB, REJOIN_S, Stream, moves_of

from r2serve.lab.lab import Lab

RATE_MBIT = 1000
SLOW_MBIT = 100
# Lower limit of the step rate, relative to the step rate on the other rail alone.  Without
# detection of the slow rail, the ratio would be 0.5.  The target of 0.9 belongs to `r2serve bench
# collectives --state slow`; a busy machine would miss 0.9 here.
SHARE = 0.7
TRIES = 4
WITHIN_S = 1.0
MEASURED_S = 1.5
WATCHED_S = 20.0


def rate(stream: Stream, for_s: float) -> float:
    """Returns all-reduces per second, measured for `for_s`."""
    before, began = stream.steps(), time.monotonic()
    time.sleep(for_s)
    return (stream.steps() - before) / (time.monotonic() - began)


def limit(lab: Lab, rail: int, mbit: int) -> None:
    for node in (0, 1):
        lab.limit(node, rail, mbit)


def slow_down(stream: Stream, eventually: Any) -> tuple[float, float]:
    """Returns two step rates: without rail 0, and 1 s after rail 0 drops to a tenth of the rate."""
    lab = stream.lab
    for rail in (0, 1):
        limit(lab, rail, RATE_MBIT)
    lab.cut(1, 0)
    eventually("rail 0 DOWN", lambda: stream.is_out(0))
    time.sleep(0.5)
    alone = rate(stream, MEASURED_S)
    lab.heal(1, 0)
    limit(lab, 0, RATE_MBIT)
    eventually("rail 0 UP", lambda: stream.is_up(0), REJOIN_S)
    time.sleep(1.0)
    stream.look()
    limit(lab, 0, SLOW_MBIT)
    time.sleep(WITHIN_S)
    return alone, rate(stream, MEASURED_S)


def moves_under(stream: Stream, for_s: float) -> list[Any]:
    """Returns the transitions to SUSPECT and to DOWN within `for_s`."""
    events: list[list[dict[str, Any]]] = [[], []]
    until = time.monotonic() + for_s
    while time.monotonic() < until:
        time.sleep(1.0)
        events = [old + new for old, new in zip(events, stream.look(), strict=True)]
    return moves_of(events, "SUSPECT") + moves_of(events, "DOWN")


@pytest.mark.alone
@pytest.mark.parametrize("size", [MIB, 4 * MIB], ids=["1MiB", "4MiB"])
@pytest.mark.timeout(120)
def test_a_slow_rail_does_not_slow_down_the_others(
    jobs, make_lab, eventually, show, size: int
) -> None:
    """1 s after the slow-down, the rate must be close to the rate of the other rail alone."""
    stream = Stream(jobs, make_lab(2), size=size)
    shares: list[float] = []
    while len(shares) < TRIES and max(shares, default=0) < SHARE:
        alone, beside = slow_down(stream, eventually)
        shares.append(beside / alone)
        show(
            f"slow rail, {size // KIB} KiB: {beside:.0f} all-reduces a second, "
            f"{alone:.0f} by the other rail alone: {shares[-1]:.2f}"
        )
    stream.finish()
    assert max(shares) >= SHARE


@pytest.mark.parametrize(
    "watched_s", [WATCHED_S, pytest.param(300.0, marks=pytest.mark.long)], ids=["short", "long"]
)
@pytest.mark.timeout(900)
def test_a_slow_rail_does_not_flap(jobs, make_lab, eventually, show, watched_s: float) -> None:
    """A slow rail still answers, so it loses its share of the data but stays UP.

    A pause of the whole host beyond a deadline also makes rails SUSPECT. An equal period without a
    slow rail gives the number of such cases.
    """
    stream = Stream(jobs, make_lab(2), size=MIB)
    for rail in (0, 1):
        limit(stream.lab, rail, RATE_MBIT)
    stream.look()
    without = moves_under(stream, watched_s)
    slow_down(stream, eventually)
    moves = moves_under(stream, watched_s)
    own = moves_of([moves], "SUSPECT", rail=0)
    show(
        f"slow rail for {watched_s:g} s: {len(own)} transitions of the rail to SUSPECT, "
        f"{len(moves) - len(own)} of the other rail, none to DOWN; "
        f"the same time without a slow rail: {len(without)} of both"
    )
    stream.finish()
    assert moves_of([moves], "DOWN") == []
    assert len(own) <= max(6, 3 * len(without)), "suspected again and again"
