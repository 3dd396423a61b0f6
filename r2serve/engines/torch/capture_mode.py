"""Calls that wait for a GPU while another thread captures a graph.

While a thread captures in the global mode, torch's default, CUDA forbids calls such as
``cudaEventQuery`` to every thread, and a forbidden call ends the capture.  Threads in the relaxed
mode are exempt.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from r2serve.config import Config
from r2serve.errors import InternalError

_LOG = logging.getLogger("r2serve.r2ccl")
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


@contextmanager
def relaxed() -> Iterator[None]:
    """Put this thread into the relaxed mode; at the end into the mode before.

    Raises:
        InternalError: the driver refuses, as one does whose GPU has failed.
    """
    mode = ctypes.c_int(_RELAXED)
    code = _exchange()(ctypes.byref(mode))
    if code != 0:
        raise InternalError(f"cuThreadExchangeStreamCaptureMode: CUDA error {code}")
    try:
        yield
    finally:
        code = _exchange()(ctypes.byref(mode))
        if code != 0:  # the failure of the GPU is being raised already
            _LOG.warning("cuThreadExchangeStreamCaptureMode: CUDA error %d", code)


@functools.cache
def _exchange() -> Any:
    """The entry point of the core's driver; a library is loaded once a process."""
    driver = ctypes.CDLL(Config.from_env().cuda_library)
    return driver.cuThreadExchangeStreamCaptureMode
