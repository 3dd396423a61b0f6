"""Polls of the sidecar after a failure: an error in log and page, and further tries."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from pairs import Pair
from timely import timely

from r2serve.observe import health
from r2serve.observe.requests import Requests
from r2serve.observe.sidecar import app as sidecar
from r2serve.observe.sidecar import polls
from r2serve.observe.watch import Watch

CLOSED = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polls, "AGAIN_S", 0.01)


@pytest.mark.case("24", "the task that asks the peers ended without a word: not asked yet")
def test_a_poll_of_peers_that_fails_is_shown_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made: type[httpx.AsyncClient] | None = None
    whole = httpx.AsyncClient

    def client(**options: Any) -> httpx.AsyncClient:
        if made is None:  # as httpx does under ALL_PROXY=socks5://… without its extra
            raise ImportError("Using SOCKS proxy, but the 'socksio' package is not installed.")
        return made(**options)

    monkeypatch.setattr(httpx, "AsyncClient", client)
    app = sidecar.make_app(Watch(tmp_path), peers=[CLOSED])
    with TestClient(app, base_url="http://localhost") as asking:

        def error() -> str:
            (_, member) = asking.get("/v1/cluster").json()["members"]
            assert not member["answers"]
            return str(member["error"])

        shown = "sidecars of other nodes: ImportError: Using SOCKS proxy, but the 'socksio'"
        timely(lambda: error().startswith(shown), "the failure is shown")
        assert 'r2serve_peer_up{peer="http://127.0.0.1:9"} 0.0' in asking.get("/metrics").text
        made = whole
        timely(lambda: error().startswith("ConnectError"), "the peer is asked again")
    told = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert len(told) == 1, "one line for one reason"
    assert "'socksio' package is not installed.; tries again every" in told[0].getMessage()


def test_a_sidecar_that_cannot_read_is_not_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watch = Watch(tmp_path)
    with TestClient(sidecar.make_app(watch), base_url="http://localhost") as asking:
        assert asking.get("/readyz").json()["status"] == "no-engine"
        look = watch.look

        def fail() -> list[Any]:
            raise RuntimeError("no memory")

        monkeypatch.setattr(watch, "look", fail)

        def found() -> Any:
            return asking.get("/readyz").json()

        timely(lambda: found()["status"] == "failing", "the failure is shown")
        assert found()["reasons"] == ["journals: RuntimeError: no memory"]
        assert asking.get("/readyz").status_code == 503
        assert "r2serve_ready 0.0" in asking.get("/metrics").text
        monkeypatch.setattr(watch, "look", look)
        timely(lambda: found()["status"] == "no-engine", "the journals are read again")
    assert [one.levelname for one in caplog.records if one.name == "r2serve.sidecar"] == ["ERROR"]


@pytest.mark.parametrize("beside", [False, True], ids=["the journals", "the request logs"])
def test_a_sidecar_starts_although_its_first_look_fails(
    pair: Pair, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubernetes would start the whole group again with a sidecar that ends."""

    def fail(_: object) -> list[Any]:
        raise RuntimeError("no memory")

    healthy = Watch(pair.folder)
    timely(
        lambda: healthy.look() is not None and health.examine(healthy).ready, "the node is ready"
    )
    monkeypatch.setattr(Requests if beside else Watch, "look", fail)
    with TestClient(sidecar.make_app(Watch(pair.folder)), base_url="http://localhost") as asking:
        found = asking.get("/readyz")
        assert found.status_code == (200 if beside else 503)
        if not beside:
            assert found.json()["reasons"] == ["journals: RuntimeError: no memory"]
        monkeypatch.undo()
        timely(lambda: asking.get("/readyz").status_code == 200, "the journals are read")


def test_a_failure_beside_the_journals_leaves_the_node_ready(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    app = sidecar.make_app(Watch(pair.folder))
    with TestClient(app, base_url="http://localhost") as asking:
        timely(lambda: asking.get("/readyz").status_code == 200, "the node is ready", within_s=60)

        def fail() -> list[Any]:
            raise RuntimeError("a request log makes no sense")

        monkeypatch.setattr(app.state.sidecar.requests, "look", fail)
        timely(lambda: "a request log makes no sense" in caplog.text, "the failure is told")
        assert asking.get("/readyz").status_code == 200


def test_a_poll_that_returns_is_an_error_too(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[str] = []

    async def watched() -> None:
        async def poll() -> None:
            """Returns at once."""

        task = asyncio.create_task(polls.keep_polling("a poll", poll, heard.append))
        while len(heard) < 3:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(watched())
    assert set(heard) == {"a poll: the poll has ended"}
    assert len(caplog.records) == 1
