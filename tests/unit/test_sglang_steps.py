"""Steps of SGLang's scheduler: the requests of a step, and steps that overlap."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from played_steps import PlayedJob, ns

from r2serve.engines.sglang import steps
from r2serve.engines.sglang.steps import step_of
from r2serve.observe.attribution import LAST_STEP, NewRequest, Step


def request(rid: str, prompt: int, generated: int = 0, *, finished: bool = False) -> Any:
    return SimpleNamespace(
        rid=rid,
        origin_input_ids=list(range(prompt)),
        output_ids=list(range(generated)),
        finished=lambda: finished,
    )


def batch(
    mode: str, *requests: Any, prefix: Any = None, extend: Any = None, number: int = 1
) -> Any:
    """Returns SGLang's ScheduleBatch as far as r2serve reads it."""
    return SimpleNamespace(
        forward_mode=SimpleNamespace(
            is_extend=lambda: mode in ("EXTEND", "MIXED"), is_decode=lambda: mode == "DECODE"
        ),
        reqs=list(requests),
        prefix_lens=prefix,
        extend_lens=extend,
        forward_iter=number,
    )


def test_a_prefill_yields_a_token_after_the_last_chunk_only() -> None:
    given = batch("EXTEND", request("a", 10), request("b", 30), prefix=[4, 0], extend=[6, 16])
    assert step_of(1, given, ["old"]) == Step(
        number=1,
        prefill=["a", "b"],
        decode=[],
        yielding=["a"],
        new=[NewRequest("a", "a", 10), NewRequest("b", "b", 30)],
        finished=["old"],
        tokens=22,
    )
    last = batch("EXTEND", request("b", 30), prefix=[16], extend=[14])
    assert step_of(1, last, []).yielding == ["b"]


def test_a_mixed_batch_has_requests_of_both_phases() -> None:
    """The token of b's prefill is not processed yet, so b has no output."""
    given = batch(
        "MIXED",
        request("a", 8),
        request("b", 5),
        request("c", 5, 3),
        prefix=[0, 5, 7],
        extend=[8, 1, 1],
    )
    step = step_of(1, given, [])
    assert (step.prefill, step.decode) == (["a"], ["b", "c"])
    assert step.yielding == ["a", "b", "c"]
    assert not step.one_each


def test_a_retracted_request_comes_back_in_decode() -> None:
    step = step_of(1, batch("EXTEND", request("a", 8, 4), prefix=[0], extend=[12]), [])
    assert (step.prefill, step.decode, step.yielding) == ([], ["a"], ["a"])


def test_a_decode_step_has_one_token_each_and_speculation_an_unknown_number() -> None:
    decode = step_of(1, batch("DECODE", request("a", 8, 4), request("b", 8, 1)), [])
    assert (decode.decode, decode.tokens, decode.one_each) == (["a", "b"], 2, True)
    assert step_of(1, batch("TARGET_VERIFY", request("a", 8, 4)), []).tokens == 0
    assert step_of(1, batch("IDLE"), []) == Step(1, [], [], [], finished=[])


def test_health_checks_belong_to_no_client() -> None:
    probe = request("HEALTH_CHECK_5", 1)
    step = step_of(1, batch("EXTEND", probe, request("a", 4), prefix=[0, 0], extend=[1, 4]), [])
    assert (step.prefill, step.yielding) == (["a"], ["a"])
    assert step_of(1, batch("DECODE", probe), []).decode == []


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, ""), (2, "requests 0, 1"), (5, "requests 0, 1, 2 and 2 more")],
)
def test_a_step_names_its_first_requests(count: int, text: str) -> None:
    assert steps.named(batch("DECODE", *(request(str(each), 1) for each in range(count)))) == text


# ---- overlapping steps ----


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PlayedJob]:
    made = PlayedJob(tmp_path, monkeypatch)
    monkeypatch.setattr(steps.process, "has_engines", lambda: True)
    yield made
    made.close()


