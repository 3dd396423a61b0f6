"""Stalled requests, joined from the logs of workers and a front end."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from timely import timely

from r2serve.observe.impact import DECODE, MAX_SPANS, MAX_STEPS, PREFILL, QUEUE, Spans
from r2serve.observe.request_log import RequestLog
from r2serve.observe.requests import MAX_HELD, SCAN_S, Ended, Requests

MS = 1_000_000


def everything(requests: Requests) -> list[Ended]:
    """Calls look() until nothing is left to read; returns all ended requests."""
    told = []
    requests.look()
    for _ in range(200):
        told += requests.look()
    return told


def worker(folder: Path, number: int = 0) -> RequestLog:
    path = folder / f"r2ccl-{number}-abc.requests"
    return RequestLog(path, writer="worker", label=f"rank {number}")


def step(
    number: int, ended_ns: int, ns: int, *, prefill: list[str], decode: list[str]
) -> dict[str, Any]:
    stall = {
        "collective": "all_reduce",
        "group": "tp:0",
        "call": number,
        "ended_ns": ended_ns,
        "ns": ns,
    }
    return {
        "step": number,
        "began_ns": ended_ns - ns - MS,
        "ended_ns": ended_ns + MS,
        "stalls": [stall],
        "prefill": prefill,
        "decode": decode,
    }


def ended(name: str, **fields: Any) -> dict[str, Any]:
    line = dict.fromkeys(("scheduled_ns", "first_token_ns", "last_token_ns", "tokens"), 1)
    return {"request": name, **line, "worst_gap_ns": 5 * MS, "worst_gap_ended_ns": 1, **fields}


def finished(name: str, **fields: Any) -> dict[str, Any]:
    seconds = {"queued_s": 0.1, "prefill_s": 0.2, "decode_s": 1.0, "e2e_s": 1.5}
    counts = {"prompt_tokens": 5, "tokens": 11}
    return {"finished": name, "reason": "stop", "ended_clock_ns": 1, **counts, **seconds, **fields}


def test_a_step_is_charged_to_its_requests_and_to_no_other(tmp_path: Path) -> None:
    now = time.monotonic_ns()
    log, requests = worker(tmp_path), Requests(tmp_path)
    log.write(step(1, now, 200 * MS, prefill=["a"], decode=["b", "c"]))
    log.write(ended("d"))
    assert requests.look() == []
    waits = {name: requests.get(name) for name in "abcd"}
    assert waits["a"] is not None
    assert (waits["a"].stall_s(PREFILL), waits["a"].stall_s(DECODE)) == (0.2, 0)
    for name in "bc":
        assert waits[name].stall_s(PREFILL) == 0
        assert waits[name].stall_s() == pytest.approx(0.2)
        assert [held.step for held in waits[name].steps] == [1]
    assert waits["d"].stall_s() == 0
    assert [request.name for request in requests.newest(limit=9, waited=True)] == ["c", "b", "a"]


@pytest.mark.parametrize(
    ("usual_ms", "late_ms"),
    [
        (0, 20),  # unknown baseline: the stall
        (5, 55),  # a slow rail delayed the step before an event was recorded
        (30, 30),
        (50, 20),  # at least the stall
    ],
)
def test_lateness_of_a_step_is_its_time_over_the_baseline(
    tmp_path: Path, usual_ms: int, late_ms: int
) -> None:
    now = time.monotonic_ns()
    log, requests = worker(tmp_path), Requests(tmp_path)
    line = step(1, now, 20 * MS, prefill=["a"], decode=["b"])
    began_ns, ended_ns = now - 49 * MS, now + 11 * MS  # 60 ms in all; the stall begins after 29 ms
    log.write(line | {"began_ns": began_ns, "ended_ns": ended_ns, "usual_ns": usual_ms * MS})
    requests.look()
    for name, phase in (("a", PREFILL), ("b", DECODE)):
        request = requests.get(name)
        assert request is not None
        assert request.late_s() == request.late_s(phase) == pytest.approx(late_ms / 1e3)
        assert request.stall_s() == pytest.approx(0.020)


def test_lateness_is_without_the_time_in_which_the_worker_did_not_run(tmp_path: Path) -> None:
    now = time.monotonic_ns()
    log, requests = worker(tmp_path), Requests(tmp_path)
    line = step(1, now, 20 * MS, prefill=[], decode=["a", "b"])
    times = {"began_ns": now - 80 * MS, "ended_ns": now, "usual_ns": 10 * MS}
    log.write(line | times | {"delay_ns": 30 * MS, "decode": ["a"]})
    log.write(line | times | {"delay_ns": 65 * MS, "decode": ["b"], "step": 2})
    requests.look()
    late = {name: requests.get(name).late_s() for name in ("a", "b")}  # type: ignore[union-attr]
    assert late["a"] == pytest.approx(0.040)
    assert late["b"] == pytest.approx(0.020)  # never less than the stall


def test_a_step_reported_in_parts_is_late_until_its_end(tmp_path: Path) -> None:
    """The step stalls for 20 ms before the logits are ready; then the tokens are 5 ms late."""
    now = time.monotonic_ns()
    log, requests = worker(tmp_path), Requests(tmp_path)
    part = step(1, now, 20 * MS, prefill=[], decode=["a"])
    log.write(part | {"began_ns": now - 30 * MS, "ended_ns": now, "usual_ns": 10 * MS})
    rest = {"began_ns": now, "ended_ns": now + 6 * MS, "usual_ns": MS, "stalls": []}
    log.write(part | rest)
    requests.look()
    request = requests.get("a")
    assert request is not None
    assert request.stall_s() == pytest.approx(0.020)
    assert request.late_s() == pytest.approx(0.025)
    (held,) = request.steps
    assert (len(held.stalls), held.ended_clock_ns - held.began_clock_ns) == (1, 36 * MS)
    assert request.held_steps == 1


def test_the_rest_of_a_step_without_its_beginning_is_ignored(tmp_path: Path) -> None:
    """The log was rotated between the parts, and read only then."""
    now = time.monotonic_ns()
    log, requests = worker(tmp_path), Requests(tmp_path)
    rest = step(1, now, MS, prefill=[], decode=["a"]) | {"usual_ns": 1, "stalls": []}
    log.write(rest)
    log.write(step(2, now + 20 * MS, MS, prefill=[], decode=["b"]))
    log.write(rest | {"step": 3, "decode": ["b"], "ended_ns": now + 30 * MS})
    requests.look()
    assert requests.get("a") is None
    request = requests.get("b")
    assert request is not None
    assert [held.step for held in request.steps] == [2]
    assert request.late_s() == pytest.approx(0.001)


def test_lateness_is_at_least_the_stall_of_both_workers(tmp_path: Path) -> None:
    """Stalls of 200 and 200.5 ms; together 201.5 ms of stall, and 200.5 ms over the baseline."""
    requests, now = Requests(tmp_path), time.monotonic_ns()
    for number, (began, waits, until) in enumerate([(0, 5, 205), (0.5, 6, 206.5)]):
        line = step(1, now + int(until * MS), int((until - waits) * MS), prefill=[], decode=["a"])
        times = {"began_ns": now + int(began * MS), "ended_ns": now + 210 * MS}
        worker(tmp_path, number).write(line | times | {"usual_ns": 12 * MS})
    requests.look()
    request = requests.get("a")
    assert request is not None
    assert request.stall_s() == request.late_s(DECODE) == request.late_s() == pytest.approx(0.2015)


def test_lateness_of_a_step_ended_before_its_stall_is_the_stall(tmp_path: Path) -> None:
    now = time.monotonic_ns()
    line = step(1, now, 20 * MS, prefill=[], decode=["a"])
    worker(tmp_path).write(line | {"ended_ns": now - 5 * MS, "usual_ns": MS})
    requests = Requests(tmp_path)
    requests.look()
    request = requests.get("a")
    assert request is not None
    (held,) = request.steps
    assert held.late_clock_ns == ((held.stalls[0].began_clock_ns, held.stalls[0].ended_clock_ns),)


def test_overlapping_stalls_of_workers_count_once(tmp_path: Path) -> None:
    now = time.monotonic_ns()
    requests = Requests(tmp_path)
    for number in range(2):
        log = worker(tmp_path, number)
        log.write(step(7, now + number * MS, 200 * MS, prefill=[], decode=["a"]))
        log.write(step(8, now + 500 * MS, 10 * MS, prefill=[], decode=["a"]))
    requests.look()
    request = requests.get("a")
    assert request is not None
    assert request.stall_s() == pytest.approx(0.211)
    assert request.held_steps == 4


def test_a_stalled_request_is_reported_once_at_its_end(tmp_path: Path) -> None:
    requests = Requests(tmp_path)
    logs = [worker(tmp_path, number) for number in range(2)]
    # The second worker's stall is read after the first worker's end of the request.
    logs[0].write(ended("a"))
    logs[1].write(step(1, time.monotonic_ns(), 30 * MS, prefill=[], decode=["a"]))
    logs[1].write(ended("a"))
    logs[1].write(ended("b"))
    (told,) = requests.look()
    assert told.stall_s == {DECODE: pytest.approx(0.03)}
    logs[0].write(ended("a"))
    assert requests.look() == []


@pytest.mark.parametrize("order", ["front end first", "workers first"])
def test_a_request_arriving_during_a_stall_stalls_in_the_queue(tmp_path: Path, order: str) -> None:
    """Stalls of 2 s and 10 ms: the request arrives within the first and is scheduled after both."""
    requests = Requests(tmp_path)
    logs = [worker(tmp_path, number) for number in range(3)]
    front = RequestLog(tmp_path / "frontend-1-2.requests", writer="frontend", label="engine 0")
    now = time.monotonic_ns()
    clock = time.time_ns() - now
    for number, log in enumerate(logs):  # the third worker belongs to another engine
        log.write(step(1, now - 5000 * MS, 100 * MS, prefill=[], decode=["a"]))
        log.write(step(2, now + number * 3 * MS, 2000 * MS, prefill=[], decode=["a"]))
        log.write(step(3, now + 100 * MS, 10 * MS, prefill=[], decode=["a"]))
        log.write(step(4, now + 500 * MS, 20 * MS, prefill=[], decode=["a", "late"]))
    end = now + 900 * MS

    def front_end_says() -> None:  # the request arrived 1 s before the end of the first stall
        front.write(finished("late", e2e_s=1.9, ended_clock_ns=clock + end))

    def workers_say() -> None:
        for log in logs[:2]:
            log.write(ended("late", scheduled_ns=now + 200 * MS, last_token_ns=end))

    told = []
    says = [front_end_says, workers_say]
    for say in says if order == "front end first" else says[::-1]:
        say()
        told += requests.look()
    late = requests.get("late")
    assert late is not None
    # The stall lasts until the slower of the request's workers continues.
    assert late.stall_s(QUEUE) == pytest.approx(1.003 + 0.010, abs=5e-3)
    assert late.stall_s(DECODE) == pytest.approx(0.020)
    assert [(held.phase, held.step) for held in late.steps] == [
        (QUEUE, 2),
        (QUEUE, 2),
        (QUEUE, 3),
        (QUEUE, 3),
        (DECODE, 4),
        (DECODE, 4),
        (DECODE, 4),
    ]
    assert late.held_steps == 7
    waits = {phase: stall_s for one in told for phase, stall_s in one.stall_s.items()}
    assert sum(len(one.stall_s) for one in told) == 2
    assert waits == {phase: pytest.approx(late.stall_s(phase)) for phase in (QUEUE, DECODE)}
    assert len({one.worker for one in told}) == 1
    first = requests.get("a")
    assert first is not None
    assert first.stall_s(QUEUE) == 0


def test_a_request_arriving_during_a_late_step_is_late_by_its_delayed_start(
    tmp_path: Path,
) -> None:
    """The step ends at 40 ms instead of 0; the stall lasts from -20 to 20 ms."""
    requests, log = Requests(tmp_path), worker(tmp_path)
    front = RequestLog(tmp_path / "frontend-1-2.requests", writer="frontend", label="engine 0")
    now = time.monotonic_ns()
    line = step(1, now + 20 * MS, 40 * MS, prefill=[], decode=["a"])
    times = {"began_ns": now - 30 * MS, "ended_ns": now + 40 * MS, "usual_ns": 30 * MS}
    log.write(line | times)
    end = now + 100 * MS
    for name, arrived_ms in (("early", -10), ("late", 10)):
        log.write(ended(name, scheduled_ns=now + 41 * MS, last_token_ns=end))
        front.write(finished(name, e2e_s=(100 - arrived_ms) / 1e3, ended_ns=end))
    everything(requests)
    for name, stall_s, late_s in (("early", 0.030, 0.040), ("late", 0.010, 0.030)):
        request = requests.get(name)
        assert request is not None
        assert request.stall_s(QUEUE) == pytest.approx(stall_s, abs=1e-3)
        assert request.late_s() == request.late_s(QUEUE) == pytest.approx(late_s, abs=1e-3)


def test_many_stalls_in_the_queue_are_all_counted(tmp_path: Path) -> None:
    requests, log = Requests(tmp_path), worker(tmp_path)
    front = RequestLog(tmp_path / "frontend-1-2.requests", writer="frontend", label="engine 0")
    now = time.monotonic_ns()
    for number in range(200):
        log.write(step(number, now + number * 20 * MS, 5 * MS, prefill=[], decode=["a"]))
    end = now + 5000 * MS
    log.write(step(200, end - 200 * MS, 7 * MS, prefill=[], decode=["late"]))
    front.write(finished("late", e2e_s=5.1, ended_ns=end))
    log.write(ended("late", scheduled_ns=end - 500 * MS, last_token_ns=end))
    everything(requests)
    late = requests.get("late")
    assert late is not None
    assert late.stall_s(QUEUE) == pytest.approx(1.0)
    assert late.held_steps == 201
    assert [held.step for held in late.steps] == list(range(201 - MAX_STEPS, 201))


def test_a_stall_is_charged_to_the_queue_or_to_the_prefill(tmp_path: Path) -> None:
    """A worker begins the prefill while another worker stalls in the step before."""
    requests = Requests(tmp_path)
    logs = [worker(tmp_path, number) for number in range(2)]
    front = RequestLog(tmp_path / "frontend-1-2.requests", writer="frontend", label="engine 0")
    now = time.monotonic_ns()
    logs[0].write(step(1, now + 100 * MS, 100 * MS, prefill=[], decode=["a"]))
    logs[0].write(step(2, now + 300 * MS, 200 * MS, prefill=["late"], decode=["a"]))
    logs[1].write(step(1, now + 300 * MS, 300 * MS, prefill=[], decode=["a"]))
    end = now + 500 * MS
    for log, scheduled_ns in zip(logs[::-1], (now + 301 * MS, now + 100 * MS), strict=True):
        log.write(ended("late", scheduled_ns=scheduled_ns, last_token_ns=end))
        requests.look()
    front.write(finished("late", e2e_s=0.490, ended_ns=end))
    everything(requests)
    late = requests.get("late")
    assert late is not None
    assert late.stall_s(QUEUE) == pytest.approx(0.090, abs=5e-3)
    assert late.stall_s() == pytest.approx(0.290, abs=5e-3)


def test_a_request_scheduled_before_a_stall_was_not_queued_in_it(tmp_path: Path) -> None:
    requests = Requests(tmp_path)
    log = worker(tmp_path)
    front = RequestLog(tmp_path / "frontend-1-2.requests", writer="frontend", label="engine 0")
    now = time.monotonic_ns()
    clock = time.time_ns() - now
    for number in range(2 * MAX_HELD):
        log.write(step(number, now + number * MS, MS // 2, prefill=[], decode=["a"]))
    end = now + 2 * MAX_HELD * MS
    for name, scheduled_ns in (("early", now - 100 * MS), ("another", end)):
        log.write(ended(name, scheduled_ns=scheduled_ns, last_token_ns=end))
        arrived_s = (100 * MS + end - now) / 1e9 if name == "early" else 0.0005
        front.write(finished(name, e2e_s=arrived_s, ended_clock_ns=clock + end))
    assert everything(requests) == []
    for name in ("early", "another"):
        request = requests.get(name)
        assert request is not None
        assert request.waited == {}


def test_beyond_the_limit_the_worker_with_the_oldest_stall_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, logs = Requests(tmp_path), [worker(tmp_path, number) for number in range(4)]
    front = RequestLog(tmp_path / "frontend-1-2.requests", writer="frontend", label="engine 0")
    kept.look()
    assert kept.followed == 5
    monkeypatch.setattr("r2serve.observe.requests.MAX_LOGS", 3)
    now = time.monotonic_ns()
    for place, number in enumerate((0, 1, 2, 0, 3)):  # the second worker has the oldest stall
        at = now + place * 20 * MS
        logs[number].write(step(place, at, 5 * MS, prefill=[], decode=["a"]))
    end = now + 500 * MS
    for number, log in enumerate(logs):
        log.write(ended(f"late{number}", scheduled_ns=end - 100 * MS, last_token_ns=end))
        front.write(finished(f"late{number}", e2e_s=0.6, ended_ns=end))
    everything(kept)
    waits = [kept.get(f"late{number}") for number in range(4)]
    assert all(one is not None for one in waits)
    found = [one.stall_s(QUEUE) for one in waits if one is not None]
    assert found == [pytest.approx(0.010), 0, pytest.approx(0.005), pytest.approx(0.005)]


def test_arrival_times_use_the_monotonic_clock(tmp_path: Path) -> None:
    front = RequestLog(tmp_path / "frontend-1-2.requests", writer="frontend", label="engine 0")
    clock_ns, now = time.time_ns(), time.monotonic_ns()
    hour_ns = 3600 * 10**9
    front.write(finished("a", e2e_s=1.5, ended_ns=now, ended_clock_ns=clock_ns + hour_ns))
    kept = Requests(tmp_path)
    kept.look()
    request = kept.get("a")
    assert request is not None
    assert request.timings is not None
    assert abs(request.timings.arrived_clock_ns - (clock_ns - 1500 * MS)) < 1000 * MS


def test_the_front_ends_times_join_the_workers(tmp_path: Path) -> None:
    requests = Requests(tmp_path)
    worker(tmp_path).write(ended("cmpl-1", worst_gap_ns=80 * MS))
    front = RequestLog(tmp_path / "frontend-1-2.requests", writer="frontend", label="engine 0")
    front.write(finished("cmpl-1"))
    requests.look()
    request = requests.get("cmpl-1")  # the id in the engine's answer
    assert request is not None
    assert request.pace is not None
    assert request.timings is not None
    assert request.pace.worst_gap_s == pytest.approx(0.08)
    assert request.timings.ttft_s == pytest.approx(0.5)
    assert request.timings.mean_itl_s == pytest.approx(0.1)


def test_memory_is_bounded(tmp_path: Path) -> None:
    requests, log = Requests(tmp_path, max_requests=10), worker(tmp_path)
    for number in range(100):
        log.write(ended(f"r{number}", last_token_ns=number))
    everything(requests)
    assert len(requests) == 10
    assert [one.name for one in requests.newest(limit=3)] == ["r99", "r98", "r97"]
    older = requests.newest(before=requests.newest(limit=3)[-1].number, limit=2)
    assert [one.name for one in older] == ["r96", "r95"]


def test_results_do_not_depend_on_when_logs_are_read(tmp_path: Path) -> None:
    """Four workers and a front end; more requests than are kept, and a request that never ends."""
    live = Requests(tmp_path, max_requests=100)
    logs = [worker(tmp_path, number) for number in range(4)]
    front = RequestLog(tmp_path / "frontend-1-2.requests", writer="frontend", label="engine 0")
    begin = time.monotonic_ns()
    clock = time.time_ns() - begin
    for number in range(1500):
        at = begin + number * 10 * MS
        for place, log in enumerate(logs):
            if number < 3 * MAX_SPANS:
                held = ["long", f"r{number}"] if number % 2 else [f"r{number}"]
                log.write(step(number, at + place * MS, 5 * MS, prefill=[], decode=held))
            log.write(ended(f"r{number}", last_token_ns=at + 5 * MS))
        front.write(finished(f"r{number}", ended_clock_ns=clock + at + 6 * MS))
        if number % 100 == 0:
            live.look()
    everything(live)
    late = Requests(tmp_path, max_requests=100)
    everything(late)
    for requests in (live, late):
        long = requests.get("long")
        assert long is not None
        # Each of these steps adds 5 ms, plus 3 ms for the delay of the last worker.
        assert long.stall_s() == pytest.approx(3 * MAX_SPANS // 2 * 8e-3)
        assert len(requests) == 100
        newest = requests.newest(limit=50)
        assert [one.name for one in newest] == [f"r{number}" for number in range(1499, 1449, -1)]
        assert all(one.pace is not None and one.timings is not None for one in newest)


def test_a_look_reads_a_bounded_amount(tmp_path: Path) -> None:
    log = worker(tmp_path)
    for number in range(20_000):
        log.write(ended(f"r{number}", last_token_ns=number))
    requests = Requests(tmp_path, max_requests=100_000)
    requests.look()
    assert 0 < len(requests) < 10_000
    everything(requests)
    assert len(requests) > 15_000


def test_a_step_reported_in_parts_counts_once(tmp_path: Path) -> None:
    now = time.monotonic_ns()
    log, requests = worker(tmp_path), Requests(tmp_path)
    log.write(step(3, now, 4 * MS, prefill=[], decode=["a", "a"]))
    log.write(step(3, now + 50 * MS, 6 * MS, prefill=[], decode=["a", "a"]))
    requests.look()
    request = requests.get("a")
    assert request is not None
    assert request.held_steps == 1
    assert [len(held.stalls) for held in request.steps] == [2]
    assert request.stall_s() == pytest.approx(0.010)


def test_a_log_read_to_its_end_is_closed(tmp_path: Path) -> None:
    log, requests = worker(tmp_path), Requests(tmp_path)
    log.write(ended("a"))
    log.close()
    requests.look()
    assert requests.followed == 1

    def closed() -> bool:
        requests.look()
        return not requests.followed

    timely(closed, "the log is closed", every_s=0.05)
    assert requests.get("a") is not None


@pytest.mark.parametrize("value", ["Infinity", "1e999", '"x"', "null", "{}"])
def test_an_invalid_number_skips_only_its_line(tmp_path: Path, value: str) -> None:
    log, requests = worker(tmp_path), Requests(tmp_path)
    text = json.dumps(ended("a")).replace('"tokens": 1', f'"tokens": {value}')
    with log.path.open("a") as raw:
        raw.write(text + "\n")
    log.write(ended("b"))
    requests.look()
    assert requests.get("b") is not None
    assert requests.unreadable == {}


def test_an_unreadable_log_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    requests = Requests(tmp_path)
    (tmp_path / "broken.requests").write_text("no\n")
    log = worker(tmp_path)
    log.write(ended("a"))
    log.write({"of a later version": 1})
    bad = worker(tmp_path, 1)
    bad.write({"step": 1})
    bad.write(ended("b"))
    requests.look()
    assert set(requests.unreadable) == {"broken.requests"}
    assert requests.get("a") is not None
    assert requests.get("b") is not None
    (tmp_path / "broken.requests").unlink()
    time.sleep(SCAN_S)
    requests.look()
    assert requests.unreadable == {}


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 40)), max_size=MAX_SPANS))
def test_overlapping_intervals_count_once(intervals: list[tuple[int, int]]) -> None:
    spans = Spans()
    for begin, length in intervals:
        spans.add(begin, begin + length)
    waited = {t for begin, length in intervals for t in range(begin, begin + length)}
    assert spans.total_ns == len(waited)


def test_the_sum_of_many_intervals_is_exact() -> None:
    spans = Spans()
    for number in range(10 * MAX_SPANS):
        spans.add(10 * number, 10 * number + 3)
    assert spans.total_ns == 30 * MAX_SPANS
    for number in range(10 * MAX_SPANS):  # a second worker's stalls, read afterwards
        spans.add(10 * number, 10 * number + 3)
    assert spans.total_ns == 30 * MAX_SPANS
