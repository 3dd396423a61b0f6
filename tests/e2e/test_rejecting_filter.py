"""A packet filter that rejects everything looks like a dead process, but is an outage."""

from __future__ import annotations

import time
from typing import Any

import pytest
from real_rails import REJOIN_S, Stream, moves_of, rejecting


@pytest.mark.timeout(300)
@pytest.mark.parametrize("lasts_s", [2, 8])
def test_connections_reset_and_refused_by_a_filter_are_survived(
    jobs: Any, make_lab: Any, eventually: Any, lasts_s: int
) -> None:
    """Each connection ends with an RST and no FIN, and each new one is refused at once."""
    stream = Stream(jobs, make_lab(2), link_timeout_s=60.0)
    with rejecting(stream.lab.nodes[1]):

        def all_lost() -> bool:
            events = stream.ranks[0].ask({"do": "events"})
            return all(moves_of([events], "DOWN", rail) for rail in range(stream.lab.rails))

        eventually("all rails lost", all_lost)
        time.sleep(lasts_s)
    steps = stream.ranks[0].ask({"do": "steps"})
    eventually("further steps", lambda: stream.ranks[0].ask({"do": "steps"}) > steps + 10, REJOIN_S)
    stream.finish()
