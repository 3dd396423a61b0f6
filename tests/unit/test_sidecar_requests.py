"""The sidecar's answers about requests, while steps over real rails stall."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from fastapi.testclient import TestClient
from steps import OUTAGE_S, Job, new
from test_sidecar import samples, wait_for
from timely import timely

from r2serve.observe import requests
from r2serve.observe.journal import Event
from r2serve.observe.names import request_name
from r2serve.observe.request_log import RequestLog
from r2serve.observe.sidecar import app as sidecar
from r2serve.observe.sidecar import requests as answers
from r2serve.observe.watch import NumberedEvent, Watch


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    made.close()


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    with TestClient(sidecar.make_app(Watch(tmp_path)), base_url="http://localhost") as made:
        yield made


def test_the_impact_of_an_outage_on_a_request_is_reported(
    job: Job, client: TestClient, tmp_path: Path
) -> None:
    job.step(prefill=["id-a", "id-b"], yielding=["id-a", "id-b"], new=new("a", "b"))
    job.step(outage=True, decode=["id-b"], yielding=["id-b"], finished=["id-a"])
    found = wait_for(client, "/v1/requests", lambda found: len(found["requests"]) == 2)
    assert [request["id"] for request in found["requests"]] == ["b", "a"]
    impact = client.get("/v1/requests/b/impact").json()
    assert impact["status"] == "running"
    assert impact["stall_s"] >= impact["decode_stall_s"] > 0
    (step,) = (one for one in impact["steps"] if one["step"] == 2)
    assert (step["phase"], step["label"]) == ("decode", "rank 0")
    # A host short of CPU may stall step 1, which is the prefill.
    in_prefill = [one for one in impact["steps"] if one["phase"] == "prefill"]
    assert all(one["step"] == 1 for one in in_prefill)
    assert (impact["prefill_stall_s"] > 0) == bool(in_prefill)
    assert [stall["collective"] for stall in step["stalls"]] == ["all_reduce"]
    told = [(event["kind"], event["rail"], event["text"]) for event in impact["events"]]
    assert ("injected", "rail0@node0", "carrier_loss") in told
    assert {("UP->DOWN injected"), ("SUSPECT->DOWN injected")} & {
        text for kind, rail, text in told if (kind, rail) == ("rail_state", "rail1@node0")
    }
    assert 2 in {event["epoch"] for event in impact["events"] if event["kind"] == "stall"}

    # vLLM writes the front end's log, so the test writes it here (see tests/engines).
    front = RequestLog(tmp_path / "frontend-1-2.requests", writer="frontend", label="engine 0")
    times = {"queued_s": 0.0, "prefill_s": 0.1, "decode_s": 80.0, "e2e_s": 100.0}
    counts = {"prompt_tokens": 5, "tokens": 3, "ended_clock_ns": 1}
    front.write({"finished": "b", "reason": "length", **counts, **times})
    job.step(finished=["id-b"])
    impact = wait_for(
        client, "/v1/requests/b/impact", lambda one: one["e2e_s"] and one["worst_itl_s"]
    )
    assert impact["status"] == "finished"
    assert impact["stall_percent"] == pytest.approx(impact["stall_s"])
    assert impact["late_s"] >= impact["stall_s"]
    assert impact["e2e_without_s"] == pytest.approx(100.0 - impact["late_s"])
    # Without a baseline, the delay of a phase is its stall.
    assert impact["ttft_s"] == pytest.approx(20.0)
    assert impact["ttft_without_s"] == pytest.approx(20.0 - impact["prefill_stall_s"])
    assert impact["mean_itl_without_s"] == pytest.approx(40.0 - impact["decode_stall_s"] / 2)
    assert impact["worst_itl_s"] > impact["decode_stall_s"]
    (waited,) = client.get("/v1/requests", params={"waited": True}).json()["requests"]
    assert waited["id"] == "b"

    ((labels, _),) = samples(client)["r2serve_engine_info"]
    assert (labels["worker"], labels["model_name"], labels["engine"]) == ("rank 0", "m", "3")
    counts = samples(client)["r2serve_request_stall_seconds_count"]
    assert ("rank 0", "decode", 1) in [
        (labels["worker"], labels["phase"], count) for labels, count in counts
    ]
    totals = samples(client)["r2serve_request_stall_seconds_sum"]
    assert sum(total_s for _, total_s in totals) == pytest.approx(impact["stall_s"])
    # The pauses of a host short of CPU are no part of a stall.
    timely(
        lambda: impact["stall_s"] > OUTAGE_S / 2,
        f"stall of the outage: {impact}",
        within_s=0,
    )


def test_requests_come_in_pages(job: Job, client: TestClient) -> None:
    names = [f"r{number}" for number in range(5)]
    ids = [f"id-{name}" for name in names]
    job.step(prefill=ids, yielding=ids, new=new(*names))
    job.step(finished=ids)
    wait_for(client, "/v1/requests", lambda found: found["known"] == 5)
    seen, before = [], None
    while before != 0:
        params = {"limit": 2} | ({"before": before} if before else {})
        page = client.get("/v1/requests", params=params).json()
        seen += [request["id"] for request in page["requests"]]
        before = page["next"]
    assert seen == names[::-1]


@pytest.mark.parametrize(
    "identity",
    [
        "cmpl-<script>alert(1)</script>",
        "cmpl-../../livez?a=b#c",
        "cmpl-a/impact",
        "cmpl-" + "x" * 4096,
        "cmpl-\n\x1b[31m\u202e",
    ],
)
def test_a_request_is_found_by_any_id_of_a_client(
    identity: str, client: TestClient, tmp_path: Path
) -> None:
    """The dashboard links to the name; a person asks by the id in the answer."""
    log = RequestLog(tmp_path / "r2ccl-0-abc.requests", writer="worker", label="rank 0")
    times = ("scheduled_ns", "first_token_ns", "last_token_ns", "tokens")
    gaps = ("worst_gap_ns", "worst_gap_ended_ns")
    log.write({"request": request_name(identity)} | dict.fromkeys((*times, *gaps), 1))
    found = wait_for(client, "/v1/requests", lambda found: found["known"] == 1)
    [name] = [request["id"] for request in found["requests"]]
    assert name == request_name(identity)
    for asked in (identity, name):
        answer = client.get(f"/v1/requests/{quote(asked, safe='')}/impact")
        assert answer.status_code == 200, answer.text
        assert answer.json()["id"] == name


def test_an_unknown_request_is_not_found(client: TestClient) -> None:
    answer = client.get("/v1/requests/no-such-request/impact")
    assert answer.status_code == 404
    assert "no-such-request" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("during", "told"),
    [
        ("CONNECTING->PROBATION", ["UP->DOWN carrier_loss", "CONNECTING->PROBATION"]),
        ("UP->SUSPECT silence", ["UP->SUSPECT silence"]),
    ],
)
def test_an_old_loss_is_a_cause_only_without_a_newer_loss(
    tmp_path: Path, during: str, told: list[str]
) -> None:
    now = time.time_ns()
    log = RequestLog(tmp_path / "r2ccl-1-a.requests", writer="worker", label="rank 0")
    stall_ns = time.monotonic_ns()
    stall = {"collective": "all_reduce", "group": "tp:0", "call": 1, "ended_ns": stall_ns, "ns": 9}
    times = {"step": 1, "began_ns": stall_ns - 10, "ended_ns": stall_ns + 10, "usual_ns": 0}
    log.write({**times, "stalls": [stall], "prefill": [], "decode": ["a"]})
    kept = requests.Requests(tmp_path)
    kept.look()
    request = kept.get("a")
    assert request is not None
    watch = Watch(tmp_path)
    watch.events += [
        event(1, now - 60 * 10**9, "UP->DOWN carrier_loss", value=1),
        event(2, now - 10**6, during),
    ]
    found = answers.ImpactView.of_all(request, watch)
    assert [one.text for one in found.events] == told


def event(number: int, clock_ns: int, text: str, value: int = 0) -> NumberedEvent:
    of_rail = {"rail": "rail0@node0", "peer": "rank 1", "epoch": 0, "comm": 0, "call": 0}
    noted = Event(time_ns=clock_ns, kind="rail_state", value=value, detail=0, text=text, **of_rail)
    return NumberedEvent(number, "1-a", "rank 0", "node0", 1, "", clock_ns, noted)
