"""Many ranks on few cores: all rails come up, and a busy peer costs no rail and no hedge."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from cpu_share import cpu_hogs, cpu_quota
from timely import TimingMiss, timely

from r2serve.config import Config

START_LIMIT_S = 60.0
PATIENCE_S = 240.0
MOST_OF_PLAIN = 1.05
"""Most p50 of a call, as a multiple of the p50 without resilience in the same run."""

Show = Callable[[str], None]
Record = Callable[..., None]


def rails(count: int) -> dict[str, str]:
    return {"rails": ",".join(f"127.0.0.{number + 1}" for number in range(count))}


def started(jobs: Any, ranks: int, *, config: Mapping[str, Any], **arguments: Any) -> list[Any]:
    """Starts the ranks, lets them connect at the same time, and returns them with all rails UP."""
    crowd = jobs.start(
        "crowd.py", ranks, config={"log_level": "debug", **config}, bytes=16 * 1024, **arguments
    )
    for rank in crowd:
        rank.hear(PATIENCE_S)  # r2serve is imported
    for rank in crowd:
        rank.say({})
    return crowd


def ended(crowd: list[Any], seconds: float) -> list[dict[str, Any]]:
    reports = [rank.hear(PATIENCE_S + seconds) for rank in crowd]
    for rank in crowd:
        rank.say({})
    for rank in crowd:
        rank.wait(PATIENCE_S)
    return reports


def keep_nothing(**_figures: object) -> None:
    """A record that is not kept."""


def check(
    reports: list[dict[str, Any]], show: Show, what: str, record: Record = keep_nothing
) -> None:
    """No rail was lost, and at most one hedge was sent per 1,000 messages, or 10 in a short run.

    A suspicion stalls a call of its rank, and a chunk sent again stalls a call of its receiver. An
    event of either kind ends within the dead deadline; the rest of its call takes at most as long
    as a call without a stall.
    """
    calls = reports[0]["calls"]
    messages = calls * len(reports) * 2
    suspicions = sum(report["suspicions"] for report in reports)
    hedges = sum(report["hedges"] for report in reports)
    withheld = sum(report["withheld"] for report in reports)
    events = suspicions + sum(report["replays"] for report in reports)
    stalled = sum(report["stalled_ms"] for report in reports)
    longest = max(report["longest_calm_ms"] for report in reports)
    explained = events * (longest + Config().dead_deadline_ms)
    plain = reports[0]["plain_p50_ms"]
    ratio = f", {reports[0]['p50_ms'] / plain:.3f} of resilience off" if plain else ""
    show(
        f"{what}: {calls} calls of p50 {reports[0]['p50_ms']:.2f} ms{ratio}; {suspicions} "
        f"suspicions, {hedges} hedges, {withheld} of withheld bytes, {stalled:.1f} ms charged to "
        f"rails, of {explained:.1f} ms explained by {events} events; short of CPU for "
        f"{max(report['short_of_cpu_s'] for report in reports):.1f} s"
    )
    downs = [down for report in reports for down in report["downs"]]
    record(
        what=what,
        ranks=len(reports),
        calls=calls,
        p50_ms=reports[0]["p50_ms"],
        plain_p50_ms=plain,
        suspicions=suspicions,
        hedges=hedges,
        withheld=withheld,
        downs=len(downs),
        stalled_ms=stalled,
    )
    assert downs == []
    if events == 0:
        assert stalled == 0, "a stall is charged to a rail without an event"
    timely(lambda: stalled <= explained, f"{stalled:.0f} ms charged, {explained:.0f} explained", 0)
    timely(lambda: withheld == 0, f"{withheld} chunks hedged as withheld by a hop", 0)
    timely(lambda: hedges <= max(10, messages // 1000), f"{hedges} hedges, {messages} messages", 0)
    if plain:
        timely(lambda: reports[0]["p50_ms"] <= MOST_OF_PLAIN * plain, f"p50{ratio}", 0)


def report(**fields: Any) -> dict[str, Any]:
    quiet: dict[str, Any] = {
        "calls": 1000,
        "p50_ms": 1.0,
        "plain_p50_ms": None,
        "longest_calm_ms": 300.0,
        "suspicions": 0,
        "hedges": 0,
        "withheld": 0,
        "replays": 0,
        "stalled_ms": 0.0,
        "short_of_cpu_s": 0.0,
        "downs": [],
    }
    return quiet | fields


def test_one_suspicion_explains_one_stall_but_not_a_minute(show: Show) -> None:
    check([report(suspicions=1, stalled_ms=700.0), report()], show, "a stall")
    with pytest.raises(TimingMiss, match="60000 ms charged"):
        check([report(suspicions=1, stalled_ms=60_000.0), report()], show, "a minute")
    with pytest.raises(AssertionError, match="without an event"):
        check([report(), report(stalled_ms=1.0)], show, "a stall without an event")
    with pytest.raises(TimingMiss, match="2 chunks hedged as withheld"):
        check([report(suspicions=1, withheld=2), report()], show, "a hop that is none")
    check([report(plain_p50_ms=1.0), report()], show, "calls as fast as without resilience")
    with pytest.raises(TimingMiss, match=r"1\.250 of resilience off"):
        check([report(plain_p50_ms=0.8), report()], show, "slower calls")


@pytest.mark.alone
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("ranks", "seconds", "warm_s"),
    [(24, 6, 0), pytest.param(32, 600, 60, marks=pytest.mark.long)],
)
def test_a_crowd_costs_no_rail(
    jobs: Any,
    free_ports: Any,
    show: Show,
    record: Record,
    ranks: int,
    seconds: int,
    warm_s: int,
) -> None:
    plain = free_ports(1)[0] if seconds > 60 else None
    crowd = started(jobs, ranks, config=rails(2), seconds=seconds, warm_s=warm_s, plain_port=plain)
    for rank in crowd:
        rank.hear(PATIENCE_S)
    check(ended(crowd, seconds), show, f"{ranks} ranks on {os.cpu_count()} cores", record)


@pytest.mark.alone
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("quota_ms", "period_ms", "seconds"),
    [
        (60, 600, 6),
        pytest.param(30, 100, 600, marks=pytest.mark.long),
        pytest.param(100, 1000, 120, marks=pytest.mark.long),
    ],
)
def test_a_cpu_quota_costs_no_rail(
    jobs: Any,
    free_ports: Any,
    show: Show,
    record: Record,
    quota_ms: int,
    period_ms: int,
    seconds: int,
) -> None:
    plain = free_ports(1)[0] if seconds > 60 else None
    with cpu_quota(quota_ms, period_ms) as limit:
        crowd = started(jobs, 2, config=rails(2), seconds=seconds, warm_s=0, plain_port=plain)
        for rank in crowd:
            rank.hear(PATIENCE_S)
            limit(rank.process.pid)
        check(ended(crowd, seconds), show, f"quota of {quota_ms} ms each {period_ms} ms", record)


@pytest.mark.alone
@pytest.mark.long
@pytest.mark.timeout(1500)
def test_cpu_hogs_cost_no_rail(jobs: Any, show: Show, record: Record) -> None:
    seconds, hogs = 600, 2 * (os.cpu_count() or 1)
    crowd = started(jobs, 2, config=rails(2), seconds=seconds, warm_s=0, plain_port=None)
    with cpu_hogs(hogs):
        for rank in crowd:
            rank.hear(PATIENCE_S)
        check(ended(crowd, seconds), show, f"{hogs} CPU hogs beside 2 ranks", record)


@pytest.mark.alone
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("ranks", [16, pytest.param(64, marks=pytest.mark.long)])
def test_many_ranks_start(jobs: Any, show: Show, ranks: int) -> None:
    crowd = started(jobs, ranks, config=rails(4), seconds=0)
    reports = ended(crowd, 0)
    slowest = max(report["all_up_s"] for report in reports)
    total = {name: sum(report[name] for report in reports) for name in ("failed", "dropped")}
    show(f"{ranks} ranks x 4 rails: all UP after {slowest:.1f} s; {total}")
    assert total["dropped"] == 0
    timely(lambda: slowest < START_LIMIT_S, f"all rails UP after {slowest:.1f} s", 0)
