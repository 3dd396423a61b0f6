"""Stalls, gaps, tokens and the verdict of an hour of faults."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from r2serve.demo.hour.report import (
    HourReport,
    Outcome,
    WrongRequest,
    render,
    wrong_requests,
)
from r2serve.demo.hour.run import request_tokens
from r2serve.demo.hour.stalls import cause_of, fault_of, stalls_of, unprovoked, was_noticed
from r2serve.lab.player import Played
from r2serve.lab.schedule import Fault
from r2serve.lab.serving.client import Request, Run
from r2serve.observe.journal import Event

MS = 1_000_000
S = 1_000 * MS


def event(at_ms: float, kind: str, value: float = 0, rail: str = "", text: str = "") -> Event:
    value_ns = int(value * MS) if kind == "stall" else int(value)
    return Event(int(at_ms * MS), kind, rail, "", 0, 0, 0, value_ns, 0, text)


def move(at_ms: float, rail: str, text: str) -> Event:
    return event(at_ms, "rail_state", rail=rail, text=text)


def played(label: str, at_s: float, rails: tuple[int, ...], **changes: Any) -> Played:
    fault = Fault(at_s, label.partition(",")[0], 0, rails[0], 2.0)
    values: dict[str, Any] = {
        "label": label,
        "fault": fault,
        "rails": rails,
        "late_s": 0.0,
        "struck_ns": int(at_s * S),
        "healed_ns": int((at_s + 2) * S),
        "back_ns": int((at_s + 3) * S),
    }
    return Played(**{**values, **changes})


def request(ids: list[int], prompt: int = 0, error: str = "", at_s: float = 0.0) -> Request:
    times = tuple(int(at_s * S) + 10 * MS * i for i in range(len(ids)))
    return Request(tuple(ids), times, error, not error, prompt)


REFERENCE = Run((request([1, 2, 3]), request([4, 5], prompt=1)))


def test_each_request_is_compared_with_its_own_prompt() -> None:
    run = Run((request([4, 5], 1), request([1, 2, 3], 0), request([4, 5], 1)))
    assert wrong_requests(REFERENCE, run) == []
    run = Run((request([4, 5], 0), request([1, 9, 9], 0), request([4], 1)))
    assert wrong_requests(REFERENCE, run) == [
        WrongRequest(0, 0, 0, 3),
        WrongRequest(1, 0, 1, 2),
        WrongRequest(2, 1, 1, 1),
    ]


def test_the_tokens_of_a_lost_request_must_be_right() -> None:
    assert wrong_requests(REFERENCE, Run((request([1, 2], error="cut off"),))) == []
    found = wrong_requests(REFERENCE, Run((request([1, 7], error="cut off"),)))
    assert found == [WrongRequest(0, 0, 1, 1)]


def two() -> list[Played]:
    return [played("carrier_loss", 10, (0,)), played("peer_port_loss, second fault", 11, (1,))]


@pytest.mark.parametrize(
    ("begin_s", "end_s", "fault"),
    [
        (9.0, 9.9, None),
        (9.0, 10.1, 0),
        (10.5, 10.6, 0),
        (10.9, 11.2, 1),
        (13.2, 13.4, 1),
        (14.4, 14.5, 1),
        (14.6, 14.7, None),
    ],
)
def test_a_stall_belongs_to_the_last_fault_under_way(
    begin_s: float, end_s: float, fault: int | None
) -> None:
    assert fault_of(two(), int(begin_s * S), int(end_s * S)) == fault


def test_a_rail_that_never_comes_back_keeps_its_fault_open() -> None:
    assert fault_of([played("carrier_loss", 10, (0,), back_ns=None)], 99 * S, 100 * S) == 0


def test_the_cause_is_the_weightiest_rail_event_of_the_wait() -> None:
    events = [
        move(90, "rail0@node1", "DOWN->FENCING"),
        move(100, "rail0@node0", "UP->SUSPECT"),
        event(101, "hedge", 1, "rail0@node0"),
        event(110, "stall", 12),
    ]
    assert cause_of(events, 98 * MS, 110 * MS) == "rail0@node0 UP->SUSPECT"
    down = move(109, "rail0@node1", "SUSPECT->DOWN dead_deadline")
    assert cause_of([*events, down], 98 * MS, 110 * MS) == (
        "rail0@node1 SUSPECT->DOWN dead_deadline"
    )
    assert cause_of(events[:1], 85 * MS, 110 * MS) == "rail0@node1 DOWN->FENCING"
    assert cause_of(events, 500 * MS, 510 * MS) == "rail0@node0 UP->SUSPECT, before the stall"
    assert cause_of(events, 5 * S, 5 * S + MS) == "no rail event recorded"


def test_every_stall_is_found_with_its_length() -> None:
    events = [event(10_005, "stall", 5), event(10_100, "hedge", 1), event(30_000, "stall", 7)]
    stalls = stalls_of(events, two())
    assert [(stall.ms, stall.fault) for stall in stalls] == [(5.0, 0), (7.0, None)]


def test_a_fault_is_noticed_if_each_of_its_rails_leaves_up() -> None:
    fault = played("carrier_loss, all rails", 10, (0, 1))
    first = move(10_010, "rail0@node1", "UP->DOWN carrier_loss")
    assert not was_noticed(fault, [first])
    assert was_noticed(fault, [first, move(10_500, "rail1@node0", "UP->SUSPECT")])
    assert not was_noticed(fault, [first, move(9_990, "rail1@node0", "UP->DOWN carrier_loss")])
    assert not was_noticed(fault, [first, move(12_900, "rail1@node0", "UP->DOWN carrier_loss")])
    assert not was_noticed(fault, [first, move(10_500, "rail1@node0", "SUSPECT->UP")])


def test_a_fault_of_the_management_nic_is_seen_at_the_control_rail() -> None:
    fault = replace(played("carrier_loss, management NIC", 10, (0,)), rails=())
    assert was_noticed(fault, [move(10_010, "control@node0", "UP->DOWN carrier_loss")])
    assert not was_noticed(fault, [move(10_010, "rail0@node0", "UP->DOWN carrier_loss")])
    assert Outcome(fault, noticed=False).problems() == []


def test_rails_leaving_up_between_faults_are_counted() -> None:
    events = [
        move(9_000, "rail0@node0", "UP->SUSPECT"),
        move(9_001, "rail0@node0", "SUSPECT->UP"),
        move(10_500, "rail0@node0", "UP->DOWN carrier_loss"),
        move(20_000, "rail1@node0", "UP->DOWN socket_error"),
    ]
    assert unprovoked(two(), events) == 2


def good_report() -> HourReport:
    report = HourReport("TP=2", seed=1, seconds=30, planned=2, streams=2)
    run = Run((request([1, 2, 3], 0, at_s=10.5), request([4, 5], 1, at_s=20)))
    events = [
        move(10_001, "rail0@node0", "UP->DOWN carrier_loss"),
        event(10_005, "stall", 5.25),
        move(11_001, "rail1@node0", "UP->DOWN peer_notice"),
    ]
    report.add_run(REFERENCE, run)
    report.add_faults(two(), events, run)
    return report


def test_a_good_hour_passes() -> None:
    report = good_report()
    assert report.problems() == []
    assert report.last_line() == (
        "hour: 2 faults, 2 requests, 0 lost, 0 wrong tokens, worst stall 5.2 ms"
    )
    data = json.loads(json.dumps(report.to_json()))
    assert data["passed"] is True
    assert data["requests"] == {"sent": 2, "completed": 2, "failed": 0}
    assert data["stalls"][0]["cause"] == "rail0@node0 UP->DOWN carrier_loss"
    assert [fault["stalls_ms"] for fault in data["faults"]] == [[5.25], []]
    assert [fault["worst_gap_ms"] for fault in data["faults"]] == [10.0, 0.0]
    assert data["faults"][0]["back_after_ms"] == 1000
    assert data["worst_gap_ms"] == 10.0
    assert data["rail_events"]["stall"] == 1


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("completed", 1, "1 of 2 requests were lost"),
        ("completed", 0, "no request was completed"),
        ("wrong", [WrongRequest(3, 1, 17, 4)], "request 3 (prompt 1): 4 tokens differ"),
        ("compared", False, "tokens were not compared"),
        ("outcomes", [], "only 0 of 2 faults were made"),
        ("errors", ["vllm ended"], "vllm ended"),
    ],
)
def test_problems_that_fail_an_hour(name: str, value: object, problem: str) -> None:
    report = good_report()
    setattr(report, name, value)
    assert not report.passed
    assert report.to_json()["passed"] is False
    assert any(text.startswith(problem) for text in report.problems()), report.problems()


def test_an_unnoticed_fault_fails_the_hour() -> None:
    report = good_report()
    report.outcomes[1].noticed = False
    assert report.problems() == [
        "peer_port_loss, second fault at 11 s, node 0: no worker noticed the fault"
    ]


def test_rails_that_do_not_come_back_fail_the_hour() -> None:
    report = good_report()
    report.outcomes[0].played.back_ns = None
    assert report.problems() == ["carrier_loss at 10 s, node 0: not all rails rejoined"]


def test_the_output_ends_with_the_summary_line() -> None:
    report = good_report()
    report.stalls += stalls_of([event(30_000, "stall", 7)], [])
    output = io.StringIO()
    render(report, Console(file=output, width=160))
    lines = output.getvalue().splitlines()
    assert lines[-1] == report.last_line()
    for wanted in (
        "peer_port_loss, second fault",
        "5.2",
        "rail0@node0 UP->DOWN carrier_loss",
        "no fault active",
    ):
        assert any(wanted in line for line in lines), wanted
    assert "failed:" not in output.getvalue()


def test_requests_take_seconds_and_differ_in_length() -> None:
    tokens = request_tokens(12, 20.0)
    assert len(tokens) == 12
    assert len(set(tokens)) == 5
    assert 40 <= min(tokens) < max(tokens) <= 120
    assert min(request_tokens(12, 0.01)) >= 8
    assert max(request_tokens(12, 1e6)) <= 400
