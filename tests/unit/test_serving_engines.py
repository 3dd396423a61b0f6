"""Several serving engines on a host, and sidecars that tell them apart."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import uvicorn
from fastapi.testclient import TestClient
from pairs import Pair
from timely import timely

from r2serve.config import Config
from r2serve.errors import ConfigError
from r2serve.observe import health, watch
from r2serve.observe.port_owner import is_taken, owner_of
from r2serve.observe.sidecar import peers
from r2serve.observe.sidecar.app import make_app
from r2serve.observe.watch import Watch


@pytest.fixture
def two(tmp_path: Path) -> Iterator[dict[str, Pair]]:
    """Two engines with a folder in common."""
    made = {name: Pair(tmp_path, serving_engine=name) for name in ("a", "b")}
    for pair in made.values():
        for rail in (0, 1):
            pair.wait_for_state(rail, "UP")
    yield made
    for pair in made.values():
        pair.close()


def seen(folder: Path, engine: str = "") -> Watch:
    made = Watch(folder, engine=engine)
    timely(lambda: made.look() is not None and len(made.live()) >= 1, "a worker is seen")
    return made


def healthy(folder: Path, engine: str = "") -> Watch:
    made = seen(folder, engine)
    timely(lambda: made.look() is not None and health.examine(made).status == "ok", "it is healthy")
    return made


def test_a_node_wide_sidecar_answers_for_each_engine(two: dict[str, Pair]) -> None:
    folder = two["a"].folder
    with TestClient(make_app(Watch(folder)), base_url="http://localhost") as client:
        for rail in (0, 1):
            two["b"].engine.inject(rail, "carrier_loss")

        def is_told() -> bool:  # a starved machine may suspect a rail of `a` for a moment
            told = client.get("/readyz").json().get("engines")
            return bool(told == {"a": "ok", "b": "failing"})

        timely(is_told, "engine b alone has no rail left", within_s=60)
        node = client.get("/readyz")
        assert node.status_code == 503
        assert node.json()["engines"] == {"a": "ok", "b": "failing"}
        own = client.get("/readyz", params={"engine": "a"})
        assert (own.status_code, own.json()["status"], own.json()["reasons"]) == (200, "ok", [])
        unknown = client.get("/readyz", params={"engine": "c"})
        assert unknown.status_code == 404
        assert "engines here: 'a', 'b'" in unknown.json()["reasons"][0]
        text = client.get("/metrics").text
        assert 'r2serve_serving_engine_ready{serving_engine="a"} 1.0' in text
        assert 'r2serve_serving_engine_ready{serving_engine="b"} 0.0' in text
        workers = client.get("/v1/topology").json()["workers"]
        assert {worker["serving_engine"] for worker in workers} == {"a", "b"}


def test_the_sidecar_of_an_engine_shows_that_engine_alone(two: dict[str, Pair]) -> None:
    folder = two["a"].folder
    for rail in (0, 1):
        two["b"].engine.inject(rail, "carrier_loss")
    other = seen(folder, "b")
    timely(lambda: other.look() is not None and not health.examine(other).ready, "b fails")
    own = healthy(folder, "a")
    assert [worker.journal.serving_engine for worker in own.workers.values()] == ["a"]
    assert {told.worker for told in own.events} == set(own.workers)
    assert health.engines(own) == ["a"]


def test_a_second_sidecar_on_a_taken_port_says_whose_it_is(tmp_path: Path) -> None:
    app = make_app(Watch(tmp_path, engine="llama-a"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        serving = threading.Thread(target=server.run, args=([listening],))
        serving.start()
        try:
            timely(lambda: server.started, "the first sidecar runs")
            assert is_taken("0.0.0.0", port)
            said = owner_of("127.0.0.1", port)
        finally:
            server.should_exit = True
            serving.join()
    assert said.startswith("the sidecar of engine 'llama-a' (process ")
    assert said.endswith(f", journals in {tmp_path})")


class NoSidecar(BaseHTTPRequestHandler):
    """Answers every request with 404."""

    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, *_: object) -> None:
        """Writes no log."""


@pytest.mark.case("24", "the sidecars asked their peers through the proxy, or not at all")
@pytest.mark.parametrize(
    "variables",
    [
        {"ALL_PROXY": "socks5://127.0.0.1:9", "all_proxy": "socks5://127.0.0.1:9"},
        {"HTTP_PROXY": "http://127.0.0.1:9", "NO_PROXY": "10.0.0.0/8"},
    ],
)
def test_proxies_are_not_used_among_sidecars(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with ThreadingHTTPServer(("127.0.0.1", 0), NoSidecar) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        asked = peers.Peers([f"http://127.0.0.1:{server.server_port}"])

        async def ask() -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(30):
                    following = asyncio.create_task(asked.poll())
                    while asked.views()[0].error == "not asked yet" and not following.done():
                        await asyncio.sleep(0.01)
                    following.cancel()
                    await asyncio.gather(following, return_exceptions=True)

        asyncio.run(ask())
        server.shutdown()
    assert "HTTP status 404" in asked.views()[0].error


@pytest.mark.case("26", "r2serve_ready had another limit than /readyz")
@pytest.mark.parametrize("stuck_s", [2.0, 60.0])
@pytest.mark.parametrize("unheard_ms", [0, 10_000], ids=["heard", "silent"])
def test_every_answer_has_one_readiness(
    two: dict[str, Pair], stuck_s: float, unheard_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call has run for days: that alone is no fault, with any --stuck-after."""
    monkeypatch.setattr(watch, "SILENT_S", 3600.0)  # no further look sees the heartbeat
    now = healthy(two["a"].folder, "a")
    (worker,) = now.live()
    group = watch.journal.Group(
        name="tp:0",
        id=1,
        rank=0,
        ranks=2,
        call="all_reduce",
        call_began_ns=1,  # long ago
        failed_calls=0,
        stalled_calls=0,
        stalled_ns=0,
        closed=False,
        latencies={},
    )
    rails = [replace(rail, unheard_ms=unheard_ms) for rail in worker.journal.rails]
    worker.journal = replace(worker.journal, groups=[group], rails=rails)
    monkeypatch.setattr(now, "look", list)
    expected = unheard_ms < stuck_s * 1e3
    with TestClient(make_app(now, stuck_s=stuck_s), base_url="http://localhost") as client:
        probe = client.get("/readyz")
        named = client.get("/readyz", params={"engine": "a"})
        text = client.get("/metrics").text
        shown = [
            probe.json(),
            client.get("/health").json(),
            client.get("/v1/node").json()["health"],
            client.get("/v1/cluster").json()["members"][0]["node"]["health"],
        ]
    assert {probe.status_code, named.status_code} == {200 if expected else 503}
    assert f"r2serve_ready {float(expected)}" in text
    assert f'r2serve_serving_engine_ready{{serving_engine="a"}} {float(expected)}' in text
    assert {each["status"] for each in shown} == {"ok" if expected else "failing"}
    reasons = [each["reasons"] for each in shown]
    assert all(each == reasons[0] for each in reasons)
    if not expected:
        silent = "rank 0: rank 1 has sent nothing on any rail for 10 s; all_reduce of tp:0 has run "
        assert reasons[0][0].startswith(silent)


