"""Ends of an engine: a peer that dies while nothing runs, and an orderly stop with a rail down."""

from __future__ import annotations

import contextlib
import http.client
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from answers import FLAG, RAILS
from features import EXACT, TOKENS, completion, together
from served_stage import SILENCE_S, STREAMS, a_stage
from test_vllm_features import Rails
from timely import ended, timely

from r2serve.engines.children import EXIT_STATUS
from r2serve.lab.serving.model import prompts
from r2serve.lab.serving.serve import Server

if TYPE_CHECKING:
    from conftest import Engine, ServeNode

pytestmark = pytest.mark.long
LINK_TIMEOUT_S = 5
LONG_LINK_TIMEOUT_S = 60
PROOF_S = 1
"""Longest time to the proof of a death."""
ENDING_S = 15
"""Longest time for vLLM's own end, once a worker knows of a death."""


@pytest.mark.case("ends", "the idle node stayed when its peer was gone")
def test_a_peer_that_dies_while_nothing_runs_ends_both_nodes(
    start_engine: Callable[..., Engine],
) -> None:
    """A killed worker of node 1 ends the idle worker of node 0, and no node ends with status 0."""
    limit = {"R2CCL_LINK_TIMEOUT_S": str(LINK_TIMEOUT_S)}
    engine = start_engine(
        2, FLAG, [RAILS | limit | {"R2CCL_NODE": f"node{number}"} for number in range(2)]
    )
    assert completion(engine, prompts(1)[0])
    timely(lambda: engine.running() == 0, "nothing runs")
    (watching,) = engine.nodes[0].workers()
    engine.nodes[1].workers()[0].kill()
    killed = time.monotonic()
    timely(lambda: not watching.is_running(), "the end of the idle worker", within_s=120)
    took_s = time.monotonic() - killed
    for node in engine.nodes:
        ended(node.process, "a node without its worker", within_s=120)
        assert node.process.poll() not in (0, None), node.log[-3000:]
    assert engine.nodes[1].process.poll() == EXIT_STATUS
    lines = re.findall(r"a peer is gone while nothing runs.*", engine.nodes[0].log)
    assert len(lines) == 1, lines
    assert "PeerLostError" in lines[0]
    # A part of the time is vLLM's, on any machine; a starved machine may exceed the limit.
    timely(lambda: took_s < LINK_TIMEOUT_S + 3, f"the worker ended after {took_s:.1f} s", 0)


def engine_of(node: ServeNode) -> psutil.Process:
    """Returns the engine process of a node."""
    children = psutil.Process(node.process.pid).children(recursive=True)
    (found,) = (each for each in children if "EngineCore" in "".join(each.cmdline()[:1]))
    return found


def worker_of_follower(engine: Engine) -> psutil.Process:
    return engine.nodes[1].workers()[0]


def ended_by_death(engine: Engine, victim: Callable[[Engine], psutil.Process]) -> float:
    """Kills a process during a request; returns the time until both nodes ended with a status."""

    def ask() -> None:
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
            engine.complete(prompts(1)[0], 400)  # its answer, if any, is cut off

    threading.Thread(target=ask, daemon=True).start()
    timely(lambda: engine.running() == 1, "a request runs", every_s=0.05)
    victim(engine).kill()
    killed = time.monotonic()
    for node in engine.nodes:
        ended(node.process, "a node after the death", within_s=120)
    took_s = time.monotonic() - killed
    for node in engine.nodes:
        assert node.process.poll() not in (0, None), node.log[-3000:]
    return took_s


@pytest.mark.case("27", "a node ended with status 0, or not at all")
@pytest.mark.parametrize(
    "victim",
    [worker_of_follower, lambda engine: engine_of(engine.nodes[0])],
    ids=["the follower's worker", "the leader's engine"],
)
def test_a_death_during_a_request_ends_both_nodes_with_a_status(
    start_engine: Callable[..., Engine], victim: Callable[[Engine], psutil.Process]
) -> None:
    """A supervisor starts again what ends with a status other than 0."""
    limit = {"R2CCL_LINK_TIMEOUT_S": str(LINK_TIMEOUT_S)}
    engine = start_engine(
        2, FLAG, [RAILS | limit | {"R2CCL_NODE": f"node{number}"} for number in range(2)]
    )
    took_s = ended_by_death(engine, victim)
    limit_s = LINK_TIMEOUT_S + ENDING_S
    timely(lambda: took_s < limit_s, f"the nodes ended after {took_s:.1f} s", 0)


@pytest.mark.case("27", "a node ended with status 0, or not at all")
def test_a_proved_death_ends_both_nodes_long_before_the_link_timeout() -> None:
    """The relay of the victim's node proves the death, whatever bytes the victim left unread."""
    settings = {"R2CCL_LINK_TIMEOUT_S": str(LONG_LINK_TIMEOUT_S)}
    with a_stage("vllm") as stage, stage.server(label="death", settings=settings) as server:
        server.wait_until_ready(lambda _: None)
        load = stage.load(server, "death")
        load.wait_for_tokens(STREAMS * 16, SILENCE_S)
        below = psutil.Process(server._processes[1].pid).children(recursive=True)
        (victim,) = (each for each in below if "Worker" in "".join(each.cmdline()[:1]))
        victim.kill()
        killed = time.monotonic()
        for number, process in enumerate(server._processes):
            status = ended(process, f"node {number} after the death", within_s=120)
            assert status != 0, log_of(server, number)[-3000:]
        took_s = time.monotonic() - killed
        load.stop()
        assert "its process has ended (the relay of its node says so)" in log_of(server, 0)
    timely(lambda: took_s < PROOF_S + ENDING_S, f"the nodes ended after {took_s:.1f} s", 0)


