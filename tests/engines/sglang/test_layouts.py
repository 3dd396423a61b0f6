"""`sglang serve` over two nodes with other layouts than TP=2: a fault changes no token."""

from __future__ import annotations

import os
import re
import signal

import pytest
from served_stage import SILENCE_S, STREAMS, Stage, tokens_of
from sglang_processes import schedulers
from timely import ended

from r2serve.lab.serving.serve import Server

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


def check_black_hole(stage: Stage, server: Server, groups: set[str]) -> None:
    """Compares the tokens of a run through a black hole with the tokens of an undisturbed run."""
    server.wait_until_ready(lambda _: None)
    reference = tokens_of(stage.run(server, "undisturbed"))
    struck = stage.struck_run(server, "struck", "black_hole", 0, 0)
    assert tokens_of(struck) == reference
    ranks = server.plan.tensor_parallel * server.plan.pipeline_parallel
    for name in groups:
        carried = f"group {name}:0: {ranks} ranks on 2 nodes, carried by r2ccl"
        assert carried in log(server, 0)


def log(server: Server, node: int) -> str:
    return server.log_path(node).read_text(errors="replace")


def test_a_black_hole_changes_no_token_with_two_stages(stage: Stage) -> None:
    with stage.server(tensor_parallel=1, pipeline_parallel=2) as server:
        check_black_hole(stage, server, {"world", "pp"})


def test_two_ranks_a_node_outlive_a_black_hole_and_end_with_a_killed_scheduler(
    stage: Stage,
) -> None:
    """A scheduler is left on each node, so both logs have the typed error."""
    with stage.server(tensor_parallel=4) as server:
        check_black_hole(stage, server, {"world", "tp"})
        load = stage.load(server, "killed")
        load.wait_for_tokens(STREAMS * 16, SILENCE_S)
        [victim] = schedulers(stage.work, rank=3)
        os.kill(victim.pid, signal.SIGKILL)
        for node, process in enumerate(server._processes):
            ended(process, f"the first process of node {node}", within_s=120.0)
        load.stop()
        assert load.result(timeout_s=30).completed == 0
        for node in (0, 1):
            said = log(server, node)
            assert re.search(r"Peer(Lost|Closed)Error: .*rank 3", said), said[-3000:]
