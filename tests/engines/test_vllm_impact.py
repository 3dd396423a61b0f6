"""A real engine during a loss of all rails: the delayed requests, and the length of the delay."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from fastapi.testclient import TestClient
from hostile_ids import OTHERS, STRUCK, Attacker
from timely import TimingMiss, timely

from r2serve.drills import client
from r2serve.lab.serving.model import prompts
from r2serve.observe import journal
from r2serve.observe.sidecar.app import make_app
from r2serve.observe.watch import Watch

if TYPE_CHECKING:
    from conftest import Engine

OUTAGE_S = 0.6
"""More than half of the dead deadline: a shorter silence of all rails may be a peer without CPU."""
# Part of an outage that at least one request must report as its stall. An outage that begins while
# a step computes stalls nothing at first.
REPORTED = 0.7
ORDERS = [
    pytest.param(order, marks=[pytest.mark.long] if place else [])
    for place, order in enumerate(itertools.permutations(("worker", "sidecar", "engine")))
]
MOST_ROUNDS = 5
SETTLED_S = 1.0


def ask(port: int, path: str) -> Any:
    """Returns the JSON answer; None if the status is 404."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        if error.code != 404:
            raise
        return None


def impact_of(port: int, name: str) -> dict[str, Any]:
    """Returns the impact of a finished request, as soon as all fields are known."""

    def known() -> dict[str, Any] | None:
        found: dict[str, Any] | None = ask(port, f"/v1/requests/{name}/impact")
        whole = found and found["e2e_s"] is not None and found["worst_itl_s"] is not None
        return found if whole else None

    impact = timely(known, f"the impact of {name} is known", within_s=120, every_s=0.1)
    assert impact is not None
    return impact


def settled_impact_of(port: int, name: str) -> dict[str, Any]:
    """Returns the impact after it has not changed for SETTLED_S; busy machines write late."""
    found = impact_of(port, name)
    since = time.monotonic()
    while time.monotonic() < since + SETTLED_S:
        time.sleep(0.1)
        if (again := impact_of(port, name)) != found:
            found, since = again, time.monotonic()
    return found


