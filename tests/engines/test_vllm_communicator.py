"""vLLM's communicator: collectives between processes, and the effect of an error."""

from __future__ import annotations

import re

import pytest
from forked import Forks
from timely import timely
from vllm_jobs import run_ranks


@pytest.mark.parametrize(
    "nodes",
    [
        pytest.param(("per-rank",) * 2, id="two nodes", marks=pytest.mark.long),
        pytest.param(("a", "b", "c"), id="three nodes"),
        pytest.param(("a", "a", "b", "b"), id="two nodes of two"),
    ],
)
def test_collectives_across_nodes(nodes: tuple[str, ...], vllm_forks: Forks) -> None:
    done = run_ranks("collectives", *nodes, forks=vllm_forks)
    assert done.returncode == 0, done.stdout


def test_group_inside_one_node_keeps_the_engines_path(vllm_forks: Forks) -> None:
    done = run_ranks("one_node", "a", "a", forks=vllm_forks)
    assert done.returncode == 0, done.stdout
    # one line from each rank
    assert len(re.findall("no rail to fail over to", done.stdout)) == 2, done.stdout


def test_an_error_ends_every_rank(vllm_forks: Forks) -> None:
    done = run_ranks(
        "error_ends_every_rank", "a", "b", "b", forks=vllm_forks, R2CCL_LINK_TIMEOUT_S="5"
    )
    assert done.returncode == 1
    assert "left waiting" not in done.stdout
    raised = re.findall(r"rank (\d) after ([\d.]+) s: (\w+)", done.stdout)
    assert sorted(rank for rank, _, _ in raised) == ["0", "1", "2"], done.stdout
    others = {name for rank, _, name in raised if rank != "1"}
    assert others <= {"PeerLostError", "PeerClosedError", "AbortedError", "OrderMismatchError"}
    # The default timeout is 30 s.
    timely(
        lambda: all(float(seconds) < 20 for _, seconds, _ in raised),
        f"errors within 20 s, at a limit of 5 s: {raised}",
        within_s=0,
    )


def test_dictionaries_and_objects_within_compared_steps(vllm_forks: Forks) -> None:
    """Only the step with a missing call is an error, on every rank."""
    done = run_ranks("dictionaries_in_steps", "a", "b", "c", forks=vllm_forks)
    assert done.returncode == 0, done.stdout
    parted = re.findall(r"rank (\d): parted: .*\bstep 4\b", done.stdout)
    assert sorted(parted) == ["0", "1", "2"], done.stdout
