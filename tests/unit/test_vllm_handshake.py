"""Nodes with a relay at vLLM's handshake socket of a node 0 without one."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

zmq = pytest.importorskip("zmq")

from r2serve.agreement import difference, node_place, relays_differ  # noqa: E402
from r2serve.engines import flag  # noqa: E402
from r2serve.engines.node_store import ComparedNode  # noqa: E402
from r2serve.engines.vllm import handshake, node_values  # noqa: E402
from r2serve.engines.vllm.handshake import SENDER, Told  # noqa: E402
from r2serve.errors import ConfigError  # noqa: E402

LONG_S = 60.0
LOOPBACK = "127.0.0.1"
FLAG = f"--distributed-backend ({flag.VARIABLE})"
CONTROL = "control (R2CCL_CONTROL)"
DEFAULT, R2CCL = {FLAG: "default"}, {FLAG: "r2ccl", CONTROL: "rails"}
ENGINE = (1).to_bytes(2, "little")


def sentence(name: str, first: str, second: str, node: int = 1) -> str:
    return (
        f"{name} is '{first}' on node 0 (host host-0) and '{second}' on node {node} (host "
        f"host-{node}): must be the same on every node"
    )


def engine_startup(handshake_socket: Any, engines: list[bytes], *, silent_ms: int = -1) -> str:
    """As vLLM's: polls, ends after a message of a stranger, and answers each engine."""
    poller = zmq.Poller()
    poller.register(handshake_socket, zmq.POLLIN)
    pending = list(engines)
    while pending:
        events = poller.poll(silent_ms)
        if not events:
            return "nothing"
        assert events[0][0] == handshake_socket
        identity, message = handshake_socket.recv_multipart()
        if identity not in engines:
            number = int.from_bytes(identity, "little")
            raise RuntimeError(f"Message from engine with unexpected data parallel rank: {number}")
        assert message == b"HELLO"
        handshake_socket.send_multipart((identity, b"init"), copy=False)
        pending.remove(identity)
    return "up"


