"""The dashboard of a node of full size: 8 workers, 8 rails and 8 peers, one NIC dead, one slow."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from full_node import DEAD, HOST, SLOW, StillWatch, full_node
from pages import picture, row_of
from timely import timely

from r2serve.observe import health
from r2serve.observe.sidecar.app import make_app
from r2serve.observe.sidecar.requests import RequestsView, RequestView
from r2serve.observe.sidecar.server import bound, place_of, server_of

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

MODEL = "Qwen/Qwen3-32B"
LONG_ID = "chatcmpl-" + "0123456789abcdef" * 7
SMALLEST_PX = 12
MOST_ELEMENTS = 3_000
"""Of the whole page, with 512 ends of rails, 200 events and closed faults."""

_SMALLEST = """() => Math.min(...[...document.querySelectorAll("body *")]
  .filter((each) => [...each.childNodes].some((one) => one.nodeType === 3 && one.data.trim()))
  .filter((each) => each.tagName !== "title" && each.getClientRects().length)
  .map((each) => parseFloat(getComputedStyle(each).fontSize) *
    (each.ownerSVGElement ? each.getScreenCTM().a : 1)))"""


@dataclass
class Served:
    url: str
    watch: StillWatch
    state: Any


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    watch = full_node(tmp_path)
    app = make_app(watch)
    state = app.state.sidecar
    state.requests.about = lambda: {key: {"model_name": MODEL} for key in watch.workers}
    server, listening = server_of(app), bound("127.0.0.1", 0, 0)
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    timely(lambda: server.started, "the sidecar answers", within_s=120)
    yield Served(place_of(listening, tls=False), watch, state)
    server.should_exit = True
    thread.join()


def refreshes(page: Any, number: int) -> None:
    """Waits for `number` further answers on the page."""
    for _ in range(number + 1):  # the first answer may be one that was asked for earlier
        with page.expect_response("**/v1/sidecar"):
            continue


def bottom_of(box: Any) -> float:
    return float(box["y"] + box["height"])


def boxes(page: Any, *selectors: str) -> list[Any]:
    return [page.locator(selector).bounding_box() for selector in selectors]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
def test_a_full_node_is_seen_at_a_glance(served, page, width: int, height: int) -> None:
    expect = playwright.expect
    page.set_viewport_size({"width": width, "height": height})
    page.goto(served.url)
    expect(page.get_by_role("status")).to_have_text("Degraded: requests are served")
    told = page.get_by_label("What is wrong").locator("summary")
    expect(told).to_have_text(list(health.examine(served.watch).reasons))
    expect(page.locator("#node")).to_have_text(f"{HOST} · {MODEL} · 8 workers")
    for looks, ports in (("bad", 1), ("warn", 1), ("good", 6)):
        expect(page.locator(f"#picture line.{looks}")).to_have_count(ports)
    expect(page.locator("#picture")).to_contain_text("DOWN (reconnecting)")

    pill, drawn, causes = boxes(page, "#health", "#picture", "#reasons")
    assert bottom_of(pill) <= drawn["y"]
    assert bottom_of(drawn) <= causes["y"]
    assert bottom_of(causes) <= height, "pill, picture and causes are the first screen"
    tops = [one.bounding_box() for one in page.locator("main section:not([hidden])").all()]
    assert min(one["y"] for one in tops) >= bottom_of(causes)
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    assert page.evaluate(_SMALLEST) >= SMALLEST_PX
    assert page.locator("*").count() < MOST_ELEMENTS
    picture(page, f"dashboard-full-{width}")

    dead = row_of(page, f"rail{DEAD}@node0").locator("td")
    expect(dead.nth(1)).to_have_text("DOWN (reconnecting)")
    expect(dead.nth(2)).to_contain_text("2026-11-22 ")
    expect(dead.nth(2)).to_contain_text(" d)")
    expect(dead.nth(5)).to_have_text("0 of 64")
    expect(row_of(page, f"rail{SLOW}@node0").locator("td").nth(1)).to_have_text("UP, slow")
    expect(page.locator("#events time").first).to_contain_text("2026-11-22 ")
    assert page.problems == []


@pytest.mark.long
@pytest.mark.timeout(600)
def test_an_open_fault_stays_open_and_keeps_the_focus(served, page) -> None:
    expect = playwright.expect
    page.goto(served.url)
    faults = page.locator("#reasons > li")
    ends = faults.first.get_by_role("listitem")
    expect(faults).to_have_count(2)
    expect(ends).to_have_count(0)
    faults.first.locator("summary").focus()
    page.keyboard.press("Enter")
    expect(ends).to_have_count(64)
    expect(ends.first).to_contain_text("rank 0: rail3@node0 to rank 8 is DOWN")
    refreshes(page, 2)
    expect(ends).to_have_count(64)
    assert page.evaluate("() => document.activeElement.tagName") == "SUMMARY"
    worker = next(iter(served.watch.workers.values()))
    up = [replace(rail, state="UP", cause="none") for rail in worker.journal.rails]
    worker.journal = replace(worker.journal, rails=up)
    served.state.health.looked()
    expect(ends).to_have_count(56)
    expect(faults.first.locator("summary")).to_contain_text("56 of 64 links of 7 workers")
    assert page.evaluate("() => document.activeElement.tagName") == "SUMMARY"
    page.keyboard.press("Enter")
    expect(ends).to_have_count(0)
    assert page.problems == []


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_long_id_is_shortened_and_whole_on_hover(served, page) -> None:
    extra: Any = RequestView.model_config["json_schema_extra"]
    fields = extra["examples"][0]
    made = RequestView.model_validate(fields | {"id": LONG_ID})
    answer = RequestsView(requests=[made], next=0, known=1, unreadable={})
    page.route(
        re.compile("/v1/requests[?]"),
        lambda route: route.fulfill(body=answer.model_dump_json(), content_type="application/json"),
    )
    page.goto(served.url)
    link = page.locator("#requests").get_by_role("link")
    playwright.expect(link).to_have_text("chatcmpl-012345…89abcdef")
    assert link.get_attribute("title") == LONG_ID
    assert page.problems == []


@pytest.mark.long
@pytest.mark.timeout(600)
def test_thousands_of_flaps_of_all_ends_do_not_grow_the_page(served, page, show) -> None:
    expect = playwright.expect
    began_ns = time.time_ns() - 60 * 1_000_000_000
    known = [one for one in served.watch.events if one.event.kind == "rail_state"]
    flaps = [
        replace(
            known[number % len(known)],
            clock_ns=began_ns + number * 5_000_000,
            event=replace(
                known[number % len(known)].event,
                text="UP->DOWN carrier_loss" if number // len(known) % 2 else "PROBATION->UP",
            ),
        )
        for number in range(9_000)
    ]
    served.watch.add(flaps)
    page.goto(served.url)
    expect(page.locator("#timeline rect")).not_to_have_count(0)
    expect(page.locator("#events li")).to_have_count(200)
    refreshes(page, 2)
    assert page.locator("#timeline rect").count() < page.evaluate("() => innerWidth")
    assert page.locator("*").count() < MOST_ELEMENTS
    longest_ms = page.evaluate(
        """() => new Promise((done) => {
          const seen = [0];
          const note = (list) => seen.push(...list.getEntries().map((one) => one.duration));
          new PerformanceObserver(note).observe({ type: "longtask" });
          setTimeout(() => done(Math.max(...seen)), 5000);
        })"""
    )
    show(f"longest task of the page in 5 s: {longest_ms:.0f} ms")
    assert page.problems == []
