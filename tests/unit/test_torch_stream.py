"""Order, completion and failures of a group's work in streams, on a played GPU."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from timely import timely

from r2serve.engines.torch import stream
from r2serve.engines.torch.stream import StreamWork
from r2serve.errors import AbortedError, InvalidArgumentError, PeerLostError, R2cclError

CUDA = torch.device("cuda", 0)
SOON_S = 0.03  # delay of an awaited event, or timeout for an event that never comes
LOST = PeerLostError("rank 1 is gone")
FAILED = RuntimeError("CUDA error: an illegal memory access was encountered")


class PlayedStream:
    """Items in order; the test decides when items are done."""

    def __init__(self, done: list[str]) -> None:
        self.given: list[str | PlayedPlace] = []
        self.count = 0  # number of done items
        self.moved = threading.Event()
        self._done = done

    def advance(self, last: str | None = None) -> None:
        """Does all items, or those up to `last`, until an item waits for another stream."""
        for each in self.given[self.count :]:
            if isinstance(each, str):
                self._done.append(each)
            elif not each.passed():
                break
            self.count += 1
            if each == last:
                break
        self.moved.set()


class PlayedPlace:
    """A fake :class:`StreamPoint`, in the current stream."""

    def __init__(self, group: Group) -> None:
        self._group, self._stream = group, group.current
        self._index = len(self._stream.given)

    def passed(self) -> bool:
        return self._stream.count >= self._index

    def precedes(self) -> None:
        self._group.current.given.append(self)

    def await_here(self) -> None:
        assert self._stream.moved.wait(120)
        assert self.passed()


class PlayedComm:
    """A communicator of the host or of a GPU that records how it was ended."""

    def __init__(self) -> None:
        self.device = CUDA
        self.failure: R2cclError | None = None
        self.calls: list[str] = []
        self.aborted = threading.Event()

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def abort(self, why: str) -> None:
        self.calls.append(f"abort: {why}")
        self.aborted.set()

    def close(self) -> None:
        self.calls.append("close")


class Group:
    """The streams of a group, on a played GPU with three streams."""

    def __init__(self) -> None:
        self.streams = stream.Streams()
        self.host, self.comm = PlayedComm(), PlayedComm()
        self.make_host = Mock(return_value=self.host)
        self.make_comm = Mock(return_value=self.comm)
        self.given, self.results = Mock(device=CUDA), [torch.ones(1)]
        self.done: list[str] = []
        self.own, self.other, self.caller = (PlayedStream(self.done) for _ in range(3))
        self.current = self.caller
        self.capturing, self.later_s = False, 0.0  # offset of the fake clock in seconds

    def open(self, device: torch.device = CUDA, timeout_s: float = 60.0) -> Any:
        return self.streams.comm_on(device, self.make_host, timeout_s)

    def ask(self, what: str = "sum", beside: bool = False, timeout_s: float = 60.0) -> StreamWork:
        return self.streams.add(
            what, lambda _: self.put(what), [self.given], self.results, timeout_s, beside=beside
        )

    def put(self, what: str) -> None:
        self.current.given.append(what)
        if what == "wrong":
            raise ValueError("so and so")

    def run(self) -> None:
        for each in (self.own, self.other, self.caller) * 3:  # the caller's stream last
            each.advance()

    @contextmanager
    def entered(self, given: PlayedStream | None) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as here:
            here.setattr(self, "current", given or self.current)
            yield

    def end_soon(self, last: str, failure: R2cclError | None = None) -> None:
        def end() -> None:
            self.comm.failure = failure
            self.caller.advance(last)

        threading.Timer(SOON_S, end).start()


@pytest.fixture
def unmade(monkeypatch: pytest.MonkeyPatch) -> Group:
    group = Group()
    # restored at the end, because a traceback would keep groups alive
    monkeypatch.setattr(LOST, "__traceback__", None)
    clock = Mock(monotonic=lambda: time.monotonic() + group.later_s, sleep=time.sleep)
    monkeypatch.setattr(stream, "time", clock)
    monkeypatch.setattr(stream, "StreamPoint", lambda _: PlayedPlace(group))
    monkeypatch.setattr(stream, "capturing", lambda _: group.capturing)
    monkeypatch.setattr(stream, "DeviceCommunicator", group.make_comm)
    monkeypatch.setattr(torch.cuda, "stream", group.entered)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: group.current)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: group.own)
    return group


@pytest.fixture
def group(unmade: Group) -> Group:
    assert unmade.open() is unmade.comm
    return unmade


def error_of(asked: Callable[[], object]) -> R2cclError | None:
    try:
        asked()
    except R2cclError as error:
        return error
    return None


def state(work: StreamWork) -> tuple[bool, bool, BaseException | None]:
    return work.is_completed(), work.is_success(), work.exception()


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("wait", ["wait", "result", "synchronize"])
def test_a_wait_orders_a_stream_after_the_work(group: Group, wait: str, beside: bool) -> None:
    work = group.ask(beside=beside)
    with group.entered(group.other):
        getattr(work, wait)()
        group.put("next")
    group.other.advance()
    assert (group.done, *state(work)) == ([], False, False, None)
    group.run()
    assert (group.done, *state(work)) == (["sum", "next"], True, True, None)


@pytest.mark.parametrize("failure", [None, LOST])
def test_a_wait_with_a_timeout_blocks_the_caller(group: Group, failure: R2cclError | None) -> None:
    work = group.ask()
    group.end_soon("sum", failure)
    assert error_of(lambda: work.wait(timedelta(seconds=30))) is failure
    assert (group.done, group.comm.calls) == (["sum"], [])


def test_work_beyond_the_timeout_of_a_wait_is_aborted(group: Group) -> None:
    late = "sum has not ended within 0.03 s (timeout)"
    with pytest.raises(AbortedError) as raised:
        group.ask().wait(timedelta(seconds=SOON_S))
    assert str(raised.value) == late
    assert {*group.comm.calls} == {f"abort: {late}"}  # the watcher thread may add a call


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("ask", ["wait", "result", "synchronize", "get_future"])
def test_a_failure_is_raised_by_every_query(group: Group, ask: str, ended: bool) -> None:
    work = group.ask()
    group.comm.failure = LOST
    if ended:
        group.run()
    assert error_of(getattr(work, ask)) is LOST
    assert state(work) == (ended, False, LOST)


@pytest.mark.parametrize("look", ["is_completed", "is_success", "exception", "wait"])
def test_a_completed_work_does_not_fail_later(group: Group, look: str) -> None:
    work = group.ask()
    group.run()
    getattr(work, look)()
    group.comm.failure = LOST
    assert state(work) == (True, True, None)
    assert work.result() == group.results
    assert error_of(group.ask("next").wait) is LOST


def test_results_are_available_before_the_work_completes(unmade: Group) -> None:
    unmade.comm.device = torch.device("cpu")
    unmade.open(unmade.comm.device)
    work = unmade.ask(beside=True)
    assert "sum" in unmade.caller.given  # the host has no second stream
    assert work.wait() is work.wait(timedelta(0)) is True
    for ask in (work.result, lambda: work.get_future().value()):
        assert ask()[0] is unmade.results[0]
    assert not work.is_completed()


@pytest.mark.parametrize("beside", [False, True])
def test_a_future_is_done_in_the_stream_of_its_work(
    group: Group, monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    future, seen = Mock(), list[object]()
    future().set_result = lambda given: seen.extend([given, group.current])
    monkeypatch.setattr(torch.futures, "Future", future)
    group.ask(beside=beside).get_future()
    assert seen == [group.results, group.own if beside else group.caller]
    future.assert_called_with(devices=[CUDA])


def test_captured_work_is_not_executed_at_capture(group: Group) -> None:
    group.capturing = True
    work = group.ask(timeout_s=1.0)
    assert work.wait(timedelta(seconds=30))  # returns at once
    group.later_s = 100
    group.streams.end_what_is_overdue()
    assert (group.streams.idle(), group.done, group.comm.calls) == (True, [], [])
    group.run()
    assert state(work) == (False, False, None)
    group.comm.failure = LOST
    assert error_of(work.wait) is LOST
    assert isinstance(error_of(group.streams.settled), InvalidArgumentError)


def test_work_in_the_side_stream_follows_the_callers_earlier_work(group: Group) -> None:
    group.put("before")
    group.ask(beside=True)
    group.put("after")
    group.given.record_stream.assert_called_once_with(group.own)
    group.own.advance()
    assert group.done == []
    group.caller.advance()
    group.own.advance()
    assert group.done == ["before", "after", "sum"]


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("second", [False, True])
def test_each_work_follows_the_last_in_any_stream(group: Group, first: bool, second: bool) -> None:
    group.ask("first", beside=first)
    with group.entered(group.other):
        group.ask("second", beside=second)
    group.run()
    assert group.done == ["first", "second"]


def test_captured_work_is_not_ordered_with_work_outside(group: Group) -> None:
    group.ask("before")
    group.capturing = True
    with group.entered(group.other):
        group.ask("captured")
    group.capturing = False
    with group.entered(group.own):
        group.ask("after")
    group.caller.advance()
    group.own.advance()
    assert group.done == ["before", "after"]
    assert group.other.given == ["captured"]


def test_failed_and_ended_works_are_not_running(group: Group) -> None:
    group.ask("first")
    with pytest.raises(ValueError, match="so and so"):
        group.ask("wrong", beside=True)
    assert not group.streams.idle()
    group.caller.advance("first")
    assert group.streams.idle()
    group.ask("second")
    assert [each.what for each in group.streams._running] == ["second"]


@pytest.fixture
def failed(group: Group) -> Iterator[Group]:
    """A group whose GPU has failed in the middle of a collective."""

    def fail(self: PlayedPlace) -> bool:
        raise FAILED

    group.work = group.ask(timeout_s=60.0)
    with pytest.MonkeyPatch.context() as here:
        here.setattr(PlayedPlace, "passed", fail)
        yield group


def test_work_on_a_failed_gpu_has_not_ended(failed: Group) -> None:
    for ask in ("is_completed", "is_success", "wait", "result"):
        with pytest.raises(RuntimeError, match="CUDA error"):
            getattr(failed.work, ask)()
    assert failed.work.exception() is FAILED
    assert not failed.streams.idle()
    failed.comm.failure = LOST
    assert failed.work.exception() is LOST  # the loss of a peer explains more than a CUDA error


def test_peers_are_notified_of_a_failed_gpu_at_the_timeout_or_the_end(
    failed: Group,
) -> None:
    failed.streams.end_what_is_overdue()
    assert failed.comm.calls == []
    failed.later_s = 100.0
    failed.streams.end_what_is_overdue()
    assert failed.comm.calls[0] == "abort: sum has not ended within 60 s (timeout)"
    failed.streams.close()
    assert failed.comm.calls[-2:] == ["abort: the process group is shut down", "close"]


def test_the_end_does_not_wait_for_a_failed_gpu(failed: Group) -> None:
    began_s = time.monotonic()
    failed.streams.drain(60.0)
    took_s = time.monotonic() - began_s
    timely(lambda: took_s < 30, f"the end came after {took_s:.1f} s", within_s=0)


def test_the_first_overdue_work_is_named(group: Group) -> None:
    for what, timeout_s in (("first", 100.0), ("second", 300.0), ("third", 200.0)):
        group.ask(what, timeout_s=timeout_s)
    group.caller.advance("first")
    for group.later_s in (0.0, 150.0, 250.0, 350.0):
        group.streams.end_what_is_overdue()
    assert [*dict.fromkeys(group.comm.calls)] == [  # the watcher thread may add calls
        "abort: third has not ended within 200 s (timeout)",
        "abort: second has not ended within 300 s (timeout)",
    ]


def test_overdue_work_is_aborted_without_a_waiting_caller(group: Group) -> None:
    group.ask(timeout_s=SOON_S)
    assert group.comm.aborted.wait(120)
    assert group.comm.calls[0] == "abort: sum has not ended within 0.03 s (timeout)"


def test_a_group_is_idle_when_all_has_ended(group: Group) -> None:
    group.ask("beside", beside=True)
    group.ask()
    group.own.advance()
    began_s = time.monotonic()
    group.streams.drain(SOON_S)
    assert time.monotonic() - began_s >= SOON_S
    assert not group.streams.idle()
    group.end_soon("sum")
    group.streams.drain(60.0)
    took_s = time.monotonic() - began_s
    assert group.streams.idle()
    timely(lambda: took_s < 30, f"the group was idle after {took_s:.1f} s", within_s=0)


@pytest.mark.parametrize("failure", [None, LOST])
def test_a_barrier_waits_for_earlier_work(group: Group, failure: R2cclError | None) -> None:
    group.put("before")
    settled = group.streams.settled()
    group.put("after")
    group.end_soon("before", failure)
    assert error_of(settled) is failure
    assert group.streams.failure() is failure
    assert group.done == ["before"]


@pytest.mark.parametrize("running", [False, True])
def test_closing_aborts_running_work_and_closes_once(group: Group, running: bool) -> None:
    if running:
        group.ask()
    group.streams.close()
    group.streams.close()
    assert group.comm.calls == ["abort: the process group is shut down"] * running + ["close"]
    assert group.streams.idle()


def test_a_group_has_one_communicator_on_one_device(unmade: Group) -> None:
    unmade.capturing = True
    assert isinstance(error_of(unmade.open), InvalidArgumentError)
    unmade.capturing = False
    assert unmade.open(timeout_s=99.5) is unmade.open() is unmade.comm
    with pytest.raises(InvalidArgumentError, match=r"is on cuda:1; must be on cuda:0,"):
        unmade.open(torch.device("cuda", 1))
    unmade.make_comm.assert_called_once_with(unmade.host, CUDA)
    timers = [each for each in threading.enumerate() if isinstance(each, threading.Timer)]
    assert all(each.finished.is_set() for each in timers if each.interval == 99.5)


def test_a_missing_rank_is_awaited_only_once(unmade: Group) -> None:
    def wait(*_: object) -> None:
        assert unmade.host.aborted.wait(120)
        raise LOST

    unmade.make_comm.side_effect = wait
    assert [error_of(lambda: unmade.open(timeout_s=SOON_S)) for _ in range(2)] == [LOST, LOST]
    late = "a rank has not joined the first GPU collective within 0.03 s (timeout)"
    assert unmade.host.calls == [f"abort: {late}", "close"]
    unmade.make_host.assert_called_once()


def test_a_group_may_end_while_it_waits_for_ranks(unmade: Group) -> None:
    def end(*_: object) -> PlayedComm:
        unmade.streams.abort("early")
        unmade.streams.close()
        return unmade.comm

    unmade.make_comm.side_effect = end
    unmade.open()
    unmade.streams.abort("late")
    assert (unmade.host.calls, unmade.comm.calls) == (["abort: early"], ["close", "abort: late"])


def test_garbage_collection_may_close_while_the_watcher_looks(unmade: Group) -> None:
    class Owner:  # like R2cclGroup, ends its streams when collected
        itself: Owner

    owner = Owner()
    owner.itself = owner  # only the garbage collector finds the cycle
    weakref.finalize(owner, unmade.streams.close)
    unmade.open()
    unmade.ask(timeout_s=0.0)
    del owner
    passed = PlayedPlace.passed

    def collecting(self: PlayedPlace) -> bool:
        gc.collect()
        return passed(self)

    with pytest.MonkeyPatch.context() as here:
        here.setattr(PlayedPlace, "passed", collecting)
        watcher = threading.Thread(target=unmade.streams.end_what_is_overdue, daemon=True)
        watcher.start()
        watcher.join(120)
    assert not watcher.is_alive()


def test_work_left_by_a_failed_put_keeps_its_order(group: Group) -> None:
    with pytest.raises(ValueError, match="so and so"):
        group.ask("wrong", beside=True)  # put() adds the work to the stream and raises afterwards
    with group.entered(group.other):
        group.ask("next")
    group.other.advance()
    assert group.done == []


def test_a_failed_stream_point_leaves_nothing_running(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "StreamPoint", Mock(side_effect=RuntimeError("CUDA error")))
    with pytest.raises(RuntimeError, match="CUDA error"):
        group.ask()
    assert group.streams.idle()


def test_completed_work_is_not_queried_again(group: Group) -> None:
    group.ask(timeout_s=60.0)
    group.run()
    assert group.streams.idle()
    group.later_s = 100.0
    asked = Mock(return_value=True)
    with pytest.MonkeyPatch.context() as here:
        here.setattr(PlayedPlace, "passed", lambda _: asked())
        group.capturing = True  # cudaEventQuery by another thread breaks a capture
        for _ in range(3):
            group.streams.end_what_is_overdue()
    assert asked.call_count == 0
