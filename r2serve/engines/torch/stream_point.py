"""Places in the streams of a GPU, and waits of host threads for these places.

A thread that waits for a GPU does so beside captures of graphs in other threads
(:mod:`r2serve.engines.torch.capture_mode`).
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
"""Priority of our own streams: torch has a pool a priority, so no user's stream is one of ours."""


class StreamPoint:
    """The current end of a device's stream; always passed where the host does the work."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))
        self._device = device

    def passed(self) -> bool:
        """Whether the stream has come to this point.

        Raises:
            RuntimeError: the GPU has failed, in torch's words; the stream never comes here.
        """
        if self._event is None:
            return True
        with relaxed():
            reached: bool = self._event.query()
        return reached

    def precedes(self) -> None:
        """Order all later work of the current stream after this point."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)

    def await_here(self) -> None:
        """Wait, on this thread, until the stream has come to this point."""
        if self._event is not None:
            with relaxed():
                self._event.synchronize()


def capturing(device: torch.device) -> bool:
    """Whether the current stream records a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def refuse_capture(given: Sequence[torch.Tensor]) -> None:
    """Refuse work of the host during a capture.

    Raises:
        InvalidArgumentError: a graph is being captured on the GPU of a tensor.
    """
    if any(capturing(tensor.device) for tensor in given):
        raise InvalidArgumentError(
            "a graph is being captured, and this goes through copies of the host, which a graph "
            "cannot have"
        )


class Handover:
    """Passes tensors from the caller's streams to another thread."""

    _own = threading.local()

    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        """given: tensors for the thread to read or write."""
        devices = {tensor.device for tensor in given if tensor.device.type == "cuda"}
        self._places = {device: StreamPoint(device) for device in devices}

    @contextmanager
    def taken(self) -> Iterator[None]:
        """In the thread: begin after the work of the streams, and end with all copies done.

        Copies of the host wait for the GPU, so the block is in the relaxed capture mode.  A new
        thread has no context before it enters a stream, so the mode comes after.
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
        """A stream of this thread alone: in a shared stream a kernel might wait for this thread."""
        kept: dict[torch.device, Any] = vars(cls._own).setdefault("streams", {})
        if device not in kept:
            kept[device] = torch.cuda.Stream(device, priority=HIGH)  # type: ignore[no-untyped-call]
        return kept[device]
