"""Ends of a collective that waits for a rank which never comes: signals and time limits."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from timely import timely

PROMPT_S = 8.0  # target: 1 s; the late rank enters the call only after its end


def start(jobs: Any, config: dict[str, Any] | None = None, **arguments: Any) -> list[Any]:
    given = {
        "handler": "",
        "late": 1,
        "late_s": 0.0,
        "turns": 3,
        "alarm_s": 0.0,
        "elements": 1000,
    }
    ranks = jobs.start("interrupts.py", 2, config=config, **{**given, **arguments})
    for rank in ranks:
        assert rank.hear(60) == "ready"
    for rank in ranks:
        rank.say("go")
    assert ranks[0].hear(60) == "calls"
    return list(ranks)


def check_prompt(took_s: float) -> None:
    timely(lambda: took_s < PROMPT_S, f"the call ended after {took_s:.1f} s", 0)


def end_of(ranks: list[Any]) -> tuple[Any, Any]:
    """Returns the report of rank 0, then lets rank 1 enter the call, and returns its report."""
    first = ranks[0].hear(60)
    ranks[1].say("come")
    return first, ranks[1].hear(60)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("sent", "handler", "error"),
    [(signal.SIGINT, "", "KeyboardInterrupt"), (signal.SIGTERM, "raises", "Stopped")],
    ids=["ctrl-c", "sigterm"],
)
def test_a_handler_that_raises_ends_the_call_on_all_ranks(
    jobs, show: Callable[[str], None], sent: int, handler: str, error: str
) -> None:
    ranks = start(jobs, handler=handler)
    sent_at = time.monotonic()
    ranks[0].process.send_signal(sent)
    said, other = end_of(ranks)
    show(f"{error} {said['at'] - sent_at:.2f} s after the signal")
    assert said["error"] == error
    assert said["again"] == "AbortedError"
    assert other["error"] == "AbortedError", other["text"]
    assert "interrupted by a signal" in other["text"]
    check_prompt(said["at"] - sent_at)


@pytest.mark.timeout(300)
def test_a_rank_that_slept_learns_why_the_others_have_ended(jobs) -> None:
    """The rank wakes inside its call, beside the end of the last process that knows the reason."""
    ranks = start(jobs, handler="raises")
    ranks[1].process.send_signal(signal.SIGSTOP)
    ranks[1].say("come")
    ranks[0].process.send_signal(signal.SIGTERM)
    assert ranks[0].hear(60)["error"] == "Stopped"
    ranks[0].wait(60)
    ranks[1].process.send_signal(signal.SIGCONT)
    said = ranks[1].hear(60)
    assert said["error"] == "AbortedError", said["text"]
    assert "interrupted by a signal" in said["text"]


@pytest.mark.timeout(300)
def test_a_rank_that_ends_waits_until_its_reason_is_on_the_way(jobs) -> None:
    """The other rank does not read, so its sockets are full of data in front of the reason."""
    ranks = start(jobs, handler="raises", elements=16 << 20)
    ranks[1].process.send_signal(signal.SIGSTOP)
    ranks[1].say("come")
    ranks[0].process.send_signal(signal.SIGTERM)
    assert ranks[0].hear(60)["error"] == "Stopped"
    ranks[1].process.send_signal(signal.SIGCONT)
    said = ranks[1].hear(60)
    assert said["error"] == "AbortedError", said["text"]
    ranks[0].wait(60)


@pytest.mark.timeout(300)
def test_an_alarm_is_a_time_limit_of_a_call(jobs) -> None:
    limit_s = 5.0  # the timer begins before the call, and the call must be seen meanwhile
    ranks = start(jobs, handler="raises", alarm_s=limit_s)
    began = time.monotonic()
    said, other = end_of(ranks)
    assert said["error"] == "Stopped"
    assert other["error"] == "AbortedError"
    check_prompt(said["at"] - began - limit_s)


@pytest.mark.timeout(300)
def test_handlers_that_return_harm_nothing(jobs) -> None:
    """A profiler interrupts a waiting call and short calls hundreds of times."""
    ranks = start(jobs, handler="counts", alarm_s=0.005, late_s=1.0, turns=1000)
    for rank in ranks:
        said = rank.hear(150)
        assert said["error"] == "", said
        assert said["again"] == ""
    ranks[0].wait(60)


@pytest.mark.timeout(300)
def test_call_timeout_s_ends_a_call_on_all_ranks(jobs, show: Callable[[str], None]) -> None:
    limit_s = 10  # also of the start, where one process may be seconds later than the other
    ranks = start(jobs, config={"call_timeout_s": limit_s})
    began = time.monotonic()
    said, other = end_of(ranks)
    show(f"call_timeout_s = {limit_s}: ended after {said['at'] - began:.2f} s")
    assert said["error"] == "AbortedError"
    assert f"rank 0 has waited for call_timeout_s = {limit_s}" in said["text"]
    assert other["error"] == "AbortedError"
    check_prompt(said["at"] - began - limit_s)
