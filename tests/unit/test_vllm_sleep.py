"""Sleep and checkpoints of an engine with r2ccl."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.distributed import parallel_state
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase

from r2serve.engines.vllm.spanning import SpanningCollectives
from r2serve.engines.vllm.worker import make_worker
from r2serve.errors import InvalidArgumentError


class OfVllm(DeviceCommunicatorBase):  # type: ignore[misc]
    """vLLM's communicator of a group, with a record of its calls."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.unique_name = name
        self.calls = calls

    def checkpoint_prepare(self) -> None:
        self.calls.append(f"{self.unique_name}: checkpoint_prepare")

    def checkpoint_restore(self) -> None:
        self.calls.append(f"{self.unique_name}: checkpoint_restore")

    def suspend(self) -> None:
        self.calls.append(f"{self.unique_name}: suspend")

    def resume(self) -> None:
        self.calls.append(f"{self.unique_name}: resume")


class Spanning(SpanningCollectives, OfVllm):
    """The classes of :class:`SpanningCudaCommunicator`, with a fake base."""


class VllmsWorker:
    """vLLM's worker at `checkpoint_prepare`."""

    def checkpoint_prepare(self) -> None:
        parallel_state._apply_to_device_comms(lambda comm: comm.checkpoint_prepare())


Worker = make_worker(VllmsWorker, "WorkerOfThisTest")


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The groups of a process, in vLLM's order, and the calls of vLLM's communicators."""
    calls: list[str] = []
    made = {
        "world": Mock(device_communicator=None),
        "pp:0": Mock(device_communicator=OfVllm("pp:0", calls)),
        "tp:0": Mock(device_communicator=Spanning("tp:0", calls)),
    }
    references: dict[str, Any] = {name: (lambda each=each: each) for name, each in made.items()}
    references["gone"] = lambda: None
    monkeypatch.setattr(parallel_state, "_groups", references)
    return {**made, "calls": calls}


def test_an_engine_that_sleeps_keeps_its_rails(
    groups: dict[str, Any], caplog: pytest.LogCaptureFixture, said: Callable[[], list[str]]
) -> None:
    with caplog.at_level(logging.INFO, logger="r2serve"):
        parallel_state.suspend_device_comms()
        parallel_state.resume_device_comms()
    assert groups["calls"] == ["pp:0: suspend", "pp:0: resume"]
    (line,) = said()
    assert line == "group tp:0: suspend frees no memory of r2ccl; rails and pinned memory stay"


def test_a_checkpoint_is_refused_before_any_group_is_prepared(groups: dict[str, Any]) -> None:
    worker = Worker.__new__(Worker)
    with pytest.raises(InvalidArgumentError) as raised:
        worker.checkpoint_prepare()
    said = str(raised.value)
    assert said.startswith("checkpoint_prepare: group tp:0 spans nodes by r2ccl")
    assert said.endswith("must run with --distributed-backend default")
    assert groups["calls"] == []
    parallel_state._apply_to_device_comms(lambda comm: comm.checkpoint_restore())
    assert groups["calls"] == ["pp:0: checkpoint_restore"]


def test_the_group_refuses_a_checkpoint_of_another_worker_class(groups: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match="checkpoint_prepare: group tp:0"):
        VllmsWorker().checkpoint_prepare()


def test_groups_inside_a_node_are_checkpointed_by_vllm(groups: dict[str, Any]) -> None:
    calls = groups["calls"]
    groups["tp:0"].device_communicator = OfVllm("tp:0", calls)
    Worker.__new__(Worker).checkpoint_prepare()
    assert calls == ["pp:0: checkpoint_prepare", "tp:0: checkpoint_prepare"]
