"""Asynchronous outputs of vLLM are returned after the check, with all their other methods."""

from __future__ import annotations

import copy
import gc
import weakref
from abc import ABC, abstractmethod
from types import NoneType
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.v1 import outputs

from r2serve.engines.vllm import worker
from r2serve.errors import PeerLostError

LOST = PeerLostError("rank 1 is gone")


class Of032(ABC):
    """vLLM 0.32's interface of an output."""

    @abstractmethod
    def get_output(self) -> str: ...


class Of033(Of032):
    """vLLM 0.33 added an abstract method."""

    @abstractmethod
    def get_kv_connector_output(self) -> str: ...


class OfALaterRelease(Of033):
    @abstractmethod
    def get_what_comes_next(self) -> str: ...


def output_of(interface: type[ABC]) -> Any:
    """Returns a model runner's output, with every method of the interface."""
    names = interface.__abstractmethods__
    methods = {name: lambda self, name=name: f"{self.label}: {name}" for name in names}
    made = type("Output", (interface,), methods)()
    made.label = "step 7"
    return made


@pytest.fixture(params=[Of032, Of033, OfALaterRelease])
def interface(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[ABC]:
    monkeypatch.setattr(outputs, "AsyncModelRunnerOutput", request.param)
    return request.param


def test_every_method_of_an_output_stays(interface: type[ABC]) -> None:
    output = output_of(interface)
    given = worker.trusted(output)
    assert given is not output
    for name in interface.__abstractmethods__:
        assert getattr(given, name)() == f"step 7: {name}"
    assert given.label == "step 7"
    given.label = "step 8"
    assert (output.label, given.get_output()) == ("step 8", "step 8: get_output")
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = given.no_such_thing


def test_the_class_of_an_output_stays(interface: type[ABC]) -> None:
    output = output_of(interface)
    given = worker.trusted(output)
    assert isinstance(given, interface)
    assert isinstance(given, type(output))
    assert isinstance(given, interface | NoneType)
    assert not isinstance(given, outputs.ModelRunnerOutput)


def test_an_output_may_be_copied_and_referred_to_weakly(interface: type[ABC]) -> None:
    output = output_of(interface)
    given = worker.trusted(output)
    other = copy.copy(given)
    assert type(other) is worker.TrustedOutput
    other.label = "step 8"
    assert output.label == "step 8"
    seen = weakref.ref(given)
    assert seen() is given
    del given
    assert seen() is None


def test_a_copy_without_an_output_yet_has_no_attributes() -> None:
    empty = object.__new__(worker.TrustedOutput)
    with pytest.raises(AttributeError, match="_r2serve_output"):
        _ = empty.label


def test_an_output_is_checked_after_its_arrival(
    interface: type[ABC], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    output = output_of(interface)
    output.get_output = lambda: calls.append("get_output")
    monkeypatch.setattr(worker, "check_all", lambda _: calls.append("check"))
    given = worker.trusted(output)
    assert calls == []
    given.get_output()
    assert calls == ["get_output", "check"]


def test_an_output_waits_for_no_later_step(
    interface: type[ABC], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With asynchronous scheduling, the next step is in the stream before the output is taken."""
    ended, checked = {"tp": 7}, []
    monkeypatch.setattr(worker, "steps_ended", lambda: dict(ended))
    monkeypatch.setattr(worker, "check_all", checked.append)
    given = worker.trusted(output_of(interface))
    ended["tp"] = 8
    given.get_output()
    assert checked == [{"tp": 7}]


def test_an_invalid_output_is_not_returned(
    interface: type[ABC], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise LOST

    ended: list[BaseException] = []
    monkeypatch.setattr(worker, "check_all", fail)
    monkeypatch.setattr(worker, "end_worker_soon", ended.append)
    given = worker.trusted(output_of(interface))
    with pytest.raises(PeerLostError, match="rank 1 is gone"):
        given.get_output()
    assert ended == [LOST]
    if hasattr(interface, "get_kv_connector_output"):  # vLLM saves the step's transfers
        assert given.get_kv_connector_output() == "step 7: get_kv_connector_output"


def test_memory_of_an_output_is_freed_without_the_garbage_collector(interface: type[ABC]) -> None:
    output = output_of(interface)
    seen = weakref.ref(output)
    given = worker.trusted(output)
    given.get_output()
    gc.disable()
    try:
        del output, given
        assert seen() is None
    finally:
        gc.enable()
