"""The meeting of a job's relays: addresses, keys, node numbers, prefixes."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from ports import free_port
from torch.distributed import TCPStore

from r2serve.config import Config
from r2serve.errors import ConfigError, R2cclError, StartupTimeoutError
from r2serve.ports.info import PortInfo, ProcessInfo, read_key
from r2serve.relay import meeting, teller
from r2serve.relay.lines import STORE_GREETING, Line, Refused, own_release
from r2serve.relay.meeting import Host, Outcome, join

pytestmark = pytest.mark.slow

LONG_S = 60.0
"""Wait for what must happen."""


def info(process: int) -> ProcessInfo:
    return ProcessInfo(
        process=process,
        public_key=bytes([process]) * 32,
        node=f"node-{process}",
        host=f"host-{process}",
        ports=(PortInfo("eth1", "10.0.0.1", 4000 + process),),
        control=None,
        unix_name="",
    )


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Node 0 does not wait for nodes that never hear of a failure."""
    monkeypatch.setattr(meeting, "GRACE_S", 0.1)
    monkeypatch.setattr(meeting, "LINGER_S", 0.1)


def all_free(candidates: Sequence[str]) -> list[str]:
    return list(candidates)


Make = Callable[..., Host]


@pytest.fixture
def host() -> Iterator[Make]:
    with ExitStack() as stack:

        def make(nodes: int, key: bytes = b"", **options: Any) -> Host:
            made = Host(["127.0.0.1"], 0, nodes, info(1), key, **{"free": all_free} | options)
            stack.callback(made.close)
            return made

        yield make


class Joining(threading.Thread):
    """A relay that joins in a thread."""

    def __init__(self, port: int, node: int, key: bytes = b"", **options: object) -> None:
        super().__init__(daemon=True)
        self.outcome: Outcome | None = None
        self.error: Exception | None = None
        self._arguments = {"addresses": ["127.0.0.1"], "free": all_free, "timeout_s": LONG_S}
        self._arguments |= {"port": port, "node": node, "own": info(node + 1), "key": key}
        self._arguments |= options
        self.start()

    def run(self) -> None:
        try:
            self.outcome = join(**self._arguments)  # type: ignore[arg-type]
        except (R2cclError, ConfigError) as error:
            self.error = error

    def done(self) -> Joining:
        self.join(LONG_S)
        assert not self.is_alive()
        return self


@pytest.mark.parametrize("key", [b"", b"k" * 32])
def test_all_relays_get_the_same_outcome(host: Make, key: bytes) -> None:
    own = host(3, key)
    others = [Joining(own.port, node, key) for node in (2, 1)]
    outcome = own.gather(LONG_S)
    assert {node: each.process for node, each in outcome.infos.items()} == {0: 1, 1: 2, 2: 3}
    assert outcome.prefix.startswith("127.")
    assert outcome.prefix.endswith(".0")
    assert not outcome.prefix.startswith("127.0.")
    for other in others:
        assert other.done().outcome == outcome, other.error


def test_the_prefix_is_free_on_every_node(host: Make) -> None:
    def only(kept: Callable[[int], bool]) -> Callable[[Sequence[str]], list[str]]:
        return lambda candidates: [each for i, each in enumerate(candidates) if kept(i)]

    own = host(2, free=only(lambda i: i % 2 == 0))
    other = Joining(own.port, 1, free=only(lambda i: i % 3 == 2))
    outcome = own.gather(LONG_S)
    assert outcome.prefix == own._candidates[1 * 3 - 1]
    assert other.done().outcome == outcome


def test_no_free_prefix_ends_the_start_on_every_node(host: Make) -> None:
    own = host(2)
    other = Joining(own.port, 1, free=lambda _: [])
    with pytest.raises(ConfigError, match="no address prefix"):
        own.gather(LONG_S)
    assert "no address prefix" in str(other.done().error)


