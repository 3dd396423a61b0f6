"""A rank forks: the child cannot harm the parent's connections, and keeps none of them."""

from __future__ import annotations

import ast
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from timely import timely

LINK_TIMEOUT_S = 2.0
MOST_GROWN = {"threads": 0, "descriptors": 8}
"""Growth of a rank's resources after the storm; rails that are connecting have descriptors."""


def start(jobs: Any, work: str, *, script: str = "forks.py", **arguments: Any) -> list[Any]:
    config = {
        # Only the test of a death needs a short timeout; a starved machine may exceed it.
        "link_timeout_s": LINK_TIMEOUT_S if work == "orphan" else 60.0,
        "rejoin_backoff_min_ms": 1,
        "rejoin_backoff_max_ms": 10,
        "flap_half_life_s": 0,
    }
    ranks = jobs.start(script, 2, config=config, work=work, **arguments)
    for rank in ranks:
        assert rank.hear(60) == "ready"
    for rank in ranks:
        rank.say("go")
    return list(ranks)


@pytest.mark.timeout(300)
def test_a_child_cannot_use_the_parents_communicator(jobs, free_ports) -> None:
    """A frame of the child in the parent's connection would be silent wrong data."""
    ranks = start(jobs, "calls", own_port=free_ports(1)[0])
    said = ranks[0].hear(60)
    uses = ast.literal_eval(said["uses"])
    assert set(uses.values()) == {"refused"}, uses
    assert said["own"] == "'right'"
    assert said["inherited"] == "[]"
    for rank in ranks:
        assert rank.hear(60) == "exact"
        rank.wait(60)


@pytest.mark.timeout(300)
def test_a_child_does_not_keep_a_dead_parent_alive(jobs, show: Callable[[str], None]) -> None:
    """With the parent's sockets in a child, the death took ten times `link_timeout_s` to find."""
    ranks = start(jobs, "orphan", child_s=300)
    child = ranks[1].hear(60)["child"]
    try:
        time.sleep(0.5)
        ranks[1].process.kill()
        killed_at = time.monotonic()
        said = ranks[0].hear(60)
    finally:
        os.kill(child, signal.SIGKILL)
    took_s = said["at"] - killed_at
    show(f"killed with a living child: known after {took_s:.2f} s")
    assert said["error"] == "PeerLostError"
    # Ten times `link_timeout_s` with the defect.
    timely(lambda: took_s < 4 * LINK_TIMEOUT_S, f"the death is known after {took_s:.1f} s", 0)


@pytest.mark.timeout(2700)
@pytest.mark.parametrize(
    "count", [400, pytest.param(10_000, marks=pytest.mark.long)], ids=["some", "many"]
)
def test_forks_amid_flapping_rails_harm_nothing(
    jobs, show: Callable[[str], None], count: int
) -> None:
    ranks = start(jobs, "storm", forks=count, most_grown=MOST_GROWN)
    said = ranks[0].hear(0.2 * count + 300)
    show(f"{said}")
    assert said["forks"] == count
    assert said["wrong"] == []
    assert said["downs"] > 10, "the rails did not flap"
    for name, most in MOST_GROWN.items():
        assert said["grown"][name] <= most, said["grown"]
    for rank in ranks:
        assert rank.hear(60) == "exact"


@pytest.mark.timeout(300)
def test_pools_of_forked_workers_harm_nothing(jobs) -> None:
    for rank in start(jobs, "pools"):
        assert rank.hear(60) == "exact"
        rank.wait(60)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_compile_pools_harm_nothing(jobs) -> None:
    """Pools of torch (forked, and forked by a process of their own) and of vLLM."""
    for rank in start(jobs, "pools", script="compilers.py"):
        assert rank.hear(400) == "exact"
        rank.wait(60)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_compiler_beside_collectives_harms_nothing(jobs, show: Callable[[str], None]) -> None:
    for rank in start(jobs, "compiled", script="compilers.py"):
        for threads in (1, 2):
            said = rank.hear(120)
            show(f"{said}")
            assert said["threads"] == threads
        assert rank.hear(60) == "exact"
        rank.wait(60)
