"""Memory, descriptors and threads do not grow with rail failures or short-lived communicators."""

from __future__ import annotations

from collections.abc import Callable

import pytest

# Memory that the allocator may keep between two measurements, without a leak.
SLACK_BYTES = 1 << 20
SLACK_BYTES_A_CYCLE = 350
"""A lower limit for a few cycles: a leak of this size in each cycle is found there, too."""
WARM = 1_500
"""Cycles until the journal is full: 8,192 events, at least 6 a cycle."""


def check(early: dict[str, int], late: dict[str, int], slack_bytes: int = SLACK_BYTES) -> None:
    assert late["descriptors"] <= early["descriptors"]
    assert late["threads"] <= early["threads"]
    assert late["bytes"] - early["bytes"] < slack_bytes


@pytest.mark.alone
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    ("cycles", "warm"), [(3_000, WARM), pytest.param(10_000, WARM, marks=pytest.mark.long)]
)
def test_resources_do_not_grow_with_rails_that_fail_and_rejoin(
    jobs, show: Callable[[str], None], cycles: int, warm: int
) -> None:
    ranks = jobs.start(
        "growth.py",
        2,
        config={
            "rejoin_backoff_min_ms": 0,
            "rejoin_backoff_max_ms": 0,
            "flap_half_life_s": 0,
            "handshake_timeout_ms": 500,
            "spin_us": 20,
        },
        cycles=cycles,
        warm=warm,
    )
    early = [rank.hear(900) for rank in ranks]
    late = [rank.hear(900) for rank in ranks]
    for rank in ranks:
        rank.wait(60)
    grown = max(b["bytes"] - a["bytes"] for a, b in zip(early, late, strict=True))
    show(
        f"{cycles} fail/rejoin cycles in {late[0]['seconds']:.0f} s, {late[0]['epochs']} epochs, "
        f"{late[0]['replays']} replays: {late[0]['descriptors']} descriptors and "
        f"{late[0]['threads']} threads as after {warm}, {grown / 1024:.0f} KiB more"
    )
    for before, after in zip(early, late, strict=True):
        assert after["epochs"] >= cycles, "rails did not really fail"
        check(before, after, min(SLACK_BYTES, SLACK_BYTES_A_CYCLE * (cycles - warm)))


@pytest.mark.timeout(900)
def test_resources_do_not_grow_with_opened_and_closed_communicators(
    jobs, show: Callable[[str], None]
) -> None:
    count, warm = 1000, 500
    ranks = jobs.start("many_communicators.py", 2, count=count, warm=warm)
    early = [rank.hear(400) for rank in ranks]
    late = [rank.hear(400) for rank in ranks]
    for rank in ranks:
        rank.wait(60)
    grown = max(b["bytes"] - a["bytes"] for a, b in zip(early, late, strict=True))
    show(f"{count} communicators opened and closed: {grown / 1024:.0f} KiB more than after {warm}")
    for before, after in zip(early, late, strict=True):
        assert after["rails"] == 2, "communicators of a process share its links"
        check(before, after)
