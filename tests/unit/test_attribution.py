"""Steps over lost rails: the requests charged, and the amount."""

from __future__ import annotations

import json
import logging
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from played_steps import PlayedJob, ns
from steps import OUTAGE_S, Job, new
from timely import timely

from r2serve.observe import attribution, impact, requests, step_baseline
from r2serve.observe.fault_report import NAMED, _requests


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    made.close()


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PlayedJob]:
    made = PlayedJob(tmp_path, monkeypatch)
    yield made
    made.close()


def lines(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.glob("*.requests")
    return [json.loads(line) for line in path.read_text().splitlines()][1:]


# ---- real rails ----


def test_an_outage_of_real_rails_is_charged_to_the_requests_of_its_step(
    job: Job, tmp_path: Path
) -> None:
    job.step(prefill=["id-a", "id-b"], yielding=["id-a", "id-b"], new=new("a", "b"))
    for _ in range(5):
        job.step(decode=["id-a", "id-b"], yielding=["id-a", "id-b"])
    job.step(decode=["id-b"], yielding=["id-b"], finished=["id-a"])
    before_ns = job.engine.stalled_ns
    took_s = job.step(
        outage=True, prefill=["id-c"], decode=["id-b"], yielding=["id-b"], new=new("c")
    )
    stall_s = (job.engine.stalled_ns - before_ns) / 1e9
    job.step(decode=["id-b"], prefill=["id-c"], yielding=["id-b", "id-c"])
    job.step(finished=["id-b", "id-c"])

    assert took_s >= OUTAGE_S
    assert 0 < stall_s <= took_s
    kept = requests.Requests(tmp_path)
    kept.look()
    waits = {name: kept.get(name) for name in "abc"}
    assert waits["a"] is not None
    assert 8 not in [held.step for held in waits["a"].steps]
    for name, phase in (("b", impact.DECODE), ("c", impact.PREFILL)):
        request = waits[name]
        assert request is not None
        assert phase in request.waited
        (held,) = (line for line in lines(tmp_path) if line.get("step") == 8)
        assert sum(stall["ns"] for stall in held["stalls"]) / 1e9 == pytest.approx(stall_s)
        assert 8 in [held.step for held in request.steps]
        assert request.stall_s() >= stall_s * 0.999
    assert waits["b"].pace is not None
    assert waits["b"].pace.tokens == 9
    assert waits["b"].pace.worst_gap_s >= took_s
    # A stall does not count the pauses of a thread without a CPU.
    timely(lambda: stall_s > OUTAGE_S / 2, f"{stall_s} s of stall in {took_s} s", within_s=0)


def test_a_stall_between_steps_is_charged_to_no_request(job: Job, tmp_path: Path) -> None:
    job.step(prefill=["id-a"], yielding=["id-a"], new=new("a"))
    before = len(lines(tmp_path))
    stalled_ns = job.engine.stalled_ns
    job.all_reduce(outage=True)  # outside any step, like an engine's warm-up
    assert job.engine.stalled_ns > stalled_ns
    assert len(lines(tmp_path)) == before


def test_one_log_line_names_a_fault_and_the_affected_requests(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attribution, "REPORT_AFTER_S", 0.1)
    caplog.set_level(logging.WARNING, "r2serve.faults")
    job.step(prefill=["id-a"], yielding=["id-a"], new=new("a"))
    job.step(outage=True, decode=["id-a"], yielding=["id-a"])

    def told() -> list[str]:
        said = [one.getMessage() for one in caplog.records if one.name == "r2serve.faults"]
        return [line for line in said if line.startswith("drill: ")]

    (said,) = timely(told, "the line about the drill")
    for rail in (0, 1):
        where = rf"rail{rail}@node0 (\(.*\) )?on {re.escape(socket.gethostname())}"
        assert re.search(rf"{where} to rank 1 was lost \(injected\)", said)
    assert re.search(r"\d ms stall in \d steps?; ", said)
    # A host short of CPU adds its own part at the end.
    assert re.search(r"; carried by rail0@node0, rail1@node0; requests: a(; this host .*)?$", said)


def test_a_finished_step_is_not_reported_again(job: Job, tmp_path: Path) -> None:
    job.step(prefill=["id-a"], yielding=["id-a"], new=new("a"))
    job.step(outage=True, decode=["id-a"], yielding=["id-a"])
    before = len(lines(tmp_path))
    job.all_reduce(outage=True)
    job.attribution.ended(sampled=True)
    assert len(lines(tmp_path)) == before


# ---- played rails and clock ----


def test_an_outage_is_charged_to_the_requests_of_its_step_alone(
    played: PlayedJob, tmp_path: Path
) -> None:
    played.step(prefill=["id-a", "id-b"], yielding=["id-a", "id-b"], new=new("a", "b"))
    for _ in range(5):
        played.step(decode=["id-a", "id-b"], yielding=["id-a", "id-b"])
    assert lines(tmp_path) == []  # no rail has failed
    played.step(decode=["id-b"], yielding=["id-b"], finished=["id-a"])
    played.step(stall_s=0.2, prefill=["id-c"], decode=["id-b"], yielding=["id-b"], new=new("c"))
    played.step(decode=["id-b"], prefill=["id-c"], yielding=["id-b", "id-c"])
    played.step(finished=["id-b", "id-c"])

    kept = requests.Requests(tmp_path)
    (b, c) = kept.look()
    waits = {name: kept.get(name) for name in "abc"}
    assert waits["a"] is not None
    assert not waits["a"].waited
    for name, phase in (("b", impact.DECODE), ("c", impact.PREFILL)):
        request = waits[name]
        assert request is not None
        assert set(request.waited) == {phase}
        assert request.stall_s() == pytest.approx(0.2)
        assert [held.step for held in request.steps] == [8]
    assert b.stall_s.keys() == {impact.DECODE}
    assert c.stall_s.keys() == {impact.PREFILL}
    assert waits["b"].pace is not None
    assert waits["b"].pace.tokens == 9
    assert waits["b"].pace.worst_gap_s == pytest.approx(0.21)


def test_a_stall_between_played_steps_is_charged_to_no_request(
    played: PlayedJob, tmp_path: Path
) -> None:
    played.step(prefill=["id-a"], yielding=["id-a"], new=new("a"))
    played.passes(0.2)
    played.engine.stall(0.2)
    played.step(decode=["id-a"], yielding=["id-a"])
    played.step(finished=["id-a"])
    assert [line for line in lines(tmp_path) if "step" in line] == []


def test_a_pending_report_is_logged_once_at_the_end(
    played: PlayedJob, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attribution, "REPORT_AFTER_S", 3600.0)
    caplog.set_level(logging.WARNING, "r2serve.faults")
    played.step(prefill=["id-a"], yielding=["id-a"], new=new("a"))
    played.step(stall_s=0.2, decode=["id-a"], yielding=["id-a"])

    def said() -> list[str]:
        return [one.getMessage() for one in caplog.records if one.name == "r2serve.faults"]

    assert said() == []
    played.attribution.close()
    (line,) = said()
    assert "200.0 ms stall in 1 step; " in line
    assert line.endswith("; requests: a")
    played.attribution.close()
    report = played.attribution._report
    assert report is not None
    report.say()  # a timer that is late
    assert len(said()) == 1


def test_the_baseline_of_a_step_comes_from_similar_steps(played: PlayedJob, tmp_path: Path) -> None:
    decode: dict[str, Any] = {"decode": ["id-a"], "yielding": ["id-a"]}
    played.step(prefill=["id-a"], yielding=["id-a"], new=new("a"))
    played.step(stall_s=0.2, **decode)
    for number in range(step_baseline.USUAL_OF):
        played.began(**decode)
        played.passes(0.5 * number, waiting_for_cpu=True)  # not part of the baseline
        played.part(0.01)
    mixed: dict[str, Any] = {**decode, "prefill": ["id-b"], "tokens": 9}
    played.step(stall_s=0.2, **decode)
    played.step(stall_s=0.2, new=new("b"), **mixed)
    for _ in range(step_baseline.USUAL_OF // 4):
        played.step(0.05, **mixed)
    played.step(stall_s=0.2, **mixed)
    last = 2 + step_baseline.USUAL_OF
    assert {line["step"]: line["usual_ns"] for line in lines(tmp_path) if "step" in line} == {
        2: 0,  # there is no similar step yet
        last + 1: ns(0.01),
        last + 2: 0,  # the first step with prefill
        last + 3 + step_baseline.USUAL_OF // 4: ns(0.05),
    }


def test_the_baseline_excludes_stalled_steps_and_separates_parts_of_a_step(
    played: PlayedJob, tmp_path: Path
) -> None:
    """A step takes 1 ms until its logits are ready, and 50 ms more until its tokens are ready."""
    many = step_baseline.USUAL_OF // 4
    decode: dict[str, Any] = {"decode": ["id-a"], "yielding": ["id-a"]}
    for number in range(2 * many + 1):  # most of the steps are stalled
        stalled = number >= many
        played.began(**decode, new=new("a") if number == 0 else ())
        played.part(0.001, stall_s=0.2 if stalled else 0.0, sampled=False)
        played.part(0.3 if stalled else 0.05)
    held = [line for line in lines(tmp_path) if line.get("step", 0) > many]
    firsts, rests = held[::2], held[1::2]
    assert len(firsts) == len(rests) == many + 1
    assert all(line["usual_ns"] == ns(0.001) and line["stalls"] for line in firsts)
    # The time after the stall is part of the step.
    for first, rest in zip(firsts, rests, strict=True):
        assert (rest["step"], rest["began_ns"]) == (first["step"], first["ended_ns"])
        assert rest["stalls"] == []
        assert rest["ended_ns"] - rest["began_ns"] == ns(0.3)
        assert rest["usual_ns"] == ns(0.05)
    played.began(**decode)
    played.part(0.001, sampled=False)
    played.part(0.05, stall_s=0.2)
    (line,) = (line for line in lines(tmp_path) if line.get("step") == 2 * many + 2)
    assert line["usual_ns"] == ns(0.05)


def test_the_rest_of_a_stalled_step_is_reported_only_if_late(
    played: PlayedJob, tmp_path: Path
) -> None:
    decode: dict[str, Any] = {"decode": ["id-a"], "yielding": ["id-a"]}
    for number in range(step_baseline.USUAL_OF):
        played.began(**decode, new=new("a") if number == 0 else ())
        played.part(0.001, sampled=False)
        played.part(0.05)
    for rest_s in (0.05, 0.051):
        played.began(**decode)
        played.part(0.001, stall_s=0.2, sampled=False)
        played.part(rest_s)
    told = [line["step"] - step_baseline.USUAL_OF for line in lines(tmp_path) if "step" in line]
    assert told == [1, 2, 2]


@pytest.mark.parametrize(
    ("count", "ends"), [(NAMED - 1, "r4"), (NAMED, "r5"), (NAMED + 1, "r5 and 1 more")]
)
def test_only_requests_beyond_the_named_ones_are_counted(count: int, ends: str) -> None:
    text = _requests([f"r{number + 1}" for number in range(count)])
    assert text.endswith(ends), text
