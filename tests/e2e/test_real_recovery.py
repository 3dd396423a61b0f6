"""After an outage, a flapping rail is damped, and the journal has the whole stall."""

from __future__ import annotations

import time
from typing import Any

import pytest
from real_rails import REJOIN_S, Stream, check_whole_stall, moves_of

FLAPS = 20
# A back-off of 50 ms, doubled with each loss up to BACKOFF_MAX_MS, allows seven rejoins in 7 s.
# Each further pause of BACKOFF_MAX_MS allows another rejoin.
REJOINS, REJOINS_TAKE_S = 7, 7.0
BACKOFF_MAX_MS = 5000
OUTAGE_S = 3.0


@pytest.mark.parametrize("node", [0, 1], ids=["accepting-end", "connecting-end"])
@pytest.mark.timeout(300)
def test_a_flapping_rail_is_damped(jobs, make_lab, eventually, show, node: int) -> None:
    """20 flaps in 7 s at either end, with default damping: the rail rejoins less and less often."""
    stream = Stream(jobs, make_lab(2), rejoin_backoff_max_ms=BACKOFF_MAX_MS)
    rail = stream.busiest()
    began = time.monotonic()
    events: list[list[dict[str, Any]]] = [[], []]
    for _ in range(FLAPS):
        stream.lab.cut(node, rail)
        time.sleep(0.15)
        stream.lab.heal(node, rail)
        time.sleep(0.2)
        events = [old + new for old, new in zip(events, stream.look(), strict=True)]
    took_s = time.monotonic() - began
    eventually(f"rail {rail} UP", lambda: stream.is_up(rail), REJOIN_S)
    stream.finish()
    # A suspicion that clears is a move to UP as well.
    moves = moves_of([events[0]], "UP", rail)
    rejoins = sum("PROBATION" in move["text"] for move in moves)
    show(f"{FLAPS} flaps in a row at node {node}: the rail rejoined {rejoins} times meanwhile")
    later_s = max(0.0, took_s - REJOINS_TAKE_S)  # a busy machine takes longer for the flaps
    assert rejoins <= REJOINS + 1 + later_s / (BACKOFF_MAX_MS / 1000)


@pytest.mark.timeout(300)
def test_the_journal_has_the_whole_stall_of_an_outage(jobs, make_lab, eventually, show) -> None:
    """During the outage, only control frames and probes arrive over the management NIC."""
    stream = Stream(jobs, make_lab(2), fallback=False)
    for rail in (0, 1):
        stream.lab.cut(1, rail)
    for rail in (0, 1):
        eventually(f"rail {rail} DOWN", lambda r=rail: stream.is_out(r))
    paused = stream.short_of_cpu_ns()
    time.sleep(OUTAGE_S)
    steps = stream.steps()
    for rail in (0, 1):
        stream.lab.heal(1, rail)
    eventually("further steps", lambda: stream.steps() > steps + 10, REJOIN_S)
    short = [now - then for now, then in zip(stream.short_of_cpu_ns(), paused, strict=True)]
    worst_s = check_whole_stall(stream.look(), short, OUTAGE_S)
    stream.finish()
    show(f"outage of {OUTAGE_S:g} s: worst stall in the journals {worst_s * 1e3:.1f} ms")
