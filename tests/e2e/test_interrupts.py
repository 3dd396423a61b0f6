"""Ends of a collective that waits for a rank which never comes: signals and time limits."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

LATE_S = 8.0
PROMPT_S = 4.0  # target: 1 s; the late rank arrives after LATE_S


def start(jobs: Any, config: dict[str, Any] | None = None, **arguments: Any) -> list[Any]:
    given = {"handler": "", "late": 1, "late_s": LATE_S, "turns": 3, "alarm_s": 0.0}
    ranks = jobs.start("interrupts.py", 2, config=config, **{**given, **arguments})
    for rank in ranks:
        assert rank.hear(60) == "ready"
    for rank in ranks:
        rank.say("go")
    return list(ranks)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("sent", "handler", "error"),
    [(signal.SIGINT, "", "KeyboardInterrupt"), (signal.SIGTERM, "raises", "Stopped")],
    ids=["ctrl-c", "sigterm"],
)
def test_a_handler_that_raises_ends_the_call_on_all_ranks(
    jobs, show: Callable[[str], None], sent: int, handler: str, error: str
) -> None:
    ranks = start(jobs, handler=handler)
    time.sleep(0.5)
    sent_at = time.monotonic()
    ranks[0].process.send_signal(sent)
    said = ranks[0].hear(30)
    show(f"{error} {said['at'] - sent_at:.2f} s after the signal")
    assert said["error"] == error
    assert said["at"] - sent_at < PROMPT_S
    assert said["again"] == "AbortedError"
    other = ranks[1].hear(30)
    assert other["error"] == "AbortedError"
    assert "interrupted by a signal" in other["text"]


@pytest.mark.timeout(60)
def test_an_alarm_is_a_time_limit_of_a_call(jobs) -> None:
    ranks = start(jobs, handler="raises", alarm_s=1.0)
    began = time.monotonic()
    said = ranks[0].hear(30)
    assert said["error"] == "Stopped"
    assert said["at"] - began < 1.0 + PROMPT_S
    assert ranks[1].hear(30)["error"] == "AbortedError"


@pytest.mark.timeout(60)
def test_handlers_that_return_harm_nothing(jobs) -> None:
    """A profiler interrupts a waiting call and short calls hundreds of times."""
    ranks = start(jobs, handler="counts", alarm_s=0.005, late_s=1.0, turns=3000)
    for rank in ranks:
        said = rank.hear(50)
        assert said["error"] == "", said
        assert said["again"] == ""
    ranks[0].wait(20)


@pytest.mark.timeout(60)
def test_call_timeout_s_ends_a_call_on_all_ranks(jobs, show: Callable[[str], None]) -> None:
    ranks = start(jobs, config={"call_timeout_s": 1})
    began = time.monotonic()
    said = ranks[0].hear(30)
    show(f"call_timeout_s = 1: ended after {said['at'] - began:.2f} s")
    assert said["error"] == "AbortedError"
    assert "rank 0 has waited for call_timeout_s = 1" in said["text"]
    assert said["at"] - began < 1.0 + PROMPT_S
    assert ranks[1].hear(30)["error"] == "AbortedError"
