"""Verdict and report of the collectives benchmark."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from r2serve.bench.collectives import machine, markdown, report
from r2serve.bench.collectives.matrix import CollectiveCall, Contender, Setting
from r2serve.bench.collectives.resilience import Pairs, evaluate
from r2serve.bench.collectives.runner import Skipped
from r2serve.bench.collectives.stalls import MeasuredFault
from r2serve.bench.collectives.stalls import summarise as summarise_faults
from r2serve.bench.collectives.statistics import LatencyRow, summarise
from r2serve.bench.collectives.verdict import Check, gloo_factor, verdicts

KIB, MIB = 1 << 10, 1 << 20
ISSUE_KEYS = {
    "op",
    "bytes",
    "dtype",
    "ranks",
    "rails",
    "impl",
    "algorithm",
    "state",
    "p50_us",
    "p99_us",
    "cpu_ns_per_byte",
}


def row(
    impl: str,
    size: int,
    p50_us: float,
    algorithm: str = "auto",
    ranks: int = 2,
    state: str = "healthy",
    rails: int = 2,
) -> LatencyRow:
    times = [[int(p50_us * 1000)] * 3] * ranks
    workload = CollectiveCall("all_reduce", size, "float32")
    cpu_ns = int(ranks * 3 * p50_us * 500)  # half of the wall-clock time
    setting = Setting(ranks, rails, state)
    return summarise(setting, workload, Contender(impl, algorithm), times, cpu_ns)


def rows(size: int, **p50_us: float) -> list[LatencyRow]:
    return [row(impl, size, value) for impl, value in p50_us.items()]


def pairs(on: int, off: int) -> Pairs:
    workload = CollectiveCall("all_reduce", KIB, "float32")
    return evaluate(Setting(2, 2), workload, [[on]] * 10, [[off]] * 10)


def by_target(checks: list[Check]) -> dict[str, bool]:
    return {check.target: check.met for check in checks}


def test_small_sizes_are_compared_with_the_floor_and_gloo() -> None:
    met = verdicts(rows(4 * KIB, r2ccl=6.25, gloo=100, openmpi=8, floor=5))
    assert by_target(met) == {"4 KiB: r2ccl / floor": True, "4 KiB: gloo / r2ccl": True}
    missed = verdicts(rows(64 * KIB, r2ccl=12.6, gloo=125.9, floor=10))
    assert by_target(missed) == {"64 KiB: r2ccl / floor": False, "64 KiB: gloo / r2ccl": False}


def test_gloos_factor_shrinks_if_gloo_is_near_the_floor() -> None:
    assert gloo_factor(gloo=125, floor=10) == 10
    assert gloo_factor(gloo=110, floor=10) == pytest.approx(8.8)
    assert gloo_factor(gloo=110, floor=None) == 10


@pytest.mark.parametrize(("r2ccl", "met"), [(12, True), (12.1, False)])
def test_one_mib_is_near_the_floor(r2ccl: float, met: bool) -> None:
    checks = verdicts(rows(MIB, r2ccl=r2ccl, gloo=300, floor=10))
    assert by_target(checks) == {"1 MiB: r2ccl / floor": met}


@pytest.mark.parametrize(("r2ccl", "met"), [(20, True), (20.1, False)])
def test_64_mib_is_compared_with_the_floors_bandwidth(r2ccl: float, met: bool) -> None:
    checks = verdicts(rows(64 * MIB, r2ccl=r2ccl, floor=17))
    assert by_target(checks) == {"64 MiB: floor / r2ccl": met}


def test_four_ranks_must_not_be_slower_than_other_contenders() -> None:
    def crowded(size: int, **p50_us: float) -> dict[str, bool]:
        return by_target(verdicts([row(impl, size, us, ranks=4) for impl, us in p50_us.items()]))

    assert crowded(KIB, r2ccl=50, gloo=50, openmpi=49) == {
        "4 ranks, 1 KiB: r2ccl / gloo": True,
        "4 ranks, 1 KiB: r2ccl / Open MPI": False,
    }
    assert crowded(64 * MIB, r2ccl=50, gloo=50) == {"4 ranks, 64 MiB: r2ccl / gloo": True}
    assert crowded(512, r2ccl=50, gloo=40) == {}


@pytest.mark.parametrize(("slow_us", "met"), [(400, True), (401, False), (300, True)])
def test_a_slow_rail_is_compared_with_the_job_without_this_rail(slow_us: float, met: bool) -> None:
    lost = row("r2ccl", MIB, 360, state="one-lost")
    slow = row("r2ccl", MIB, slow_us, state="slow")
    assert by_target(verdicts([slow, lost])) == {"1 MiB: r2ccl, one-lost / slow": met}


def test_a_slow_rail_without_the_same_point_of_a_lost_rail_has_no_verdict() -> None:
    slow = row("r2ccl", MIB, 500, state="slow")
    assert verdicts([slow, row("r2ccl", MIB, 360)]) == []
    for other in (
        row("openmpi", MIB, 360, state="one-lost"),
        row("r2ccl", MIB, 360, "one_shot", state="one-lost"),
        row("r2ccl", MIB, 360, ranks=4, state="one-lost"),
        row("r2ccl", 4 * MIB, 360, state="one-lost"),
        row("r2ccl", MIB, 360, state="one-lost", rails=3),
    ):
        assert verdicts([slow, other]) == []


def test_no_verdict_without_r2ccl_nor_on_other_matrices() -> None:
    assert verdicts(rows(4 * KIB, gloo=100, floor=4)) == []
    assert verdicts(rows(KIB, r2ccl=5, gloo=100, floor=4)) == []
    assert verdicts([row("r2ccl", 4 * KIB, 5, "one_shot"), row("floor", 4 * KIB, 4)]) == []
    assert verdicts([row("r2ccl", KIB, 5, ranks=3), row("gloo", KIB, 90, ranks=3)]) == []
    assert verdicts(rows(256 * KIB, r2ccl=50, gloo=100, floor=40)) == []


@pytest.mark.parametrize(("on", "met"), [(1030, True), (1031, False), (900, True)])
def test_resilience_may_cost_three_percent(on: int, met: bool) -> None:
    (check,) = verdicts([], [pairs(on, 1000)])
    assert check.met is met


def fault(kind: str, stall_ms: float, next_ratio: float = 1.0) -> MeasuredFault:
    return MeasuredFault(kind, KIB, 0, 1, stall_ms, undisturbed_ms=5.0, next_ratio=next_ratio)


@pytest.mark.parametrize(
    ("kind", "stall_ms", "met"),
    [
        ("carrier_loss", 20.0, True),
        ("carrier_loss", 20.1, False),
        ("black_hole", 105.0, True),
        ("black_hole", 105.1, False),
    ],
)
def test_the_worst_stall_counts(kind: str, stall_ms: float, met: bool) -> None:
    summaries = summarise_faults([fault(kind, 1.0), fault(kind, stall_ms), fault(kind, 1.0)])
    stall, following = verdicts([], [], summaries)
    assert stall.met is met
    assert stall.measured == stall_ms
    assert following.met


def test_the_calls_after_a_fault_are_compared_with_one_healthy_rail() -> None:
    summaries = summarise_faults([fault("carrier_loss", 1, ratio) for ratio in (1.0, 1.11, 1.2)])
    assert [check.met for check in verdicts([], [], summaries)] == [True, False]


def full_report() -> report.CollectivesReport:
    measured = rows(4 * KIB, r2ccl=6, gloo=120, openmpi=9, mpich=12, floor=5)
    measured.append(row("r2ccl", 4 * KIB, 12, "two_shot"))
    compared = [pairs(1010, 1000)]
    return report.CollectivesReport(
        machine.describe(["bench", "collectives", "--json", "a file.json"]),
        rows=measured,
        skipped=[Skipped("floor (4 ranks, 2 rails)", "two ranks only")],
        resilience=compared,
        faults=[fault("carrier_loss", 4.0), fault("black_hole", 60.0), fault("black_hole", 40.0)],
        checks=verdicts(measured, compared),
    )


def test_json_has_the_promised_keys_and_the_machine(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    full_report().write_json(path)
    document: dict[str, Any] = json.loads(path.read_text())
    assert document["command"] == "r2serve bench collectives --json 'a file.json'"
    assert {"commit", "machine", "date", "versions"} <= document.keys()
    assert document["machine"]["cores"] >= 1
    for measured in document["rows"]:
        assert measured.keys() >= ISSUE_KEYS
        assert measured["state"] == "healthy"
    assert [r["impl"] for r in document["rows"]] == [
        "r2ccl",
        "gloo",
        "openmpi",
        "mpich",
        "floor",
        "r2ccl",
    ]
    assert document["rows"][5]["algorithm"] == "two_shot"
    assert document["skipped"] == [{"what": "floor (4 ranks, 2 rails)", "reason": "two ranks only"}]
    assert document["resilience"][0]["ratio"] == pytest.approx(1.01)
    assert [(s["kind"], s["faults"], s["stall_ms_worst"]) for s in document["stalls"]] == [
        ("carrier_loss", 1, 4.0),
        ("black_hole", 2, 60.0),
    ]
    assert len(document["faults"]) == 3
    assert all(check["met"] for check in document["verdict"])


def test_ratios_compare_rows_of_one_point_with_the_rows_own_algorithm() -> None:
    measured = full_report().rows + rows(16 * KIB, floor=1000)
    assert report.ratios(measured[0], measured) == {
        "r2ccl/floor": pytest.approx(1.2),
        "gloo/r2ccl": pytest.approx(20),
        "openmpi/r2ccl": pytest.approx(1.5),
        "mpich/r2ccl": pytest.approx(2),
    }
    assert report.ratios(measured[5], measured)["r2ccl/floor"] == pytest.approx(2.4)


def test_the_table_is_readable_in_80_columns() -> None:
    text = io.StringIO()
    report.show(full_report(), Console(file=text, width=80))
    shown = text.getvalue()
    for expected in ("r2ccl/two_shot", "20.00", "120.0", "60.00", "not measured", "two ranks only"):
        assert expected in shown
    assert "3 of 3 targets met" in shown
    assert "…" not in shown


def test_a_barrier_has_no_bytes_to_share_its_time_among() -> None:
    times = [[5000] * 3] * 2
    barrier = summarise(
        Setting(2, 2), CollectiveCall("barrier", 0, "float32"), Contender("r2ccl"), times, 9
    )
    assert report.cpu_cell(barrier) == ""
    text = io.StringIO()
    report.show(report.CollectivesReport({}, rows=[barrier, barrier]), Console(file=text, width=80))
    assert text.getvalue().count("0 B") == 1


def test_settings_without_time_are_reported() -> None:
    late = report.CollectivesReport({}, pending=["8 ranks, 3 rails, slow"])
    text = io.StringIO()
    report.show(late, Console(file=text, width=80))
    assert "no time for: 8 ranks, 3 rails, slow" in text.getvalue()
    assert late.as_json()["pending"] == ["8 ranks, 3 rails, slow"]


def test_a_missed_target_is_shown_with_its_ratio() -> None:
    missed = report.CollectivesReport({}, checks=verdicts(rows(4 * KIB, r2ccl=10, floor=5)))
    text = io.StringIO()
    report.show(missed, Console(file=text, width=100))
    assert "not reached" in text.getvalue()
    assert "0 of 1 targets met" in text.getvalue()


def test_the_report_names_a_commit_or_a_version() -> None:
    assert machine.commit()


def test_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "rows.png"
    report.write_png(full_report().rows + rows(16 * KIB, r2ccl=7, gloo=140), path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_results_in_docs_replace_the_older_results(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Benchmarks\n\n{markdown.MARKER}\n\nold numbers\n")
    markdown.put(full_report(), page)
    text = page.read_text()
    assert text.startswith(f"# Benchmarks\n\n{markdown.MARKER}\n\n- command: `r2serve bench")
    assert "old numbers" not in text
    assert "| 4 KiB | r2ccl | 6.0 | 6.0 | 6.0 | 5.46 | 0.732 | 1.20 | 20.00 | 1.50 | 2.00 |" in text
    assert "| black_hole | 1 KiB | 2 | 40.00 | 60.00 | 5.00 | 1.00 | 1.00 |" in text
    assert "| 4 KiB: r2ccl / floor | 1.2 | at most 1.25 | met |" in text
    markdown.put(full_report(), page)
    assert page.read_text().count("| 4 KiB | floor |") == 1


def test_docs_without_a_place_for_results_are_unchanged(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Another page\n")
    with pytest.raises(markdown.MarkerError, match="no line"):
        markdown.require_place(page)
    with pytest.raises(markdown.MarkerError, match="no line"):
        markdown.put(full_report(), page)
    assert page.read_text() == "# Another page\n"


def test_the_benchmarks_page_has_a_place_for_results() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"
    assert page.read_text().count(markdown.MARKER) == 1
