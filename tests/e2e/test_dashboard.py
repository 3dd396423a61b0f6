"""The dashboard in a real browser during faults: contents of the page, and the delay."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from pages import picture, row_of
from real_rails import REJOIN_S, Stream
from sidecars import Sidecar
from steps import Job, new
from timely import timely

from r2serve.lab.serving.client import Load
from r2serve.lab.serving.model import make_tiny_llama, prompts
from r2serve.lab.serving.places import LabPlace
from r2serve.lab.serving.plan import Plan
from r2serve.lab.serving.serve import Server

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

VISIBLE_S = 10.0  # about 0.2 s on a machine with a core for each process


@pytest.fixture
def sidecar(tmp_path: Path, free_ports: Any) -> Iterator[Sidecar]:
    folder = tmp_path / "journals"
    folder.mkdir()
    made = Sidecar(folder, free_ports(1)[0])
    yield made
    made.kill()


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Yields a folder with a short path: vLLM's socket paths may have at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="r2serve-") as made:
        yield Path(made)


@pytest.mark.timeout(300)
def test_the_page_shows_a_carrier_loss_at_once(
    jobs, make_lab, sidecar, page, eventually, show
) -> None:
    expect = playwright.expect
    page.goto(f"http://127.0.0.1:{sidecar.port}/")
    expect(page.get_by_role("status")).to_have_text("No engine is running here")
    expect(page.locator("#requests")).to_have_text("No stalled request.")
    lab = make_lab(2)
    stream = Stream(jobs, lab, per_rank=lambda rank: folder_of(sidecar, rank))
    expect(page.get_by_role("status")).to_have_text("All rails up")
    for rail in (0, 1):
        expect(row_of(page, f"rail{rail}@node0").locator("td").nth(1)).to_have_text("UP")
    expect(page.locator("#collectives")).to_contain_text("all_reduce")
    expect(page.locator("#picture line.good")).to_have_count(3)  # the management NIC, too
    picture(page, "dashboard")

    rail = stream.busiest()
    # The page records the delay between the time of the event and the display of the event.
    page.evaluate(
        """() => new MutationObserver(() => {
          const lost = [...document.querySelectorAll("#events li")].find((item) =>
            item.textContent.includes("->DOWN"));
          if (lost && window.shown === undefined)
            window.shown = Date.now() - Date.parse(lost.querySelector("time").dateTime);
        }).observe(document.getElementById("events"), { childList: true })"""
    )
    lab.cut(0, rail)
    expect(page.get_by_role("status")).to_have_text("Degraded: requests are served")
    expect(page.get_by_label("What is wrong")).to_contain_text(
        re.compile(rf"rail{rail}@node0 \(rail{rail}\) on .* is DOWN \(reconnecting\) since ")
    )
    lost = row_of(page, f"rail{rail}@node0").locator("td")
    expect(lost.nth(1)).to_have_text(re.compile(r"^DOWN( \(reconnecting\))?$"))
    expect(lost.nth(3)).to_have_text("carrier_loss")
    expect(lost.nth(4)).to_have_text("local NIC")
    expect(page.locator("#picture line.bad")).to_have_count(1)
    expect(page.locator("#picture")).to_contain_text("fault at the local NIC")
    expect(page.locator("#events")).to_contain_text(
        re.compile(f"rank 0: rail{rail}@node0 to rank 1: (UP|SUSPECT)->DOWN carrier_loss")
    )
    expect(page.locator("#events")).to_contain_text("the fault is at the local NIC")
    shown_ms = timely(lambda: page.evaluate("() => window.shown"), "the event on the page")
    late_s = shown_ms / 1e3
    show(f"the page shows the carrier loss {late_s * 1e3:.0f} ms after the event")
    timely(lambda: late_s < VISIBLE_S, f"the loss is shown after {late_s:.1f} s", 0)
    picture(page, "dashboard-rail-lost")

    lab.heal(0, rail)
    eventually(f"rail {rail} UP", lambda: stream.is_up(rail), REJOIN_S)
    expect(page.get_by_role("status")).to_have_text("All rails up")
    page.emulate_media(color_scheme="dark")
    picture(page, "dashboard-dark")
    stream.finish()
    expect(page.get_by_role("status")).to_have_text("No engine is running here")
    assert page.problems == []


def counters(collective: str, stalled_s: float) -> dict[str, Any]:
    """Returns counters of a collective of the same worker and group."""
    return {
        "worker": "1-0",
        "label": "rank 0",
        "group": "tp:0",
        "collective": collective,
        "calls": 9,
        "stalled_s": stalled_s,
        "buckets": [9, 0],
    }


def test_the_stalls_of_a_group_stand_once_and_only_while_they_are_new(sidecar, page) -> None:
    """The counter is of the group, so a further collective brings no stall of an hour ago."""
    expect = playwright.expect
    told = [counters("all_reduce", 30.0)]
    page.route(
        "**/v1/collectives",
        lambda route: route.fulfill(json={"bounds_s": [0.001], "collectives": told}),
    )
    page.goto(f"http://127.0.0.1:{sidecar.port}/")
    rows = page.locator("#collectives tr")
    stalls = [rows.nth(index).locator("td").last for index in (0, 1)]
    expect(rows).to_have_count(1)
    expect(stalls[0]).to_have_text("")
    told.append(counters("broadcast", 30.0))
    expect(rows).to_have_count(2)
    for stall in stalls:
        expect(stall).to_have_text("")
    told[:] = [counters("all_reduce", 30.5), counters("broadcast", 30.5)]
    expect(stalls[0]).to_have_text("500.0 ms")
    expect(stalls[1]).to_have_text("")
    assert page.problems == []


@pytest.mark.timeout(300)
def test_the_page_shows_a_stalled_request(sidecar, page) -> None:
    expect = playwright.expect
    page.goto(f"http://127.0.0.1:{sidecar.port}/")
    expect(page.locator("#requests")).to_have_text("No stalled request.")
    job = Job(sidecar.folder)
    try:
        job.step(prefill=["id-a", "id-b"], yielding=["id-a", "id-b"], new=new("a", "b"))
        job.step(outage=True, decode=["id-b"], yielding=["id-b"], finished=["id-a"])
        row = page.locator("#requests tr", has=page.get_by_role("rowheader"))
        expect(row).to_have_count(1)  # request a did not wait
        expect(row.get_by_role("rowheader")).to_have_text("b")
        expect(row.locator("td").nth(1)).to_contain_text("ms")
        impact = sidecar.ask(f"/{row.get_by_role('link').get_attribute('href')}")
        assert impact["id"] == "b"
        assert impact["decode_stall_s"] > 0
        picture(page, "dashboard-requests")
    finally:
        job.close()
    assert page.problems == []


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("forked_vllm")
def test_the_page_shows_stalled_requests_of_vllm(
    make_lab, short_path, free_ports, page, eventually, request
) -> None:
    expect = playwright.expect
    lab = make_lab(2)
    model = make_tiny_llama(short_path / "model")
    # A relay would have rails of the same names.
    settings = {"R2CCL_CONTROL": "direct"}
    plan = Plan("r2ccl", model, True, True, short_path, 4, settings=settings)
    texts = prompts(4)
    with Server(plan, [LabPlace(node) for node in lab.nodes]) as server:
        server.wait_until_ready(lambda _: None)
        server.stream(texts, 32, "warm-up", lambda _: None)
        sidecar = Sidecar(server.journals()[0], free_ports(1)[0])
        request.addfinalizer(sidecar.kill)
        load = Load(server.client, server.url, texts, 400, short_path / "load.json", streams=4)
        load.wait_for_tokens(100, 120)
        page.goto(f"http://127.0.0.1:{sidecar.port}/")
        expect(page.get_by_role("status")).to_have_text("All rails up")

        lab.cut(0, 0)
        expect(page.get_by_role("status")).to_have_text("Degraded: requests are served")
        lost = row_of(page, "rail0@node0").locator("td")
        expect(lost.nth(3)).to_have_text("carrier_loss")
        expect(lost.nth(4)).to_have_text("local NIC")
        lab.heal(0, 0)
        eventually("rail 0 UP", lambda: is_up(sidecar, "rail0@node0"), REJOIN_S)
        time.sleep(1.0)  # until both rails carry data again
        for _ in range(5):  # decoding may leave the rail just before the fault
            expect(page.get_by_role("status")).to_have_text("All rails up")
            rail, struck = busiest(sidecar), time.time()
            lab.black_hole(1, rail)  # no carrier event reports the loss
            expect(page.get_by_role("status")).to_have_text("Degraded: requests are served")
            picture(page, "dashboard-requests")
            lab.heal(1, rail)
            eventually("healed", lambda rail=rail: is_up(sidecar, f"rail{rail}@node0"), REJOIN_S)
            # On a busy machine, a merely suspected rail may have stalled other requests, too.
            name = f"rail{rail}@node0"
            held = (one for one in impacts(sidecar) if one["decode_stall_s"])
            impact = next((one for one in held if was_lost(one, name, struck)), None)
            if impact is not None:
                break
        assert impact is not None
        waited = page.locator(
            "#requests tr", has=page.get_by_role("rowheader", name=impact["id"], exact=True)
        )
        expect(waited.locator("td").nth(1)).to_contain_text("ms")
        link = waited.get_by_role("link")
        assert sidecar.ask(f"/{link.get_attribute('href')}")["id"] == impact["id"]
        assert impact["id"].startswith("cmpl-")
        load.drain()
        load.finish(60, lambda: None)
    assert page.problems == []


@pytest.mark.timeout(240)
def test_the_page_works_with_the_keyboard_and_reports_a_lost_sidecar(sidecar, page) -> None:
    page.goto(f"http://127.0.0.1:{sidecar.port}/")
    playwright.expect(page.get_by_role("status")).to_have_text("No engine is running here")
    reached = []
    for _ in range(5):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("() => document.activeElement.outerHTML.slice(0, 200)"))
    assert "skip" in reached[0]
    assert "Table of rails" in reached[1]
    assert "Table of collectives" in reached[2]
    assert "Table of stalled requests" in reached[3]
    assert 'id="events"' in reached[4]
    for region in ("Rails", "Collectives", "Stalled requests", "Events"):
        assert page.get_by_role("heading", name=region, exact=True).count() == 1
    sidecar.kill()
    playwright.expect(page.locator("#connection")).to_have_text("the sidecar does not answer")
    sidecar.start()
    playwright.expect(page.locator("#connection")).to_have_text("live")


@pytest.mark.timeout(240)
def test_the_page_lists_other_nodes_even_without_an_answer(
    sidecar, page, tmp_path, free_ports, request
) -> None:
    expect = playwright.expect
    page.goto(f"http://127.0.0.1:{sidecar.port}/")
    expect(page.get_by_role("heading", name="Nodes")).to_be_hidden()
    folder = tmp_path / "other"
    folder.mkdir()
    other = Sidecar(folder, free_ports(1)[0], "--peers", f"127.0.0.1:{sidecar.port}")
    request.addfinalizer(other.kill)
    page.goto(f"http://127.0.0.1:{other.port}/")
    row = page.locator("#members tr", has=page.get_by_role("link"))
    expect(row.get_by_role("link")).to_have_text(f"http://127.0.0.1:{sidecar.port}")
    expect(row).to_contain_text("No engine is running here")
    sidecar.kill()
    expect(row).to_contain_text("The sidecar does not answer")
    expect(row).to_contain_text("ConnectError")
    assert page.problems == []


def busiest(sidecar: Sidecar) -> int:
    """Returns the rail of node 0 with the most bytes at the moment."""
    before = sent(sidecar)
    time.sleep(0.3)
    after = sent(sidecar)
    return max((0, 1), key=lambda rail: after[f"rail{rail}@node0"] - before[f"rail{rail}@node0"])


def sent(sidecar: Sidecar) -> dict[str, int]:
    return {rail["name"]: rail["tx_bytes"] for rail in sidecar.ask("/v1/rails")["rails"]}


def impacts(sidecar: Sidecar) -> list[Any]:
    """Returns the impact of rail events on each stalled request, newest first."""
    waited = sidecar.ask("/v1/requests?waited=true")["requests"]
    return [sidecar.ask(f"/v1/requests/{request['id']}/impact") for request in waited]


def was_lost(impact: Any, rail: str, since: float) -> bool:
    """Whether a loss of the rail after `since` is among the causes of the request's stalls."""
    return any(
        event["rail"] == rail
        and event["text"].startswith("UP->")
        and datetime.fromisoformat(event["time"]).timestamp() >= since
        for event in impact["events"]
    )


def is_up(sidecar: Sidecar, rail: str) -> bool:
    rails = sidecar.ask("/v1/rails")["rails"]
    return all(one["state"] == "UP" for one in rails if one["name"] == rail)


def folder_of(sidecar: Sidecar, rank: int) -> dict[str, str]:
    """Returns the journal folder's option for rank 0: the sidecar reads only rank 0's node."""
    return {"journal_dir": str(sidecar.folder)} if rank == 0 else {}
