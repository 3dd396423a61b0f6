"""Steps over rails that are really lost: the requests charged, and the amount."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from steps import OUTAGE_S, Job, new

from r2serve.observe import attribution, impact, requests, step_baseline
from r2serve.observe.attribution import Step
from r2serve.observe.fault_report import NAMED, _requests


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    made.close()


def lines(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.glob("*.requests")
    return [json.loads(line) for line in path.read_text().splitlines()][1:]


def test_an_outage_is_charged_to_the_requests_of_its_step_alone(job: Job, tmp_path: Path) -> None:
    job.step(prefill=["id-a", "id-b"], yielding=["id-a", "id-b"], new=new("a", "b"))
    for _ in range(5):
        job.step(decode=["id-a", "id-b"], yielding=["id-a", "id-b"])
    assert lines(tmp_path) == []  # no rail has failed
    job.step(decode=["id-b"], yielding=["id-b"], finished=["id-a"])
    took_s = job.step(
        outage=True, prefill=["id-c"], decode=["id-b"], yielding=["id-b"], new=new("c")
    )
    assert took_s > OUTAGE_S / 2  # on a busy machine the call begins late
    job.step(decode=["id-b"], prefill=["id-c"], yielding=["id-b", "id-c"])
    job.step(finished=["id-b", "id-c"])

    kept = requests.Requests(tmp_path)
    (b, c) = kept.look()
    waits = {name: kept.get(name) for name in "abc"}
    assert waits["a"] is not None
    assert not waits["a"].waited
    for name, phase in (("b", impact.DECODE), ("c", impact.PREFILL)):
        request = waits[name]
        assert request is not None
        assert set(request.waited) == {phase}
        assert request.stall_s() == pytest.approx(job.engine.stalled_ns / 1e9)
        assert OUTAGE_S / 2 < request.stall_s() <= took_s
        assert [held.step for held in request.steps] == [8]
    assert b.stall_s.keys() == {impact.DECODE}
    assert c.stall_s.keys() == {impact.PREFILL}
    assert waits["b"].pace is not None
    assert waits["b"].pace.tokens == 9
    assert waits["b"].pace.worst_gap_s >= took_s


def test_a_stall_between_steps_is_charged_to_no_request(job: Job, tmp_path: Path) -> None:
    job.step(prefill=["id-a"], yielding=["id-a"], new=new("a"))
    job.lose_all_rails()
    job.all_reduce()  # outside any step, like an engine's warm-up
    assert job.engine.stalled_ns > 0
    job.step(decode=["id-a"], yielding=["id-a"])
    job.step(finished=["id-a"])
    assert [line for line in lines(tmp_path) if "step" in line] == []


def test_one_log_line_names_a_fault_and_the_affected_requests(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attribution, "REPORT_AFTER_S", 0.1)
    caplog.set_level(logging.WARNING, "r2serve.faults")
    job.step(prefill=["id-a"], yielding=["id-a"], new=new("a"))
    job.step(outage=True, decode=["id-a"], yielding=["id-a"])
    deadline = time.monotonic() + 10
    while not (records := [one for one in caplog.records if one.name == "r2serve.faults"]):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (said,) = (record.getMessage() for record in records)
    assert said.startswith("drill: rail0@node0 to rank 1 was lost (injected)")
    assert "ms stall in 1 step" in said
    assert said.endswith("carried by rail0@node0, rail1@node0; requests: a")


def test_a_pending_report_is_logged_once_at_the_end(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "r2serve.faults")
    job.step(prefill=["id-a"], yielding=["id-a"], new=new("a"))
    job.step(outage=True, decode=["id-a"], yielding=["id-a"])

    def said() -> list[str]:
        return [one.getMessage() for one in caplog.records if one.name == "r2serve.faults"]

    assert said() == []
    job.attribution.close()
    job.attribution.close()
    time.sleep(attribution.REPORT_AFTER_S + 0.2)
    assert len(said()) == 1


def test_the_baseline_of_a_step_comes_from_similar_steps(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attribution, "REPORT_AFTER_S", 0.01)
    job.step(prefill=["id-a"], yielding=["id-a"], new=new("a"))
    job.step(outage=True, decode=["id-a"], yielding=["id-a"])
    took_s = []
    for _ in range(step_baseline.USUAL_OF):
        began = time.monotonic()
        job.step(decode=["id-a"], yielding=["id-a"])
        took_s.append(time.monotonic() - began)
    mixed: dict[str, Any] = {"decode": ["id-a"], "prefill": ["id-b"], "yielding": ["id-a"]}
    job.step(outage=True, decode=["id-a"], yielding=["id-a"])
    job.step(outage=True, new=new("b"), tokens=9, **mixed)
    for _ in range(step_baseline.USUAL_OF // 4):
        job.attribution.began(Step(**mixed, tokens=9))
        time.sleep(0.05)
        job.attribution.ended(sampled=True)
    job.step(outage=True, tokens=9, **mixed)
    told = {line["step"]: line["usual_ns"] for line in lines(tmp_path) if "step" in line}
    last = 2 + step_baseline.USUAL_OF
    assert told[2] == 0  # there is no similar step yet
    assert 0 < told[last + 1] <= max(took_s) * 1e9
    assert told[last + 2] == 0  # the first step with prefill
    assert 0.05e9 <= told[max(told)] < 0.05e9 + OUTAGE_S * 1e9 / 2


def test_the_baseline_excludes_stalled_steps_and_separates_parts_of_a_step(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step takes 1 ms until its logits are ready, and 50 ms more until its tokens are ready."""
    monkeypatch.setattr(attribution, "REPORT_AFTER_S", 0.01)
    many = step_baseline.USUAL_OF // 4
    for number in range(2 * many + 1):  # most of the steps are stalled
        fields: dict[str, Any] = {"new": new("a") if number == 0 else ()}
        job.attribution.began(Step([], ["id-a"], ["id-a"], tokens=1, **fields))
        if number >= many:
            job.lose_all_rails()
            job.all_reduce()
        job.attribution.ended(sampled=False)
        time.sleep(0.3 if number >= many else 0.05)
        job.attribution.ended(sampled=True)
    held = [line for line in lines(tmp_path) if line.get("step", 0) > many]
    firsts, rests = held[::2], held[1::2]
    assert len(firsts) == len(rests) == many + 1
    assert all(0 < line["usual_ns"] < 0.04e9 and line["stalls"] for line in firsts)
    # The time after the stall is part of the step.
    for first, rest in zip(firsts, rests, strict=True):
        assert (rest["step"], rest["began_ns"]) == (first["step"], first["ended_ns"])
        assert rest["stalls"] == []
        assert rest["ended_ns"] - rest["began_ns"] >= 0.3e9
        assert 0.05e9 <= rest["usual_ns"] < 0.2e9
    job.attribution.began(Step([], ["id-a"], ["id-a"], tokens=1))
    job.attribution.ended(sampled=False)
    job.lose_all_rails()
    job.all_reduce()
    job.attribution.ended(sampled=True)
    (line,) = (line for line in lines(tmp_path) if line.get("step") == 2 * many + 2)
    assert 0.05e9 <= line["usual_ns"] < 0.2e9


