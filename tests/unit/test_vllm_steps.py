"""Conversion of the output of vLLM's scheduler to a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from r2serve.engines.vllm import compared, worker
from r2serve.errors import OrderMismatchError
from r2serve.observe.attribution import LAST_STEP, Attribution, NewRequest, next_step


def scheduled(
    new: list[tuple[str, int, int, int]] = [],  # noqa: B006  never changed
    cached: list[tuple[str, int, int, int]] = [],  # noqa: B006
    finished: set[str] = set(),  # noqa: B006
) -> Any:
    """new: id, prompt, computed, scheduled; cached: id, computed, output tokens, scheduled."""
    from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

    output = SchedulerOutput.make_empty()
    output.finished_req_ids = finished
    output.scheduled_new_reqs = [
        NewRequestData(
            req_id=identity,
            prompt_token_ids=[1] * prompt,
            mm_features=[],
            sampling_params=None,
            pooling_params=None,
            block_ids=([],),
            num_computed_tokens=computed,
            lora_request=None,
        )
        for identity, prompt, computed, _ in new
    ]
    data = CachedRequestData.make_empty()
    data.req_ids = [identity for identity, *_ in cached]
    data.num_computed_tokens = [computed for _, computed, _, _ in cached]
    data.num_output_tokens = [made for _, _, made, _ in cached]
    output.scheduled_cached_reqs = data
    output.num_scheduled_tokens = {one[0]: one[3] for one in (*new, *cached)}
    return output


def test_a_chunked_prompt_yields_with_its_last_chunk() -> None:
    known = Attribution(list)
    step = worker.step_of(1, scheduled(new=[("a", 100, 0, 60), ("b", 10, 4, 6)]), known)
    assert (step.prefill, step.decode, step.yielding) == (["a", "b"], [], ["b"])
    assert step.new == [NewRequest("a", "a", 100), NewRequest("b", "b", 10)]
    known.began(step)
    step = worker.step_of(1, scheduled(cached=[("a", 60, 0, 30), ("b", 10, 1, 1)]), known)
    assert (step.prefill, step.decode, step.yielding) == (["a"], ["b"], ["b"])
    step = worker.step_of(1, scheduled(cached=[("a", 90, 0, 10)], finished={"b"}), known)
    assert (step.prefill, step.yielding, set(step.finished)) == (["a"], ["a"], {"b"})


def test_one_each_marks_steps_of_one_token_a_request() -> None:
    known = Attribution(list)
    assert not worker.step_of(1, scheduled(), known).one_each  # no request has a computed token
    assert not worker.step_of(1, scheduled(new=[("a", 10, 0, 10)]), known).one_each
    assert worker.step_of(1, scheduled(cached=[("a", 10, 1, 1), ("b", 9, 4, 1)]), known).one_each
    # A request is computed again after a preemption, together with a decoding request.
    again = scheduled(cached=[("a", 0, 5, 15), ("b", 9, 4, 1)])
    step = worker.step_of(1, again, known)
    assert (step.prefill, step.one_each, step.tokens) == ([], False, 16)


def test_a_preempted_request_continues_as_decode() -> None:
    known = Attribution(list)
    known.began(worker.step_of(1, scheduled(new=[("a", 10, 0, 10)]), known))
    known.ended(sampled=True)
    for made in range(1, 4):
        known.began(worker.step_of(1, scheduled(cached=[("a", 9 + made, made, 1)]), known))
        known.ended(sampled=True)
    again = scheduled(new=[("a", 10, 0, 8)])
    again.scheduled_new_reqs[0].prefill_token_ids = [1] * 14
    step = worker.step_of(1, again, known)
    assert (step.prefill, step.decode, step.yielding) == ([], ["a"], [])
    known.began(step)
    known.ended(sampled=True)
    assert known._running["a"].tokens == 4
    again.scheduled_new_reqs[0].num_computed_tokens = 6
    assert worker.step_of(1, again, known).yielding == ["a"]


@pytest.mark.parametrize(
    ("identity", "name"),
    [
        ("cmpl-7f-0-0a1b2c3d", "cmpl-7f"),
        ("cmpl-7f-12-0a1b2c3d", "cmpl-7f"),  # the 13th prompt of one request
        ("2_cmpl-7f-3-0-0a1b2c3d", "cmpl-7f-3"),  # a sample; the client's id ends in -3
        ("cmpl-7f-0", "cmpl-7f"),
        ("3_chatcmpl-7f-0a1b2c3d", "chatcmpl-7f"),
        ("chatcmpl-7f-3-0a1b2c3d", "chatcmpl-7f-3"),
        ("cmpl-a\nb\x1b[31m-0-0a1b2c3d", "cmpl-a\nb\x1b[31m"),
        ("cmpl-\n-0-0a1b2c3d", "cmpl-\n"),
        ("chatcmpl-7f", "chatcmpl-7f"),
        ("2026_request", "2026_request"),
        ("cmpl--0-0a1b2c3d", "cmpl-"),  # an empty header X-Request-Id
        ("1_cmpl--0-0a1b2c3d", "cmpl-"),
        ("cmpl-7f-0123456789abcdef-beam-1-0a1b2c3d", "cmpl-7f"),  # a beam of a completion
        ("chatcmpl-7f-0123456789abcdef-beam-0-0a1b2c3d", "chatcmpl-7f"),
        ("cmpl-7f-0123456789abcdef-beam-1-0-0a1b2c3d", "cmpl-7f-0123456789abcdef-beam-1"),
        ("resp_7f_0-0a1b2c3d", "resp_7f"),  # the first turn of a response
        ("2_mine_1-0a1b2c3d", "2_mine"),  # an id that a client chose for a response
        ("chatcmpl-7f_1-0a1b2c3d", "chatcmpl-7f_1"),
        ("3_12-0a1b2c3d", "12"),  # a sample of vllm.LLM
    ],
)
def test_a_request_has_the_clients_name(identity: str, name: str) -> None:
    assert worker.client_name(identity) == name


def test_an_error_while_recording_a_step_does_not_fail_the_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker.process, "has_engines", lambda: True)
    steps = worker.FollowedSteps()
    without_fields = SimpleNamespace(num_scheduled_tokens={})
    steps.began(1, without_fields)
    steps.ended(sampled=True)
    steps.began(2, scheduled())
    assert caplog.text.count("per-request impact is disabled") == 1


def test_a_worker_class_of_vllm_has_a_subclass() -> None:
    from vllm.v1.worker.cpu_worker import CPUWorker

    ours = worker.R2cclCpuWorker
    assert issubclass(ours, CPUWorker)
    assert ours.__qualname__ == "R2cclCpuWorker"
    with pytest.raises(AttributeError):
        worker.R2cclOtherWorker  # noqa: B018


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, ""),
        (2, "requests cmpl-0, cmpl-1"),
        (5, "requests cmpl-0, cmpl-1, cmpl-2 and 2 more"),
    ],
)
def test_a_step_names_its_first_requests(count: int, text: str) -> None:
    scheduled_tokens = {f"cmpl-{number}-0a1b2c3d": 1 for number in range(count)}
    assert compared.named(scheduled_tokens) == text


class PlayedGroup:
    """A group of a scheduler that records the calls of a step."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def step(self, number: int, about: str) -> None:
        self.calls.append(("step", number, about))

    def mark_step(self, number: int, about: str) -> None:
        self.calls.append(("mark", number))

    def post_position(self) -> None:
        self.calls.append(("post",))

    def end_step(self) -> None:
        self.calls.append(("end",))


