"""Checksums over verbs, between nodes with different numbers of NICs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ranks import Job

SMALL, LARGE = 4 * 1024, 64 * 1024  # floats: 16 KiB, 1 message; 256 KiB, striped


@pytest.mark.usefixtures("alone")
def test_wrong_checksums_between_nodes_with_two_and_three_nics(
    new_job: type[Job], show: Callable[[str], None]
) -> None:
    """The receiver charges the rail with wrong checksums; another rail replays the chunks."""
    # The third NIC's network does not reach the other end, so its rail never comes up.
    job = new_job(
        rails_of=lambda rank: ",".join(f"n{rank}r{rail}" for rail in range(2 + rank)),
        first=2,
        checksum=True,
    )
    assert {rail["kind"] for rails in job.ask("rails") for rail in rails} == {"verbs"}
    since = time.monotonic_ns()
    with job.over_verbs(), job.stream(LARGE) as stream:
        stream.more(5)
        job.eventually(
            "both rails carry, at both ends",
            lambda: all(min(list(job.carried(rank).values())[:2]) > 0 for rank in (0, 1)),
        )
    for rank in (0, 1):
        assert sum(list(job.carried(rank).values())[2:]) == 0
    assert job.moves(since) == []
    show(f"2 NICs at one node, 3 at the other: {', '.join(job.states()[0])}")
    replayed = 0
    for sender, elements in ((0, SMALL), (1, LARGE)):
        before = sum(rail["replayed_chunks"] for rail in job.ranks[sender].ask("rails"))
        with job.over_verbs(), job.stream(elements) as stream:
            for _ in range(5):  # small messages may have moved to another rail before the fault
                since = time.monotonic_ns()
                victim = stream.busiest()
                job.ranks[sender].ask("inject", rail=victim, fault="corrupt")
                stream.more(20)
                job.ranks[sender].ask("inject", rail=victim, fault="heal")
                job.await_up()
                moves = job.moves(since)
                assert {rail for _, rail, _ in moves} <= {f"rail{victim}"}
                if moves:
                    break
        assert (1 - sender, f"rail{victim}", "checksum") in moves
        replayed += sum(rail["replayed_chunks"] for rail in job.ranks[sender].ask("rails")) - before
    show(f"chunks with wrong checksums: found at both ends, {replayed} replayed, all exact")
    assert replayed > 0
    job.stop()
