"""First processes of vLLM nodes that tell each other their choices, before any node waits."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore

from r2serve.engines import flag, node_store
from r2serve.engines.node_store import ComparedNode
from r2serve.engines.vllm import handshake, node_values
from r2serve.ports.info import ProcessInfo
from r2serve.relay import meeting, teller
from r2serve.relay.meeting import Host

LONG_S = 60.0
FLAG = f"--distributed-backend ({flag.VARIABLE})"
DEFAULT, R2CCL = {FLAG: "default"}, {FLAG: "r2ccl", "control (R2CCL_CONTROL)": "rails"}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_store, "RETRY_S", 0.02)
    monkeypatch.setattr(node_store, "LOOK_S", 0.01)


def node(number: int, values: dict[str, str], port: int = 0, nodes: int = 2) -> ComparedNode:
    relay = values[FLAG] == "r2ccl"
    return ComparedNode(number, nodes, "127.0.0.1", port, f"host-{number}", values, has_relay=relay)


class Told(threading.Thread):
    """The thread of a node's first process."""

    def __init__(
        self, own: ComparedNode, compare: Callable[[ComparedNode], str] = node_values.compare
    ) -> None:
        super().__init__(daemon=True)
        self._own, self._compare = own, compare
        self.text: str | None = None
        self.start()

    def run(self) -> None:
        if self._compare is node_values.compare:
            node_values._run(self._own, lambda text: setattr(self, "text", text))
        else:
            self.text = self._compare(self._own)

    def ended(self) -> str | None:
        self.join(LONG_S)
        assert not self.is_alive()
        return self.text


@pytest.fixture
def no_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    """No relay greets in this test."""
    monkeypatch.setattr(teller, "GREETING_S", 0.1)


@pytest.fixture
def store(no_relay: None) -> TCPStore:
    """The store of an engine whose rank 0 has no relay; rank 0 waits there for the other ranks."""
    return TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=5), wait_for_workers=False)


@pytest.mark.case("22", "the nodes waited for each other, and named no value")
@pytest.mark.parametrize(
    ("values", "said"),
    [
        ((DEFAULT, R2CCL), (f"{FLAG} is ", "'default' on node 0", "'r2ccl' on node 1")),
        (
            (R2CCL | {"control (R2CCL_CONTROL)": "direct"}, R2CCL),
            ("control (R2CCL_CONTROL) is ", "'direct' on node 0", "'rails' on node 1"),
        ),
    ],
)
def test_nodes_differ_and_node_0_has_no_relay(
    store: TCPStore, values: tuple[dict[str, str], ...], said: tuple[str, ...]
) -> None:
    nodes = [Told(node(number, each, store.port)) for number, each in enumerate(values)]
    for each in nodes:
        text = each.ended()
        assert text is not None
        assert text.startswith(said[0])
        assert all(part in text for part in said), text
        assert "(host host-0)" in text
        assert "(host host-1)" in text


@pytest.mark.case("22", "the nodes waited for each other, and named no value")
def test_nodes_differ_and_node_0_has_a_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "LINGER_S", LONG_S)
    own = ProcessInfo(1, b"s" * 32, "node-0", "host-0", (), None, "")
    host = Host(["127.0.0.1"], 0, 2, own, free=list, values=R2CCL)
    try:
        other = Told(node(1, DEFAULT, host.port))
        with pytest.raises(ValueError, match=r"'r2ccl' on node 0 .* and 'default' on node 1") as at:
            host.gather(LONG_S)
        assert other.ended() == str(at.value)
        related = Told(node(1, R2CCL, host.port))  # its relay tells the values
        assert related.ended() is None
    finally:
        host.close()


@pytest.mark.case("22", "the nodes waited for each other, and named no value")
def test_a_data_parallel_node_without_the_flag_tells_the_relay_of_node_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(meeting, "LINGER_S", LONG_S)
    own = ProcessInfo(1, b"s" * 32, "node-0", "host-0", (), None, "")
    host = Host(["127.0.0.1"], 0, 2, own, free=list, values=R2CCL)
    try:
        other = Told(replace(node(1, DEFAULT, host.port), has_store=False))
        with pytest.raises(ValueError, match=r"'r2ccl' on node 0 .* and 'default' on node 1") as at:
            host.gather(LONG_S)
        assert other.ended() == str(at.value)
    finally:
        host.close()


