"""What a group does with tensors of a GPU.

Collectives are put into the caller's stream at once, in the order in which they are asked for; a
work stands for the place in the stream where one ends.  What goes through the host instead, on a
lane, begins when the caller's stream has come to where it was asked for.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from r2serve.communicator import Communicator
from r2serve.device import DeviceCommunicator
from r2serve.engines.torch.lane import watch
from r2serve.errors import InvalidArgumentError, R2cclError

_Work: Any = dist.Work  # its types promise more than it has

LOOK_S = 0.001
"""How often whoever waits with a limit looks."""


class Place:
    """Where the current stream of a device is now; past, where the host's calls do the work."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))
        self._device = device

    def passed(self) -> bool:
        """Whether the stream has come there."""
        return self._event is None or self._event.query()

    def precedes(self) -> None:
        """What is put into the current stream from now on comes after."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)


def capturing(device: torch.device) -> bool:
    """Whether what is put into the current stream becomes a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class StreamWork(_Work):  # type: ignore[misc]
    """One collective in a stream."""

    def __init__(
        self,
        what: str,
        results: Sequence[torch.Tensor],
        timeout_s: float,
        comm: DeviceCommunicator,
    ) -> None:
        super().__init__()
        self.what = what
        self._results = list(results)
        self._timeout_s = timeout_s
        self._comm = comm
        self._began_s = time.monotonic()
        self._end: Place | None = None  # None: it is being put there

    def put(self) -> None:
        """All of it is in the stream."""
        self._end = Place(self._comm.device)

    def ended(self) -> bool:
        return self._end is not None and self._end.passed()

    def end_if_overdue(self) -> None:
        """What has not ended within its timeout is ended, on every rank."""
        if time.monotonic() - self._began_s > self._timeout_s and not self.ended():
            self._abandon(self._timeout_s)

    def _abandon(self, limit_s: float) -> None:
        self._comm.abort(f"{self.what} has not ended within {limit_s:g} s (timeout)")

    # --- what torch asks of a Work ----------------------------------------------------------------

    def wait(self, timeout: timedelta | None = None) -> bool:
        """What is put into the current stream from now on comes after; True.

        Args:
            timeout: with one the caller waits himself.  What takes longer is ended on every rank,
                and its communicator with it.

        Raises:
            R2cclError: this collective or one before it has failed, as far as is known yet.
        """
        limit_s = timeout.total_seconds() if timeout else 0.0
        if limit_s > 0:
            until_s = time.monotonic() + limit_s
            while not self.ended():
                if time.monotonic() > until_s:
                    self._abandon(limit_s)
                    break
                time.sleep(LOOK_S)
        if self._end is not None:
            self._end.precedes()
        self._comm.check()
        return True

    def is_completed(self) -> bool:
        return self.ended()

    def is_success(self) -> bool:
        return self.ended() and self.exception() is None

    def exception(self) -> BaseException | None:
        try:
            self._comm.check()
        except R2cclError as error:
            return error
        return None

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
        self.wait()
        device = self._comm.device
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(
            devices=[device] if device.type == "cuda" else None
        )
        future.set_result(self._results)
        return future


class StreamLane:
    """The works of one communicator of a GPU, in the order of its stream."""

    def __init__(self, comm: DeviceCommunicator) -> None:
        self.comm = comm
        self._lock = threading.Lock()  # of what follows
        self._open: deque[StreamWork] = deque()
        watch(self)

    @classmethod
    def made(cls, host: Communicator, device: torch.device, timeout_s: float) -> StreamLane:
        """Make the communicator; collective over the ranks of ``host``.

        Raises:
            InvalidArgumentError: a graph is being captured, which cannot have the buffers.
            AbortedError: a rank has not come within ``timeout_s``.
        """
        if capturing(device):
            raise InvalidArgumentError(
                "the first collective of a group on a GPU makes its buffers, which a graph that is "
                "captured cannot have: call one before the capture"
            )
        why = (
            "not every rank has come to the first collective of the group on a GPU within "
            f"{timeout_s:g} s (timeout)"
        )
        with _ended_after(timeout_s, host.abort, why):
            return cls(DeviceCommunicator(host, device))

    def add(
        self,
        what: str,
        put: Callable[[], None],
        results: Sequence[torch.Tensor],
        timeout_s: float,
    ) -> StreamWork:
        """Have ``put`` put it into the current stream."""
        work = StreamWork(what, results, timeout_s, self.comm)
        if not capturing(self.comm.device):  # else it is done when the graph is replayed, not now
            with self._lock:
                while self._open and self._open[0].ended():
                    self._open.popleft()
                self._open.append(work)
        try:
            put()
        finally:
            work.put()
        return work

    def end_what_is_overdue(self) -> None:
        with self._lock:
            oldest = self._open[0] if self._open else None
        if oldest is not None:  # those after it end with it
            oldest.end_if_overdue()

    def settle(self) -> None:
        """Wait for what is in the current stream.

        Raises:
            R2cclError: something in it has failed.
        """
        if self.comm.device.type == "cuda":
            torch.cuda.current_stream(self.comm.device).synchronize()
        self.comm.check()

    def close(self, limit_s: float) -> None:
        """Wait for what is in the stream, so long, and leave."""
        with self._lock:
            ended = not self._open or self._open[-1].ended()
        limit_s = math.inf if ended else limit_s
        with _ended_after(limit_s, self.comm.abort, "the process group is shut down"):
            self.comm.close()


@contextmanager
def _ended_after(limit_s: float, abort: Callable[[str], None], why: str) -> Iterator[None]:
    """What takes longer than ``limit_s`` is made to fail."""
    if limit_s == math.inf:
        yield
        return
    late = threading.Timer(limit_s, abort, [why])
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()


class Handover:
    """From the caller's streams to another thread, which does something with their tensors."""

    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        """given: what the thread will read or write."""
        devices = {tensor.device for tensor in given if tensor.device.type == "cuda"}
        self._places = {device: Place(device) for device in devices}

    @contextmanager
    def taken(self) -> Iterator[None]:
        """In the thread: after what was in the streams, and all of it done at the end."""
        streams = []
        with ExitStack() as entered:
            for device, place in self._places.items():
                streams.append(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
                entered.enter_context(torch.cuda.stream(streams[-1]))
                place.precedes()
            yield
            for stream in streams:
                stream.synchronize()