def complete(engine: Engine, prompt: str, tokens: int) -> str:
    """Sends a completion request; returns the id of the answer."""
    body = {"model": str(engine.model), "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{engine.port}/v1/completions",
        data=json.dumps(body | {"ignore_eos": True}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        answer: str = json.load(response)["id"]
    return answer


def short_of_cpu_ns(folder: Path) -> int:
    """Returns for how long all workers together were ready to run and did not run."""
    found = (journal.read(path, events=False) for path in folder.glob(journal.PATTERN))
    return sum(one.short_of_cpu_ns for one in found)


def complete_alone(engine: Engine, folder: Path) -> tuple[str, bool]:
    """Completes a request without a fault; returns the id, and whether a worker lacked CPU time."""
    before = short_of_cpu_ns(folder)
    name = complete(engine, prompts(1)[0], 32)
    time.sleep(SETTLED_S)  # a worker notes a pause after its end
    return name, short_of_cpu_ns(folder) > before


def lose_all_rails(folder: Path) -> None:
    rails = {rail: client.find(folder, rail) for rail in ("rail0@node0", "rail1@node0")}
    for rail, workers in rails.items():
        client.start(workers, kind="black_hole", rail=rail, seconds=OUTAGE_S)


def two_requests_and_an_outage(engine: Engine, folder: Path) -> list[str]:
    """Returns the ids of two requests that were served together when all rails were lost.

    On a busy machine the first request may end before the second begins. Then the test tries again.
    """
    for _ in range(5):
        with ThreadPoolExecutor() as pool:
            asking = [pool.submit(complete, engine, text, 200) for text in prompts(2)]
            together = False
            while not together and not any(one.done() for one in asking):
                together = engine.running() == 2
            if together:
                lose_all_rails(folder)
        if together:
            return [one.result() for one in asking]
    raise TimingMiss("two requests were never served at the same time")


def last_outage_s(port: int) -> float:
    """Returns for how many seconds the last two drills, each on one rail, left no rail."""

    def ended() -> list[dict[str, Any]] | None:  # a busy worker reports the end of a drill late
        last = sorted(ask(port, "/v1/drills")["drills"], key=lambda drill: drill["began"])[-2:]
        return last if all(drill["ended"] for drill in last) else None

    drills = timely(ended, "the drills have ended", within_s=120, every_s=0.05)
    assert drills is not None
    assert {drill["rail"] for drill in drills} == {"rail0@node0", "rail1@node0"}
    began = max(datetime.fromisoformat(drill["began"]) for drill in drills)
    ended = min(datetime.fromisoformat(drill["ended"]) for drill in drills)
    return (ended - began).total_seconds()


def all_events(port: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while page := ask(port, f"/v1/events?limit=1000&after={found[-1]['id'] if found else 0}")[
        "events"
    ]:
        found += page
    return found


def processes(engine: Engine, port: int) -> dict[str, psutil.Process]:
    """Returns the processes that a test kills in a given order."""
    (sidecar,) = {
        connection.pid
        for connection in psutil.net_connections("tcp4")
        if connection.laddr == ("127.0.0.1", port) and connection.status == psutil.CONN_LISTEN
    }
    return {
        "worker": engine.nodes[0].workers()[0],
        "sidecar": psutil.Process(sidecar),
        "engine": psutil.Process(engine.nodes[0].process.pid),
    }


def metrics_of(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as metrics:
        text: str = metrics.read().decode()
    return text


def page_of(request: pytest.FixtureRequest) -> Any:
    """Returns a page of a browser; None if this machine has no browser."""
    try:
        return request.getfixturevalue("page")
    except pytest.skip.Exception:
        return None


def hostile_ids_write_nothing(engine: Engine, port: int, folder: Path, page: Any) -> None:
    """A client's id is one word in log, API and page, with several answers, too; see hostile_ids.

    page: of a browser; None: there is no browser.
    """
    attacker = Attacker(engine, port, ask, lambda: lose_all_rails(folder))
    before = attacker.listed(waited=False)
    struck = attacker.send_all_in_an_outage(STRUCK, MOST_ROUNDS)
    others = attacker.send_all(OTHERS, 8)
    # A worker learns of the end of a request with the next step.
    others.append(complete(engine, prompts(1)[0], 8))
    attacker.check_api([*struck, *others], before)
    attacker.check_log(struck)
    attacker.check_metrics(metrics_of(port))
    if page is not None:
        attacker.check_page(page, struck)


@pytest.mark.alone
@pytest.mark.timeout(600)
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_the_impact_of_an_outage_is_reported_after_any_process_is_killed(
    start_engine: Callable[..., Engine],
    sidecar_port: int,
    tmp_path_factory: pytest.TempPathFactory,
    order: tuple[str, ...],
    request: pytest.FixtureRequest,
    show: Callable[[str], None],
) -> None:
    folder = tmp_path_factory.mktemp("impact")  # the path of a socket for drills is short
    port = sidecar_port
    environment = {
        "R2CCL_RAILS": "127.0.0.1,127.0.0.2",
        "R2CCL_NODE": "per-rank",
        "R2CCL_JOURNAL_DIR": str(folder),
        "R2CCL_DRILLS": "on",
        "R2CCL_REJOIN_BACKOFF_MAX_MS": "50",
    }
    flags = ["--distributed-backend", "r2ccl", "--r2serve-sidecar", str(port)]
    engine = start_engine(2, flags, [environment])
    assert f"; sidecar: http://127.0.0.1:{port}" in engine.nodes[0].log
    begin_ns = short_of_cpu_ns(folder)
    starved = dict([complete_alone(engine, folder)])
    hit: list[str] = []
    reported: list[float] = []
    # An outage that begins while a step computes stalls little; then the rails are lost again.
    for _ in range(MOST_ROUNDS):
        if max(reported, default=0.0) > REPORTED:
            break
        names = two_requests_and_an_outage(engine, folder)
        outage_s = last_outage_s(port)
        starved |= [complete_alone(engine, folder)]
        if not any(settled_impact_of(port, name)["stall_s"] for name in names):
            continue
        hit += names
        for name in names:
            impact = impact_of(port, name)
            assert impact["tokens"] == 200
            # On a busy machine a request may still be in prefill.
            phases = [impact[f"{phase}_stall_s"] for phase in ("queue", "prefill", "decode")]
            assert impact["stall_s"] == pytest.approx(sum(phases))
            assert impact["stall_s"] > 0, f"{name} was served during the outage"
            assert impact["e2e_without_s"] == pytest.approx(impact["e2e_s"] - impact["late_s"])
            assert impact["late_s"] >= impact["stall_s"]
            kinds = {(event["kind"], event["text"]) for event in impact["events"]}
            assert ("injected", "black_hole") in kinds
            # A gap between two tokens contains the stall, so the reported stall is not too long.
            timely(
                lambda i=impact: i["worst_itl_s"] > i["decode_stall_s"],
                f"{name}: the stalls span several gaps: {impact}",
                within_s=0,
            )
            reported.append(impact["stall_s"] / outage_s)
    timely(lambda: hit, f"none of {MOST_ROUNDS} outages was charged to a request", within_s=0)
    alone = [*starved]
    unhit = {name: impact_of(port, name) for name in alone}
    assert all(impact["tokens"] > 0 for impact in unhit.values())
    waited = {request["id"] for request in ask(port, "/v1/requests?waited=true")["requests"]}
    assert set(hit) <= waited
    text = metrics_of(port)
    assert f'model_name="{engine.model}"' in text
    assert re.search(r'r2serve_request_stall_seconds_count\{[^}]*phase="decode"[^}]*\} [1-9]', text)
    said = [line for line in engine.nodes[0].log.splitlines() if "ms stall in" in line]
    assert any("drill: rail" in line and hit[0] in line for line in said), said
    # A host short of CPU may delay a request without a fault, too.
    charged = {name for name, one in unhit.items() if (one["stall_s"], one["steps"]) != (0, [])}
    assert all(starved[name] for name in charged), charged
    others = waited - {*hit, *charged}
    assert not others or short_of_cpu_ns(folder) > begin_ns, others
    assert not others & set(alone)
    timely(lambda: len(charged) < len(alone), f"each of {alone} waited", within_s=0)
    timely(lambda: max(reported) > REPORTED, f"reported parts of outages: {reported}", within_s=0)

    began = time.monotonic()
    page = page_of(request)
    hostile_ids_write_nothing(engine, port, folder, page)
    shown = "without a browser" if page is None else "on the page, too"
    show(f"ids of an attacker, {shown}: {time.monotonic() - began:.1f} s")

    events = all_events(port)
    impacts = {name: settled_impact_of(port, name) for name in (*hit, *alone)}
    victims = processes(engine, port)
    for place, who in enumerate(order):
        with contextlib.suppress(psutil.NoSuchProcess):  # a worker ends with its engine
            victims[who].kill()
            # A process that is gone raises NoSuchProcess.
            timely(
                lambda: victims[who].status() == psutil.STATUS_ZOMBIE,  # noqa: B023
                f"the end of the {who}",
                within_s=120,
            )
        survivors = set(order[place + 1 :])
        if "sidecar" in survivors:
            assert all_events(port)[: len(events)] == events
        if {"engine", "worker"} <= survivors:
            alone.append(complete(engine, prompts(1)[0], 8))
    with TestClient(make_app(Watch(folder)), base_url="http://localhost") as after:
        for name, before in impacts.items():

            def differing() -> dict[str, Any]:
                found = after.get(f"/v1/requests/{name}/impact").json()  # noqa: B023
                here = before.items()  # noqa: B023
                return {key: found.get(key) for key, one in here if found.get(key) != one}

            def same() -> bool:
                return not differing().keys() - {"number"}

            with contextlib.suppress(TimingMiss):
                timely(same, f"the impact of {name}", within_s=60, every_s=0.05)
            assert not differing().keys() - {"number"}, (differing(), before)
        kept = {event["id"]: event for event in after.get("/v1/events?limit=1000").json()["events"]}
        assert [kept.get(event["id"]) for event in events[:1000]] == events[:1000]
        # The other worker notices the loss with a delay.
        timely(
            lambda: after.get("/readyz").status_code == 503,
            "the engine without a worker is not ready",
            within_s=120,
            every_s=0.1,
        )
