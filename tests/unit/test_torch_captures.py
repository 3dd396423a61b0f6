"""Queries and waits for a GPU while another thread captures a graph."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from r2serve.engines.torch import capture_mode, stream_point

CUDA = torch.device("cuda", 0)
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
NOT_READY = 600
CAPTURE_UNSUPPORTED = 900


class Driver:
    """The fake driver with two streams: the first is captured, the second works."""

    def __init__(self, library: Path) -> None:
        self.cuda = ctypes.CDLL(str(library))
        self.captured, self.busy = self._stream(), self._stream()
        self.done = threading.Event()
        self._wait = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: self.done.wait(30))

    def _stream(self) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        assert self.cuda.cuStreamCreate(ctypes.byref(made), 0) == 0
        return made

    def begin(self) -> None:
        """Starts work in a stream, and a capture of the other stream in global mode."""
        assert self.cuda.cuLaunchHostFunc(self.busy, self._wait, None) == 0
        assert self.cuda.cuStreamBeginCapture_v2(self.captured, GLOBAL) == 0

    def end(self) -> None:
        self.done.set()
        graph = ctypes.c_void_p()
        assert self.cuda.cuStreamEndCapture(self.captured, ctypes.byref(graph)) == 0
        self.cuda.cuGraphDestroy(graph)
        for stream in (self.captured, self.busy):
            assert self.cuda.cuStreamDestroy_v2(stream) == 0

    def mode(self) -> int:
        """Returns the capture mode of the calling thread."""
        mode = ctypes.c_int(GLOBAL)
        assert self.cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)) == 0
        found = mode.value
        assert self.cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)) == 0
        return found


class DriverEvent:
    """torch.cuda.Event in the working stream, by calls of the driver."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def record(self, _: object) -> None:
        """Does nothing: all work of the stream comes before the event."""

    def query(self) -> bool:
        code = self._driver.cuda.cuStreamQuery(self._driver.busy)
        if code not in (0, NOT_READY):
            raise RuntimeError(f"CUDA error {code}")
        return bool(code == 0)

    def synchronize(self) -> None:
        self.query()
        assert self._driver.cuda.cuStreamSynchronize(self._driver.busy) == 0


@pytest.fixture
def driver(fake_cuda: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    monkeypatch.setenv("R2CCL_CUDA_LIBRARY", str(fake_cuda))
    capture_mode._exchange.cache_clear()
    made = Driver(fake_cuda)
    monkeypatch.setattr(torch.cuda, "Event", lambda: DriverEvent(made))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: made.busy)
    made.begin()
    yield made
    made.end()
    capture_mode._exchange.cache_clear()


@pytest.fixture
def beside() -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Returns a function that calls another function in a thread without a capture."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda call: pool.submit(call).result(30)


@pytest.mark.slow
def test_the_driver_forbids_queries_in_threads_without_relaxed_mode(
    driver: Driver, beside: Callable[[Callable[[], Any]], Any]
) -> None:
    asked = beside(lambda: driver.cuda.cuStreamQuery(driver.busy))
    assert asked == CAPTURE_UNSUPPORTED


def test_a_stream_point_is_queried_during_a_capture(
    driver: Driver, beside: Callable[[Callable[[], Any]], Any]
) -> None:
    here = stream_point.StreamPoint(CUDA)
    assert [beside(here.passed) for _ in range(3)] == [False] * 3
    driver.done.set()
    beside(here.await_here)
    assert beside(here.passed)
    assert beside(driver.mode) == GLOBAL


def test_a_lane_works_during_a_capture(
    driver: Driver, beside: Callable[[Callable[[], Any]], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[int] = []
    own = Mock(synchronize=lambda: modes.append(driver.mode()))

    @contextmanager
    def entered(_: object) -> Iterator[None]:
        modes.append(driver.mode())
        yield

    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: own)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Mock())
    handover = stream_point.Handover([Mock(device=CUDA)])

    def work(error: Exception | None = None) -> None:
        with handover.taken():
            modes.append(driver.mode())
            if error is not None:
                raise error

    beside(work)
    # creating the stream creates the CUDA context, before the mode changes
    assert modes == [GLOBAL, RELAXED, RELAXED]
    with pytest.raises(ValueError, match="wrong"):
        beside(lambda: work(ValueError("wrong")))
    assert beside(driver.mode) == GLOBAL


def test_a_lane_without_gpus_asks_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_mode, "_exchange", Mock(side_effect=OSError("no driver")))
    with stream_point.Handover([torch.ones(1)]).taken():
        assert stream_point.StreamPoint(torch.device("cpu")).passed()


def test_the_previous_capture_mode_is_restored(driver: Driver) -> None:
    mode = ctypes.c_int(THREAD_LOCAL)
    driver.cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        with capture_mode.relaxed(), capture_mode.relaxed():
            assert driver.mode() == RELAXED
        assert driver.mode() == THREAD_LOCAL
    finally:
        driver.cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def an_event(monkeypatch: pytest.MonkeyPatch, **answers: Any) -> Mock:
    event = Mock(**answers)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: event.current)
    return event


@pytest.mark.parametrize("code", [201, 700])  # no CUDA context; a failure of the GPU
def test_a_thread_keeps_its_mode_if_the_exchange_fails(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    exchange = Mock(return_value=code)
    monkeypatch.setattr(capture_mode, "_exchange", lambda: exchange)
    failed = RuntimeError("CUDA error: an illegal memory access")
    event = an_event(monkeypatch, **{"query.side_effect": [True, failed]})
    here = stream_point.StreamPoint(CUDA)
    assert here.passed()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        here.passed()
    here.await_here()
    event.synchronize.assert_called_once_with()
    assert exchange.call_count == 3  # one call a wait: there is no mode to restore


@pytest.mark.parametrize("library", ["libno-such-driver.so.1", "libc.so.6"])
def test_a_thread_keeps_its_mode_without_a_cuda_driver(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    said: Callable[[], list[str]],
    library: str,
) -> None:
    monkeypatch.setenv("R2CCL_CUDA_LIBRARY", library)
    capture_mode._exchange.cache_clear()
    an_event(monkeypatch, **{"query.return_value": True})
    try:
        with caplog.at_level("INFO", logger="r2serve"):
            assert [stream_point.StreamPoint(CUDA).passed() for _ in range(3)] == [True] * 3
    finally:
        capture_mode._exchange.cache_clear()
    (line,) = said()
    assert line.startswith(f"cuda_library (R2CCL_CUDA_LIBRARY) is '{library}', without a CUDA")


@pytest.mark.parametrize("device", [CUDA, torch.device("cpu")])
def test_a_stream_point_is_passed_on_the_host_and_raises_after_a_gpu_failure(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setattr(capture_mode, "_exchange", lambda: lambda _: 0)
    failed = RuntimeError("CUDA error: an illegal memory access")
    event = an_event(monkeypatch, **{"query.side_effect": [False, True, failed]})
    here = stream_point.StreamPoint(device)
    if device.type == "cpu":
        assert [here.passed() for _ in range(3)] == [True] * 3
        here.precedes()
        here.await_here()
        assert event.mock_calls == []
        return
    assert [here.passed() for _ in range(2)] == [False, True]
    with pytest.raises(RuntimeError, match="illegal memory access"):
        here.passed()
    here.precedes()
    here.await_here()
    event.record.assert_called_once_with(event.current)
    event.current.wait_event.assert_called_once_with(event)
    event.synchronize.assert_called_once_with()