def test_an_address_that_does_not_answer_is_skipped(
    host: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first address is a listener that is silent, as behind a lost NIC."""
    monkeypatch.setattr(meeting, "SILENCE_S", 0.2)
    own = host(2)
    with socket.create_server(("127.0.0.9", own.port)):
        other = Joining(own.port, 1, addresses=["127.0.0.8", "127.0.0.9", "127.0.0.1"])
        outcome = own.gather(LONG_S)
        assert other.done().outcome == outcome, other.error


def test_a_relay_that_lost_its_connection_still_gets_the_outcome(host: Make) -> None:
    own = host(2)
    first = Joining(own.port, 1).done
    outcome = own.gather(LONG_S)
    assert first().outcome == outcome
    assert Joining(own.port, 1).done().outcome == outcome


@pytest.mark.parametrize(("of_host", "of_guest"), [(b"a" * 32, b"b" * 32), (b"a" * 32, b"")])
def test_another_key_is_refused(host: Make, of_host: bytes, of_guest: bytes) -> None:
    own = host(2, of_host)
    error = Joining(own.port, 1, of_guest).done().error
    assert isinstance(error, Refused)
    assert "R2CCL_SECRET_FILE" in str(error)
    with pytest.raises(StartupTimeoutError, match=r"\[1\]"):
        own.gather(0.1)


def test_a_node_number_is_used_once(host: Make) -> None:
    own = host(3)
    waiting = Joining(own.port, 1)
    assert own._changed is not None
    with own._changed:
        assert own._changed.wait_for(lambda: own._joined, LONG_S)
    error = Joining(own.port, 1, own=info(9)).done().error
    assert "another relay is node 1 already (host host-2)" in str(error)
    error = Joining(own.port, 3).done().error
    assert "nodes 0 to 2" in str(error)
    assert waiting.is_alive()
    Joining(own.port, 2)
    assert own.gather(LONG_S) == waiting.done().outcome


def test_a_relay_that_restarts_during_the_meeting_takes_its_place(host: Make) -> None:
    own = host(3)
    first = Joining(own.port, 1)
    with own._changed:
        assert own._changed.wait_for(lambda: own._joined, LONG_S)
    again = Joining(own.port, 1, own=replace(info(9), node=info(2).node))  # on the same host
    assert "a later connection is node 1" in str(first.done().error)
    other = Joining(own.port, 2)
    outcome = own.gather(LONG_S)
    assert again.done().outcome == other.done().outcome == outcome
    assert {node: each.process for node, each in outcome.infos.items()} == {0: 1, 1: 9, 2: 3}
    error = Joining(own.port, 1, own=replace(info(8), node=info(2).node)).done().error
    assert "another relay is node 1 already" in str(error)  # the job has started with process 9


def test_a_relay_elsewhere_takes_the_place_of_one_that_has_ended(
    host: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "HEARTBEAT_S", 0.02)
    own = host(3)
    with socket.create_connection(("127.0.0.1", own.port)) as connection:
        line = Line(connection, b"")
        line.exchange_challenges()
        offer = line.receive()
        hello = {"release": own_release(), "node": 1, "info": info(2).to_wire()}
        line.send(hello | {"free": offer["candidates"]})
        assert line.receive() == {"waits": True}
    with own._changed:
        assert own._changed.wait_for(lambda: 1 not in own._connected, LONG_S)
    elsewhere = Joining(own.port, 1, own=info(9))
    with own._changed:  # the start waits for node 2, so this relay is in time
        assert own._changed.wait_for(lambda: own._joined[1][0].process == 9, LONG_S)
    other = Joining(own.port, 2)
    outcome = own.gather(LONG_S)
    assert elsewhere.done().outcome == other.done().outcome == outcome
    assert outcome.infos[1].process == 9


def test_a_node_joins_after_the_start(host: Make) -> None:
    late: queue.Queue[tuple[int, ProcessInfo]] = queue.Queue()
    own = host(2, on_late=lambda node, info: late.put((node, info)))
    early = Joining(own.port, 1)
    outcome = own.gather(LONG_S)
    assert early.done().outcome == outcome
    joined = Joining(own.port, 2).done()
    assert joined.error is None
    assert joined.outcome is not None
    assert joined.outcome.prefix == outcome.prefix
    assert sorted(joined.outcome.infos) == [0, 1, 2]
    assert late.get(timeout=LONG_S) == (2, info(3))
    assert late.empty()
    error = Joining(own.port, 3, free=lambda _: []).done().error
    assert f"prefix {outcome.prefix} of the job is not free" in str(error)


def test_strangers_do_not_end_the_meeting(host: Make) -> None:
    own = host(2)
    for text in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\n{}\n",
        b"x" * 100,
        b'\n{"body": "[]", "mac": ""}\n',
    ):
        with socket.create_connection(("127.0.0.1", own.port)) as stranger:
            stranger.sendall(text)
            stranger.settimeout(LONG_S)
            while stranger.recv(4096):
                pass
    other = Joining(own.port, 1)
    assert own.gather(LONG_S) == other.done().outcome


def test_two_nodes_of_one_host_are_refused(host: Make) -> None:
    own = host(3)
    waiting = Joining(own.port, 1)
    with own._changed:
        assert own._changed.wait_for(lambda: own._joined, LONG_S)
    for node, neighbour in ((0, info(1)), (1, info(2))):
        error = Joining(own.port, 2, own=replace(info(3), node=neighbour.node)).done().error
        assert f"nodes {node} and 2 run on one host (host-3)" in str(error)
        assert "R2CCL_CONTROL=direct" in str(error)
    Joining(own.port, 2)
    assert own.gather(LONG_S) == waiting.done().outcome


def store_client(port: int) -> threading.Thread:
    """Starts a client of torch's store, as a node without a relay does."""

    def connect() -> None:
        with suppress(RuntimeError):
            TCPStore("127.0.0.1", port, 2, False, timedelta(seconds=1))

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    return thread


def test_a_node_without_a_relay_ends_the_start(host: Make) -> None:
    own = host(3)
    waiting = Joining(own.port, 1)
    client = store_client(own.port)
    text = "the node at 127.0.0.1: it runs without a relay: .*R2CCL_CONTROL must be the same"
    with pytest.raises(ConfigError, match=text):
        own.gather(LONG_S)
    assert "it runs without a relay" in str(waiting.done().error)
    client.join(LONG_S)


@pytest.mark.parametrize(
    "greeting",
    [
        b"\xff\0\0\0\0\0\0\0\x03\x7f",  # of ZMQ, with an identity of two bytes
        STORE_GREETING + b"\x0d\x0a\0\0\0",  # a line feed is in the next message
    ],
)
def test_every_client_of_an_engine_ends_the_start(host: Make, greeting: bytes) -> None:
    own = host(2)
    with socket.create_connection(("127.0.0.1", own.port)) as client:
        client.sendall(greeting)
        with pytest.raises(ConfigError, match="it runs without a relay"):
            own.gather(LONG_S)


def test_a_stranger_ends_no_start_of_a_job_with_a_key(host: Make) -> None:
    own = host(2, b"k" * 32)
    store_client(own.port).join(LONG_S)
    other = Joining(own.port, 1, b"k" * 32)
    assert own.gather(LONG_S) == other.done().outcome


R2CCL = {"--distributed-backend (FLAG)": "r2ccl", "checksum (R2CCL_CHECKSUM)": "off"}


@pytest.mark.case("22", "the nodes waited for each other, and named no value")
def test_another_value_ends_the_start_on_every_node_with_one_sentence(
    host: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "LINGER_S", LONG_S)
    own = host(3, values=R2CCL)
    equal = Joining(own.port, 2, values=R2CCL)
    with own._changed:
        assert own._changed.wait_for(lambda: own._joined, LONG_S)
    other = Joining(own.port, 1, values=R2CCL | {"checksum (R2CCL_CHECKSUM)": "on"})
    text = (
        "checksum (R2CCL_CHECKSUM) is 'off' on node 0 (host host-1) and 'on' on node 1 (host "
        "host-2): must be the same on every node"
    )
    with pytest.raises(ConfigError) as caught:
        own.gather(LONG_S)
    assert str(caught.value) == str(other.done().error) == text
    assert str(equal.done().error).endswith(text)


@pytest.mark.case("22", "the nodes waited for each other, and named no value")
@pytest.mark.parametrize("store_first", [False, True])
def test_a_node_without_a_relay_tells_its_values(
    host: Make, monkeypatch: pytest.MonkeyPatch, store_first: bool
) -> None:
    """Its workers may connect as clients of torch's store before its first process does."""
    monkeypatch.setattr(meeting, "GRACE_S", LONG_S)
    monkeypatch.setattr(meeting, "LINGER_S", LONG_S)
    own = host(2, values=R2CCL)
    client = store_client(own.port) if store_first else None
    with socket.create_connection(("127.0.0.1", own.port)) as connection:
        assert teller.greets(connection)
        told = teller.tell(connection, 1, "b", {"--distributed-backend (FLAG)": "default"})
    assert told == (
        "--distributed-backend (FLAG) is 'r2ccl' on node 0 (host host-1) and 'default' on node 1 "
        "(host b): must be the same on every node"
    )
    with pytest.raises(ConfigError) as caught:
        own.gather(LONG_S)
    assert str(caught.value) == told
    if client is not None:
        client.join(LONG_S)


@pytest.mark.case("22", "the nodes waited for each other, and named no value")
def test_equal_values_without_a_relay_end_the_start_with_one_sentence(
    host: Make, monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    monkeypatch.setattr(meeting, "LINGER_S", LONG_S)
    own = host(2, values=R2CCL)
    with socket.create_connection(("127.0.0.1", own.port)) as connection:
        told = teller.tell(connection, 1, "b", R2CCL)
    assert told.startswith(
        "node 1 (host b) runs without a relay and node 0 (host host-1) with one, although their "
        "values are equal: must be the same on every node; "
    )
    with pytest.raises(ConfigError) as caught:
        own.gather(LONG_S)
    assert str(caught.value) == told
    assert not [line for line in said() if "malformed" in line or "refused" in line]


def test_node_0_also_listens_at_further_addresses_of_its_host() -> None:
    port = free_port()
    nowhere = "198.51.100.7"  # of no host (RFC 5737)
    own = Host(["127.0.0.1"], port, 2, info(1), free=all_free, also=[nowhere, "127.0.0.8"])
    try:
        other = Joining(port, 1, addresses=["127.0.0.8"])
        assert own.gather(LONG_S) == other.done().outcome
    finally:
        own.close()


def test_a_late_node_with_another_value_ends_nothing_but_itself(host: Make) -> None:
    own = host(2, values=R2CCL, on_late=lambda *_: None)
    first = Joining(own.port, 1, values=R2CCL)
    outcome = own.gather(LONG_S)
    assert first.done().outcome == outcome
    late = Joining(own.port, 2, values=R2CCL | {"checksum (R2CCL_CHECKSUM)": "on"}).done()
    assert "is 'off' on node 0 (host host-1) and 'on' on node 2" in str(late.error)
    assert Joining(own.port, 3, values=R2CCL).done().error is None


def test_torch_s_store_is_no_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teller, "GREETING_S", 0.1)
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=5), wait_for_workers=False)
    with socket.create_connection(("127.0.0.1", store.port)) as connection:
        assert not teller.greets(connection)


