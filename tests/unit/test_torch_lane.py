"""Order and completion of work in a lane, without a communicator."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pairs import Pair
from timely import timely

from r2serve import _core
from r2serve.engines.torch import lane
from r2serve.engines.torch.group import R2cclGroup
from r2serve.engines.torch.lane import Lane, R2cclWork
from r2serve.errors import AbortedError, InvalidArgumentError, PeerClosedError


class Asked:
    """Adds works with a given behaviour to a lane, and records their calls."""

    def __init__(self) -> None:
        self.lane = Lane("test")
        self.done: list[tuple[str, int]] = []
        self.given_up: list[str] = []
        self.ending = threading.Event()

    def ask(
        self,
        name: str,
        *,
        wait: bool = False,
        until: threading.Event | None = None,
        error: Exception | None = None,
        timeout_s: float = 60.0,
    ) -> R2cclWork:
        def call() -> None:
            if until is not None:
                assert until.wait(120)
            self.done.append((name, threading.get_ident()))
            if error is not None:
                raise error

        def give_up(why: str) -> None:
            self.given_up.append(why)
            self.ending.set()

        return self.lane.add(R2cclWork(name, call, [torch.ones(1)], timeout_s, give_up), wait=wait)

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.done]


@pytest.fixture
def asked() -> Iterator[Asked]:
    made = Asked()
    yield made
    made.ending.set()
    made.lane.close(PeerClosedError("the test is over"))


def test_a_waiting_caller_runs_the_work_if_the_lane_is_empty(asked: Asked) -> None:
    assert asked.ask("first", wait=True).is_completed()
    assert asked.done == [("first", threading.get_ident())]


def test_works_end_in_the_order_of_their_requests(asked: Asked) -> None:
    go = threading.Event()
    works = [asked.ask("0", until=go), *(asked.ask(str(i), wait=i % 3 == 0) for i in range(1, 20))]
    assert asked.names == []
    assert not works[3].is_completed()  # a waiting caller does not overtake earlier work
    go.set()
    assert all(work.wait() for work in works)
    assert asked.names == [str(i) for i in range(20)]
    assert threading.get_ident() not in dict.fromkeys(thread for _, thread in asked.done)


def test_an_error_is_raised_by_wait_and_by_the_future(asked: Asked) -> None:
    work = asked.ask("wrong", error=ValueError("so and so"))
    with pytest.raises(ValueError, match="so and so"):
        work.wait()
    assert isinstance(work.exception(), ValueError)
    assert work.is_completed()
    assert not work.is_success()
    with pytest.raises(Exception, match="so and so"):  # C++ converts the error to another type
        work.get_future().wait()
    assert asked.ask("next", wait=True).wait()


def test_a_future_asked_for_before_or_after_the_end_has_the_results(asked: Asked) -> None:
    go = threading.Event()
    work = asked.ask("it", until=go)
    early = work.get_future().then(lambda done: done.value()[0].item())
    go.set()
    assert early.wait() == 1.0
    assert work.get_future().wait()[0].item() == 1.0


def test_a_wait_beyond_its_timeout_gives_the_work_up(asked: Asked) -> None:
    work = asked.ask("endless", until=asked.ending, error=ValueError("given up"))
    with pytest.raises(ValueError, match="given up"):
        work.wait(timedelta(seconds=0.05))
    assert asked.given_up == ["endless has not ended within 0.05 s (timeout)"]


def test_a_wait_ends_after_call_timeout_s_on_all_ranks(tmp_path: Path, asked: Asked) -> None:
    """Rank 1 does not call in time, and the timeout of the work is longer than the option."""
    pair = Pair(tmp_path, call_timeout_s=0.5)
    try:
        pair.wait_for_state(0, "UP")
        processes = [end.info.process for end in pair.ends]
        ranks = [
            _core.Communicator(end.engine, 7, "late", rank, processes, [0, 1], "auto")
            for rank, end in enumerate(pair.ends)
        ]
        work = R2cclWork("barrier", ranks[0].barrier, [], 60.0, ranks[0].abort)
        with pytest.raises(AbortedError, match=r"rank 0 has waited for call_timeout_s = 0\.5"):
            asked.lane.add(work, wait=False).wait()
        with contextlib.suppress(AbortedError):  # rank 0 has sent its message of this barrier
            ranks[1].barrier()
        with pytest.raises(AbortedError, match=r"rank 0 has waited for call_timeout_s = 0\.5"):
            ranks[1].barrier()
    finally:
        pair.close()


@pytest.mark.parametrize("limit", [None, timedelta(seconds=60)])
def test_a_wait_that_a_signal_interrupts_gives_the_work_up(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, limit: timedelta | None
) -> None:
    class Interrupted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            raise KeyboardInterrupt

    work = asked.ask("endless", until=asked.ending)
    monkeypatch.setattr(work, "_ended", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        work.wait(limit)
    assert asked.given_up == ["endless: its wait was interrupted by a signal (KeyboardInterrupt)"]
    timely(work.is_completed, "the end of the work")
    with pytest.raises(KeyboardInterrupt):
        work.wait(limit)
    assert len(asked.given_up) == 1  # nothing is left to give up


@pytest.mark.parametrize("wait", [True, False])
def test_work_without_a_waiting_caller_times_out_too(asked: Asked, wait: bool) -> None:
    """A caller waiting for a future (like DDP), or in the call, sets no timeout."""
    began = time.monotonic()
    work = asked.ask("endless", wait=wait, until=asked.ending, timeout_s=0.1)
    work.get_future().wait()
    assert asked.given_up[0] == "endless has not ended within 0.1 s (timeout)"
    took_s = time.monotonic() - began
    timely(lambda: took_s < 5 + lane.WATCH_S, f"given up after {took_s:.1f} s", within_s=0)


@pytest.mark.timeout(120)
def test_a_callback_may_add_work_and_wait_for_it(asked: Asked) -> None:
    """DDP's communication hooks do the same."""
    go = threading.Event()
    work = asked.ask("first", until=go)

    def more(_: object) -> int:
        asked.ask("second").wait()
        asked.ask("third").get_future().wait()
        return 3

    done = work.get_future().then(more)
    go.set()
    assert done.wait() == 3
    assert asked.names == ["first", "second", "third"]


