"""Places in the streams of a GPU, and how a thread of the host waits for them.

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
"""Priority of streams of our own: torch has a pool for each, which others' streams are not in."""


class Place:
    """Where the current stream of a device is now; past, where the host's calls do the work."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))
        self._device = device

    def passed(self) -> bool:
        """Whether the stream has come there.

        Raises:
            RuntimeError: the GPU has failed, in torch's words: the stream never comes there.
        """
        if self._event is None:
            return True
        with relaxed():
            reached: bool = self._event.query()
        return reached

    def precedes(self) -> None:
        """What is put into the current stream from now on comes after."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)

    def await_here(self) -> None:
        """Wait, on this thread, until the stream has come there."""
        if self._event is not None:
            with relaxed():
                self._event.synchronize()


def capturing(device: torch.device) -> bool:
    """Whether what is put into the current stream becomes a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def refuse_capture(given: Sequence[torch.Tensor]) -> None:
    """Of what the host does itself.

    Raises:
        InvalidArgumentError: a graph is being captured on a GPU that a tensor is on.
    """
    if any(capturing(tensor.device) for tensor in given):
        raise InvalidArgumentError(
            "a graph is being captured, and this goes through copies of the host, which a graph "
            "cannot have"
        )


class Handover:
    """From the caller's streams to another thread, which does something with their tensors."""

    _own = threading.local()

    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        """given: what the thread will read or write."""
        devices = {tensor.device for tensor in given if tensor.device.type == "cuda"}
        self._places = {device: Place(device) for device in devices}

    @contextmanager
    def taken(self) -> Iterator[None]:
        """In the thread: after what was in the streams, and all of it done at the end.

        Copies of the host wait for the GPU, too, so all of it is beside captures of other threads.
        """
        streams = []
        with ExitStack() as entered:
            if self._places:
                entered.enter_context(relaxed())
            for device, place in self._places.items():
                streams.append(self._stream_on(device))
                entered.enter_context(torch.cuda.stream(streams[-1]))
                place.precedes()
            yield
            for stream in streams:
                stream.synchronize()

    @classmethod
    def _stream_on(cls, device: torch.device) -> Any:
        """Of this thread: in one that it shared a kernel might wait for what the thread brings."""
        kept: dict[torch.device, Any] = vars(cls._own).setdefault("streams", {})
        if device not in kept:
            kept[device] = torch.cuda.Stream(device, priority=HIGH)  # type: ignore[no-untyped-call]
        return kept[device]