def test_missing_nodes_are_told(
    host: Make, monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    monkeypatch.setattr(meeting, "TELL_S", 0.05)
    own = host(3)
    waiting = Joining(own.port, 1)
    with own._changed:
        assert own._changed.wait_for(lambda: own._joined, LONG_S)
    with pytest.raises(StartupTimeoutError, match=r"relays of nodes \[2\] did not arrive"):
        own.gather(0.3)
    assert any("the relays of nodes [2] are missing for" in line for line in said())
    with pytest.raises(StartupTimeoutError):
        join(["127.0.0.1"], 1, 1, info(2), 0.5, free=all_free)
    assert any("no meeting with the relay of node 0 at port 1 so far" in line for line in said())
    assert waiting.is_alive()


def test_no_master_ends_in_an_error_with_each_address() -> None:
    with pytest.raises(StartupTimeoutError, match=r"127\.0\.0\.1: .*refused"):
        join(["127.0.0.1"], 1, 1, info(2), 0.5, free=all_free)


def test_no_own_address_is_an_error() -> None:
    with pytest.raises(ConfigError, match="R2CCL_CONTROL_MASTER"):
        Host(["192.0.2.1"], 0, 2, info(1), free=all_free)


# ---- the key ----


def test_a_key_file_belongs_to_its_owner_and_is_long(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"k" * 31 + b"\n")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="31 bytes; must be at least 32"):
        read_key(str(path))
    path.write_bytes(b"k" * 32 + b"\n")
    assert read_key(str(path)) == b"k" * 32
    assert read_key("") == b""
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="open to other users"):
        read_key(str(path))
    with pytest.raises(ConfigError, match="No such file"):
        read_key(str(tmp_path / "none"))


def test_the_options_of_the_relay_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="control_master"):
        Config(control_master="10.0.0.1,node1")
    with pytest.raises(ConfigError, match="secret_file"):
        Config(secret_file=str(tmp_path / "none"))
    assert Config(control_master="10.0.0.1,fd00::1").control_master == "10.0.0.1,fd00::1"
