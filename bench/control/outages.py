"""Outages of all NICs, and ends of processes: what a job waits for, and how soon it ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from r2serve.bench.control.jobs import TYPED, Job, lab_of, talk
from r2serve.lab.lab import Lab

NICS = 3
AWAY_S = 8.0
STOPPED_S = 5.0
LINK_TIMEOUT_S = 10.0
"""R2CCL_LINK_TIMEOUT_S of the job that does not get its NICs back."""
LATER_S = 3.0
"""Time for the typed error after the limit; also for the end after a process is killed."""
FAILED = 70
LONGEST_S = 90.0
BETWEEN_S = 1.0


def away(work: Path, watch: Callable[[str], None]) -> dict[str, Any]:
    """All NICs of a node lose their carrier for 8 s: the job waits, and goes on."""
    with lab_of(NICS) as lab, Job(lab, work, talk("rounds")) as job:
        job.settle()
        job.mark("before")
        _cut(lab)
        begun = time.monotonic()
        time.sleep(AWAY_S)
        _heal(lab)
        away_s = time.monotonic() - begun
        time.sleep(BETWEEN_S)
        found = job.mark("after")
        time.sleep(BETWEEN_S)
        later = job.mark("later")
    waited_s = found["round"]["worst"] / 1e3
    watch(f"all NICs away for {away_s:.1f} s: the longest round took {waited_s:.2f} s")
    return {
        "away_s": round(away_s, 3),
        "longest_round_s": waited_s,
        "rounds_afterwards": later["round"]["count"],
        "met": later["round"]["count"] > 0,
    }


def lost(work: Path, watch: Callable[[str], None]) -> dict[str, Any]:
    """All NICs of a node are lost for good: both nodes end with the typed error."""
    settings = {"R2CCL_LINK_TIMEOUT_S": f"{LINK_TIMEOUT_S:g}"}
    with lab_of(NICS) as lab, Job(lab, work, talk("rounds"), settings=settings) as job:
        job.settle()
        _cut(lab)
        ends = _ends(job)
    limit_s = LINK_TIMEOUT_S + LATER_S
    watch(f"all NICs lost: the nodes ended after {_seconds(ends)}")
    return {"link_timeout_s": LINK_TIMEOUT_S, "nodes": ends, "met": _met(ends, limit_s)}


def stopped_relay(work: Path, watch: Callable[[str], None]) -> dict[str, Any]:
    """The relay of node 1 is stopped for 5 s: the job waits and goes on, and no rail is charged."""
    with lab_of(NICS) as lab, Job(lab, work, talk("rounds")) as job:
        job.settle()
        job.mark("before")
        begun_ns = time.monotonic_ns()
        relay = job.relay(1)
        relay.suspend()
        time.sleep(STOPPED_S)
        relay.resume()
        time.sleep(BETWEEN_S)
        found = job.mark("after")
        lost = job.rails_lost(begun_ns)
    waited_s = found["round"]["worst"] / 1e3
    watch(
        f"relay stopped for {STOPPED_S:g} s: the longest round took {waited_s:.2f} s; {lost} lost"
    )
    return {
        "stopped_s": STOPPED_S,
        "longest_round_s": waited_s,
        "rails_lost": lost,
        "met": lost == 0,
    }


def killed_relay(work: Path, watch: Callable[[str], None]) -> dict[str, Any]:
    """The relay of node 1 is killed under traffic: both nodes end with the typed error."""
    with lab_of(NICS) as lab, Job(lab, work, talk("rounds")) as job:
        job.settle()
        job.relay(1).kill()
        ends = _ends(job)
    watch(f"relay of node 1 killed: the nodes ended after {_seconds(ends)}")
    return {"nodes": ends, "met": _met(ends, LATER_S)}


def killed_worker(work: Path, watch: Callable[[str], None]) -> dict[str, Any]:
    """The rank of node 1 is killed: the other rank sees the end of its connections, and fails."""
    with lab_of(NICS) as lab, Job(lab, work, talk("rounds")) as job:
        job.settle()
        job.worker(1).kill()
        ends = _ends(job)
    watch(f"rank of node 1 killed: the nodes ended after {_seconds(ends)}")
    failed = all(each["status"] not in (0, None) for each in ends)
    return {"nodes": ends, "met": failed and _soon(ends, LATER_S)}


def _cut(lab: Lab) -> None:
    for rail in (None, *range(lab.rails)):
        lab.cut(1, rail)


def _heal(lab: Lab) -> None:
    for rail in (None, *range(lab.rails)):
        lab.heal(1, rail)


def _ends(job: Job) -> list[dict[str, Any]]:
    """Waits for the end of both nodes; returns times, exit statuses, and the typed error.

    The time of a node is None if it goes on for LONGEST_S.
    """
    begun = time.monotonic()
    after_s: dict[int, float] = {}
    while len(after_s) < len(job.programs):
        now_s = time.monotonic() - begun
        for node, program in enumerate(job.programs):
            if node not in after_s and program.process.poll() is not None:
                after_s[node] = now_s
        if now_s > LONGEST_S:
            break
        time.sleep(0.01)
    return [
        {
            "after_s": round(after_s[node], 3) if node in after_s else None,
            "status": program.process.poll(),
            "typed": TYPED in program.log,
        }
        for node, program in enumerate(job.programs)
    ]


def _met(ends: list[dict[str, Any]], limit_s: float) -> bool:
    typed = all(each["status"] == FAILED and each["typed"] for each in ends)
    return typed and _soon(ends, limit_s)


def _soon(ends: list[dict[str, Any]], limit_s: float) -> bool:
    return all(each["after_s"] is not None and each["after_s"] <= limit_s for each in ends)


def _seconds(ends: list[dict[str, Any]]) -> str:
    return " and ".join(
        "more than the wait" if each["after_s"] is None else f"{each['after_s']:.2f} s"
        for each in ends
    )
