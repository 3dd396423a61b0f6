"""Random collectives over verbs rails while ports go down and come back."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from rails import rails

if TYPE_CHECKING:
    from ranks import Job

CALLS = int(os.environ.get("R2SERVE_GUEST_CALLS", "600"))
"""Calls of a round; a round takes seconds, and so has few faults on a fast machine."""
FAULTS = 6
KINDS = [("down", "up"), ("unplug", "plug"), ("mute", "unmute")]


def test_random_collectives_are_exact_while_rails_break(
    job: Job, show: Callable[[str], None]
) -> None:
    seed = int(os.environ.get("R2SERVE_GUEST_SEED", time.time()))
    plan = random.Random(seed)
    since = time.monotonic_ns()
    faults = rounds = 0
    kinds: Counter[str] = Counter()
    while faults < FAULTS:
        for rank in job.ranks:
            rank.begin("random_calls", seed=seed + rounds, count=CALLS)
        rounds += 1
        while not all(rank.is_through() for rank in job.ranks):
            nic = f"n{plan.randrange(2)}r{plan.randrange(3)}"
            # A mute rail without traffic does not go DOWN, but a port that is down always does.
            breaks, heals = plan.choice(KINDS) if faults else KINDS[0]
            rails(breaks, nic)
            time.sleep(plan.uniform(0.2, 1.5))
            rails(heals, nic)
            faults += 1
            time.sleep(0.3)
        done = [rank.end() for rank in job.ranks]
        assert [sum(of_rank.values()) for of_rank in done] == [CALLS, CALLS]
        kinds.update(done[0])
    job.await_up()
    downs = len(job.moves(since))
    counts = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
    show(
        f"{rounds * CALLS} random collectives, seed {seed}: {faults} faults, rails went DOWN "
        f"{downs} times"
    )
    show(f"of three types: {counts}")
    assert downs > 0
