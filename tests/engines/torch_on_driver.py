"""torch.cuda on the fake CUDA driver, with a torch built without CUDA.

:func:`install` gives torch streams, events and graphs of the driver, and a single device with the
host's memory. A request for a tensor on `cuda` makes a tensor on the CPU. torch's operations run on
the calling thread at once, so a graph holds only the kernels of r2ccl.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Driver:
    """The library in `R2CCL_CUDA_LIBRARY`, called by ctypes."""

    def __init__(self, library: str) -> None:
        self._library = ctypes.CDLL(library)

    def call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise RuntimeError(f"{name} answered {code}")

    def new(self, name: str, *arguments: Any, handle_last: bool = False) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        where = ctypes.byref(made)
        self.call(name, *((*arguments, where) if handle_last else (where, *arguments)))
        return made


@functools.cache
def driver() -> Driver:
    return Driver(os.environ["R2CCL_CUDA_LIBRARY"])


class Stream:
    """Stand-in for torch.cuda.Stream; without a handle, a new stream of the driver."""

    def __init__(self, device: Any = None, priority: int = 0, *, handle: int | None = None) -> None:
        self.device = torch.device("cuda", 0)
        self.cuda_stream = driver().new("cuStreamCreate", 0).value if handle is None else handle

    def synchronize(self) -> None:
        driver().call("cuStreamSynchronize", ctypes.c_void_p(self.cuda_stream))

    def wait_stream(self, other: Stream) -> None:
        other.synchronize()

    def wait_event(self, event: Event) -> None:
        event.synchronize()

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.cuda_stream == other.cuda_stream

    def __hash__(self) -> int:
        return hash(self.cuda_stream)


class Event:
    """Stand-in for torch.cuda.Event; a wait covers all work in the stream at the time."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._stream: Stream | None = None

    def record(self, stream: Stream | None = None) -> None:
        self._stream = stream or current_stream()

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def wait(self, stream: Stream | None = None) -> None:
        self.synchronize()


class Graph:
    """Stand-in for torch.cuda.CUDAGraph."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._executable: ctypes.c_void_p | None = None

    def end_capture(self, stream: ctypes.c_void_p) -> None:
        made = driver().new("cuStreamEndCapture", stream, handle_last=True)
        none = ctypes.c_ulonglong(0)
        self._executable = driver().new("cuGraphInstantiateWithFlags", made, none)
        driver().call("cuGraphDestroy", made)

    def replay(self) -> None:
        stream = ctypes.c_void_p(current_stream().cuda_stream)
        driver().call("cuGraphLaunch", self._executable, stream)


@contextlib.contextmanager
def capture(graph: Graph, pool: Any = None, stream: Stream | None = None) -> Iterator[None]:
    """Stand-in for torch.cuda.graph."""
    with entered(stream or Stream()) as captured:
        handle = ctypes.c_void_p(captured.cuda_stream)
        driver().call("cuStreamBeginCapture_v2", handle, 0)
        try:
            yield
        finally:
            graph.end_capture(handle)


_current = threading.local()


def current_stream(device: Any = None) -> Stream:
    """Returns the stream set by the program, else the default stream, which runs work at once."""
    found: Stream | None = getattr(_current, "stream", None)
    return found or Stream(handle=0)


def set_stream(stream: Stream) -> None:
    _current.stream = stream


@contextlib.contextmanager
def entered(stream: Stream | None) -> Iterator[Stream]:
    """Stand-in for torch.cuda.stream."""
    before = current_stream()
    torch.cuda.set_stream(stream or before)  # vLLM wraps torch.cuda.set_stream
    try:
        yield stream or before
    finally:
        torch.cuda.set_stream(before)


def is_current_stream_capturing() -> bool:
    capturing = ctypes.c_int()
    stream = ctypes.c_void_p(current_stream().cuda_stream)
    driver().call("cuStreamIsCapturing", stream, ctypes.byref(capturing))
    return bool(capturing.value)


class OnTheHost(TorchFunctionMode):
    """Turns the device `cuda` into `cpu` in every call of torch."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.device:  # groups keep the name of their device
            return function(*args, **(kwargs or {}))
        given = {name: _at_home(value) for name, value in (kwargs or {}).items()}
        given.pop("pin_memory", None)  # this GPU reaches all memory of the host
        if function is torch.Tensor.pin_memory:
            return args[0]
        return function(*map(_at_home, args), **given)


def _at_home(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return "cpu"
    return value


MEMORY_BYTES = 80 << 30  # same value as in fake_nvml.cc

PROPERTIES = SimpleNamespace(
    name="fake GPU",
    major=9,
    minor=0,
    is_integrated=False,
    multi_processor_count=132,
    total_memory=MEMORY_BYTES,
)

IN_CUDA = {
    "Stream": Stream,
    "Event": Event,
    "CUDAGraph": Graph,
    "graph": capture,
    "stream": entered,
    "current_stream": current_stream,
    "set_stream": set_stream,
    "is_current_stream_capturing": is_current_stream_capturing,
    "graph_pool_handle": lambda: (0, 0),
    "current_device": lambda: 0,
    "device_count": lambda: 1,
    "set_device": lambda device: None,
    "synchronize": lambda device=None: current_stream().synchronize(),
    "empty_cache": lambda: None,
    "get_device_properties": lambda device=None: PROPERTIES,
    "get_device_capability": lambda device=None: (PROPERTIES.major, PROPERTIES.minor),
    "get_device_name": lambda device=None: PROPERTIES.name,
    "manual_seed_all": lambda seed: None,
    "reset_peak_memory_stats": lambda device=None: None,
    "max_memory_allocated": lambda device=None: 0,
}
"""Replacements in torch.cuda."""

IN_ACCELERATOR = {
    "device_count": lambda: 1,
    "current_device_index": lambda: 0,
    "set_device_index": lambda device: None,
    "current_stream": current_stream,
    "synchronize": lambda device=None: current_stream().synchronize(),
    "empty_cache": lambda: None,
    "empty_host_cache": lambda: None,
    "get_memory_info": lambda device=None: (MEMORY_BYTES, MEMORY_BYTES),
    "memory_stats": lambda device=None: {},
    "memory_reserved": lambda device=None: 0,
    "memory_allocated": lambda device=None: 0,
    "max_memory_allocated": lambda device=None: 0,
    "max_memory_reserved": lambda device=None: 0,
    "reset_peak_memory_stats": lambda device=None: None,
}
"""Replacements in torch.accelerator."""


def install() -> None:
    """Installs the replacements; must run before other modules import the functions by name."""
    for name, stand_in in IN_CUDA.items():
        setattr(torch.cuda, name, stand_in)
    for name, stand_in in IN_ACCELERATOR.items():
        setattr(torch.accelerator, name, stand_in)
    torch.cuda.memory.get_allocator_backend = lambda: "the host's"
