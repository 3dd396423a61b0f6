"""Collectives of a group on GPU tensors.

A call enqueues the collective at once. A synchronous collective runs on the caller's stream. An
asynchronous collective (``async_op``) runs on a stream of the group, after the caller's work so
far. A work refers to the point in the stream at the end of the collective. Sends and receives copy
through host memory, so they run on a lane instead, and start when the caller's stream has reached
the call.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from r2serve.communicator import Communicator
from r2serve.device import DeviceCommunicator
from r2serve.engines.torch.lane import watch
from r2serve.engines.torch.stream_point import HIGH, StreamPoint, capturing
from r2serve.errors import AbortedError, InvalidArgumentError, R2cclError
from r2serve.process import Origin

_Work: Any = dist.Work  # torch's type stubs promise methods absent from the class

LOOK_S = 0.001
"""Polling interval of waits with a timeout, in seconds."""


@dataclass(eq=False)
class _RunningCollective:
    """A collective in a stream, for the check of timeouts."""

    what: str
    timeout_s: float
    began_s: float = field(default_factory=time.monotonic)
    end: StreamPoint | None = None
    """Point in the stream after the collective; None: the collective is being enqueued."""
    _seen: bool = False

    def ended(self) -> bool:
        """Whether the collective has ended; True is remembered, without another query of the GPU.

        Raises:
            RuntimeError: the GPU has failed, so the collective never ends.
        """
        if not self._seen:
            self._seen = self.end is not None and self.end.passed()
        return self._seen

    def pending(self) -> bool:
        """Whether the collective has not ended; a failed GPU counts as not ended."""
        try:
            return not self.ended()
        except RuntimeError:
            return True

    def overdue(self) -> bool:
        return time.monotonic() - self.began_s > self.timeout_s and self.pending()

    def late(self, limit_s: float) -> str:
        return f"{self.what} has not ended within {limit_s:g} s (timeout)"


class StreamWork(_Work):  # type: ignore[misc]
    """The work of a collective in a stream."""

    def __init__(
        self,
        running: _RunningCollective,
        results: Sequence[torch.Tensor],
        comm: DeviceCommunicator,
        *,
        stream: Any,
        captured: bool,
    ) -> None:
        """``stream`` is the stream of the collective; None: the caller's stream."""
        super().__init__()
        self._stream = stream
        self._running = running
        self._results = list(results)
        self._comm = comm
        self._captured = captured
        self._origin = Origin()
        self._sound = False  # True: the collective ended without a failure

    def _ended(self) -> bool:
        """Whether the collective has ended; False for a collective in a captured graph."""
        self._origin.check("process group")
        if self._captured or not self._running.ended():
            return False
        if not self._sound:  # a failure after the end belongs to another collective
            self._sound = self._failure() is None
        return True

    def _failure(self) -> BaseException | None:
        try:
            self._comm.check()
        except R2cclError as error:
            return error
        return None

    # ---- interface of torch.distributed.Work ----

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Orders all later work of the current stream after the collective. Returns True.

        Args:
            timeout: with a timeout the calling thread waits, except in a capture. A collective
                past the timeout is aborted on every rank, together with its communicator.

        Raises:
            R2cclError: the host already knows that this or an earlier collective has failed.
            RuntimeError: the GPU has failed; the text is torch's.
        """
        self._origin.check("process group")
        limit_s = timeout.total_seconds() if timeout else 0.0
        if limit_s > 0 and not self._captured:
            until_s = time.monotonic() + limit_s
            while not self._ended():
                if time.monotonic() > until_s:
                    late = self._running.late(limit_s)
                    self._comm.abort(late)
                    raise AbortedError(late)
                time.sleep(LOOK_S)
        if self._running.end is not None:
            self._running.end.precedes()
        failure = self.exception()
        if failure is not None:
            raise failure
        return True

    def is_completed(self) -> bool:
        return self._ended()

    def is_success(self) -> bool:
        return self._ended() and self._sound

    def exception(self) -> BaseException | None:
        try:
            self._ended()
        except RuntimeError as error:  # the error of a peer names the cause, so it takes precedence
            return self._failure() or error
        return None if self._sound else self._failure()

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self._results

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Returns a completed future for use in a stream; tensors are valid in stream order.

        Raises:
            R2cclError: see :meth:`wait`.
        """
        failure = self.exception()
        if failure is not None:
            raise failure
        device = self._comm.device
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(
            devices=[device] if device.type == "cuda" else None
        )
        with torch.cuda.stream(self._stream):  # a wait on the future follows this stream
            future.set_result(self._results)
        return future


