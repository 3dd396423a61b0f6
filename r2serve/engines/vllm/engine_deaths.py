"""Death of an engine's own process (``EngineCore``) with its only worker inside.

The first process of ``vllm serve`` watches its engine processes. After the death of one, the first
process ends in good order, with exit status 0. A worker that is a process of its own tells of such
a death (:mod:`r2serve.engines.vllm.orphans`). An engine with vLLM's executor ``uni`` has its only
worker inside, and no such witness. So the watching method itself tells.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any

from r2serve.engines.vllm import exit_status

_LOG = logging.getLogger(__name__)

MODULE, MANAGER, WATCH = (
    "vllm.v1.engine.utils",
    "CoreEngineProcManager",
    "monitor_engine_liveness",
)
"""Where vLLM watches engine processes; returns after the first one has ended."""


def hear_once() -> None:
    """Makes the first process of a command line tell of its engine processes' deaths.

    Elsewhere does nothing. Call after :func:`exit_status.listen_once`.
    """
    if not exit_status.listens():
        return
    try:
        manager: Any = getattr(importlib.import_module(MODULE), MANAGER)
        watch = getattr(manager, WATCH)
    except (ImportError, AttributeError) as error:
        _LOG.warning("the death of an engine process may leave exit status 0: %s", error)
        return
    if not hasattr(watch, "__wrapped__"):
        setattr(manager, WATCH, _telling(watch))


def _telling(watch: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(watch)
    def watch_and_tell(manager: Any) -> None:
        watch(manager)
        _tell(manager)

    return watch_and_tell


def _tell(manager: Any) -> None:
    """Reports the process that vLLM has found to fail before anything told it to end."""
    for process in manager.processes:
        failed = process.name == manager.failed_proc_name
        if failed and process.exitcode not in exit_status.STOPPED:
            exit_status.report(
                f"{process.name} (process {process.pid}) has ended (exit code: {process.exitcode})"
            )
