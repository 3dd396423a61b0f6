"""Random collectives over verbs rails while ports go down and come back."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from rails import rails

if TYPE_CHECKING:
    from ranks import Job

CALLS = int(os.environ.get("R2SERVE_GUEST_CALLS", "600"))


def test_random_collectives_are_exact_while_rails_break(
    job: Job, show: Callable[[str], None]
) -> None:
    seed = int(os.environ.get("R2SERVE_GUEST_SEED", time.time()))
    plan = random.Random(seed)
    since = time.monotonic_ns()
    for rank in job.ranks:
        rank.begin("random_calls", seed=seed, count=CALLS)
    faults = 0
    while not all(rank.is_through() for rank in job.ranks):
        nic = f"n{plan.randrange(2)}r{plan.randrange(3)}"
        breaks, heals = plan.choice([("down", "up"), ("unplug", "plug"), ("mute", "unmute")])
        rails(breaks, nic)
        time.sleep(plan.uniform(0.2, 1.5))
        rails(heals, nic)
        faults += 1
        time.sleep(0.3)
    done = [rank.end() for rank in job.ranks]
    assert [sum(of_rank.values()) for of_rank in done] == [CALLS, CALLS]
    job.await_up()
    downs = len(job.moves(since))
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(done[0].items()))
    show(f"{CALLS} random collectives, seed {seed}: {faults} faults, rails went DOWN {downs} times")
    show(f"of three types: {kinds}")
    assert faults > 0
    assert downs > 0
