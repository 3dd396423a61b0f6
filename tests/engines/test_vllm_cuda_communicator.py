"""The communicator that vLLM builds on CUDA, whole, from its groups to the wire, without a GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from vllm_jobs import run_ranks


@pytest.mark.parametrize(
    "nodes", [("per-rank",) * 2, ("a", "a", "b", "b")], ids=["two nodes", "two nodes of two"]
)
def test_collectives_across_nodes(nodes: tuple[str, ...], fake_cuda: Path) -> None:
    done = run_ranks("gpu_collectives", *nodes, R2CCL_CUDA_LIBRARY=str(fake_cuda))
    assert done.returncode == 0, done.stdout
    # Ranks of a node, each a process, give each other memory of their GPUs.
    exchanging = "2 ranks of each node exchange before and behind the rails" in done.stdout
    assert exchanging is (len(nodes) == 4), done.stdout


def test_a_graph_survives_cuts(fake_cuda: Path, show) -> None:
    done = run_ranks("gpu_graph", "per-rank", "per-rank", R2CCL_CUDA_LIBRARY=str(fake_cuda))
    assert done.returncode == 0, done.stdout
    for line in re.findall(r"rank \d: \d+ replays.*", done.stdout):
        show(line)


def test_what_stages_exchange_survives_cuts(fake_cuda: Path, show) -> None:
    done = run_ranks(
        "gpu_stages",
        "per-rank",
        "per-rank",
        R2CCL_CUDA_LIBRARY=str(fake_cuda),
        R2CCL_REJOIN_BACKOFF_MIN_MS="1",
    )
    assert done.returncode == 0, done.stdout
    [line] = re.findall(r"90 steps of two stages.*", done.stdout)
    show(line)


def test_no_token_is_computed_without_a_lost_peer(fake_cuda: Path) -> None:
    done = run_ranks(
        "gpu_loss",
        "per-rank",
        "per-rank",
        R2CCL_CUDA_LIBRARY=str(fake_cuda),
        R2CCL_LINK_TIMEOUT_S="2",
    )
    assert done.stdout.count("not given out: PeerLostError") == 2, done.stdout
    assert "garbage" not in done.stdout
    assert "left waiting" not in done.stdout
