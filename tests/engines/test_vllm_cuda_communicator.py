"""vLLM's communicator on CUDA, from groups to the wire, without a GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from forked import Forks
from vllm_jobs import run_ranks


@pytest.mark.parametrize(
    "nodes",
    [
        pytest.param(("per-rank",) * 2, id="two nodes", marks=pytest.mark.long),
        pytest.param(("a", "a", "b", "b"), id="two nodes of two"),
    ],
)
def test_collectives_across_nodes(
    nodes: tuple[str, ...], fake_cuda: Path, vllm_forks: Forks
) -> None:
    library = str(fake_cuda)
    done = run_ranks("gpu_collectives", *nodes, forks=vllm_forks, R2CCL_CUDA_LIBRARY=library)
    assert done.returncode == 0, done.stdout
    # The ranks of a node are processes that share GPU memory with each other.
    exchanging = "2 ranks of each node exchange data before and after the rails" in done.stdout
    assert exchanging is (len(nodes) == 4), done.stdout


def test_a_cuda_graph_survives_rail_cuts(fake_cuda: Path, vllm_forks: Forks, show) -> None:
    done = run_ranks(
        "gpu_graph",
        "per-rank",
        "per-rank",
        forks=vllm_forks,
        R2CCL_CUDA_LIBRARY=str(fake_cuda),
    )
    assert done.returncode == 0, done.stdout
    for line in re.findall(r"rank \d: \d+ replays.*", done.stdout):
        show(line)


def test_pipeline_stages_survive_rail_cuts(fake_cuda: Path, vllm_forks: Forks, show) -> None:
    done = run_ranks(
        "gpu_stages",
        "per-rank",
        "per-rank",
        forks=vllm_forks,
        R2CCL_CUDA_LIBRARY=str(fake_cuda),
        R2CCL_REJOIN_BACKOFF_MIN_MS="1",
    )
    assert done.returncode == 0, done.stdout
    [line] = re.findall(r"90 steps of two stages.*", done.stdout)
    show(line)


def test_no_token_is_returned_after_the_loss_of_a_peer(fake_cuda: Path, vllm_forks: Forks) -> None:
    done = run_ranks(
        "gpu_loss",
        "per-rank",
        "per-rank",
        forks=vllm_forks,
        R2CCL_CUDA_LIBRARY=str(fake_cuda),
        R2CCL_LINK_TIMEOUT_S="2",
    )
    assert done.stdout.count("not given out: PeerLostError") == 2, done.stdout
    assert "garbage" not in done.stdout
    assert "left waiting" not in done.stdout
