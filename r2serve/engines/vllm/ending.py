"""Ends a worker whose collectives have failed for good, so that no part of the engine hangs.

vLLM answers its clients when the output rank raises.  Any other rank only logs the exception and
waits for work that never comes: the engine of a follower node would stay for ever.  vLLM does
notice when a worker process ends, on every node, and then takes the engine down.  So a worker
that raised is given time to deliver the error and is then ended.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading

_LOG = logging.getLogger(__name__)

DELIVERY_S = 2.0  # for the output rank's error to travel to the clients
CLEANUP_S = 10.0  # for the worker's own shutdown; then it is ended without one
EXIT_STATUS = 70  # EX_SOFTWARE of sysexits(3)

_lock = threading.Lock()
_arranged = False


def end_worker_soon(error: BaseException) -> None:
    """Arrange, once, that this process ends if it is a worker of vLLM.

    A process that is nobody's child in the sense of multiprocessing (``vllm.LLM`` without worker
    processes, a Ray actor) belongs to someone who sees the exception, and is left alone.
    """
    global _arranged
    if multiprocessing.parent_process() is None:
        return
    with _lock:
        if _arranged:
            return
        _arranged = True
    _LOG.error(
        "a collective failed for good; this worker ends in %g s: %s: %s",
        DELIVERY_S,
        type(error).__name__,
        error,
    )
    _after(DELIVERY_S, _ask_main_thread)


def _ask_main_thread() -> None:
    _after(CLEANUP_S, _leave)
    os.kill(os.getpid(), signal.SIGTERM)  # vLLM's handler turns it into an orderly shutdown


def _leave() -> None:
    _LOG.critical("the worker did not shut down within %g s", CLEANUP_S)
    os._exit(EXIT_STATUS)


def _after(seconds: float, action: object) -> None:
    timer = threading.Timer(seconds, action)  # type: ignore[arg-type]
    timer.daemon = True
    timer.start()
