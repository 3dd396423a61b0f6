"""Termination of a worker after a fatal collective error, so that no part of the engine hangs.

vLLM answers clients when the output rank raises. Any other rank only logs the exception and waits
for work that never comes, so the engine of a follower node would hang forever. vLLM notices the
end of a worker process on every node, and then stops the engine. So a failed worker gets time to
deliver the error and then exits; between two calls there is nothing to deliver.
"""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import threading

from r2serve.engines import children, flag
from r2serve.engines.children import EXIT_STATUS
from r2serve.engines.vllm.exit_status import report

_LOG = logging.getLogger(__name__)

DELIVERY_S = 2.0  # seconds for the output rank's error to reach the clients
CLEANUP_S = 10.0  # seconds for the worker's own shutdown before a forced exit
IDLE_CLEANUP_S = 2.0  # the same between two calls
LEAVE_S = 1.0  # seconds for the API server to answer its clients after the end of its engine
API_SERVER = "ApiServer"
"""Start of the name of vLLM's processes that answer clients."""

_lock = threading.Lock()
_arranged = False


def end_worker_soon(error: BaseException) -> None:
    """Schedules the end of this process, once, if this process is a worker of vLLM.

    A process without a multiprocessing parent (``vllm.LLM`` without worker processes, a Ray actor)
    continues, because its caller sees the exception.
    """
    if _arranges():
        _LOG.error(
            "a collective failed without recovery; this worker exits in %g s: %s: %s",
            DELIVERY_S,
            type(error).__name__,
            error,
        )
        report(f"{type(error).__name__}: {error}")
        _after(DELIVERY_S, lambda: _ask_main_thread(CLEANUP_S))


def end_worker_now(error: BaseException) -> None:
    """Ends this process, once, for an error between two calls; see :func:`end_worker_soon`."""
    if _arranges():
        _LOG.error(
            "a peer is gone while nothing runs; this worker exits: %s: %s",
            type(error).__name__,
            error,
        )
        report(f"{type(error).__name__}: {error}")
        _ask_main_thread(IDLE_CLEANUP_S)


def end_engine(reason: str) -> None:
    """Ends the engine from its first process, after a failure outside the workers.

    The API servers hear of the end of the engine's processes, and answer their clients. The first
    process of a command line then ends with a status; a program with ``vllm.LLM`` gets an
    exception.
    """
    children.kill_children(spare=API_SERVER)
    if flag.of_command_line:
        _after(LEAVE_S, lambda: _leave_engine(reason))


def _leave_engine(reason: str) -> None:
    _LOG.critical("exit status %d: %s", EXIT_STATUS, reason)
    children.leave()


def _arranges() -> bool:
    """Whether the caller is the first to end this process, and the process is a worker."""
    global _arranged
    if multiprocessing.parent_process() is None:
        return False
    with _lock:
        first, _arranged = not _arranged, True
    return first


def _ask_main_thread(cleanup_s: float) -> None:
    _after(cleanup_s, lambda: _leave(cleanup_s))
    # vLLM's handler ends the process in good order, but with exit status 0.
    multiprocessing.util.Finalize(None, _exit, exitpriority=-1000)
    os.kill(os.getpid(), signal.SIGTERM)


def _exit() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_STATUS)


def _leave(cleanup_s: float) -> None:
    _LOG.critical("the worker did not shut down within %g s: forced exit", cleanup_s)
    os._exit(EXIT_STATUS)


def _after(seconds: float, action: object) -> None:
    timer = threading.Timer(seconds, action)  # type: ignore[arg-type]
    timer.daemon = True
    timer.start()
