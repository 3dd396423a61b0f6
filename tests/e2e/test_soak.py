"""Random collectives in two threads stay exact amid rail faults, forks, signals and limits."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

RANKS = 3
SEED = 20_262
# Spare slots are touched after the first fences: 4 MiB to receive and 1 MiB to send, for each of
# two peers and two communicators.
SLACK_BYTES = 24 << 20


@pytest.mark.alone
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("seconds", "seed"), [(6, SEED), pytest.param(300, None, marks=pytest.mark.long)]
)
def test_a_soak_is_exact_and_leaves_nothing_behind(
    jobs: Any,
    free_ports: Any,
    show: Callable[[str], None],
    record: Callable[..., None],
    seconds: int,
    seed: int | None,
) -> None:
    """The long variant chooses a seed at random, and prints the seed."""
    seed = random.randrange(1 << 31) if seed is None else seed
    ranks = jobs.start(
        "soak.py",
        RANKS,
        config={"rejoin_backoff_min_ms": 5, "rejoin_backoff_max_ms": 200},
        seed=seed,
        seconds=seconds,
        rounds=2,
        ports=free_ports(2),
        fault_every_s=1.0,
    )
    rounds = [[rank.hear(seconds + 300) for rank in ranks] for _ in range(2)]
    for round_ in rounds:
        failed = [said["failed"] for said in round_ if "failed" in said]
        assert not failed, f"seed {seed}:\n" + "\n".join(failed)
    for rank in ranks:
        rank.wait(60)
    total = {
        name: sum(said[name] for round_ in rounds for said in round_)
        for name in ("calls", "forks", "harmed", "signals", "limits")
    }
    show(
        f"seed {seed}, 2 rounds of {seconds} s: {total}, "
        f"{sum(said['rejoins'] for said in rounds[1])} rejoins, resources "
        f"{[said['resources'] for said in rounds[0]]} -> "
        f"{[said['resources'] for said in rounds[1]]}"
    )
    record(
        seed=seed,
        rounds=2,
        seconds=seconds,
        wrong=0,  # a wrong result has failed above
        rejoins=sum(said["rejoins"] for said in rounds[1]),
        resources=[[said["resources"] for said in round_] for round_ in rounds],
        **total,
    )
    assert total["harmed"] == 0
    assert min(total["calls"], total["forks"], total["signals"], total["limits"]) > 0
    assert sum(said["rejoins"] for said in rounds[1]) > 0, "no rail failed"
    for early, late in zip(*rounds, strict=True):
        assert late["resources"]["threads"] <= early["resources"]["threads"]
        assert late["resources"]["descriptors"] <= early["resources"]["descriptors"]
        assert late["resources"]["bytes"] - early["resources"]["bytes"] < SLACK_BYTES
