"""`vllm serve` with TP=2 over two nodes of a lab: the management NIC goes for good.

One server serves all tests of this file, in their order; the last test ends it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import served_stage
from served_stage import SILENCE_S, STREAMS, a_stage, tokens_of
from timely import ended, timely

from r2serve.engines.children import EXIT_STATUS
from r2serve.lab.serving.client import Load

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

PORTS = range(40000, 40100)
"""Ports of all listeners of r2serve between nodes."""
SETTINGS = {"R2CCL_CONTROL": "rails", "R2CCL_PORTS": f"{PORTS[0]}-{PORTS[-1]}"}


class Stage:
    """A stage with a served model."""

    def __init__(self, stage: served_stage.Stage) -> None:
        self._stage = stage
        self.lab, self.work, self.injector = stage.lab, stage.work, stage.injector
        self.server = stage.server(label="rails", settings=SETTINGS)

    def load(self, label: str) -> Load:
        return self._stage.load(self.server, label)

    def run(self, label: str) -> list[tuple[int, ...]]:
        return tokens_of(self._stage.run(self.server, label))

    def log(self, node: int) -> str:
        return self.server.log_path(node).read_text(errors="replace")


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with a_stage("vllm") as made:
        served = Stage(made)
        with served.server:
            served.server.wait_until_ready(lambda _: None)
            yield served


@pytest.fixture(scope="module")
def undisturbed(stage: Stage) -> list[tuple[int, ...]]:
    return stage.run("undisturbed")


def test_connections_between_nodes_use_virtual_addresses(stage: Stage) -> None:
    for node in (0, 1):
        log = stage.log(node)
        assert re.search(rf"relay of node {node} of 2: .* at 127\.\d+\.\d+\.{node + 1},", log), log
        assert re.search(r"distributed_init_method=tcp://127\.\d+\.\d+\.1:29500 ", log), log
    assert re.search(r"mq_connect_ip=127\.\d+\.\d+\.1 ", stage.log(0))


def test_only_r2serve_has_connections_between_the_nodes(
    stage: Stage, undisturbed: list[tuple[int, ...]]
) -> None:
    """The engine's own connections end at addresses of 127.0.0.0/8."""
    for node in stage.lab.nodes:
        lines = node.run("ss", "--no-header", "--tcp", "--numeric", "--processes")
        between = [line for line in lines.splitlines() if line.split()[4].startswith("10.77.")]
        strange = [line for line in between if not ports_of(line) & set(PORTS)]
        assert len(between) > 0
        assert strange == []


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


def ports_of(line: str) -> set[int]:
    """Returns both ports of a connection, as a line of `ss` has them."""
    return {int(word.rpartition(":")[2]) for word in line.split()[3:5]}


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
