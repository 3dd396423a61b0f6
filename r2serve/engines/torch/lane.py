"""Queue of a communicator's operations; the caller waits for an operation or continues.

A communicator runs a single operation at a time. A synchronous call on an empty queue runs on the
calling thread, which saves a thread switch. All other operations run on the lane's thread.
Callbacks of futures run on other threads, because a callback may submit and wait for operations.
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

from r2serve.errors import InvalidArgumentError
from r2serve.process import made_before_fork

_Work: Any = dist.Work  # torch's type stubs promise methods absent from the class

_LOG = logging.getLogger("r2serve.r2ccl")

WATCH_S = 1.0
"""Interval of checks for overdue operations, in seconds."""


class R2cclWork(_Work):  # type: ignore[misc]
    """A queued collective: torch's handle to wait for the end and the outcome."""

    def __init__(
        self,
        what: str,
        run: Callable[[], None],
        results: Sequence[torch.Tensor],
        timeout_s: float,
        give_up: Callable[[str], None],
    ) -> None:
        """``run`` runs the collective; ``give_up`` makes a running ``run`` end with an error."""
        super().__init__()
        self.what = what
        self.timeout_s = timeout_s
        self._began_s = 0.0  # 0: not started
        self._run = run
        self._results = list(results)
        self._give_up = give_up
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._future: torch.futures.Future[None] | None = None
        self._told: torch.futures.Future[list[torch.Tensor]] | None = None

    def begin(self) -> None:
        """Starts the timeout, unless it has started."""
        self._began_s = self._began_s or time.monotonic()

    def execute(self) -> None:
        self.begin()
        try:
            self._run()
        except BaseException as error:  # noqa: BLE001  re-raised by wait()
            self._error = error
        self._end()

    def refuse(self, error: BaseException) -> None:
        """Ends the work with an error before its start."""
        self._error = error
        self._end()

    def end_if_overdue(self) -> None:
        """Aborts the collective on every rank if its timeout has passed."""
        began_s = self._began_s
        if began_s and not self._ended.is_set() and time.monotonic() - began_s > self.timeout_s:
            self._abandon(self.timeout_s)

    def _abandon(self, limit_s: float) -> None:
        self._give_up(f"{self.what} has not ended within {limit_s:g} s (timeout)")

    def _end(self) -> None:
        with self._lock:
            self._ended.set()
            future = self._future
        self._run = _nothing  # drops the references to tensors
        if future is not None:
            # A separate thread, because the callback may wait for later operations of the lane.
            threading.Thread(
                target=future.set_result, args=(None,), name="r2ccl-callback", daemon=True
            ).start()

    def _outcome(self, _: object) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return self._results

    def forsake(self, error: BaseException) -> None:
        """Ends the work of a parent process in a forked child, where nothing runs the work.

        A thread of the parent may have held the locks, so this object gets new locks.
        """
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._error = error
        self._run = _nothing
        self._ended.set()

    # ---- interface of torch.distributed.Work ----

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits until the collective has ended. Returns True.

        A collective is aborted on every rank, together with its communicator, if its timeout passes
        or a signal handler raises in the wait.

        Args:
            timeout: default: the collective's own timeout.

        Raises:
            R2cclError: the collective has failed.
        """
        limit_s = timeout.total_seconds() if timeout else 0.0
        if limit_s > 0 and not self._wait_for_end(limit_s):
            self._abandon(limit_s)
        self._wait_for_end(None)
        if self._error is not None:
            raise self._error
        return True

    def _wait_for_end(self, limit_s: float | None) -> bool:
        try:
            return self._ended.wait(limit_s)
        except BaseException as error:
            if not self._ended.is_set():
                name = type(error).__name__
                self._give_up(f"{self.what}: its wait was interrupted by a signal ({name})")
            raise

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
        """Returns a future with the written tensors or the error.

        C++ sees an error only through a callback that raises the error, because ``set_exception``
        of torch's futures works in Python only.
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
    """An object with works to check for timeouts."""

    def end_what_is_overdue(self) -> None: ...

    def after_fork(self) -> None: ...


class Lane:
    """The queue of a communicator's works."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._waiting: deque[R2cclWork] = deque()
        self._running: R2cclWork | None = None
        self._runner = 0  # identifier of the thread that runs the current work
        self._closed: BaseException | None = None
        self._thread: threading.Thread | None = None
        watch(self)

    def add(self, work: R2cclWork, *, wait: bool) -> R2cclWork:
        """Runs or queues a work.

        Args:
            wait: the caller waits at once, so the calling thread may run the work.

        Returns:
            ``work``, already ended if the calling thread ran the work or the lane is closed.
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
        """Ends queued works with ``why`` and starts no more; returns when no work is running.

        The caller has made sure that the running work ends. Garbage collection may call this
        method in the thread of the running work.
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
        """Waits at most ``limit_s`` seconds for an empty queue; returns whether it is empty."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._waiting and self._running is None, limit_s
            )

    def after_fork(self) -> None:
        """Refuses all works in a forked child: the threads and the communicator are the parent's.

        A thread of the parent may have held the lock, so this object gets a new lock.
        """
        error = InvalidArgumentError(made_before_fork("process group"))
        works = [*self._waiting, *filter(None, [self._running])]
        self._changed, self._thread, self._running = threading.Condition(), None, None
        self._waiting.clear()
        self._closed = error
        for work in works:
            work.forsake(error)

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


# ---- a single thread checks all lanes of the process ----

_LANES: weakref.WeakSet[Watched] = weakref.WeakSet()
_WATCHING = threading.Lock()
_STOP = threading.Event()
_watcher: threading.Thread | None = None


def watch(lane: Watched) -> None:
    """Checks ``lane`` for overdue works every :data:`WATCH_S`, for the lifetime of ``lane``."""
    global _watcher
    with _WATCHING:
        _LANES.add(lane)
        if _watcher is None:
            _watcher = threading.Thread(
                target=_look_again_and_again, name="r2ccl-watch", daemon=True
            )
            _watcher.start()


def _after_fork() -> None:
    """Resets the state in a forked child: the parent's lock may be held, and no thread exists."""
    global _WATCHING, _watcher
    _WATCHING, _watcher = threading.Lock(), None
    for lane in list(_LANES):
        lane.after_fork()
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
            except Exception:  # noqa: BLE001  other lanes must still be checked
                _LOG.exception("timeout check of a collective failed")
        del lanes, lane  # the references would keep lanes alive


@atexit.register
def _stop_watching() -> None:
    """Stops the watcher.

    A daemon thread returning from the core during interpreter exit would crash the process.
    """
    _STOP.set()
    if _watcher is not None:
        _watcher.join()
