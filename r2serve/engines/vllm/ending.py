"""Termination of a worker after a fatal collective error, so that no part of the engine hangs.

vLLM answers clients when the output rank raises. Any other rank only logs the exception and waits
for work that never comes, so the engine of a follower node would hang forever. vLLM notices the
end of a worker process on every node, and then stops the engine. So a failed worker gets time to
deliver the error and then exits.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading

_LOG = logging.getLogger(__name__)

DELIVERY_S = 2.0  # seconds for the output rank's error to reach the clients
CLEANUP_S = 10.0  # seconds for the worker's own shutdown before a forced exit
EXIT_STATUS = 70  # EX_SOFTWARE of sysexits(3)

_lock = threading.Lock()
_arranged = False


def end_worker_soon(error: BaseException) -> None:
    """Schedules the end of this process, once, if this process is a worker of vLLM.

    A process without a multiprocessing parent (``vllm.LLM`` without worker processes, a Ray actor)
    continues, because its caller sees the exception.
    """
    global _arranged
    if multiprocessing.parent_process() is None:
        return
    with _lock:
        if _arranged:
            return
        _arranged = True
    _LOG.error(
        "a collective failed without recovery; this worker exits in %g s: %s: %s",
        DELIVERY_S,
        type(error).__name__,
        error,
    )
    _after(DELIVERY_S, _ask_main_thread)


def _ask_main_thread() -> None:
    _after(CLEANUP_S, _leave)
    os.kill(os.getpid(), signal.SIGTERM)  # vLLM's handler starts an orderly shutdown


def _leave() -> None:
    _LOG.critical("the worker did not shut down within %g s: forced exit", CLEANUP_S)
    os._exit(EXIT_STATUS)


def _after(seconds: float, action: object) -> None:
    timer = threading.Timer(seconds, action)  # type: ignore[arg-type]
    timer.daemon = True
    timer.start()
