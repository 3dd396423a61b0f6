"""Token comparison, verdict, JSON schema and table of the demo's report."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from r2serve.demo.report import (
    BaselineReport,
    FaultReport,
    ManagementReport,
    Mismatch,
    Report,
    compare,
    render,
)
from r2serve.lab.serving.client import Request, Run


def run_of(*streams: list[int]) -> Run:
    return Run(
        tuple(
            Request(tuple(ids), tuple(range(0, len(ids) * 1000, 1000)), "", True) for ids in streams
        )
    )


def fault(kind: str, rail: str, after: str, **changes: Any) -> FaultReport:
    values: dict[str, Any] = {
        "kind": kind,
        "rail": rail,
        "bytes_before": 4096,
        "replayed_chunks": 2,
        "hedged_chunks": 0,
        "rail_after": after,
        "stall_ms_max": 3.25,
        "stalls": 1,
        "missed_strikes": 0,
        "rejoin_ms": 80.0,
        "tokens_per_s": {"before": 400.0, "during": 380.0, "after": 401.0},
    }
    return FaultReport(**{**values, **changes})


def good_report() -> Report:
    return Report(
        mode="2 nodes with 2 rails each",
        sent=8,
        completed=8,
        tokens_each=100,
        compared=True,
        faults=[
            fault("carrier_loss", "rail0@node0", "rail1@node0"),
            fault("black_hole", "rail1@node1", "rail0@node1"),
        ],
        management=ManagementReport(1, 3.0004, 41.25),
        tokens_per_s={"undisturbed": 400.0, "disturbed": 390.0},
        decode_step_ms=9.5,
    )


def test_equal_runs_have_no_mismatch() -> None:
    assert compare(run_of([1, 2], [3]), run_of([1, 2], [3])) == []


def test_the_first_difference_of_each_request_is_named() -> None:
    found = compare(run_of([1, 2, 3], [4, 5], [6]), run_of([1, 9, 9], [4], [6]))
    assert found == [Mismatch(0, 1), Mismatch(1, 1)]


def test_a_different_number_of_requests_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="1 requests against 2"):
        compare(run_of([1], [2]), run_of([1]))


def test_json_has_the_promised_fields() -> None:
    data = json.loads(json.dumps(good_report().to_json()))
    assert data["requests"] == {"sent": 8, "completed": 8, "failed": 0}
    assert data["tokens_identical"] is True
    assert data["passed"] is True
    assert [item["kind"] for item in data["faults"]] == ["carrier_loss", "black_hole"]
    wanted = {"kind", "rail", "bytes_before", "replayed_chunks", "rail_after", "stall_ms_max"}
    for item in data["faults"]:
        assert wanted <= set(item)
    assert data["faults"][0]["stall_ms_max"] == 3.25
    assert data["management"] == {
        "kind": "carrier_loss",
        "node": 1,
        "away_s": 3.0,
        "longest_gap_ms": 41.25,
    }
    assert data["baseline"] is None


def test_a_measured_baseline_is_in_the_json() -> None:
    report = good_report()
    report.baseline = BaselineReport(20.5, 380.0, 30.0, 30.0, 8, 8)
    assert report.to_json()["baseline"]["requests"] == {"sent": 8, "unfinished": 8}
    assert report.to_json()["baseline"]["frozen_s"] == 30.0


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"bytes_before": 0}, "the rail was idle"),
        ({"stalls": 0}, "no collective stalled"),
        ({"replayed_chunks": 0}, "no chunk was replayed"),
        ({"after": "rail0@node0"}, "did not move"),
        ({"after": ""}, "did not move"),
        ({"rejoin_ms": None}, "did not rejoin"),
    ],
)
def test_a_fault_that_proves_nothing_fails_the_demo(change: dict[str, Any], problem: str) -> None:
    report = good_report()
    report.faults[0] = fault("carrier_loss", "rail0@node0", **{"after": "rail1@node0", **change})
    assert not report.passed
    assert any(problem in text for text in report.problems())


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("completed", 7, "1 of 8 requests were lost"),
        ("sent", 0, "no request was sent"),
        ("mismatches", [Mismatch(3, 17)], "request 3: token 17 differs"),
        ("compared", False, "not compared"),
        ("faults", [], "the carrier_loss fault was not made"),
        (
            "management",
            ManagementReport(1, 3.0, 3100.0),
            "management NIC of node 1 away for 3.0 s: no token for 3.1 s",
        ),
        ("errors", ["the server ended"], "the server ended"),
    ],
)
def test_problems_that_fail_the_demo(name: str, value: object, problem: str) -> None:
    report = good_report()
    setattr(report, name, value)
    assert not report.passed
    assert report.to_json()["passed"] is False
    assert any(problem in text for text in report.problems())


def test_unequal_tokens_are_not_identical() -> None:
    report = good_report()
    report.mismatches = [Mismatch(0, 0)]
    assert report.to_json()["tokens_identical"] is False


def shown(report: Report) -> str:
    output = io.StringIO()
    render(report, Console(file=output, width=160))
    return output.getvalue()


def test_the_table_shows_the_outcome() -> None:
    text = shown(good_report())
    for wanted in ("8 of 8", "identical", "rail0@node0", "black_hole", "3.2", "passed"):
        assert wanted in text
    # A rate also follows the machine's other work, so the table has stalls, and JSON has rates.
    assert "tokens/s" not in text


def test_the_management_nic_is_shown_if_there_is_any() -> None:
    report = good_report()
    assert "management NIC of node 1 away for 3.0 s" in shown(report)
    assert "41 ms" in shown(report)
    report.management = None
    assert report.passed
    assert report.to_json()["management"] is None
    assert "management" not in shown(report)


def test_a_gap_counts_if_it_overlaps_the_fault() -> None:
    run = Run((Request((1, 2, 3), (0, 40_000_000, 50_000_000), "", True),))
    assert run.longest_gap_ms(30_000_000, 45_000_000) == 40.0
    assert run.longest_gap_ms(40_000_000, 45_000_000) == 10.0
    assert run.longest_gap_ms(60_000_000, 70_000_000) is None


def test_the_table_shows_a_failure() -> None:
    report = good_report()
    report.completed = 5
    text = shown(report)
    assert "failed:" in text
    assert "passed" not in text


def test_rates_count_only_their_window() -> None:
    second = 10**9
    run = Run((Request((1, 2, 3, 4), (0, second, 2 * second, 3 * second), "", True),))
    assert run.tokens_per_second(second, 3 * second) == pytest.approx(1.0)
    assert run.tokens_per_second(second, second) == 0.0


def test_a_step_is_the_median_gap_over_eight_steps() -> None:
    times = tuple(5_000_000 * i for i in range(40))
    run = Run((Request(tuple(range(40)), times, "", True),))
    assert run.step_ms() == pytest.approx(5.0)
    assert run.step_ms(0, 20_000_000) == 0.0
