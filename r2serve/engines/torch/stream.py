"""What a group does with tensors of a GPU.

Collectives are put into a stream at once, in the order in which they are asked for: into the
caller's, or, of those that he does not wait for (``async_op``), into one of the group's own, which
follows the caller's.  A work stands for the place in the stream where one ends.  What goes through
the host instead, on a lane, begins when the caller's stream has come to where it was asked for.
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

_Work: Any = dist.Work  # its types promise more than it has

LOOK_S = 0.001
"""How often whoever waits with a limit looks."""


@dataclass(eq=False)
class _RunningCollective:
    """A collective in a stream, for the one who looks whether it is late."""

    what: str
    timeout_s: float
    began_s: float = field(default_factory=time.monotonic)
    end: StreamPoint | None = None
    """None: it is being put there."""
    _seen: bool = False

    def ended(self) -> bool:
        """Whether it has; a GPU that has said so is not asked again.

        Raises:
            RuntimeError: the GPU has failed, so it never ends.
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
    """One collective in a stream."""

    def __init__(
        self,
        running: _RunningCollective,
        results: Sequence[torch.Tensor],
        comm: DeviceCommunicator,
        *,
        stream: Any,
        captured: bool,
    ) -> None:
        """stream: that it is in; None: the caller's."""
        super().__init__()
        self._stream = stream
        self._running = running
        self._results = list(results)
        self._comm = comm
        self._captured = captured
        self._sound = False

    def _ended(self) -> bool:
        """In a graph that is captured: not now."""
        if self._captured or not self._running.ended():
            return False
        if not self._sound:  # what fails later was another one
            self._sound = self._failure() is None
        return True

    def _failure(self) -> BaseException | None:
        try:
            self._comm.check()
        except R2cclError as error:
            return error
        return None

    # --- what torch asks of a Work ----------------------------------------------------------------

    def wait(self, timeout: timedelta | None = None) -> bool:
        """What is put into the current stream from now on comes after; True.

        Args:
            timeout: with one the caller waits himself, but not in a capture.  What takes longer is
                ended on every rank, and its communicator with it.

        Raises:
            R2cclError: it has failed, or one before it, as far as is known yet.
            RuntimeError: the GPU has failed, in torch's words.
        """
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
        except RuntimeError as error:  # a peer's error names the cause, so that error comes first
            return self._failure() or error
        return None if self._sound else self._failure()

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self._results

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Done now, for whoever goes on in a stream; the results are, when the stream comes there.

        Raises:
            R2cclError: as :meth:`wait`.
        """
        failure = self.exception()
        if failure is not None:
            raise failure
        device = self._comm.device
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(
            devices=[device] if device.type == "cuda" else None
        )
        with torch.cuda.stream(self._stream):  # where who waits for it waits
            future.set_result(self._results)
        return future


class Streams:
    """A group's collectives on a GPU: made with the first one, on all ranks."""

    def __init__(self) -> None:
        self._making = threading.Lock()  # held until the other ranks are there
        # Of what follows.  A group that is collected closes on whatever thread that happens on.
        self._lock = threading.RLock()
        self._host: Communicator | None = None
        self._comm: DeviceCommunicator | None = None
        self._failure: BaseException | None = None
        self._closed = False
        self._own: Any = None  # stream, of a real GPU
        self._running: deque[_RunningCollective] = deque()
        self._last: StreamPoint | None = None  # of what was put there, outside of captures
        watch(self)

    def comm_on(
        self, device: torch.device, make_host: Callable[[], Communicator], timeout_s: float
    ) -> DeviceCommunicator:
        """The communicator; collective at the first call.

        Args:
            make_host: makes what carries it, without a word from the others.

        Raises:
            InvalidArgumentError: a graph is being captured, which cannot have its buffers; or it is
                on another device.
            AbortedError: a rank has not come within ``timeout_s``.
        """
        with self._making:
            if self._comm is None:
                self._make(device, make_host, timeout_s)
            comm = self._comm
        assert comm is not None
        if comm.device != device:
            raise InvalidArgumentError(
                f"tensor: is on {device}; this group's first collective had one on {comm.device}, "
                "and r2ccl has one device a process"
            )
        return comm

    def _make(
        self, device: torch.device, make_host: Callable[[], Communicator], timeout_s: float
    ) -> None:
        if self._failure is not None:
            raise self._failure  # the others will not come again
        if capturing(device):
            raise InvalidArgumentError(
                "the first collective of a group on a GPU makes its buffers, which a graph that is "
                "captured cannot have: call one before the capture"
            )
        host = make_host()
        with self._lock:
            self._host = host
        why = f"a rank has not come to the first GPU collective within {timeout_s:g} s (timeout)"
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
        if closed:  # while it was made
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
        """Have ``put`` put it into a stream.

        Args:
            beside: into the group's own, so that the caller's goes on.
        """
        comm = self._comm
        assert comm is not None
        captured = capturing(comm.device)
        running = _RunningCollective(what, timeout_s)
        if not captured:  # else it is done when the graph is replayed, not now
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
                    self._last.precedes()  # the caller may have gone on to another stream
                try:
                    put(comm)
                finally:  # what it has put there by then is there
                    running.end = StreamPoint(comm.device)
                    if not captured:
                        self._last = running.end
        except BaseException:
            with self._lock:
                if running in self._running:
                    self._running.remove(running)
            raise
        return StreamWork(running, results, comm, stream=stream, captured=captured)

    def end_what_is_overdue(self) -> None:
        with self._lock:
            late = [each for each in tuple(self._running) if each.overdue()]
            comm = self._comm
        if late and comm is not None:
            comm.abort(late[0].late(late[0].timeout_s))

    def settled(self) -> Callable[[], None]:
        """A function that waits, on any thread, for what is in the current stream now.

        It raises an R2cclError if something in there has failed.
        """
        comm = self._comm
        if comm is None:
            return lambda: None
        if capturing(comm.device):
            raise InvalidArgumentError("barrier: a graph is being captured, and a barrier waits")
        place = StreamPoint(comm.device)

        def wait() -> None:
            place.await_here()
            comm.check()

        return wait

    def abort(self, why: str) -> None:
        """End what is under way, on all ranks."""
        with self._lock:
            each = self._comm or self._host
        if each is not None:
            each.abort(why)

    def idle(self) -> bool:
        with self._lock:
            return not any(each.pending() for each in tuple(self._running))

    def drain(self, limit_s: float) -> None:
        """Wait until all has ended or a GPU has failed, ``limit_s`` seconds at most."""
        until_s = time.monotonic() + limit_s
        while time.monotonic() < until_s:
            with self._lock:
                running = tuple(self._running)
            try:
                if all(each.ended() for each in running):
                    return
            except RuntimeError:  # nothing more ends; torch tells the next user of the GPU
                return
            time.sleep(LOOK_S)

    def failure(self) -> BaseException | None:
        """Why results are void, of what has been asked for so far."""
        if self._comm is None:
            return None
        try:
            self._comm.check()
        except R2cclError as error:
            return error
        return None

    def close(self) -> None:
        """End what is under way, and leave.  Idempotent."""
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
    """Memory of these is nobody else's before the current stream has done with it."""
    for tensor in given:
        if tensor.device.type == "cuda":
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


@contextmanager
def _ended_after(limit_s: float, abort: Callable[[str], None], why: str) -> Iterator[None]:
    """What takes longer than ``limit_s`` is made to fail."""
    late = threading.Timer(limit_s, abort, [why])
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()
