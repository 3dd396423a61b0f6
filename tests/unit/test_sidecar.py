"""The sidecar's answers, over journals of running engines."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from pairs import Pair
from prometheus_client.parser import text_string_to_metric_families
from timely import TimingMiss, timely

from r2serve.observe.sidecar import app as sidecar
from r2serve.observe.sidecar import metrics, schema
from r2serve.observe.watch import Watch

GETS = [
    "/livez",
    "/health",
    "/metrics",
    "/v1/rails",
    "/v1/collectives",
    "/v1/topology",
    "/v1/events",
    "/v1/requests",
    "/v1/drills",
    "/v1/node",
    "/v1/cluster",
    "/v1/sidecar",
]


def client_of(folder: Path) -> TestClient:
    return TestClient(sidecar.make_app(Watch(folder)), base_url="http://localhost")


@pytest.fixture
def client(pair: Pair) -> Iterator[TestClient]:
    with client_of(pair.folder) as made:
        yield made


def samples(client: TestClient) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def wait_for(client: TestClient, path: str, done: Any) -> Any:
    found: list[Any] = [None]

    def look() -> bool:
        found[0] = client.get(path).json()
        return bool(done(found[0]))

    try:
        timely(look, f"the expected answer of {path}", within_s=60)
    except TimingMiss as miss:
        raise TimingMiss(f"{miss}; last answer: {found[0]}") from None
    return found[0]


def test_without_an_engine_everything_but_readyz_answers(tmp_path: Path) -> None:
    with client_of(tmp_path / "not there") as client:
        for path in GETS:
            assert client.get(path).status_code == 200, path
        assert client.get("/v1/rails").json() == {"rails": []}
        assert client.get("/v1/collectives").json()["collectives"] == []
        assert client.get("/v1/topology").json() == {"workers": [], "unreadable": {}}
        assert client.get("/v1/events").json() == {"events": [], "next": 0, "first_kept": 0}
        assert client.get("/readyz").status_code == 503
        assert client.get("/readyz").json()["status"] == "no-engine"


def test_every_documented_path_is_tested_here(client: TestClient) -> None:
    documented = client.get("/openapi.json").json()["paths"]
    assert set(documented) == {
        *GETS,
        "/readyz",
        "/v1/events/stream",
        "/v1/requests/{request}/impact",
        "/v1/drills/{drill}",
    }
    changing = {
        (method, path)
        for path, methods in documented.items()
        for method in methods
        if method != "get"
    }
    assert changing == {("post", "/v1/drills"), ("delete", "/v1/drills/{drill}")}


def test_rails_have_state_and_cause(pair: Pair, client: TestClient) -> None:
    def both(found: Any) -> bool:
        return [rail["state"] for rail in found["rails"]] == ["UP", "UP"]

    rails = wait_for(client, "/v1/rails", both)["rails"]
    assert [rail["name"] for rail in rails] == ["rail0@node0", "rail1@node0"]
    assert {rail["peer"] for rail in rails} == {"rank 1"}
    assert {rail["host"] for rail in rails} == {socket.gethostname()}
    assert client.get("/readyz").status_code == 200
    pair.engine.inject(1, "carrier_loss")
    (_, lost) = wait_for(
        client, "/v1/rails", lambda found: found["rails"][1]["state"] not in ("UP", "SUSPECT")
    )["rails"]
    assert lost["cause"] == "injected"
    assert client.get("/readyz").status_code == 200
    assert client.get("/readyz").json()["status"] == "degraded"
    pair.engine.inject(0, "carrier_loss")
    wait_for(client, "/readyz", lambda found: found["status"] == "failing")
    assert client.get("/readyz").status_code == 503
    assert client.get("/health").status_code == 200
    assert client.get("/livez").text == "ok\n"


def test_a_rail_never_up_has_a_metric_and_a_reason(tmp_path: Path) -> None:
    pair = Pair(tmp_path, dead=1)
    try:
        pair.wait_for_state(0, "UP")
        with client_of(tmp_path) as client:

            def known(found: Any) -> bool:
                return [rail["presence"] for rail in found["rails"]] == ["up", "never up"] and bool(
                    found["rails"][1]["never_up"]
                )

            rails = wait_for(client, "/v1/rails", known)["rails"]
            assert rails[0]["never_up"] == ""
            assert rails[1]["never_up"] in ("refused", "no_connection")
            lines = client.get("/metrics").text.splitlines()
            never = [line for line in lines if line.startswith("r2serve_rail_never_up{")]
            assert sorted(line.rpartition(" ")[2] for line in never) == ["0.0", "1.0"]
            pair.engine.inject(0, "carrier_loss")
            lost = wait_for(
                client, "/v1/rails", lambda found: found["rails"][0]["presence"] == "lost"
            )
            assert lost["rails"][1]["presence"] == "never up"
    finally:
        pair.close()


def test_workers_are_listed_after_their_end(pair: Pair, client: TestClient) -> None:
    (worker,) = wait_for(client, "/v1/topology", lambda found: found["workers"])["workers"]
    assert (worker["label"], worker["node"], worker["status"]) == ("rank 0", "node0", "running")
    pair.close()
    (worker,) = wait_for(
        client, "/v1/topology", lambda found: found["workers"][0]["status"] == "closed"
    )["workers"]
    assert client.get("/v1/rails").json() == {"rails": []}


def test_events_come_in_pages(pair: Pair, client: TestClient) -> None:
    pair.cut_and_heal(1)

    def is_over(found: Any) -> bool:
        texts = [event["text"] for event in found["events"]]
        return "heal" in texts and "PROBATION->UP" in texts[texts.index("heal") :]

    everything = wait_for(client, "/v1/events", is_over)
    events = everything["events"]
    assert everything["first_kept"] == events[0]["id"]
    paged: list[Any] = []
    after = 0
    while (page := client.get("/v1/events", params={"after": after, "limit": 2}).json())["events"]:
        assert len(page["events"]) <= 2
        paged += page["events"]
        after = page["next"]
    assert paged[: len(events)] == events  # a busy machine may have added events
    injected = client.get("/v1/events", params={"kind": "injected"}).json()
    assert [event["text"] for event in injected["events"]] == ["carrier_loss", "heal"]
    assert injected["next"] == paged[-1]["id"] or len(paged) > len(events)


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ({"after": -1}, "after"),
        ({"after": "x"}, "after"),
        ({"limit": 0}, "limit"),
        ({"limit": 1001}, "limit"),
        ({"kind": "gossip"}, "kind"),
    ],
)
def test_a_wrong_query_is_named(client: TestClient, query: dict[str, Any], field: str) -> None:
    answer = client.get("/v1/events", params=query)
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"] == ["query", field]


def test_without_a_token_nothing_can_be_changed(client: TestClient) -> None:
    for path in [*GETS, "/readyz", "/v1/events/stream"]:
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            assert client.request(method, path).status_code == 401, (method, path)


def test_metrics_show_states_and_bytes_of_rails(pair: Pair, client: TestClient) -> None:
    found = samples(client)
    assert [value for _, value in found["r2serve_ready"]] == [1.0]
    states = [
        (labels["rail"], labels["state"]) for labels, value in found["r2serve_rail_state"] if value
    ]
    assert [rail for rail, _ in states] == ["rail0@node0", "rail1@node0"]
    # A machine short of CPU suspects rails.
    assert {state for _, state in states} <= {"UP", "SUSPECT"}
    up = {labels["rail"]: value for labels, value in found["r2serve_rail_up"]}
    assert up == {rail: float(state == "UP") for rail, state in states}
    assert all(value > 0 for _, value in found["r2serve_rail_bytes_total"])
    assert {labels["host"] for labels, _ in found["r2serve_rail_up"]} == {socket.gethostname()}
    pair.engine.inject(1, "carrier_loss")

    def lost_alone() -> bool:
        up = {labels["rail"]: value for labels, value in samples(client)["r2serve_rail_up"]}
        return up == {"rail0@node0": 1.0, "rail1@node0": 0.0}

    timely(lost_alone, "rail1 alone is down", within_s=60)


def test_a_lost_rail_keeps_the_time_of_its_loss(pair: Pair, client: TestClient) -> None:
    """Attempts to connect change the state again and again, and are no new losses."""

    def since_s() -> float:
        found = samples(client)["r2serve_rail_state_since_timestamp_seconds"]
        (value,) = [value for labels, value in found if labels["rail"] == "rail1@node0"]
        return value

    def losses_s() -> list[float]:
        return [
            datetime.fromisoformat(event["time"]).timestamp()
            for event in client.get("/v1/events?limit=1000").json()["events"]
            if event["rail"] == "rail1@node0" and "->DOWN" in event["text"]
        ]

    assert since_s() > 0
    pair.engine.inject(1, "carrier_loss")
    wait_for(client, "/v1/rails", lambda found: found["rails"][1]["presence"] == "lost")

    def told() -> bool:
        shown_s = since_s()
        return any(abs(shown_s - lost_s) < 1e-3 for lost_s in losses_s())

    timely(told, "the time of the loss", within_s=60)
    first_s = since_s()
    time.sleep(0.5)
    assert since_s() == first_s


def test_the_sidecar_tells_of_its_own_process(client: TestClient) -> None:
    found = samples(client)
    assert found["process_resident_memory_bytes"][0][1] > 1e6
    assert found["process_cpu_seconds_total"][0][1] > 0
    assert found["process_open_fds"][0][1] > 0


def test_a_failover_is_counted_once(pair: Pair, client: TestClient) -> None:
    for _ in range(3):
        pair.cut_and_heal(1)

    def counted() -> Any:
        found = samples(client).get("r2serve_failover_total")
        return found if found and found[0][1] >= 3 else None

    [(labels, value)] = timely(counted, "three failovers are counted", within_s=60)
    assert (labels["rail"], labels["cause"], labels["peer"]) == (
        "rail1@node0",
        "injected",
        "rank 1",
    )
    assert value == 3.0
    assert labels["injected"] == "true"


def test_a_drill_is_a_metric_while_it_explains_the_rail(pair: Pair, client: TestClient) -> None:
    assert "r2serve_drill_active" not in samples(client)
    pair.engine.inject(1, "carrier_loss")
    [(labels, value)] = timely(
        lambda: samples(client).get("r2serve_drill_active"), "the drill is shown", within_s=60
    )
    assert (labels["rail"], labels["peer"], labels["kind"], value) == (
        "rail1@node0",
        "rank 1",
        "carrier_loss",
        1.0,
    )
    pair.engine.inject(1, "heal")
    timely(lambda: "r2serve_drill_active" not in samples(client), "the drill is over", within_s=60)


def test_a_failover_without_a_verdict_is_counted_too(
    pair: Pair, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "VERDICT_S", 0.2)
    pair.engine.inject(0, "carrier_loss")
    found = timely(
        lambda: samples(client).get("r2serve_failover_total"), "a failover is counted", within_s=60
    )
    assert [value for _, value in found] == [1.0]


def test_the_examples_of_the_openapi_description_are_valid(client: TestClient) -> None:
    described = client.get("/openapi.json").json()["components"]["schemas"]
    for name in ("HealthView", "RailView", "WorkerView", "EventView", "CollectiveView"):
        (example,) = described[name]["examples"]
        getattr(schema, name).model_validate(example)
        assert set(example) == set(described[name]["properties"])