def test_a_finished_step_is_not_reported_again(job: Job, tmp_path: Path) -> None:
    job.step(prefill=["id-a"], yielding=["id-a"], new=new("a"))
    job.step(outage=True, decode=["id-a"], yielding=["id-a"])
    before = len(lines(tmp_path))
    job.lose_all_rails()
    job.all_reduce()
    job.attribution.ended(sampled=True)
    assert len(lines(tmp_path)) == before


def test_the_rest_of_a_stalled_step_is_reported_only_if_late(job: Job, tmp_path: Path) -> None:
    for number in range(step_baseline.USUAL_OF):
        job.attribution.began(Step([], ["a"], ["a"], new("a") if number == 0 else (), tokens=1))
        job.attribution.ended(sampled=False)
        time.sleep(0.05)
        job.attribution.ended(sampled=True)
    for rest_s in (0, 0.3):
        job.attribution.began(Step([], ["a"], ["a"], tokens=1))
        job.lose_all_rails()
        job.all_reduce()
        job.attribution.ended(sampled=False)
        time.sleep(rest_s)
        job.attribution.ended(sampled=True)
    told = [line["step"] - step_baseline.USUAL_OF for line in lines(tmp_path) if "step" in line]
    assert told == [1, 2, 2]


@pytest.mark.parametrize(
    ("count", "ends"), [(NAMED - 1, "r4"), (NAMED, "r5"), (NAMED + 1, "r5 and 1 more")]
)
def test_only_requests_beyond_the_named_ones_are_counted(count: int, ends: str) -> None:
    text = _requests([f"r{number + 1}" for number in range(count)])
    assert text.endswith(ends), text
