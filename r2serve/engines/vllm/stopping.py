"""Orderly stop of a follower node while its leader still serves.

A leader that is told to stop with ``--shutdown-timeout`` first finishes its requests. vLLM ends the
workers of a follower as soon as the follower is told to stop, too, and the leader's requests fail.
So the first process of a follower keeps its workers until the leader has closed its communicators,
or for the same time. vLLM leaves its main function with ``SystemExit``, and an exit function ends
the workers. The wait is an exit function as well, and runs earlier.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import signal
import time
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

from r2serve.config import Config
from r2serve.engines import flag
from r2serve.engines.vllm import exit_status

_LOG = logging.getLogger(__name__)

LOOK_S = 0.2
"""Pause between two looks at the workers and their messages."""

_arranged = False
_told = False


def told_to_stop() -> bool:
    """Whether this first process of a follower was told to stop, and ends in order."""
    return _told


def keep_workers_once(vllm_config: Any) -> None:
    """Arranges the wait in the first process of a follower node; elsewhere does nothing.

    Call after :func:`exit_status.listen_once`, whose exit function has to run later.
    """
    global _arranged
    if _arranged or not flag.of_command_line or multiprocessing.parent_process() is not None:
        return
    timeout_s = vllm_config.shutdown_timeout
    if timeout_s <= 0 or vllm_config.parallel_config.node_rank_within_dp == 0:
        return
    _arranged = True
    flag.log_with(logging.getLogger("vllm"), Config.from_env().log_level)
    # Exit functions run in reverse order. The first finaliser of a process registers the exit
    # function of all finalisers, vLLM's included.
    weakref.finalize(keep_workers_once, lambda: None)
    atexit.register(_at_exit, os.getpid(), timeout_s)


def _at_exit(process: int, timeout_s: float) -> None:
    global _told
    _told = True
    workers = [child for child in multiprocessing.active_children() if child.daemon]
    if not workers or os.getpid() != process:
        return  # the workers have failed and are gone, or this is a forked child
    _LOG.info(
        "told to stop: the workers of this node serve until the leader node has ended, for at "
        "most %g s (--shutdown-timeout)",
        timeout_s,
    )
    again: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: again.append(number))
    why = keep(workers, timeout_s, exit_status.peer_closed, lambda: bool(again))
    _LOG.info("the workers of this node end: %s", why)


def keep(
    workers: Sequence[BaseProcess],
    timeout_s: float,
    leader_ended: Callable[[], bool],
    told_again: Callable[[], bool],
) -> str:
    """Waits while the workers are needed; returns the reason why the wait is over."""
    until_s = time.monotonic() + timeout_s
    while True:
        if leader_ended():
            return "the leader node has ended"
        if told_again():
            return "told to stop again"
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            return f"the leader node still serves after {timeout_s:g} s"
        if gone := [worker for worker in workers if not worker.is_alive()]:
            return _ended(gone)
        time.sleep(min(left_s, LOOK_S))


def _ended(workers: Sequence[BaseProcess]) -> str:
    """Returns which workers have ended; reports a death to the exit status."""
    ends = [f"{worker.name} (exit code: {worker.exitcode})" for worker in workers]
    text = f"{', '.join(ends)} ended"
    if any(worker.exitcode not in exit_status.STOPPED for worker in workers):
        exit_status.report(text)
    return text