def test_a_change_between_two_looks_changes_no_answer(pair: Pair) -> None:
    now = healthy(pair.folder)
    judge = health.Judge(now)
    assert judge().ready
    (worker,) = now.live()
    rails = [replace(rail, unheard_ms=60_000) for rail in worker.journal.rails]
    worker.journal = replace(worker.journal, rails=rails)
    assert judge().ready
    judge.looked()
    assert not judge().ready
    judge.failed("journals: OSError: gone")
    assert judge() == health.Health("failing", ("journals: OSError: gone",))
    judge.looked()
    assert judge().reasons[0].startswith("rank 0: rank 1 has sent nothing")


def test_a_shortage_of_cpu_is_noted_and_changes_no_status(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_SHORT_S", 0.0)
    now = healthy(pair.folder)
    (worker,) = now.live()
    worker.take(worker.journal)
    monkeypatch.setattr(watch, "_SHORT_S", -1.0)
    at_ns, short_ns = worker._short_sample
    worker._take_shortage(at_ns + 10**9, short_ns + 3 * 10**8)
    found = health.examine(now)
    assert found.status == "ok"
    (note,) = found.notes
    assert note.startswith("rank 0: this host is short of CPU: the worker did not run for 30% of ")


@pytest.mark.parametrize("name", ["a name of two words", "x" * 16, "\u00e4" * 8])
def test_a_name_that_does_not_fit_the_journal_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"serving_engine .* a word of at most 15 bytes"):
        Config(serving_engine=name)