class Streams:
    """Communicator and streams of a group on a GPU; made by the first collective on all ranks."""

    def __init__(self) -> None:
        self._making = threading.Lock()  # held until all ranks have joined
        # Guards the fields below; reentrant, because garbage collection may call close() anywhere.
        self._lock = threading.RLock()
        self._host: Communicator | None = None
        self._comm: DeviceCommunicator | None = None
        self._failure: BaseException | None = None
        self._closed = False
        self._own: Any = None  # the group's stream; None without a real GPU
        self._running: deque[_RunningCollective] = deque()
        self._last: StreamPoint | None = None  # end of the last collective outside captures
        watch(self)

    def comm_on(
        self, device: torch.device, make_host: Callable[[], Communicator], timeout_s: float
    ) -> DeviceCommunicator:
        """Returns the communicator on ``device``; the first call is collective.

        Args:
            make_host: makes the host communicator below, without communication.

        Raises:
            InvalidArgumentError: the first call is in a capture, which cannot allocate buffers; or
                the communicator is on another device.
            AbortedError: a rank did not join within ``timeout_s``.
        """
        with self._making:
            if self._comm is None:
                self._make(device, make_host, timeout_s)
            comm = self._comm
        assert comm is not None
        if comm.device != device:
            raise InvalidArgumentError(
                f"tensor: is on {device}; must be on {comm.device}, like the group's first "
                "collective, because r2ccl supports one device a process"
            )
        return comm

    def _make(
        self, device: torch.device, make_host: Callable[[], Communicator], timeout_s: float
    ) -> None:
        if self._failure is not None:
            raise self._failure  # the other ranks do not join a second attempt
        if capturing(device):
            raise InvalidArgumentError(
                "the first collective of a group on a GPU allocates buffers, which is impossible "
                "during a capture: run a collective of the group before the capture"
            )
        host = make_host()
        with self._lock:
            self._host = host
        why = f"a rank has not joined the first GPU collective within {timeout_s:g} s (timeout)"
        try:
            with _ended_after(timeout_s, host.abort, why):
                comm = DeviceCommunicator(host, device)
        except BaseException as error:
            self._failure = error
            host.close()
            raise
        with self._lock:
            self._comm = comm
            closed = self._closed
        if device.type == "cuda":
            self._own = torch.cuda.Stream(device, priority=HIGH)  # type: ignore[no-untyped-call]
        if closed:  # by another thread, while the communicator was made
            comm.close()

    def add(
        self,
        what: str,
        put: Callable[[DeviceCommunicator], None],
        touched: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        timeout_s: float,
        *,
        beside: bool,
    ) -> StreamWork:
        """Enqueues a collective by a call of ``put``.

        Args:
            beside: True: on the group's stream, so that the caller's stream continues.
        """
        comm = self._comm
        assert comm is not None
        captured = capturing(comm.device)
        running = _RunningCollective(what, timeout_s)
        if not captured:  # a captured collective runs at replay, so no timeout is checked
            with self._lock:
                self._running = deque(e for e in tuple(self._running) if e.pending())
                self._running.append(running)
        stream = self._own if beside else None
        try:
            asked = StreamPoint(comm.device)
            with torch.cuda.stream(stream):
                if beside:
                    asked.precedes()
                    _keep(touched)
                if not captured and self._last is not None:
                    self._last.precedes()  # the previous collective may be in another stream
                try:
                    put(comm)
                finally:  # after an error, kernels may be in the stream already
                    running.end = StreamPoint(comm.device)
                    if not captured:
                        self._last = running.end
        except BaseException:
            with self._lock:
                if running in self._running:
                    self._running.remove(running)
            raise
        return StreamWork(running, results, comm, stream=stream, captured=captured)

    def after_fork(self) -> None:
        """Drops the parent's collectives in a forked child; the parent's threads held the locks."""
        self._making, self._lock = threading.Lock(), threading.RLock()
        self._running.clear()

    def end_what_is_overdue(self) -> None:
        with self._lock:
            late = [each for each in tuple(self._running) if each.overdue()]
            comm = self._comm
        if late and comm is not None:
            comm.abort(late[0].late(late[0].timeout_s))

    def settled(self) -> Callable[[], None]:
        """Returns a function to wait, on any thread, for the current work of the current stream.

        The function raises an R2cclError if any of this work has failed.
        """
        comm = self._comm
        if comm is None:
            return lambda: None
        if capturing(comm.device):
            raise InvalidArgumentError("barrier: not possible while a graph is captured")
        place = StreamPoint(comm.device)

        def wait() -> None:
            place.await_here()
            comm.check()

        return wait

    def abort(self, why: str) -> None:
        """Aborts running collectives on all ranks."""
        with self._lock:
            each = self._comm or self._host
        if each is not None:
            each.abort(why)

    def idle(self) -> bool:
        with self._lock:
            return not any(each.pending() for each in tuple(self._running))

    def drain(self, limit_s: float) -> None:
        """Waits until all collectives have ended or a GPU has failed, at most ``limit_s`` s."""
        until_s = time.monotonic() + limit_s
        while time.monotonic() < until_s:
            with self._lock:
                running = tuple(self._running)
            try:
                if all(each.ended() for each in running):
                    return
            except RuntimeError:  # no collective ends any more; torch's next GPU call raises
                return
            time.sleep(LOOK_S)

    def failure(self) -> BaseException | None:
        """Returns the error that makes results so far void, or None."""
        if self._comm is None:
            return None
        try:
            self._comm.check()
        except R2cclError as error:
            return error
        return None

    def close(self) -> None:
        """Aborts running collectives and closes. Idempotent."""
        with self._lock:
            first, self._closed = not self._closed, True
            comm = self._comm
        if comm is None or not first:
            return
        if not self.idle():
            comm.abort("the process group is shut down")
        comm.close()
        with self._lock:
            self._running.clear()
        self._last = None


def _keep(given: Sequence[torch.Tensor]) -> None:
    """Reserves the tensors' memory until the current stream has passed this point."""
    for tensor in given:
        if tensor.device.type == "cuda":
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


@contextmanager
def _ended_after(limit_s: float, abort: Callable[[str], None], why: str) -> Iterator[None]:
    """Calls ``abort`` if the block takes longer than ``limit_s`` seconds."""
    late = threading.Timer(limit_s, abort, [why])
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()
