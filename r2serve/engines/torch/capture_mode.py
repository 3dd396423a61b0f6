"""Calls that wait for a GPU while another thread captures a graph.

During a capture in the global mode (torch's default) CUDA forbids calls like ``cudaEventQuery`` in
every thread; a forbidden call ends the capture. Threads in the relaxed mode are exempt.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from r2serve.config import Config

_LOG = logging.getLogger("r2serve.r2ccl")
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


@contextmanager
def relaxed() -> Iterator[None]:
    """Puts this thread into the relaxed mode; restores the previous mode at the end.

    The mode stays unchanged without a CUDA library (ROCm), or if the driver returns an error, for
    example after a failure of the GPU. torch's own call then raises the error.
    """
    exchange = _exchange()
    mode = ctypes.c_int(_RELAXED)
    if exchange is None or exchange(ctypes.byref(mode)) != 0:
        yield
        return
    try:
        yield
    finally:
        code = exchange(ctypes.byref(mode))
        if code != 0:  # torch's own call raises the failure of the GPU
            _LOG.warning("cuThreadExchangeStreamCaptureMode: CUDA error %d", code)


@functools.cache
def _exchange() -> Any:
    """Returns the driver's function, looked up once a process; None: not available."""
    library = Config.from_env().cuda_library
    try:
        return ctypes.CDLL(library).cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError) as error:
        _LOG.info(
            "cuda_library (R2CCL_CUDA_LIBRARY) is %r, without a CUDA driver (%s): threads that "
            "wait for a GPU keep their capture mode",
            library,
            error,
        )
        return None