def test_an_error_reaches_a_future_requested_before_the_end(asked: Asked) -> None:
    go = threading.Event()
    work = asked.ask("wrong", until=go, error=ValueError("so and so"))
    seen: list[str] = []

    def look(done: torch.futures.Future[list[torch.Tensor]]) -> None:
        with pytest.raises(Exception, match="so and so"):
            done.value()
        seen.append("error")

    after = work.get_future().then(look)
    go.set()
    after.wait()
    assert seen == ["error"]


def test_a_closed_lane_fails_waiting_work_and_starts_none(asked: Asked) -> None:
    go = threading.Event()
    running, waiting = asked.ask("running", until=go), asked.ask("waiting")
    assert not asked.lane.drain(0.05)
    closing = threading.Thread(target=asked.lane.close, args=(PeerClosedError("it is over"),))
    closing.start()
    time.sleep(0.05)
    assert closing.is_alive()  # close() waits for running work
    go.set()
    closing.join(120)
    assert running.wait()
    later = asked.ask("later", wait=True)
    for refused in (waiting, later):
        with pytest.raises(PeerClosedError, match="it is over"):
            refused.wait()
    assert asked.names == ["running"]


@pytest.mark.parametrize("wait", [True, False])
def test_a_lane_can_be_closed_from_within(asked: Asked, wait: bool) -> None:
    """Garbage collection may close a lane."""

    def close() -> None:
        asked.lane.close(PeerClosedError("it is over"))

    ends: Callable[[str], None] = asked.given_up.append
    work = asked.lane.add(R2cclWork("closing", close, [], 60.0, ends), wait=wait)
    assert work.wait(timedelta(seconds=120))
    assert not asked.given_up


@pytest.mark.parametrize(("given_s", "limit_s"), [(0.0, 7.0), (0.5, 0.5), (1.0, 1.0), (3.0, 3.0)])
def test_a_calls_own_timeout_replaces_the_groups(given_s: float, limit_s: float) -> None:
    """torch passes 0 if the caller has given no timeout."""
    group = R2cclGroup.__new__(R2cclGroup)
    group._timeout_s = 7.0
    options = SimpleNamespace(timeout=timedelta(seconds=given_s))
    assert group._limit_s(options) == limit_s
    assert group._limit_s(None) == 7.0


def test_a_forked_child_refuses_and_ends_the_parents_works() -> None:
    """The handler of a fork, called without a fork: nothing may hang, and nothing may run."""
    asked, release = Lane("parent"), threading.Event()
    running = asked.add(work(release.wait), wait=False)
    waiting = asked.add(work(release.wait), wait=False)
    timely(lambda: running._began_s, "the work has begun")
    thread = asked._thread
    asked.after_fork()
    for each in (running, waiting, asked.add(work(release.wait), wait=False)):
        with pytest.raises(InvalidArgumentError, match="before a fork"):
            each.wait()
    release.set()
    assert thread is not None
    thread.join(120)


def work(run: Callable[[], object]) -> R2cclWork:
    return R2cclWork("work", lambda: (run(), None)[1], [], 60.0, lambda why: None)