@pytest.fixture
def utils(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of vLLM that waits for engines."""
    module: Any = ModuleType(handshake.MODULE)
    module.wait_for_engine_startup = engine_startup
    monkeypatch.setitem(sys.modules, handshake.MODULE, module)
    return module


class Node0:
    """The start of a node 0, in a thread."""

    def __init__(self, utils: Any, values: dict[str, str] | None, engines: list[bytes]) -> None:
        """``values``: None for a node without r2serve."""
        self.ended_by: list[str] = []
        self.error: BaseException | None = None
        self.result = ""
        if values is not None:
            here = node_place(0, "host-0")

            def differs(told: Told) -> str:
                there = node_place(told.node, told.host)
                return difference(values, here, told.values, there) or relays_differ(here, there)

            handshake.hear(differs, self.ended_by.append)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self.port = self._socket.bind_to_random_port(f"tcp://{LOOPBACK}")
        self._thread = threading.Thread(target=self._run, args=(utils, engines), daemon=True)
        self._thread.start()

    def _run(self, utils: Any, engines: list[bytes]) -> None:
        try:
            self.result = utils.wait_for_engine_startup(self._socket, engines)
        except (ConfigError, RuntimeError) as error:
            self.error = error
        finally:
            self._context.destroy(linger=0)  # as vLLM

    def done(self) -> Node0:
        self._thread.join(LONG_S)
        assert not self._thread.is_alive()
        return self


class Asking(threading.Thread):
    """A node whose relay has met the handshake socket."""

    def __init__(self, port: int, values: dict[str, str], number: int = 1, nodes: int = 2) -> None:
        super().__init__(daemon=True)
        host = f"host-{number}"
        self._own = ComparedNode(
            number, nodes, LOOPBACK, port, host, values, has_relay=True, has_store=False
        )
        self._text = ""
        self.start()

    def run(self) -> None:
        self._text = node_values.compare(self._own)

    def told(self) -> str:
        self.join(LONG_S)
        assert not self.is_alive()
        return self._text


class Dealer:
    """A sender of messages to the handshake socket."""

    def __init__(self, port: int, identity: bytes | None) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        if identity is not None:
            self.socket.setsockopt(zmq.IDENTITY, identity)
        self.socket.connect(f"tcp://{LOOPBACK}:{port}")

    def answer(self) -> bytes:
        assert self.socket.poll(LONG_S * 1000)
        return bytes(self.socket.recv())

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def dealers() -> Iterator[list[Dealer]]:
    made: list[Dealer] = []
    yield made
    for each in made:
        each.close()


@pytest.mark.case("22", "the nodes waited for each other, and named no value")
@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((DEFAULT, R2CCL), sentence(FLAG, "default", "r2ccl")),
        ((R2CCL | {CONTROL: "direct"}, R2CCL), sentence(CONTROL, "direct", "rails")),
        (
            (R2CCL, R2CCL),
            "node 0 (host host-0) runs without a relay and node 1 (host host-1) with one, although "
            "their values are equal: must be the same on every node; the log of node 0 (host "
            "host-0) says why its connections stay direct",
        ),
    ],
)
def test_both_nodes_end_with_one_sentence(
    utils: Any, values: tuple[dict[str, str], dict[str, str]], text: str
) -> None:
    first = Node0(utils, values[0], [ENGINE])
    assert Asking(first.port, values[1]).told() == text
    assert isinstance(first.done().error, ConfigError)
    assert [str(first.error)] == first.ended_by == [text]


def test_node_0_ends_after_every_node_has_heard(
    utils: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "LINGER_S", LONG_S)
    first = Node0(utils, DEFAULT, [ENGINE])
    assert Asking(first.port, R2CCL, 1, 3).told() == sentence(FLAG, "default", "r2ccl", 1)
    first._thread.join(0.2)
    assert not first.ended_by, "node 2 has not heard"
    assert Asking(first.port, R2CCL, 2, 3).told() == sentence(FLAG, "default", "r2ccl", 2)
    assert first.done().ended_by == [sentence(FLAG, "default", "r2ccl", 1)]


def test_node_0_waits_for_a_silent_node_for_a_limited_time(
    utils: Any, monkeypatch: pytest.MonkeyPatch, dealers: list[Dealer]
) -> None:
    monkeypatch.setattr(handshake, "LINGER_S", 0.3)
    first = Node0(utils, DEFAULT, [ENGINE])
    dealers.append(Dealer(first.port, SENDER + b"1"))
    body = {"node": 1, "nodes": 2, "host": "host-1", "values": R2CCL}
    dealers[0].socket.send(json.dumps(body).encode())
    text = sentence(FLAG, "default", "r2ccl")
    assert json.loads(dealers[0].answer()) == {"refused": text}
    assert first.done().ended_by == [text]


def test_engines_of_equal_nodes_start_as_before(utils: Any, dealers: list[Dealer]) -> None:
    engines = [number.to_bytes(2, "little") for number in range(3)]
    first = Node0(utils, DEFAULT, engines)
    dealers += [Dealer(first.port, engine) for engine in engines]
    for dealer in dealers:
        dealer.socket.send(b"HELLO")
    assert [dealer.answer() for dealer in dealers] == [b"init"] * 3
    assert (first.done().result, first.error, first.ended_by) == ("up", None, [])


TOLD = {"node": 1, "nodes": 2, "host": "host-1", "values": {}}


@pytest.mark.parametrize(
    ("identity", "message"),
    [
        (None, b"HELLO"),
        (b"another", json.dumps(TOLD).encode()),
        (SENDER + b"1", b""),
        (SENDER + b"1", b"\xff\xfe"),
        (SENDER + b"1", b"[" * 60000),
        (SENDER + b"1", b"null"),
        (SENDER + b"1", b'{"node": 1}'),
        (SENDER + b"1", json.dumps(TOLD | {"values": ["r2ccl"]}).encode()),
        (SENDER + b"1", json.dumps(TOLD | {"node": 0}).encode()),
        (SENDER + b"1", json.dumps(TOLD | {"nodes": 10**6}).encode()),
        (SENDER + b"1", json.dumps(TOLD | {"nodes": float("inf")}).encode()),
        (SENDER + b"1", json.dumps(TOLD | {"host": "h" * handshake.LONGEST}).encode()),
    ],
)
def test_other_messages_reach_vllm(
    utils: Any, dealers: list[Dealer], identity: bytes | None, message: bytes
) -> None:
    first = Node0(utils, DEFAULT, [ENGINE])
    dealers.append(Dealer(first.port, identity))
    dealers[0].socket.send(message)
    assert isinstance(first.done().error, RuntimeError)
    assert "unexpected data parallel rank" in str(first.error)
    assert first.ended_by == []


def test_a_host_begins_no_line_of_the_log() -> None:
    told = handshake.read([SENDER, json.dumps(TOLD | {"host": "a\nERROR b"}).encode()])
    assert told is not None
    assert told.host == "a\\nERROR b"


def test_a_node_0_without_r2serve_ends_and_says_no_values(
    utils: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "ANSWER_S", 1.0)
    first = Node0(utils, None, [ENGINE])
    assert Asking(first.port, R2CCL).told() == (
        f"node 0 (at {LOOPBACK}, port {first.port}) has told no values, and it runs without a "
        "relay: --distributed-backend and R2CCL_CONTROL must be the same on every node"
    )
    assert "unexpected data parallel rank" in str(first.done().error)


@pytest.mark.parametrize("answer", [None, b"", b"[1]", b'{"refused"'])
def test_a_node_0_that_does_not_answer_is_left(
    monkeypatch: pytest.MonkeyPatch, answer: bytes | None
) -> None:
    monkeypatch.setattr(handshake, "ANSWER_S", 0.5 if answer is None else LONG_S)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as silent:
        silent.setsockopt(zmq.LINGER, 0)
        port = silent.bind_to_random_port(f"tcp://{LOOPBACK}")
        asking = Asking(port, R2CCL)
        if answer is not None:
            assert silent.poll(LONG_S * 1000)
            silent.send_multipart((silent.recv_multipart()[0], answer))
        assert "has told no values, and it runs without a relay" in asking.told()


@pytest.mark.parametrize("master", [LOOPBACK, "no.such.invalid", "a..b"])
def test_a_node_0_that_is_gone_is_left(monkeypatch: pytest.MonkeyPatch, master: str) -> None:
    monkeypatch.setattr(handshake, "ANSWER_S", 0.2)
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        port = taken.getsockname()[1]
        own = ComparedNode(1, 2, master, port, "host-1", R2CCL, has_relay=True, has_store=False)
        assert "has told no values" in handshake.ask(own)


def test_a_later_engine_of_the_process_has_other_values(utils: Any) -> None:
    for value in ("before", "after"):
        handshake.hear(lambda _, value=value: value, lambda _: None)  # type: ignore[misc]
    assert utils.wait_for_engine_startup.r2serve_real is engine_startup


def test_a_release_without_the_function_is_told_once(
    utils: Any, caplog: pytest.LogCaptureFixture
) -> None:
    del utils.wait_for_engine_startup
    handshake.hear(lambda _: "", lambda _: None)
    assert "does not learn the values of this node" in caplog.text
