"""The sidecar's stream of events over real sockets: with clients that read, and that do not."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from pairs import Pair
from timely import timely

from r2serve.observe.sidecar import app, events, streams
from r2serve.observe.sidecar.server import server_of
from r2serve.observe.watch import Watch

pytestmark = pytest.mark.slow

# Number of events: a journal's ring full, so that memory kept for a client is visible.
MANY = 8000
UNREAD_CLIENTS = 30


class Server:
    """A sidecar in a thread of this process."""

    def __init__(
        self,
        watch: Watch,
        *,
        token: str | None = None,
        listening: socket.socket | None = None,
        **tls: Path,
    ) -> None:
        self.app = app.make_app(watch, token=token)
        self.state = self.app.state.sidecar
        self.socket = listening or socket.create_server(("127.0.0.1", 0), backlog=128)
        # A larger send buffer in the kernel would hold all events for a client that does not read.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
        # A unix socket has a path in place of an address.
        self.port = 0 if listening else int(self.socket.getsockname()[1])
        self._server = server_of(self.app, **tls)
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._server.serve(sockets=[self.socket]))
        )
        self._thread.start()

    @property
    def connections(self) -> int:
        return len(self._server.server_state.connections)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()


@pytest.fixture
def server(pair: Pair) -> Iterator[Server]:
    made = Server(Watch(pair.folder))
    until(lambda: bool(made.state.watch.events))
    yield made
    made.close()


def until(done: Callable[[], bool], what: str = "the expected state of the sidecar") -> None:
    timely(done, what, within_s=120, every_s=0.005)


@contextlib.contextmanager
def stream(server: Server, query: str = "", *headers: str) -> Iterator[socket.socket]:
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(120)
        client.connect(("127.0.0.1", server.port))
        request = [f"GET /v1/events/stream{query} HTTP/1.1", "Host: localhost", *headers, "", ""]
        client.sendall("\r\n".join(request).encode())
        try:
            yield client
        finally:
            # closes the stream even while a line reader is still open
            client.shutdown(socket.SHUT_RDWR)


def events_of(client: socket.socket) -> Iterator[dict[str, Any]]:
    with client.makefile("r", encoding="utf-8", newline="") as lines:
        for line in lines:
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))


def test_a_stream_sends_new_events_within_seconds(pair: Pair, server: Server) -> None:
    with stream(server) as client:
        until(lambda: len(server.state.streams) == 1)
        pair.engine.inject(1, "carrier_loss")
        struck_s = time.monotonic()
        # Events before it: for example of a host short of CPU.
        assert any(event["text"] == "carrier_loss" for event in events_of(client))
        took_s = time.monotonic() - struck_s
        timely(lambda: took_s < 5, f"the event came after {took_s:.1f} s", within_s=0)
    until(lambda: len(server.state.streams) == 0)


@pytest.mark.parametrize("way", ["query", "header"])
def test_a_stream_resumes_after_the_last_event(pair: Pair, server: Server, way: str) -> None:
    pair.cut_and_heal(1)
    seen = server.state.watch.events
    until(lambda: "heal" in [told.event.text for told in seen])
    until(lambda: "PROBATION->UP" in [told.event.text for told in list(seen)[-3:]])
    everything = list(seen)
    last = everything[-3].id
    query, headers = (f"?after={last}", ()) if way == "query" else ("", (f"Last-Event-ID: {last}",))
    with stream(server, query, *headers) as client:
        events = events_of(client)
        assert [next(events)["id"] for _ in range(2)] == [told.id for told in everything[-2:]]


@pytest.mark.timeout(400)
def test_clients_that_do_not_read_use_no_memory_and_are_disconnected(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "SEND_S", 5)
    for _ in range(MANY):
        pair.engine.inject(0, "heal")
    server = Server(Watch(pair.folder))
    try:
        until(lambda: len(server.state.watch.events) > MANY / 2)
        before = psutil.Process().memory_info().rss
        with contextlib.ExitStack() as unread:
            for _ in range(UNREAD_CLIENTS):
                unread.enter_context(stream(server, "?after=0"))
            until(lambda: len(server.state.streams) == UNREAD_CLIENTS)
            held = psutil.Process().memory_info().rss - before
            size = sum(len(told.event.text) + 250 for told in server.state.watch.events)
            assert held < UNREAD_CLIENTS * size / 4
            until(lambda: len(server.state.streams) == 0)
            with stream(server, "?after=0") as reader:  # other clients are still served
                assert next(events_of(reader))["id"] == server.state.watch.events[0].id
    finally:
        server.close()


def test_a_client_cannot_keep_others_from_a_stream(
    pair: Pair, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new stream ends the oldest: the streams of one client cause no 503 for another."""
    monkeypatch.setattr(streams, "MAX_STREAMS", 2)
    with stream(server) as oldest, stream(server):
        until(lambda: len(server.state.streams) == 2)
        with stream(server) as newest:
            assert newest.recv(12) == b"HTTP/1.1 200"
            with oldest.makefile("rb") as rest:
                assert b"0\r\n\r\n" in rest.read()  # the whole answer has ended
            assert len(server.state.streams) == 2
            pair.engine.inject(1, "carrier_loss")
            assert any(event["text"] == "carrier_loss" for event in events_of(newest))
    until(lambda: len(server.state.streams) == 0)


def test_the_oldest_stream_of_the_busiest_address_makes_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams, "MAX_STREAMS", 3)
    opened = streams.Streams()
    alone = opened.add("10.0.0.1")
    many = [opened.add("10.0.0.2") for _ in range(3)]
    assert [each.over for each in (alone, *many)] == [False, True, False, False]
    opened.remove(many[0])
    assert len(opened) == 3
    opened.remove(alone)
    assert len(opened) == 2