def log_of(server: Server, node: int) -> str:
    return server.log_path(node).read_text(errors="replace")


@pytest.mark.case("27", "a node ended with status 0, or not at all")
@pytest.mark.parametrize("node", [0, 1], ids=["with the HTTP server", "without"])
def test_the_death_of_an_engine_with_its_worker_inside_ends_both_nodes_with_a_status(
    start_moe: Callable[..., Engine], node: int
) -> None:
    """An engine with the executor `uni` has no process for its worker.

    Data-parallel engines have the executor `mp` by default. On CPUs vLLM also replaces `uni` by
    `mp`, unless the variable of vLLM says otherwise. The experts are split like tensors: vLLM's
    kernel for CPUs ignores which experts a rank has under `--enable-expert-parallel`.
    """
    limit = {"R2CCL_LINK_TIMEOUT_S": str(LINK_TIMEOUT_S), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    flags = [*FLAG, "--distributed-executor-backend", "uni"]
    places = [RAILS | limit | {"R2CCL_NODE": f"node{number}"} for number in range(2)]
    engine = start_moe(1, flags, places, replicas=True)
    assert completion(engine, prompts(1)[0])
    victim = engine_of(engine.nodes[node])
    assert not engine.nodes[node].workers()
    victim.kill()
    killed = time.monotonic()
    for each in engine.nodes:
        ended(each.process, "a node after the death", within_s=120)
    took_s = time.monotonic() - killed
    for each in engine.nodes:
        assert each.process.poll() not in (0, None), each.log[-3000:]
    assert engine.nodes[node].process.poll() == EXIT_STATUS
    limit_s = LINK_TIMEOUT_S + ENDING_S
    timely(lambda: took_s < limit_s, f"the nodes ended after {took_s:.1f} s", 0)


@pytest.mark.case("28", "the follower ended its workers, and no stream finished")
@pytest.mark.parametrize("first", [0, 1], ids=["the leader first", "the follower first"])
def test_both_nodes_told_to_stop_finish_their_streams(
    start_engine: Callable[..., Engine], first: int
) -> None:
    """The follower serves until the leader has ended; no rail is charged, and no node hangs."""
    flags = [*FLAG, *EXACT, "--shutdown-timeout", "120"]
    engine = start_engine(2, flags, [RAILS | {"R2CCL_NODE": f"node{node}"} for node in range(2)])
    asks = [lambda one=one: completion(engine, one) for one in prompts(4)]
    expected = together(asks)
    answers: list[list[list[str]]] = []
    asking = threading.Thread(target=lambda: answers.append(together(asks)))
    asking.start()
    timely(lambda: engine.running() == 4, "four streams run", every_s=0.05)
    workers = [worker for node in engine.nodes for worker in node.workers()]
    engine.nodes[first].process.send_signal(signal.SIGTERM)
    time.sleep(0.4)
    assert asking.is_alive()
    assert all(worker.is_running() for worker in workers)
    engine.nodes[1 - first].process.send_signal(signal.SIGTERM)
    asking.join()
    assert answers == [expected]
    for node in engine.nodes:
        ended(node.process, "a node after SIGTERM", within_s=120)
        assert node.process.poll() == 0, node.log[-3000:]
        assert not re.findall(r".*(?:DOWN \(|the fault is at).*", node.log)
    assert "the workers of this node end: the leader node has ended" in engine.nodes[1].log


@pytest.mark.case("SIGTERM", "not tried with a lost rail")
def test_eight_streams_end_in_good_order_while_a_rail_is_down(
    start_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    rails = Rails(tmp_path)
    flags = [*FLAG, *EXACT, "--shutdown-timeout", "120"]
    engine = start_engine(2, flags, [rails.environment])
    expected = together([lambda one=one: completion(engine, one) for one in prompts(8)])
    answers: list[list[list[str]]] = []
    began_ns = time.monotonic_ns()

    def ask() -> None:
        answers.append(together([lambda one=one: completion(engine, one) for one in prompts(8)]))

    asking = threading.Thread(target=ask)
    asking.start()
    timely(lambda: engine.running() == 8, "eight streams run", every_s=0.05)
    rails.say("0 carrier_loss")
    timely(lambda: rails.lost_ns("rail0", began_ns), "rail0 is lost")
    (node,) = engine.nodes
    assert asking.is_alive()
    node.process.send_signal(signal.SIGTERM)
    asking.join()
    assert answers == [expected]
    assert all(len(texts[0].split()) > TOKENS - 4 for texts in answers[0])
    ended(node.process, "the engine after SIGTERM", within_s=120)
    assert node.process.poll() == 0, node.log[-3000:]
    after = node.log[node.log.rfind("rail0@node") :]
    # After the last answer, vLLM's API server may see the end of the engine as an error, by chance.
    errors = [line for line in after.splitlines() if "Error" in line and "(APIServer" not in line]
    assert not errors, after
