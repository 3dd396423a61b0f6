"""Drills through the sidecar: authorisation and results."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from pairs import Pair
from test_sidecar import wait_for

from r2serve.observe.sidecar import app as sidecar
from r2serve.observe.sidecar.auth import TokenError, read_token
from r2serve.observe.watch import Watch

pytestmark = pytest.mark.slow

TOKEN = "0123456789abcdef"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
ORDER = {"kind": "carrier_loss", "rail": "rail1@node0", "seconds": 0.3}


@pytest.fixture
def drilled(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path, drills=True)
    for rail in (0, 1):
        made.wait_for_state(rail, "UP")
    yield made
    made.close()


def client_of(folder: Path, token: str | None = None) -> TestClient:
    app = sidecar.make_app(Watch(folder), token=token)
    return TestClient(app, base_url="http://localhost")


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    with client_of(tmp_path, TOKEN) as made:
        yield made


def has_ended(found: Any) -> bool:
    """Whether the only drill has ended; a busy worker may be missing in an answer."""
    return bool(found["drills"] and found["drills"][0]["ended"])


def test_a_client_with_the_token_can_drill(drilled: Pair, client: TestClient) -> None:
    assert client.get("/v1/drills").json() == {"enabled": True, "drills": []}
    answer = client.post("/v1/drills", json=ORDER | {"seconds": 3}, headers=BEARER)
    assert answer.status_code == 201, answer.text
    (drill,) = answer.json()["drills"]
    assert answer.json()["note"] == ""
    assert (drill["kind"], drill["rail"], drill["ended"]) == ("carrier_loss", "rail1@node0", None)
    lost = wait_for(
        client, "/v1/rails", lambda found: found["rails"][1]["state"] not in ("UP", "SUSPECT")
    )
    assert lost["rails"][1]["cause"] == "injected"
    wait_for(client, "/v1/drills", has_ended)
    events = wait_for(client, "/v1/events?kind=injected", lambda found: len(found["events"]) == 2)[
        "events"
    ]
    assert [event["text"] for event in events] == ["carrier_loss", "heal"]
    drilled.wait_for_state(1, "UP")


def test_a_deprecated_kind_is_accepted_with_a_note(drilled: Pair, client: TestClient) -> None:
    lower_case = {"Authorization": f"bearer {TOKEN}"}  # a scheme has no case: RFC 9110, 11.1
    answer = client.post("/v1/drills", json=ORDER | {"kind": "drop"}, headers=lower_case).json()
    assert [drill["kind"] for drill in answer["drills"]] == ["black_hole"]
    assert answer["note"] == "`drop` is deprecated: use `black_hole`"


def test_a_drill_can_be_ended(drilled: Pair, client: TestClient) -> None:
    long = ORDER | {"seconds": 600}
    (drill,) = client.post("/v1/drills", json=long, headers=BEARER).json()["drills"]
    assert client.delete(f"/v1/drills/{drill['id']}", headers=BEARER).status_code == 204
    wait_for(client, "/v1/drills", has_ended)
    assert client.delete(f"/v1/drills/{drill['id']}", headers=BEARER).status_code == 404


@pytest.mark.parametrize(
    ("order", "status"),
    [
        (ORDER | {"rail": "rail9@node0"}, 409),
        (ORDER | {"kind": "corrupt"}, 409),
        (ORDER | {"kind": "melt"}, 422),
        (ORDER | {"seconds": 1e9}, 422),
        (ORDER | {"further": 1}, 422),
    ],
)
def test_an_impossible_drill_is_refused(
    drilled: Pair, client: TestClient, order: Any, status: int
) -> None:
    answer = client.post("/v1/drills", json=order, headers=BEARER)
    assert answer.status_code == status
    assert answer.json()["detail"]
    assert client.get("/v1/drills").json()["drills"] == []


def test_workers_without_drills_refuse(pair: Pair) -> None:
    with client_of(pair.folder, TOKEN) as client:
        assert client.get("/v1/drills").json() == {"enabled": False, "drills": []}
        answer = client.post("/v1/drills", json=ORDER, headers=BEARER)
    assert answer.status_code == 409
    assert "R2CCL_DRILLS=on" in answer.json()["detail"]


def changing_routes(client: TestClient) -> list[tuple[str, str]]:
    documented = client.get("/openapi.json").json()["paths"]
    return [
        (method, path.format(drill="x"))
        for path, methods in documented.items()
        for method in methods
        if method != "get"
    ]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer "},
        {"Authorization": f"Bearer {TOKEN}x"},
        {"Authorization": f"Basic {TOKEN}"},
        {"Authorization": "Basic " + base64.b64encode(f":{TOKEN}".encode()).decode()},
        {"Authorization": TOKEN},
        {"Authorization": "Bearer \u00fc".encode()},
    ],
)
def test_a_wrong_token_changes_nothing(client: TestClient, headers: Any) -> None:
    routes = changing_routes(client)
    assert len(routes) == 2
    for method, path in [*routes, ("put", "/v1/rails"), ("patch", "/"), ("post", "/nowhere")]:
        answer = client.request(method, path, content=b"{}", headers=headers)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer"), path


def test_a_sidecar_without_a_token_is_read_only(tmp_path: Path) -> None:
    with client_of(tmp_path) as client:
        answer = client.post("/v1/drills", json=ORDER, headers={"Authorization": "Bearer None"})
        assert answer.status_code == 401
        assert "read-only" in answer.json()["detail"]


def test_a_body_without_a_token_is_not_read(tmp_path: Path) -> None:
    app = sidecar.make_app(Watch(tmp_path), token=TOKEN)
    sent: list[Any] = []

    async def receive() -> Any:
        raise AssertionError("the body was asked for")

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/drills", "headers": []}
    asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == 401


def test_the_token_comes_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("R2SERVE_TOKEN", raising=False)
    assert read_token(None) is None
    monkeypatch.setenv("R2SERVE_TOKEN", TOKEN)
    assert read_token(None) == TOKEN
    file = tmp_path / "token"
    file.write_text(TOKEN[::-1] + "\n")
    file.chmod(0o600)
    assert read_token(file) == TOKEN[::-1]


@pytest.mark.parametrize(
    ("text", "mode", "why"),
    [
        ("short", 0o600, "at least 16"),
        ("a token with spaces in it", 0o600, "without spaces"),
        (TOKEN, 0o644, "accessible to other users"),
        (None, 0, "No such file"),
    ],
)
def test_an_invalid_token_is_refused(tmp_path: Path, text: str | None, mode: int, why: str) -> None:
    file = tmp_path / "token"
    if text is not None:
        file.write_text(text)
        file.chmod(mode)
    with pytest.raises(TokenError, match=why):
        read_token(file)
