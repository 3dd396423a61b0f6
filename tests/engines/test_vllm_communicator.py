"""The communicator that vLLM builds: its collectives between processes, and what an error does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("vllm_ranks.py")


def run_ranks(case: str, *nodes: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {
        **os.environ,
        "R2SERVE_DISTRIBUTED_BACKEND": "r2ccl",
        "R2CCL_RAILS": "127.0.0.1,127.0.0.2",
        "VLLM_HOST_IP": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    return subprocess.run(
        [sys.executable, str(SCRIPT), case, ",".join(nodes)],
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize(
    "nodes",
    [("per-rank",) * 2, ("a", "b", "c"), ("a", "a", "b", "b")],
    ids=["two nodes", "three nodes", "two nodes of two"],
)
def test_collectives_across_nodes(nodes: tuple[str, ...]) -> None:
    done = run_ranks("collectives", *nodes)
    assert done.returncode == 0, done.stdout


def test_group_inside_one_node_keeps_the_engines_path() -> None:
    done = run_ranks("one_node", "a", "a")
    assert done.returncode == 0, done.stdout
    assert len(re.findall("no rail to fail over to", done.stdout)) == 2, done.stdout  # one a rank


def test_an_error_ends_every_rank() -> None:
    done = run_ranks("error_ends_every_rank", "a", "b", "b", R2CCL_LINK_TIMEOUT_S="5")
    assert done.returncode == 1
    assert "left waiting" not in done.stdout
    raised = re.findall(r"rank (\d) after ([\d.]+) s: (\w+)", done.stdout)
    assert sorted(rank for rank, _, _ in raised) == ["0", "1", "2"], done.stdout
    assert all(float(seconds) < 7 for _, seconds, _ in raised), done.stdout
    others = {name for rank, _, name in raised if rank != "1"}
    assert others <= {"PeerLostError", "PeerClosedError", "AbortedError", "OrderMismatchError"}
