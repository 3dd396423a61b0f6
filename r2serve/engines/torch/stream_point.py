"""Points in the streams of a GPU, and waits of host threads for these points.

Waits for a GPU are allowed during captures of graphs in other threads; see
:mod:`r2serve.engines.torch.capture_mode`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from r2serve.engines.torch.capture_mode import relaxed
from r2serve.errors import InvalidArgumentError

HIGH = -1
"""Priority of r2serve's streams. torch takes streams from a pool per priority, so streams of the
default priority, as most users have, are never r2serve's streams."""


class StreamPoint:
    """The end of all work enqueued so far in the current stream of a device.

    On a device without streams the point counts as passed.
    """

    def __init__(self, device: torch.device) -> None:
        self._event: Any = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))
        self._device = device

    def passed(self) -> bool:
        """Whether the stream has passed this point.

        Raises:
            RuntimeError: the GPU has failed, so the stream never passes the point.
        """
        if self._event is None:
            return True
        with relaxed():
            reached: bool = self._event.query()
        return reached

    def precedes(self) -> None:
        """Orders all later work of the current stream after this point."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)

    def await_here(self) -> None:
        """Blocks this thread until the stream has passed this point."""
        if self._event is not None:
            with relaxed():
                self._event.synchronize()


def capturing(device: torch.device) -> bool:
    """Whether the current stream captures a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def refuse_capture(given: Sequence[torch.Tensor]) -> None:
    """Refuses host work during a capture.

    Raises:
        InvalidArgumentError: a graph is being captured on the GPU of a tensor.
    """
    if any(capturing(tensor.device) for tensor in given):
        raise InvalidArgumentError(
            "tensor: a graph is being captured, but this call copies through the host, which a "
            "graph cannot contain"
        )


class Handover:
    """Passes tensors from the caller's streams to another thread."""

    _own = threading.local()

    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        """``given`` are the tensors for the thread to read or write."""
        devices = {tensor.device for tensor in given if tensor.device.type == "cuda"}
        self._places = {device: StreamPoint(device) for device in devices}

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Context for the other thread's copies, on a stream of that thread.

        Copies start after the work of the caller's streams, and the context ends after all copies.
        Host copies wait for the GPU, so the block runs in the relaxed capture mode. The mode is
        set after the stream, because a new thread gets its CUDA context with the stream.
        """
        streams = []
        with ExitStack() as entered:
            for device, place in self._places.items():
                streams.append(self._stream_on(device))
                entered.enter_context(torch.cuda.stream(streams[-1]))
                place.precedes()
            if streams:
                entered.enter_context(relaxed())
            yield
            for stream in streams:
                stream.synchronize()

    @classmethod
    def _stream_on(cls, device: torch.device) -> Any:
        """Returns a stream used by this thread only.

        In a shared stream, a kernel before the copies might wait for this thread: a deadlock.
        """
        kept: dict[torch.device, Any] = vars(cls._own).setdefault("streams", {})
        if device not in kept:
            kept[device] = torch.cuda.Stream(device, priority=HIGH)  # type: ignore[no-untyped-call]
        return kept[device]
