"""`sglang serve` with TP=2 over two nodes of a lab: faults change no token.

One server serves all tests of this file; the last test ends it.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator

import pytest
from served_stage import SILENCE_S, STREAMS, TOKENS, Stage, tokens_of
from sglang_processes import schedulers
from timely import ended, timely

from r2serve.lab.serving.journals import Journals
from r2serve.lab.serving.serve import Server
from r2serve.observe.requests import Requests

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

FAULTS = {
    "black_hole": ("black_hole", 0, 0),
    "carrier_loss": ("carrier_loss", 1, 1),
    "management": ("carrier_loss", 1, None),
}


@pytest.fixture(scope="module")
def reference(stage: Stage) -> list[tuple[int, ...]]:
    """The tokens of SGLang's own communicator, with TP=2 over both nodes."""
    with stage.server(r2ccl=False) as server:
        server.wait_until_ready(lambda _: None)
        return tokens_of(stage.run(server, "reference"))


@pytest.fixture(scope="module")
def server(stage: Stage, reference: list[tuple[int, ...]]) -> Iterator[Server]:
    with stage.server() as made:
        made.wait_until_ready(lambda _: None)
        yield made


def logs(server: Server) -> list[str]:
    return [server.log_path(node).read_text(errors="replace") for node in (0, 1)]


def test_tokens_are_those_of_sglangs_own_communicator(
    stage: Stage, server: Server, reference: list[tuple[int, ...]]
) -> None:
    assert tokens_of(stage.run(server, "undisturbed")) == reference
    for log in logs(server):
        carried = re.findall(r"group (\S+): 2 ranks on 2 nodes, carried by r2ccl over (.*?);", log)
        assert "tp" in {name.partition(":")[0] for name, _ in carried}, log[-3000:]
        assert all("rail0" in rails and "rail1" in rails for _, rails in carried)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_changes_no_token(
    stage: Stage, server: Server, reference: list[tuple[int, ...]], fault: str
) -> None:
    assert tokens_of(stage.struck_run(server, fault, *FAULTS[fault])) == reference
    journals = Journals(server.journals())
    timely(journals.all_up, "all rails are UP again", within_s=60.0)


def test_new_requests_are_served_without_the_management_nic(
    stage: Stage, server: Server, reference: list[tuple[int, ...]]
) -> None:
    """Under vLLM new requests wait for the NIC: its scheduler talks to the workers over it."""
    stage.injector.make("carrier_loss", 1, None)
    try:
        assert tokens_of(stage.run(server, "mgmt-gone")) == reference
    finally:
        stage.injector.undo("carrier_loss", 1, None)


def test_requests_have_timings_and_the_engine_a_label(stage: Stage, server: Server) -> None:
    run = stage.run(server, "named")
    ids = {request.id for request in run.requests}
    kept = Requests(server.journals()[0])

    def known() -> bool:
        kept.look()
        return all((one := kept.get(name)) is not None and one.timings for name in ids)

    timely(known, "timings of every request")
    for name in ids:
        one = kept.get(name)
        assert one is not None
        assert one.timings is not None
        assert one.timings.tokens == TOKENS
        assert 0 < one.timings.prefill_s < one.timings.e2e_s
    labels = list(kept.about().values())
    assert {"model_name": "tiny-llama", "engine": "sglang"} in labels
    kept.close()


def test_a_killed_scheduler_ends_both_nodes_with_the_reason(stage: Stage, server: Server) -> None:
    """The killed scheduler is the only one of its node, whose first process names it instead."""
    load = stage.load(server, "killed")
    load.wait_for_tokens(STREAMS * 16, SILENCE_S)
    [victim] = schedulers(stage.work, rank=1)
    os.kill(victim.pid, signal.SIGKILL)
    timely(
        lambda: not schedulers(stage.work, rank=0),
        "the scheduler of the other node has ended",
        within_s=120.0,
    )
    for node, process in enumerate(server._processes):
        ended(process, f"the first process of node {node}", within_s=120.0)
    load.stop()
    assert load.result(timeout_s=30).completed == 0
    with_scheduler, without = logs(server)
    assert re.search(r"Peer(Lost|Closed)Error: .*rank 1", with_scheduler), with_scheduler[-3000:]
    assert "terminated with -9" in without, without[-3000:]
