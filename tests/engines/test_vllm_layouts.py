"""`vllm serve` over two nodes of a lab with other layouts than TP=2: no NIC is needed for good.

In mid-decode the management NIC of node 1 goes for good, and a rail of node 0 meanwhile.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from served_stage import SILENCE_S, STREAMS, TOKENS, Stage, a_stage, goes_on, tokens_of
from tiny_moe import make_tiny_moe

from r2serve.lab.serving.client import Load
from r2serve.lab.serving.serve import Server

pytestmark = [pytest.mark.long, pytest.mark.timeout(2400)]

# Without a compiler's warm-up, vLLM's second stage on a CPU has no buffers.
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "TP=4 on 2 nodes": {"tensor_parallel": 4},
    "PP=2": {"tensor_parallel": 1, "pipeline_parallel": 2, "eager": False},
    "DP=2, an API server for each engine": {"tensor_parallel": 1, "data_parallel": 2},
}


@pytest.fixture
def stage() -> Iterator[Stage]:
    with a_stage("vllm") as made:
        yield made


def log(server: Server, node: int) -> str:
    return server.log_path(node).read_text(errors="replace")


def prefix_of(server: Server) -> str:
    """Returns the virtual addresses of a server; its nodes must agree about them."""
    found = set()
    for node in (0, 1):
        said = re.search(rf"relay of node {node} of 2: .* at (127\.\d+\.\d+)\.", log(server, node))
        assert said is not None, log(server, node)[-3000:]
        found.add(said[1])
    assert len(found) == 1
    return str(found.pop())


def lose_two_nics(stage: Stage, *loads: Load) -> None:
    """The management NIC goes for good; a rail goes, too, and comes back."""
    for load in loads:
        load.wait_for_tokens(STREAMS * 32, SILENCE_S)
    stage.injector.make("carrier_loss", 1, None)
    for load in loads:
        goes_on(load)
    stage.injector.make("carrier_loss", 0, 0)
    try:
        for load in loads:
            goes_on(load)
    finally:
        stage.injector.undo("carrier_loss", 0, 0)


def check(stage: Stage, server: Server, show: Callable[[str], None]) -> None:
    """Compares the tokens of a run that loses NICs with the tokens of an undisturbed run."""
    server.wait_until_ready(lambda _: None)
    prefix_of(server)
    undisturbed = tokens_of(stage.run(server, "undisturbed"))
    load = stage.load(server, "struck")
    lose_two_nics(stage, load)
    assert tokens_of(load.finish(SILENCE_S, server.check_alive)) == undisturbed
    assert tokens_of(stage.run(server, "afterwards")) == undisturbed
    digest = hashlib.sha256(repr(undisturbed).encode()).hexdigest()[:16]
    show(f"{STREAMS} streams of {TOKENS} tokens, undisturbed, struck and afterwards: {digest}")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_layout_needs_the_management_nic(
    stage: Stage, show: Callable[[str], None], layout: str
) -> None:
    with stage.server(**LAYOUTS[layout]) as server:
        check(stage, server, show)


def test_experts_of_two_engines_need_no_management_nic(
    stage: Stage, show: Callable[[str], None]
) -> None:
    """The engines all-reduce in each step whether any of them has requests."""
    model = make_tiny_moe(stage.work / "tiny-moe")
    with stage.server(model=model, tensor_parallel=1, data_parallel=2) as server:
        check(stage, server, show)


def test_a_start_needs_no_management_nic(stage: Stage) -> None:
    """The management NIC of both nodes has no carrier while the engine starts and serves."""
    masters = ",".join(stage.lab.nodes[0].rail_address(rail) for rail in range(stage.lab.rails))
    for node in (0, 1):
        stage.injector.make("carrier_loss", node, None)
    with stage.server(settings={"R2CCL_CONTROL_MASTER": masters}) as server:
        server.wait_until_ready(lambda _: None)
        prefix_of(server)
        for node in (0, 1):
            assert f"meets other nodes at {masters}, port" in log(server, node)
        without = tokens_of(stage.run(server, "without"))
        assert tokens_of(stage.struck_run(server, "struck", "black_hole", 1, 0)) == without
        for node in (0, 1):
            stage.injector.undo("carrier_loss", node, None)
        assert tokens_of(stage.run(server, "with")) == without


def test_two_jobs_beside_each_other_need_no_management_nic(stage: Stage) -> None:
    first = stage.server(label="first")
    second = stage.server(label="second", job=1)
    with first, second:
        for server in (first, second):
            server.wait_until_ready(lambda _: None)
        assert prefix_of(first) != prefix_of(second)
        undisturbed = [tokens_of(stage.run(server, "undisturbed")) for server in (first, second)]
        loads = [stage.load(server, "struck") for server in (first, second)]
        lose_two_nics(stage, *loads)
        for load, server, wanted in zip(loads, (first, second), undisturbed, strict=True):
            assert tokens_of(load.finish(SILENCE_S, server.check_alive)) == wanted
