"""First processes of SGLang nodes that tell each other their choices, before any node waits."""

from __future__ import annotations

import subprocess
import sys
import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import TCPStore

from r2serve.engines import flag, node_store
from r2serve.engines.children import EXIT_STATUS
from r2serve.engines.node_store import ComparedNode
from r2serve.engines.sglang import node_values

pytestmark = pytest.mark.slow

OPTIONS = {"nnodes": 2, "node_rank": 1, "dist_init_addr": "10.0.0.1:29500"}
FLAG = f"--distributed-backend ({flag.VARIABLE})"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[ComparedNode]:
    """The nodes whose comparison has started."""
    found: list[ComparedNode] = []
    monkeypatch.setattr(node_values, "_run", found.append)
    monkeypatch.setattr(node_values, "_started", False)
    monkeypatch.setattr(flag, "of_command_line", True)
    monkeypatch.delenv(flag.VARIABLE, raising=False)
    return found


def compare_once(**changed: Any) -> None:
    node_values.compare_once(SimpleNamespace(**OPTIONS | changed))
    for thread in threading.enumerate():
        if thread.name == "r2serve-nodes":
            thread.join()


@pytest.mark.parametrize("chosen", ["default", "r2ccl"])
def test_a_node_tells_its_choice_with_or_without_the_flag(
    started: list[ComparedNode], monkeypatch: pytest.MonkeyPatch, chosen: str
) -> None:
    if chosen == "r2ccl":
        monkeypatch.setenv(flag.VARIABLE, chosen)
    for _ in range(2):
        compare_once()
    (own,) = started
    assert (own.number, own.nodes, own.master, own.port) == (1, 2, "10.0.0.1", 29500)
    assert own.values[FLAG] == chosen
    assert ("checksum (R2CCL_CHECKSUM)" in own.values) == (chosen == "r2ccl")


def test_an_address_of_ipv6_has_brackets(started: list[ComparedNode]) -> None:
    compare_once(dist_init_addr="[fd00::1]:29500")
    assert [(own.master, own.port) for own in started] == [("fd00::1", 29500)]


@pytest.mark.parametrize(
    "changed",
    [
        {"nnodes": 1},
        {"dist_init_addr": None},
        {"dist_init_addr": "10.0.0.1"},
        {"dist_init_addr": "10.0.0.1:port"},
    ],
)
def test_a_start_without_other_nodes_compares_nothing(
    started: list[ComparedNode], changed: dict[str, Any]
) -> None:
    compare_once(**changed)
    assert started == []


def test_a_program_of_its_own_compares_nothing(
    started: list[ComparedNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flag, "of_command_line", False)
    compare_once()
    assert started == []


# A first process with a scheduler that waits for the other node.
FIRST = """
import logging, multiprocessing, sys, time
from types import SimpleNamespace
from r2serve.engines import flag
from r2serve.engines.sglang import node_values

if __name__ == "__main__":
    number, port = int(sys.argv[1]), sys.argv[2]
    logging.basicConfig(level=logging.INFO)
    flag.of_command_line = True
    scheduler = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    scheduler.start()
    address = f"127.0.0.1:{port}"
    node_values.compare_once(SimpleNamespace(nnodes=2, node_rank=number, dist_init_addr=address))
    scheduler.join()
    time.sleep(600)
"""


@pytest.mark.case("22", "the nodes waited for each other, and named no value")
def test_both_nodes_end_with_a_status_and_the_same_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=5), wait_for_workers=False)
    monkeypatch.delenv(flag.VARIABLE, raising=False)
    firsts = []
    for number, chosen in enumerate(("r2ccl", "default")):
        monkeypatch.setenv(flag.VARIABLE, chosen)
        command = [sys.executable, "-c", FIRST, str(number), str(store.port)]
        firsts.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
    for first in firsts:
        _, said = first.communicate(timeout=300)
        assert first.returncode == EXIT_STATUS, said
        assert "the nodes of this engine differ" in said
        assert "'r2ccl' on node 0 (host " in said
        assert "'default' on node 1 (host " in said


def test_a_wrong_port_is_no_end(
    started: list[ComparedNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing listens there so far: the comparison tries again, and ends nothing."""
    monkeypatch.setattr(node_store, "WAIT_S", 0.1)
    monkeypatch.setattr(node_store, "RETRY_S", 0.01)
    monkeypatch.setattr(node_store, "CONNECT_S", 0.05)
    ended: list[str] = []
    node_store.run(ComparedNode(1, 2, "127.0.0.1", 1, "host", {}), node_store.compare, ended.append)
    assert ended == []
