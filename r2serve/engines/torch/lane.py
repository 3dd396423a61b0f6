"""Runs what one communicator is asked for, in order; who asked waits, or goes on.

A communicator does one thing after another.  A caller who waits anyway does it himself, without
the cost of another thread, if nothing is before him; all else is done by the lane's own thread.
Callbacks of futures run on neither: they may ask for more, and wait for it.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

_Work: Any = dist.Work  # its types promise more than it has

_LOG = logging.getLogger("r2serve.r2ccl")

WATCH_S = 1.0
"""How often it is looked whether anything takes too long."""


class R2cclWork(_Work):  # type: ignore[misc]
    """One collective: whoever holds it can wait for its end, and learns how it ended."""

    def __init__(
        self,
        what: str,
        run: Callable[[], None],
        results: Sequence[torch.Tensor],
        timeout_s: float,
        give_up: Callable[[str], None],
    ) -> None:
        """run: does it.  give_up: makes ``run`` end with an error, whoever runs it."""
        super().__init__()
        self.what = what
        self.timeout_s = timeout_s
        self._began_s = 0.0  # 0: nobody runs it yet
        self._run = run
        self._results = list(results)
        self._give_up = give_up
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._future: torch.futures.Future[None] | None = None
        self._told: torch.futures.Future[list[torch.Tensor]] | None = None

    def execute(self) -> None:
        self._began_s = time.monotonic()
        try:
            self._run()
        except BaseException as error:  # noqa: BLE001  it is for whoever waits
            self._error = error
        self._end()

    def refuse(self, error: BaseException) -> None:
        """End without having begun."""
        self._error = error
        self._end()

    def end_if_overdue(self) -> None:
        """What has run for longer than its timeout is ended, on every rank."""
        began_s = self._began_s
        if began_s and not self._ended.is_set() and time.monotonic() - began_s > self.timeout_s:
            self._abandon(self.timeout_s)

    def _abandon(self, limit_s: float) -> None:
        self._give_up(f"{self.what} has not ended within {limit_s:g} s (timeout)")

    def _end(self) -> None:
        with self._lock:
            self._ended.set()
            future = self._future
        self._run = _nothing  # lets go of the tensors
        if future is not None:
            # A callback may wait for what this lane, or this future's kind, has yet to do.
            threading.Thread(
                target=future.set_result, args=(None,), name="r2ccl-callback", daemon=True
            ).start()

    def _outcome(self, _: object) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return self._results

    # --- what torch asks of a Work ----------------------------------------------------------------

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until it has ended; True.

        Args:
            timeout: default: the collective's own.  What takes longer is ended on every rank, and
                its communicator with it.

        Raises:
            R2cclError: it failed.
        """
        limit_s = timeout.total_seconds() if timeout else 0.0
        if limit_s > 0 and not self._ended.wait(limit_s):
            self._abandon(limit_s)
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def is_success(self) -> bool:
        return self._ended.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self._results

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Done when this is, with the tensors that it wrote, or with its error.

        C++ learns of an error only from a callback that raises it: ``set_exception`` of torch's
        futures is for Python alone.
        """
        with self._lock:
            if self._told is not None:
                return self._told
            self._future = torch.futures.Future()
            self._told = self._future.then(self._outcome)
            ended = self._ended.is_set()
        if ended:
            self._future.set_result(None)
        return self._told


def _nothing() -> None:
    pass


class Watched(Protocol):
    """What has works that may be overdue."""

    def end_what_is_overdue(self) -> None: ...


class Lane:
    """The works of one communicator, one after another."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._waiting: deque[R2cclWork] = deque()
        self._running: R2cclWork | None = None
        self._runner = 0  # identity of the thread that runs it
        self._closed: BaseException | None = None
        self._thread: threading.Thread | None = None
        watch(self)

    def add(self, work: R2cclWork, *, wait: bool) -> R2cclWork:
        """Have it done.

        Args:
            wait: the caller will wait for it at once, so it may be done right here.
        """
        with self._changed:
            if self._closed is not None:
                work.refuse(self._closed)
                return work
            if self._waiting or self._running is not None or not wait:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                    self._thread.start()
                self._waiting.append(work)
                self._changed.notify_all()
                return work
            self._begin(work)
        self._execute(work)
        return work

    def close(self, why: BaseException) -> None:
        """Nothing more is begun; what waits ends with ``why``.  Returns when nothing runs.

        Whoever calls this has made sure that what runs will end.  Garbage collection may call it
        in the very thread that runs something.
        """
        me = threading.get_ident()
        with self._changed:
            if self._closed is None:
                self._closed = why
            refused = list(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._running is None or self._runner == me)
        for work in refused:
            work.refuse(why)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def drain(self, limit_s: float) -> bool:
        """Wait until everything is done, but not for ever; whether it is."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._waiting and self._running is None, limit_s
            )

    def end_what_is_overdue(self) -> None:
        work = self._running
        if work is not None:
            work.end_if_overdue()

    def _begin(self, work: R2cclWork) -> None:
        self._running = work
        self._runner = threading.get_ident()

    def _execute(self, work: R2cclWork) -> None:
        try:
            work.execute()
        finally:
            with self._changed:
                self._running = None
                self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._due)
                if self._closed is not None:
                    return
                work = self._waiting.popleft()
                self._begin(work)
            self._execute(work)

    def _due(self) -> bool:
        return self._closed is not None or (bool(self._waiting) and self._running is None)


# --- one thread watches all lanes of the process --------------------------------------------------

_LANES: weakref.WeakSet[Watched] = weakref.WeakSet()
_WATCHING = threading.Lock()
_STOP = threading.Event()
_watcher: threading.Thread | None = None


def watch(lane: Watched) -> None:
    """Look every :data:`WATCH_S` whether something of it is overdue, as long as it is there."""
    global _watcher
    with _WATCHING:
        _LANES.add(lane)
        if _watcher is None:
            _watcher = threading.Thread(
                target=_look_again_and_again, name="r2ccl-watch", daemon=True
            )
            _watcher.start()


def _after_fork() -> None:
    """A child has the parent's lock, maybe held, and none of its threads."""
    global _WATCHING, _watcher
    _WATCHING, _watcher = threading.Lock(), None
    _LANES.clear()


os.register_at_fork(after_in_child=_after_fork)


def _look_again_and_again() -> None:
    while not _STOP.wait(WATCH_S):
        with _WATCHING:
            lanes = list(_LANES)
        lane: Watched | None = None
        for lane in lanes:
            try:
                lane.end_what_is_overdue()
            except Exception:  # noqa: BLE001  the others' time passes, too
                _LOG.exception("whether a collective takes too long is not known")
        del lanes, lane  # or they would live on


@atexit.register
def _stop_watching() -> None:
    """A thread that comes back from the core while the interpreter ends takes the process along."""
    _STOP.set()
    if _watcher is not None:
        _watcher.join()
