"""`vllm serve` with TP=2 over two nodes of a lab: the management NIC goes for good.

One server serves all tests of this file, in their order; the last test ends it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest
from timely import ended, timely

from r2serve.engines.children import EXIT_STATUS
from r2serve.lab.holder import LabUnavailableError
from r2serve.lab.injector import LabInjector
from r2serve.lab.lab import Lab
from r2serve.lab.serving.client import Load, Run
from r2serve.lab.serving.model import make_tiny_llama, prompts
from r2serve.lab.serving.places import LabPlace
from r2serve.lab.serving.plan import Plan
from r2serve.lab.serving.serve import Server

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

STREAMS, TOKENS = 4, 600
SILENCE_S = 120.0


class Stage:
    """A lab with a served model."""

    def __init__(self, lab: Lab, work: Path) -> None:
        self.lab, self.work = lab, work
        self.texts = prompts(STREAMS)
        self.injector = LabInjector(lab)
        plan = Plan(
            "rails",
            make_tiny_llama(work / "model"),
            r2ccl=True,
            lab=True,
            work=work,
            max_requests=STREAMS,
            settings={"R2CCL_CONTROL": "rails"},
        )
        self.server = Server(plan, [LabPlace(node) for node in lab.nodes])

    def load(self, label: str) -> Load:
        path = self.work / f"{label}.json"
        return Load(self.server.client, self.server.url, self.texts, TOKENS, path)

    def run(self, label: str) -> list[tuple[int, ...]]:
        return tokens_of(self.load(label).finish(SILENCE_S, self.server.check_alive))

    def log(self, node: int) -> str:
        return self.server.log_path(node).read_text(errors="replace")


def tokens_of(run: Run) -> list[tuple[int, ...]]:
    """Returns the tokens of each request, none of which may fail."""
    assert run.failed == 0, [request.error for request in run.requests]
    return [request.token_ids for request in run.requests]


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with ExitStack() as stack:
        # Sockets of the engine have long names, so the folder has a short one.
        work = Path(stack.enter_context(TemporaryDirectory(prefix="r2s-")))
        try:
            lab = stack.enter_context(Lab(nodes=2, rails=2))
        except LabUnavailableError as error:
            pytest.skip(f"no lab on this machine: {error}")
        made = Stage(lab, work)
        stack.enter_context(made.server)
        made.server.wait_until_ready(lambda _: None)
        yield made


@pytest.fixture(scope="module")
def undisturbed(stage: Stage) -> list[tuple[int, ...]]:
    return stage.run("undisturbed")


def test_connections_between_nodes_use_virtual_addresses(stage: Stage) -> None:
    for node in (0, 1):
        log = stage.log(node)
        assert re.search(rf"relay of node {node} of 2: .* at 127\.\d+\.\d+\.{node + 1},", log), log
        assert re.search(r"distributed_init_method=tcp://127\.\d+\.\d+\.1:29500 ", log), log
    assert re.search(r"mq_connect_ip=127\.\d+\.\d+\.1 ", stage.log(0))


def test_the_management_nic_goes_for_good_in_mid_decode(
    stage: Stage, undisturbed: list[tuple[int, ...]]
) -> None:
    load = stage.load("management")
    load.wait_for_tokens(STREAMS * 32, SILENCE_S)
    stage.injector.make("carrier_loss", 1, None)
    before = load.tokens
    load.wait_for_tokens(before + STREAMS * 16, SILENCE_S)
    # Takes the address away, too, which would reset connections of the NIC.
    stage.lab.nodes[0].run("ip", "address", "flush", "dev", "mgmt0")
    assert load.running, "the fault came after the last token: use more tokens"
    before = load.tokens
    load.wait_for_tokens(before + STREAMS * 16, SILENCE_S)
    assert tokens_of(load.finish(SILENCE_S, stage.server.check_alive)) == undisturbed


def test_new_requests_are_served_without_the_management_nic(
    stage: Stage, undisturbed: list[tuple[int, ...]]
) -> None:
    assert stage.run("without") == undisturbed


def test_a_rail_is_lost_after_the_management_nic(
    stage: Stage, undisturbed: list[tuple[int, ...]]
) -> None:
    load = stage.load("second")
    load.wait_for_tokens(STREAMS * 32, SILENCE_S)
    stage.injector.make("carrier_loss", 0, 0)
    before = load.tokens
    load.wait_for_tokens(before + STREAMS * 16, SILENCE_S)
    assert load.running, "the fault came after the last token: use more tokens"
    stage.injector.undo("carrier_loss", 0, 0)
    assert tokens_of(load.finish(SILENCE_S, stage.server.check_alive)) == undisturbed


def test_a_killed_relay_ends_both_nodes_with_the_typed_error(stage: Stage) -> None:
    load = stage.load("killed")
    load.wait_for_tokens(STREAMS * 16, SILENCE_S)
    [relay] = relays(stage.work, node=1)
    relay.kill()
    killed = time.monotonic()
    took_s = []
    for node, process in enumerate(stage.server._processes):
        assert ended(process, f"node {node}", within_s=60) == EXIT_STATUS, stage.log(node)[-3000:]
        took_s.append(time.monotonic() - killed)
        assert re.search(r"the engine exits: PeerLostError: ", stage.log(node)), stage.log(node)
    load.stop()
    assert load.result(timeout_s=30).completed == 0
    timely(lambda: max(took_s) < 3.0, f"the nodes ended after {took_s} s", 0)


def relays(folder: Path, node: int) -> list[psutil.Process]:
    """Returns the relay of a node, found by its working folder."""
    found = []
    for process in psutil.process_iter():
        try:
            words, cwd = process.cmdline(), process.cwd()
        except (psutil.Error, OSError):
            continue
        if cwd != str(folder) or "relay" not in words or "--node" not in words:
            continue
        if words[words.index("--node") + 1] == str(node):
            found.append(process)
    return found
