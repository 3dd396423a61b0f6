"""Real engines: the same tokens as stock over 2 nodes, 2 workers a node, and a lost worker."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from answers import FLAG, PROMPTS, RAILS, greedy
from timely import ended, timely

if TYPE_CHECKING:
    from conftest import Answers, Engine

CARRIED = "carried by r2ccl over rail0@node0, rail1@node0"


def test_two_nodes_give_the_same_tokens_as_stock_vllm(
    start_engine: Callable[..., Engine], eager_answers: Answers
) -> None:
    stock = start_engine(2, [], [{}, {}])
    expected = greedy(stock)
    stock.stop()
    assert "CPU SHM communicator disabled" in stock.nodes[0].log  # stock used gloo over the network
    assert "r2ccl" not in stock.nodes[0].log + stock.nodes[1].log

    assert eager_answers.texts == expected
    assert f"group tp:0: 2 ranks on 2 nodes, {CARRIED}" in eager_answers.log


@pytest.mark.long
def test_two_workers_a_node_and_the_loss_of_one(start_engine: Callable[..., Engine]) -> None:
    limit = {"R2CCL_LINK_TIMEOUT_S": "5"}
    engine = start_engine(
        4, FLAG, [RAILS | limit | {"R2CCL_NODE": f"node{number}"} for number in range(2)]
    )
    assert [len(node.workers()) for node in engine.nodes] == [2, 2]
    first, again = greedy(engine), greedy(engine)
    assert first == again
    assert len(set(first)) == len(PROMPTS)
    assert f"group tp:0: 4 ranks on 2 nodes, {CARRIED}, shm@node0" in engine.nodes[0].log

    answers: list[tuple[int, str]] = []
    asking = threading.Thread(target=lambda: answers.append(engine.complete(PROMPTS[0], 450)))
    asking.start()
    timely(lambda: engine.running() == 1, "the engine computes", every_s=0.1)
    killed = time.monotonic()
    engine.nodes[1].workers()[0].kill()
    asking.join()
    late_s = time.monotonic() - killed
    assert answers[0][0] == 500, answers
    for node in engine.nodes:
        ended(node.process, "a node without its worker", within_s=120)
    assert "PeerLostError" in engine.nodes[0].log or "PeerClosedError" in engine.nodes[0].log
    # The default timeout is 30 s.
    timely(lambda: late_s < 20, f"the error came after {late_s:.1f} s, at a limit of 5 s", 0)
