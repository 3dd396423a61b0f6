"""The benchmark of the observers' cost: its parts run, and its targets are checked."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from r2serve.bench.observers import costs


def result(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "journal": {"clock_ns": 20.0, "record_ns": 49.0, "call_ns": 5.0},
        "attribution_us": {1: 2.0},
        "requests_mb": 60.0,
        "load": {"requests_per_s": 1990.0, "p99_ms": 5.0, "failed": 0.0},
        "scraped": {1024: 1.01},
    }
    return found | changes


def test_met_targets() -> None:
    assert [met for *_, met in costs.checks(result())] == [True] * 5


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"journal": {"clock_ns": 20.0, "record_ns": 51.0, "call_ns": 5.0}}, 0),
        ({"requests_mb": 100.0}, 1),
        ({"load": {"requests_per_s": 800.0, "p99_ms": 5.0, "failed": 0.0}}, 2),
        ({"load": {"requests_per_s": 1990.0, "p99_ms": 5.0, "failed": 1.0}}, 2),
        ({"load": {"requests_per_s": 1990.0, "p99_ms": 21.0, "failed": 0.0}}, 3),
        ({"scraped": {1024: 1.03}}, 4),
    ],
)
def test_missed_targets(changes: dict[str, Any], place: int) -> None:
    met = [met for *_, met in costs.checks(result(**changes))]
    assert met == [at != place for at in range(5)]


def test_a_report_shows_every_target(capsys: pytest.CaptureFixture[str]) -> None:
    costs.show(result(), Console(width=120))
    shown = capsys.readouterr().out
    for what, *_ in costs.checks(result()):
        assert what in shown


@pytest.mark.slow
def test_a_journal_in_a_worker_is_measured() -> None:
    measured = costs.journal_costs()
    assert set(measured) == {"clock_ns", "record_ns", "call_ns"}
    assert min(measured.values()) > 0


def test_attribution_is_measured_at_every_size() -> None:
    measured = costs.attribution_costs()
    assert set(measured) == set(costs.BATCHES)
    assert measured[256] > measured[1] > 0


@pytest.mark.slow
def test_the_memory_of_requests_is_measured() -> None:
    assert costs.requests_memory(1000) > 0.5
