"""Collectives of random kind, size, dtype and ranks are exact to the bit while rails fail.

The seed determines the calls and all elements, so a failing run can be repeated. The times of rail
faults depend on the machine.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

STEPS, MANY_STEPS = 1_000, 20_000
SEED = 20_261
PROCESSES = 8
COMMUNICATORS = 14


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("steps", "seed"),
    [(STEPS, SEED), pytest.param(MANY_STEPS, None, marks=pytest.mark.long)],
    ids=["some", "many"],
)
def test_random_collectives_are_exact_while_rails_break(
    jobs, free_ports, show: Callable[[str], None], steps: int, seed: int | None
) -> None:
    """The long variant chooses a seed at random, and prints the seed."""
    seed = random.randrange(1 << 31) if seed is None else seed
    ranks = jobs.start(
        "random_collectives.py",
        PROCESSES,
        config={
            "rails": "127.0.0.1,127.0.0.2,127.0.0.3",
            "spin_us": 20,
            "rejoin_backoff_min_ms": 5,
            "rejoin_backoff_max_ms": 200,
            "handshake_timeout_ms": 1000,
        },
        # Nodes of 3, 1, 2 and 2 ranks: shared memory is used, and sums are rounded per node.
        per_rank=lambda rank: {"node": f"node{min(rank // 2, rank - 2, key=abs)}"},
        seed=seed,
        steps=steps,
        ports=free_ports(COMMUNICATORS),
        fault_every_s=0.15,
    )
    reports = [rank.hear(timeout_s=1500) for rank in ranks]
    # After the failure of a rank, the other ranks fail with the same message.
    failed = list(dict.fromkeys(report["failed"] for report in reports if "failed" in report))
    assert not failed, f"seed {seed}:\n" + "\n".join(failed)
    for rank in ranks:
        rank.wait(120)

    faults: Counter[str] = Counter()
    for report in reports:
        faults.update(report["faults"])
    totals = {name: sum(report[name] for report in reports) for name in ("replays", "hedges")}
    show(
        f"{steps} random collectives, seed {seed}, {PROCESSES} processes, "
        f"{COMMUNICATORS} communicators, {max(report['seconds'] for report in reports):.0f} s: "
        f"{faults['carrier_loss']} cuts, {faults['black_hole']} drops, "
        f"{totals['replays']} replays, "
        f"{totals['hedges']} hedges, {sum(report['rejoins'] for report in reports)} rejoins"
    )
    assert reports[0]["kinds"] == ["shm", "tcp"]
    assert faults["carrier_loss"] > 0
    assert faults["black_hole"] > 0
    assert totals["replays"] > totals["hedges"] > 0, "no rail broke under traffic"