@pytest.fixture
def followed(played: PlayedJob) -> steps.FollowedSteps:
    made = steps.FollowedSteps({}, None)
    made._attribution = played.attribution
    return made


def held(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.glob("*.requests")
    lines = [json.loads(line) for line in path.read_text().splitlines()][1:]
    return [line for line in lines if "step" in line]


def test_a_stall_is_charged_to_its_own_step_while_two_steps_overlap(
    played: PlayedJob, followed: steps.FollowedSteps, tmp_path: Path
) -> None:
    first = batch("EXTEND", request("a", 4), prefix=[0], extend=[4], number=1)
    second = batch("EXTEND", request("b", 4), prefix=[0], extend=[4], number=2)
    followed.began(first, 1)
    played.passes(0.01)
    followed.computed(1)
    followed.began(second, 2)
    played.passes(0.5)
    played.engine.stall(0.5)
    followed.computed(2)
    followed.ended(first)
    followed.ended(second)
    [line] = held(tmp_path)
    assert line["prefill"] == ["b"]
    assert [each["ns"] for each in line["stalls"]] == [ns(0.5)]


@pytest.mark.parametrize(("number", "later"), [(1, 2), (LAST_STEP, 1)])
def test_the_number_of_the_open_step_stays_announced(
    played: PlayedJob, followed: steps.FollowedSteps, number: int, later: int
) -> None:
    first, second = batch("DECODE", number=number), batch("DECODE", number=number + 1)
    followed.began(first, number)
    followed.began(second, number + 1)
    followed.ended(first)
    assert played.engine.step == later
    followed.ended(second)
    assert played.engine.step == 0


def test_a_stall_of_the_broadcast_is_charged_to_all_running_requests(
    played: PlayedJob, followed: steps.FollowedSteps, tmp_path: Path
) -> None:
    prompts = [request("a", 4), request("b", 4)]
    first = batch("EXTEND", *prompts, prefix=[0, 0], extend=[4, 4], number=1)
    followed.began(first, 1)
    followed.computed(1)
    followed.ended(first)
    followed.broadcast_began(SimpleNamespace(reqs=prompts), 2)
    played.passes(0.3)
    played.engine.stall(0.3)
    followed.broadcast_ended()
    [line] = held(tmp_path)
    assert (line["step"], line["decode"]) == (2, ["a", "b"])
    assert played.engine.step == 0


def test_a_finished_request_is_logged_with_its_tokens(
    played: PlayedJob, followed: steps.FollowedSteps, tmp_path: Path
) -> None:
    followed.began(batch("EXTEND", request("a", 4), prefix=[0], extend=[4], number=1), 1)
    followed.ended(batch("EXTEND", request("a", 4, 1, finished=True), number=1))
    followed.began(batch("DECODE", number=2), 2)
    (path,) = tmp_path.glob("*.requests")
    [line] = [json.loads(each) for each in path.read_text().splitlines()][1:]
    assert (line["request"], line["tokens"]) == ("a", 1)


def test_an_error_in_a_report_fails_no_step(
    followed: steps.FollowedSteps, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    for number in (1, 2):
        followed.began(SimpleNamespace(), number)  # a batch without the expected fields
    assert caplog.text.count("per-request impact is disabled") == 1


def test_positions_are_compared_before_tokens_leave(played: PlayedJob) -> None:
    calls: list[Any] = []
    group = SimpleNamespace(
        step=lambda number, about: calls.append((number, about)),
        post_position=lambda: calls.append("posted"),
        end_step=lambda: calls.append("ended"),
    )
    made = steps.FollowedSteps({}, group)  # type: ignore[arg-type]
    one = batch("DECODE", request("a", 4, 1), number=7)
    made.began(one, 7)
    made.computed(7)
    copied = SimpleNamespace(synchronize=lambda: calls.append("copied"))
    made.check(SimpleNamespace(copy_done=copied))
    assert calls == [(7, "requests a"), "posted", "copied", "ended"]
