"""`r2serve bench control`: the pairs of faults, the verdicts, and the search for processes."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from r2serve.bench.control import costs, grid, jobs, outages
from r2serve.bench.control.cli import command
from r2serve.lab.kinds import KINDS
from r2serve.lab.schedule import Aim, is_second

# ---- the grid ----


@pytest.mark.parametrize("nics", [3, 5])
def test_each_fault_meets_each_fault_on_another_network(nics: int) -> None:
    found = grid.pairs(grid.KINDS, nics)
    assert {(each.first, each.second) for each in found} == {
        (first, second) for first in grid.KINDS for second in grid.KINDS
    }
    assert all(each.at[1] != each.then_at[1] for each in found)
    ports = {(node, rail) for node in (0, 1) for rail in (None, *range(nics - 1))}
    assert {each.at for each in found} == {each.then_at for each in found} == ports


def test_the_default_faults_exist() -> None:
    assert set(grid.KINDS) <= set(KINDS)


def test_the_second_fault_strikes_during_the_first() -> None:
    pair = grid.FaultPair("slow", (0, None), "reset", (1, 1))
    faults = pair.faults()
    assert [fault.rail for fault in faults] == [Aim.MANAGEMENT, 1]
    assert is_second(faults, 1)
    assert {round(fault.end_s, 6) for fault in faults} == {grid.END_S}
    assert pair.as_row() == {"first": "slow: mgmt@node0", "second": "reset: rail1@node1"}


def trips(p50: float, worst: float) -> dict[str, Any]:
    return {kind: {"count": 9, "p50": p50, "p99": worst, "worst": worst} for kind in grid.TRIPS}


def test_limits_are_of_the_median_and_of_the_worst() -> None:
    direct = trips(0.2, 1.0)
    found = grid.judge(direct, trips(0.45, 2.0), [trips(0.4, 50.0), trips(0.4, 3.0)])
    assert (found["worst_ms"], found["worst_met"]) == (50.0, True)
    assert found["median_limits_ms"] == dict.fromkeys(grid.TRIPS, 0.45)
    assert all(found["median_met"].values())
    found = grid.judge(direct, trips(0.451, 2.0), [trips(0.4, 50.1)])
    assert not found["worst_met"]
    assert not any(found["median_met"].values())


@pytest.mark.parametrize("row", [{**trips(1, 1), "zmq": None}, {"failed": "ended"}])
def test_a_pair_without_round_trips_is_not_met(row: dict[str, Any]) -> None:
    found = grid.judge(trips(0.2, 1.0), trips(0.2, 1.0), [trips(1, 1), row])
    assert not found["worst_met"]
    assert found["worst_ms"] is None


# ---- ends and costs ----


def end(after_s: float | None, status: int | None = 70, *, typed: bool = True) -> dict[str, Any]:
    return {"after_s": after_s, "status": status, "typed": typed}


@pytest.mark.parametrize(
    ("ends", "met"),
    [
        ([end(2.9), end(3.0)], True),
        ([end(2.9), end(3.1)], False),
        ([end(2.9), end(None, None)], False),
        ([end(2.9), end(2.9, 0)], False),
        ([end(2.9), end(2.9, typed=False)], False),
    ],
)
def test_both_nodes_must_end_in_time_with_the_typed_error(
    ends: list[dict[str, Any]], met: bool
) -> None:
    assert outages._met(ends, 3.0) is met


@pytest.mark.parametrize(
    ("cpu_percent", "rss_mb", "cheap"),
    [(0.2, 20.0, True), (0.21, 20.0, False), (0.2, 20.1, False)],
)
def test_an_idle_relay_keeps_both_limits(cpu_percent: float, rss_mb: float, cheap: bool) -> None:
    fine = {"cpu_percent": 0.0, "rss_mb": 1.0}
    assert costs.is_cheap([fine, {"cpu_percent": cpu_percent, "rss_mb": rss_mb}]) is cheap


# ---- processes ----

RELAY = ["python", "-c", "main()", "relay", "--node", "1", "--nodes", "2"]


@pytest.mark.parametrize(
    ("words", "is_relay"),
    [
        (RELAY, True),
        ([*RELAY, "--", "env", "python", "talk.py"], False),
        (["python", "namespaces.py", "enter", "12", "--", *RELAY], False),
        (["python", "talk.py"], False),
    ],
)
def test_a_relay_is_known_by_its_command(words: list[str], is_relay: bool) -> None:
    assert jobs.is_relay_of(words, 1) is is_relay
    assert not jobs.is_relay_of(words, 0)


def test_round_trips_have_percentiles() -> None:
    talk = pytest.importorskip("r2serve.bench.control.talk", exc_type=ImportError)
    marks = talk.Marks()
    for ns in range(1, 101):
        marks.add("zmq", ns * 1e6)
    found = marks.take("first")
    assert found["zmq"] == {"count": 100, "p50": 50.0, "p99": 99.0, "worst": 100.0}
    assert found["gloo"] is None
    assert marks.take("second") == {"mark": "second", **dict.fromkeys(talk.KINDS)}


def test_a_wrong_part_is_refused() -> None:
    result = CliRunner().invoke(command, ["--part", "grids"])
    assert result.exit_code == 2
    assert "'grids' is not one of" in result.output