def test_a_data_parallel_engine_without_a_relay_is_left_alone() -> None:
    """A ZMQ socket greets with its signature, and gets no byte."""
    with socket.create_server(("127.0.0.1", 0)) as engine:
        other = Told(replace(node(1, DEFAULT, engine.getsockname()[1]), has_store=False))
        connection, _ = engine.accept()
        with connection:
            connection.settimeout(LONG_S)
            connection.sendall(b"\xff\0\0\0\0\0\0\0\x01\x7f")
            with suppress(ConnectionResetError):  # the other side has not read the signature
                assert connection.recv(1) == b""
        assert other.ended() is None


def test_a_silent_listener_is_asked_again(no_relay: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as engine:
        silent = replace(node(1, DEFAULT, engine.getsockname()[1]), has_store=False)
        with pytest.raises(TimeoutError, match="no relay has greeted so far"):
            node_values.compare(silent)


@pytest.mark.parametrize("values", [DEFAULT, R2CCL])
def test_equal_nodes_end_nothing(values: dict[str, str]) -> None:
    shared = HashStore()
    told = [
        Told(node(number, values), lambda own: node_store.compare_over(shared, own))
        for number in range(2)
    ]
    assert [each.ended() for each in told] == ["", ""]


def test_every_node_hears_before_the_store_ends() -> None:
    shared = HashStore()

    def compare(own: ComparedNode) -> str:
        return node_store.compare_over(shared, own)

    first = Told(node(0, DEFAULT, nodes=3), compare)
    second = Told(node(1, R2CCL, nodes=3), compare)
    assert second.ended()
    first.join(0.2)
    assert first.is_alive(), "node 2 has not heard"
    third = Told(node(2, R2CCL, nodes=3), compare)
    assert third.ended()
    assert first.ended()


def test_a_store_that_comes_late_is_found(no_relay: None) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        nodes = [Told(node(number, each, port)) for number, each in enumerate((DEFAULT, R2CCL))]
    store = TCPStore("127.0.0.1", port, None, True, timedelta(seconds=5), wait_for_workers=False)
    assert [each.ended() is not None for each in nodes] == [True, True]
    assert store.port == port


def test_a_node_without_r2serve_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_store, "WAIT_S", 0.05)
    assert node_store.compare_over(HashStore(), node(0, DEFAULT)) == ""


# ---- where a comparison starts ----


PARALLEL = {
    "nnodes": 2,
    "node_rank": 1,
    "master_addr": "10.0.0.1",
    "master_port": 29501,
    "data_parallel_size": 1,
    "data_parallel_size_local": 1,
    "data_parallel_backend": "mp",
    "data_parallel_external_lb": False,
    "distributed_executor_backend": "mp",
}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[ComparedNode]:
    """The nodes whose comparison has started."""
    found: list[ComparedNode] = []
    monkeypatch.setattr(handshake, "hear", lambda *_: None)
    monkeypatch.setattr(node_values, "_run", lambda node, _: found.append(node))
    monkeypatch.setattr(node_values, "_started", False)
    monkeypatch.setattr(flag, "of_command_line", True)
    monkeypatch.delenv(flag.VARIABLE, raising=False)
    return found


def compare_once(transfer: Any = None, **changed: Any) -> None:
    parallel = SimpleNamespace(**PARALLEL | changed)
    node_values.compare_once(SimpleNamespace(parallel_config=parallel, kv_transfer_config=transfer))
    for thread in threading.enumerate():
        if thread.name == "r2serve-nodes":
            thread.join()


def test_a_node_without_the_flag_tells_its_choice(started: list[ComparedNode]) -> None:
    for _ in range(2):
        compare_once()
    (own,) = started
    assert (own.number, own.nodes, own.master, own.port) == (1, 2, "10.0.0.1", 29501)
    assert (own.values, own.has_relay) == (DEFAULT, False)


@pytest.mark.parametrize(
    ("number", "control", "starts"),
    [(0, "rails", False), (1, "rails", True), (0, "direct", True), (1, "direct", True)],
)
def test_a_node_0_with_a_relay_hears_all_values_there(
    started: list[ComparedNode],
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    control: str,
    starts: bool,
) -> None:
    monkeypatch.setenv(flag.VARIABLE, "r2ccl")
    monkeypatch.setenv("R2CCL_CONTROL", control)
    compare_once(node_rank=number)
    assert [own.number for own in started] == [number] * starts
    assert all(own.has_relay == (control == "rails") for own in started)


