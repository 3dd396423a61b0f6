"""Verbs and TCP rails in the same link."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from rails import rails

if TYPE_CHECKING:
    from ranks import Job

LARGE = 256 * 1024  # floats: 1 MiB, striped


@pytest.mark.usefixtures("alone")
def test_traffic_fails_over_to_tcp_and_back(new_job: type[Job]) -> None:
    job = new_job(rails_of=lambda rank: f"n{rank}r0,n{rank}r1,n{rank}t", rdma="auto")
    kinds = [rail["kind"] for rail in job.ranks[0].ask("rails")]
    assert kinds == ["verbs", "verbs", "tcp"]
    with job.stream(LARGE) as stream:
        stream.more(20)
        together = job.sent()[0]
        assert together["verbs"] > 0
        # Both RDMA rails become black holes, without an event.
        for rail in (0, 1):
            rails("mute", f"n0r{rail}")
        for rail in (0, 1):
            job.await_left(rail)
        before = job.sent()[0]
        stream.more(15)
        alone = job.sent()[0] - before
        assert alone["tcp"] >= 15 * LARGE * 4 / 2
        assert alone["verbs"] == 0
        for rail in (0, 1):
            rails("unmute", f"n0r{rail}")
        job.await_up()
        before = job.sent()[0]
        stream.more(20)
        assert (job.sent()[0] - before)["verbs"] > 0
    job.stop()
