"""Every row of the fault model that Soft-RoCE can play, under a stream of all-reduces."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from bare import port_is_active
from rails import rails

if TYPE_CHECKING:
    from ranks import Job

SMALL, LARGE = 4 * 1024, 64 * 1024  # floats: 16 KiB, one message; 256 KiB, striped

# What happens, to NIC 0 of which node, and what undoes it; and how its end may notice.
FAULTS = {
    "own port down": (("down", "n0r0"), ("up", "n0r0")),
    "peer's port down": (("down", "n1r0"), ("up", "n1r0")),
    "own cable pulled": (("unplug", "n0r0"), ("plug", "n0r0")),
    "peer's cable pulled": (("unplug", "n1r0"), ("plug", "n1r0")),
    "black hole": (("mute", "n0r0"), ("unmute", "n0r0")),
    "own NIC hears nothing": (("deafen", "n0r0"), ("undeafen", "n0r0")),
    "peer's NIC hears nothing": (("deafen", "n1r0"), ("undeafen", "n1r0")),
    "only small frames pass": (("narrow", "n0r0"), ("widen", "n0r0")),
}
SAID = ("down", "unplug")  # by an event; of all others only silence tells
BOTH_SIZES = list(FAULTS)[:5]
CASES = [
    pytest.param(name, elements, id=f"{name}-{elements * 4 // 1024} KiB")
    for name in FAULTS
    for elements in ((SMALL, LARGE) if name in BOTH_SIZES else (LARGE,))
]
STRIKES = 2
RETRIES_MS = 400.0
"""Until a queue pair gives up by itself, at the default timeout and retry count."""


@pytest.fixture(autouse=True)
def _whole_again(job: Job):
    yield
    job.await_up()


@pytest.mark.parametrize(("name", "elements"), CASES)
def test_a_rail_fails_in_the_middle_and_comes_back(
    job: Job, show: Callable[[str], None], name: str, elements: int
) -> None:
    breaks, heals = FAULTS[name]
    quick = breaks[0] in SAID
    since = time.monotonic_ns()
    carried = job.carried()
    struck = []
    with job.stream(elements) as stream:
        stream.more(30)
        # Whatever else the host does may hold up one of them.
        for _ in range(STRIKES if quick else 1):
            struck.append(stream.steps)
            rails(*breaks)
            job.await_left(0)
            assert port_is_active(f"rxe_{breaks[1]}") != quick, "the fault is another one"
            stream.more(20)
            rails(*heals)
            job.await_up()
    moves = job.moves(since)
    assert {rail for _, rail, _ in moves} == {"rail0"}, "no other rail was charged"
    sent = sum(job.carried().values()) - sum(carried.values())
    assert sent > len(stream.took) * elements * 4
    healthy = stream.median
    stalls = [stream.longest(*span) for span in zip(struck, [*struck[1:], None], strict=True)]
    wanted = f" (wanted {max(10 * healthy, 50.0):.0f})" if quick else ""
    show(
        f"{name}, {elements * 4 // 1024} KiB: longest calls "
        f"{', '.join(f'{stall:.0f}' for stall in stalls)} ms{wanted}, "
        f"median of all {healthy:.1f} ms"
    )
    if quick:
        assert min(stalls) < RETRIES_MS, "only the queue pair's own retries have found it"


def test_flaps(job: Job) -> None:
    with job.stream(SMALL) as stream:
        for _ in range(4):
            rails("down", "n1r1")
            stream.more(5)
            rails("up", "n1r1")
            stream.more(5)
    assert {rail for _, rail, _ in job.moves()} >= {"rail1"}


def test_one_rail_after_the_other_and_the_one_just_failed_over_to(job: Job) -> None:
    with job.stream(SMALL) as stream:
        stream.more(10)
        rails("unplug", "n0r0")
        stream.more(10)
        rails("down", "n1r1")
        stream.more(20)
        rails("plug", "n0r0")
        rails("up", "n1r1")


def test_a_rail_that_died_unused_is_known(job: Job) -> None:
    since = time.monotonic_ns()
    rails("mute", "n0r2")
    job.eventually("rail2 DOWN", lambda: any(m[1] == "rail2" for m in job.moves(since)))
    with job.stream(SMALL) as stream:
        stream.more(20)
        rails("unmute", "n0r2")


def test_all_rails_gone_for_a_while(job: Job) -> None:
    with job.stream(SMALL) as stream:
        stream.more(10)
        for rail in range(3):
            rails("mute", f"n0r{rail}")
        time.sleep(8)
        for rail in range(3):
            rails("unmute", f"n0r{rail}")
        stream.more(10)


def test_a_slow_rail_is_not_taken_for_a_dead_one(job: Job) -> None:
    since = time.monotonic_ns()
    with job.stream(LARGE) as stream:
        stream.more(20)
        rails("limit", "n0r1", "50000")
        stream.more(40)
        rails("unlimit", "n0r1")
        stream.more(10)
    # Soft-RoCE may run out of retries under a shaper; what we judge ourselves is silence.
    causes = {cause for _, _, cause in job.moves(since)}
    assert causes <= {"completion-error", "peer-notice", "socket-error"}, causes


@pytest.mark.parametrize("rank", [0, 1])
def test_a_queue_pair_in_the_error_state(job: Job, rank: int) -> None:
    since = time.monotonic_ns()
    with job.stream(SMALL) as stream:
        stream.more(5)
    # Between two streams, since a rank that streams takes no orders.
    job.ranks[rank].ask("inject", rail=0, fault="error")
    with job.stream(SMALL) as stream:
        stream.more(20)
    moves = job.moves(since)
    assert (rank, "rail0", "completion-error") in moves
    assert {rail for _, rail, _ in moves} == {"rail0"}
