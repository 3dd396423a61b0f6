"""`r2serve bench serve`: results of runs, and the files that keep the results."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from r2serve.bench.collectives.markdown import MarkerError
from r2serve.bench.serve import (
    compare,
    contenders,
    outcome,
    plots,
    report,
    runner,
    scenarios,
    store,
)
from r2serve.bench.serve.outcome import Goal
from r2serve.bench.serve.store import Rows, TokenTimes
from r2serve.bench.serve.workload import arrange
from r2serve.lab.serving.client import Request, Run

pytestmark = pytest.mark.slow

ABOUT = {
    "commit": "c1",
    "date": "today",
    "command": "r2serve bench serve",
    "machine": {"cpu": "x", "cores": 2, "memory_gib": 8, "kernel": "6", "load_before": 0.1},
}

# ---- results of runs ----


def request(*times_ms: float, ids: tuple[int, ...] | None = None, **changes: Any) -> Request:
    times = tuple(int(time * 1e6) + 1 for time in times_ms)
    given = tuple(range(len(times))) if ids is None else ids
    return Request(given, times, **({"error": "", "finished": True, "sent_ns": 1} | changes))


def test_latencies_are_measured_at_the_client() -> None:
    never = request(error="unfinished when stopped", finished=False, sent_ns=0)
    cut = request(5, error="cut", finished=False)
    run = Run((request(10, 20, 40), request(30, 130), cut, never))
    row = outcome.describe(run, None, Goal(ttft_ms=20, tpot_ms=50))
    assert row["requests"] == {
        "sent": 3,
        "completed": 2,
        "failed": 1,
        "never_sent": 1,
        "wrong": None,
        "sent_again": 0,
        "good": 1,
    }
    assert row["ttft_ms"] == {"p50": 10.0, "p95": 30.0, "p99": 30.0}
    assert row["tpot_ms"] == {"p50": 15.0, "p95": 100.0, "p99": 100.0}
    assert row["itl_ms"]["p50"] == 20.0
    assert row["e2e_ms"] == {"p50": 40.0, "p95": 130.0, "p99": 130.0}
    assert row["longest_gap_ms"] == 100.0
    assert row["errors"] == ["cut", "unfinished when stopped"]
    assert row["seconds"] == 0.13


def test_a_run_without_tokens_has_no_latencies() -> None:
    row = outcome.describe(Run((request(error="gone", finished=False),)), None, Goal())
    assert row["ttft_ms"] is row["e2e_ms"] is row["longest_gap_ms"] is None
    assert row["goodput_per_s"] == 0.0


@pytest.mark.parametrize(
    ("got", "wrong"),
    [
        (request(1, 2, ids=(4, 5)), 0),
        (request(1, 2, ids=(4, 6)), 1),
        (request(1, ids=(4,)), 1),  # the short answer claims to be complete
        (request(1, ids=(4,), error="cut", finished=False), 0),
        (request(1, ids=(7,), error="cut", finished=False), 1),
    ],
)
def test_answers_that_differ_from_the_reference_are_wrong(got: Request, wrong: int) -> None:
    assert outcome.wrong(Run((request(1, 2, ids=(4, 5)),)), Run((got,))) == wrong


def test_text_is_compared_without_token_ids() -> None:
    want = request(1, ids=(), text="one two")
    assert not outcome.differs(want, request(1, ids=(), text="one two"))
    assert outcome.differs(want, request(1, ids=(), text="one too"))
    assert not outcome.differs(want, request(1, ids=(), text="one", finished=False))


# ---- turns and rows ----


def options(**changes: Any) -> runner.RunOptions:
    given = {
        "workload": arrange([("a", 2)], 0, concurrency=1),
        "contenders": ("r2ccl", "gloo"),
        "scenarios": {"healthy": (), "carrier-loss": scenarios.scenario("carrier-loss")},
    }
    return runner.RunOptions(**(given | changes))


def test_contenders_alternate_and_take_turns_in_going_first() -> None:
    order = list(runner.turns(options(pairs=2)))
    assert len(order) == len(set(order)) == 8
    assert [name for _, _, name in order[::2]] == ["r2ccl", "gloo", "r2ccl", "gloo"]
    assert [name for _, name, _ in order[::2]] == [
        "healthy",
        "carrier-loss",
        "carrier-loss",
        "healthy",
    ]


def a_row(contender: str, pair: int = 0, **more: Any) -> dict[str, Any]:
    return {"key": "k", "contender": contender, "scenario": "healthy", "pair": pair, **more}


def test_a_measured_row_is_not_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = Rows(path, ABOUT)
    rows.add(a_row("r2ccl"))
    rows.add(a_row("gloo", not_run="no gloo"))
    again = Rows(path, ABOUT)
    assert again.find("k", "healthy", "r2ccl", 0) is not None
    assert again.find("k", "healthy", "gloo", 0) is None
    assert again.find("k", "healthy", "r2ccl", 1) is None
    assert again.find("other", "healthy", "r2ccl", 0) is None
    assert Rows(path, ABOUT | {"commit": "c2"}).find("k", "healthy", "r2ccl", 0) is None
    assert Rows(path, ABOUT, label="x").find("k", "healthy", "r2ccl", 0) is None
    # A row without token times is measured again if a folder for times is given.
    with_times = Rows(path, ABOUT, folder=tmp_path / "runs")
    assert with_times.find("k", "healthy", "r2ccl", 0) is None
    kept = with_times.add(a_row("r2ccl"), TokenTimes(((0.0, (1.0, 2.5)),)))
    assert with_times.find("k", "healthy", "r2ccl", 0) == kept
    assert with_times.times(kept) == TokenTimes(((0.0, (1.0, 2.5)),))
    assert rows.times(kept) is None


def test_a_file_keeps_the_newest_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    old = Rows(path, ABOUT)
    for row in (a_row("r2ccl"), a_row("r2ccl", 1), a_row("gloo")):
        old.add(row)
    Rows(path, ABOUT, label="x").add(a_row("r2ccl"))
    new = Rows(path, ABOUT | {"commit": "c2"})
    mine = [new.add(a_row("r2ccl")), new.add(a_row("ecmp", not_run="no"))]
    others = new.tidy(mine)
    assert [(row["commit"], row["label"], row["contender"]) for row in others] == [
        ("c1", "", "gloo"),
        ("c1", "x", "r2ccl"),
    ]
    assert len(store.read(path)) == 4  # the second pair of the old commit is removed, too


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for text, said in (("{", "line 1 is no row"), ('{"key": 1}', "commit, contender, label")):
        path.write_text(text + "\n")
        with pytest.raises(ValueError, match=said):
            Rows(path, ABOUT)


def test_another_workload_is_another_measurement() -> None:
    one = options()
    assert one.key("carrier-loss") == options(pairs=9, contenders=("r2ccl",)).key("carrier-loss")
    assert one.key("carrier-loss") != one.key("healthy")
    other = options(workload=arrange([("b", 2)], 0, concurrency=1))
    assert one.key("carrier-loss") != other.key("carrier-loss")
    assert one.key("carrier-loss") != options(engine="sglang").key("carrier-loss")
    without_a_management_nic = options(scenarios={"mgmt-is-rail0": ()})
    assert without_a_management_nic.key("mgmt-is-rail0") != one.key("healthy")


def test_token_times_count_from_the_start_of_the_run() -> None:
    never = request(error="unfinished", finished=False, sent_ns=0)
    one, two = request(10, 20, sent_ns=3_000_000), request(12, sent_ns=5_000_000)
    times = TokenTimes.of(Run((one, never, two)))
    assert times.requests == ((0.0, (7.0, 17.0)), (2.0, (9.0,)))


# ---- pairs ----


def pairs(change: float, count: int = 5, requests: int = 300, noise: float = 0.02) -> list[Any]:
    """Returns rows of pairs; a lost rail multiplies all latencies by `change`."""
    source = random.Random(7)
    rows = []
    for pair in range(count):
        for scenario, factor in (("healthy", 1.0), ("permanent", change)):
            values = [100 * factor * source.uniform(1 - noise, 1 + noise) for _ in range(requests)]
            samples = {"e2e_ms": values, "tpot_ms": values}
            rows.append(
                {"label": "", "scenario": scenario, "contender": "r2ccl", "pair": pair}
                | {"samples": samples}
            )
    return rows


@pytest.mark.parametrize(
    ("change", "noise", "said"),
    [(1.0, 0.001, "met"), (1.5, 0.02, "not reached"), (1.012, 0.3, "not resolved")],
)
def test_a_target_is_met_if_its_whole_interval_is_within(
    change: float, noise: float, said: str
) -> None:
    found = compare.verdicts(pairs(change, noise=noise))
    assert [each.contender for each in found] == ["r2ccl", "r2ccl"]
    assert found[1].said == said
    for each in found:
        assert each.low <= each.ratio <= each.high
        assert each.ratio == pytest.approx(change, rel=0.05)


def test_pairs_are_of_one_label() -> None:
    others = [row | {"label": "x"} for row in pairs(1.5)]
    found = compare.verdicts([*pairs(1.0, noise=0.001), *others])
    assert [each.said for each in found] == ["met", "met", "not reached", "not reached"]


def test_too_few_pairs_give_no_verdict() -> None:
    for rows in (pairs(1.0, count=4), pairs(1.0, requests=299)):
        assert all(each.said.startswith("too few") for each in compare.verdicts(rows))
    assert compare.verdicts(pairs(1.0)[:1]) == []


def test_a_progress_bar_shows_the_finished_part() -> None:
    assert [contenders.bar(part, 4) for part in (0, 0.5, 1, 7)] == ["╌╌╌╌", "━━╌╌", "━━━━", "━━━━"]


# ---- tables, pages and pictures ----


def measured(rows: Rows, contender: str, scenario: str, **changes: Any) -> dict[str, Any]:
    run = Run((request(10, 20, 40), request(30, 130)))
    faults = [{"at_s": 0.01, "healed_at_s": None, "fault": "at: 0s, cut: rail0@node1"}]
    about = {"contender": contender, "scenario": scenario, "pair": 0, "key": "k"}
    row = {
        **about,
        **outcome.describe(run, run, Goal()),
        "faults": faults,
        "serves": "vllm <serve>",
    }
    return rows.add({**row, **changes}, TokenTimes.of(run))


WAITED = {
    "requests": [{"request": 0, "sidecar_ms": 200.0, "client_ms": 203.0}],
    "agree": 1,
    "jitter_ms": 13.6,
}


def test_pictures_and_page_have_every_contender_and_are_self_contained(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = Rows(tmp_path / "rows.jsonl", ABOUT, folder=tmp_path / "runs")
    found = [
        measured(rows, "r2ccl", "carrier-loss", impact=WAITED),
        measured(rows, "gloo", "carrier-loss"),
        rows.add(
            {"contender": "ecmp", "scenario": "carrier-loss", "pair": 0, "key": "k"}
            | {"not_run": "no <bird>"}
        ),
    ]
    pictures = plots.draw(found, rows.times, tmp_path)
    assert sorted(path.name for path in pictures.values()) == [
        "serve-carrier-loss-cdf.png",
        "serve-carrier-loss-timeline.png",
        "serve-impact.png",
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures.values())
    page = tmp_path / "index.html"
    report.write_page(found, compare.verdicts(pairs(1.0)), pictures, page)
    text = page.read_text()
    assert "not run: no &lt;bird&gt;" in text
    assert "vllm &lt;serve&gt;" in text
    assert text.count("data:image/png;base64,") == 3
    assert not re.search(r"(?:src|href)=\"(?!data:)", text)
    assert "1 of 1 (±14 ms)" in text
    assert "met" in text


def test_dots_are_drawn_in_front_of_shaded_areas(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = Rows(None, ABOUT)
    row = measured(rows, "r2ccl", "carrier-loss")
    [strip] = plots.timeline([(row, TokenTimes(((0.0, (7.0, 17.0)),)))]).axes
    [shade], [dots] = strip.patches, strip.collections
    assert shade.get_zorder() < dots.get_zorder()


def test_contenders_not_run_are_shown(capsys: Any) -> None:
    rows = Rows(None, ABOUT)
    measured(rows, "r2ccl", "carrier-loss", impact=WAITED)
    found = [
        measured(rows, "r2ccl", "healthy"),
        rows.add(
            {"contender": "gloo", "scenario": "healthy", "pair": 0, "key": "k"}
            | {"not_run": "no [/tcp/pair.cc:152]"}
        ),
    ]
    report.show(found, [])
    said = capsys.readouterr().out
    assert all(
        name in said for name in ("sent again", "longest gap", "sidecar agrees")
    )  # a terminal with 80 columns cuts nothing off
    assert "healthy, gloo: not run: no [/tcp/pair.cc:152]" in said
    assert "30 / 30" not in said.splitlines()[-1]


def test_docs_mark_stale_rows(tmp_path: Path) -> None:
    docs = tmp_path / "page.md"
    docs.write_text(f"# Above\n\n{report.BEGIN}\nold\n{report.END}\n\nbelow\n")
    path = tmp_path / "rows.jsonl"
    old = Rows(path, ABOUT | {"commit": "c0", "date": "then"})
    measured(old, "r2ccl", "healthy")
    measured(old, "r2ccl", "slow")
    rows = Rows(path, ABOUT)
    found = [measured(rows, "r2ccl", "healthy")]
    others = rows.tidy(found)
    report.put(found, others, [], {"a": Path("a.png")}, docs)
    text = docs.read_text()
    assert text.startswith("# Above\n\n")
    assert text.endswith("\n\nbelow\n")
    assert "old" not in text
    assert "![a](a.png)" in text
    current, stale = text.split("**Stale**: measured at commit `c0`, then")
    assert "| healthy | r2ccl |" in current
    assert "| slow | r2ccl |" in stale
    assert "| healthy | r2ccl |" not in stale
    report.put(found, others, [], {}, docs)  # written again, over the earlier output
    assert docs.read_text().count("**Stale**") == 1
    docs.write_text("# no markers\n")
    with pytest.raises(MarkerError, match=r"page\.md has no lines"):
        report.put(found, others, [], {}, docs)