def test_a_node_0_whose_connections_stay_direct_compares_over_the_store(
    started: list[ComparedNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(flag.VARIABLE, "r2ccl")
    transfer = SimpleNamespace(kv_connector="MooncakeConnector", kv_connector_extra_config={})
    compare_once(transfer, node_rank=0)
    assert [(own.number, own.has_relay) for own in started] == [(0, False)]


@pytest.mark.parametrize(
    "changed",
    [{"distributed_executor_backend": "ray"}, {"master_addr": "127.0.0.1"}],
)
def test_other_starts_have_no_comparison_of_nodes(
    started: list[ComparedNode], changed: dict[str, Any]
) -> None:
    compare_once(**changed)
    assert started == []


REPLICAS = {
    "nnodes": 1,
    "data_parallel_size": 2,
    "data_parallel_rank": 0,
    "data_parallel_rank_local": None,
    "data_parallel_master_ip": "10.0.0.1",
    "data_parallel_rpc_port": 29550,
}


@pytest.mark.parametrize(
    ("rank", "backend", "elsewhere", "starts"),
    [
        (1, "default", "", True),
        (0, "default", "", False),
        (1, "r2ccl", "", False),
        (0, "r2ccl", "", False),
        (1, "r2ccl", "10.1.0.1", True),  # the relay does not look at the master address
        (0, "r2ccl", "10.1.0.1", False),
    ],
)
def test_a_data_parallel_node_tells_only_what_no_relay_tells(
    started: list[ComparedNode],
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    backend: str,
    elsewhere: str,
    starts: bool,
) -> None:
    monkeypatch.setenv(flag.VARIABLE, backend)
    monkeypatch.setenv("R2CCL_CONTROL_MASTER", elsewhere)
    compare_once(**REPLICAS | {"data_parallel_rank": rank})
    wanted = [(1, 29550, False)] * starts
    assert [(own.number, own.port, own.has_store) for own in started] == wanted


@pytest.mark.case("22", "the nodes waited for each other, and named no value")
@pytest.mark.parametrize(
    ("changed", "backend", "control", "name", "value"),
    [
        ({}, "default", "rails", FLAG, "default"),
        ({}, "r2ccl", "direct", "control (R2CCL_CONTROL)", "direct"),
        ({"data_parallel_size": 3, "data_parallel_size_local": 2}, "default", "rails", FLAG, ""),
        ({}, "r2ccl", "rails", "", ""),
        ({"data_parallel_rank": 1}, "default", "rails", "", ""),
        ({"nnodes": 2, "node_rank": 0}, "default", "rails", "", ""),
    ],
)
@pytest.mark.parametrize("command_line", [False, True])
def test_a_node_0_without_a_relay_answers_nodes_with_one(
    started: list[ComparedNode],
    monkeypatch: pytest.MonkeyPatch,
    changed: dict[str, Any],
    backend: str,
    control: str,
    name: str,
    value: str,
    command_line: bool,
) -> None:
    heard: list[Any] = []
    ended: list[str] = []
    monkeypatch.setattr(handshake, "hear", lambda *functions: heard.append(functions))
    monkeypatch.setattr(node_values, "_end", ended.append)
    monkeypatch.setattr(flag, "of_command_line", command_line)
    monkeypatch.setattr(socket, "gethostname", lambda: "host-0")
    monkeypatch.setenv(flag.VARIABLE, backend)
    monkeypatch.setenv("R2CCL_CONTROL", control)
    compare_once(**REPLICAS | changed)
    assert len(heard) == bool(name)
    for differs, end in heard:
        text = differs(handshake.Told(1, 2, "host-1", R2CCL))
        assert text.startswith(f"{name} is '{value or backend}' on node 0 (host host-0) and ")
        end(text)
        assert ended == [text] * command_line


def test_a_relay_that_meets_elsewhere_finds_a_node_0_without_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Unlike a node without a relay, which ends nothing."""
    asked: list[ComparedNode] = []
    monkeypatch.setattr(handshake, "ask", lambda own: asked.append(own) or "they differ")
    with socket.create_server(("127.0.0.1", 0)) as engine:
        own = replace(node(1, R2CCL, engine.getsockname()[1]), has_store=False)
        related = Told(own)
        connection, _ = engine.accept()
        with connection:
            connection.sendall(b"\xff\0\0\0\0\0\0\0\x01\x7f")
            assert related.ended() == "they differ"
    assert asked == [own]


def test_a_program_of_its_own_compares_nothing(
    started: list[ComparedNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flag, "of_command_line", False)
    compare_once()
    assert started == []