def test_a_stall_and_a_mismatch_have_the_same_step_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal and the comparison get the worker's number, also if one began to count later."""

    class Base:
        def __init__(self) -> None:
            names = SimpleNamespace(served_model_name="m")
            self.local_rank = 0
            self.vllm_config = SimpleNamespace(
                model_config=names, parallel_config=SimpleNamespace(data_parallel_index=0)
            )

        def execute_model(self, _: object) -> None:
            return None

        def sample_tokens(self, _: object) -> None:
            return None

    announced: list[int] = []
    engine = SimpleNamespace(
        set_step=announced.append, stalled_ns=0, journal_path="", journal_bytes=bytes
    )
    has_engines = False
    monkeypatch.setattr(worker.process, "has_engines", lambda: has_engines)
    monkeypatch.setattr(worker.process, "opened", lambda: [SimpleNamespace(engine=engine)])
    here = worker.make_worker(Base, "PlayedWorker")()
    group, stage = PlayedGroup(), PlayedGroup()
    here._r2serve_compared._meeting, here._r2serve_compared._pipelined = [group], [stage]
    for number in range(1, 4):
        has_engines = number > 1
        here.execute_model(scheduled(cached=[("a", 9 + number, number, 1)]))
        here.sample_tokens(None)
    assert group.calls == [
        call
        for number in range(1, 4)
        for call in (("step", number, "requests a"), ("post",), ("end",))
    ]
    assert stage.calls == [("mark", number) for number in range(1, 4)]
    assert [number for number in announced if number] == [2, 3]


def test_numbers_of_steps_never_are_0() -> None:
    assert [next_step(number) for number in (0, 1, LAST_STEP - 1, LAST_STEP)] == [
        1,
        2,
        LAST_STEP,
        1,
    ]


def test_only_groups_of_one_scheduler_replay_alike() -> None:
    alike = [
        name for name in ("tp:0", "dcp:0", "dp:0", "ep:0", "pp:0") if compared.replays_alike(name)
    ]
    assert alike == ["tp:0", "dcp:0"]


def test_an_exception_in_a_step_ends_the_groups_of_the_scheduler() -> None:
    aborted: list[str] = []
    steps = compared.ComparedSteps()
    steps._meeting = [SimpleNamespace(abort=aborted.append)]  # type: ignore[list-item]
    with pytest.raises(ZeroDivisionError), worker.aborting(steps):
        raise ZeroDivisionError("no draft")
    assert aborted == ["ZeroDivisionError in a step: no draft"]
    with pytest.raises(OrderMismatchError), worker.aborting(steps):
        raise OrderMismatchError("known to all ranks")
    assert len(aborted) == 1
