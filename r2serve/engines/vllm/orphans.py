"""Death of an engine's own process, told by its workers.

The first process of ``vllm serve`` ends in good order after the death of its engine process
(``EngineCore``), with exit status 0. A worker is a child of the engine process and outlives its
sudden death for a moment; in an orderly end, vLLM ends the workers first. So a worker that loses
its parent tells the first process, which then exits with a status other than 0.
"""

from __future__ import annotations

import multiprocessing
import threading
from multiprocessing.process import BaseProcess

from r2serve.engines.vllm.exit_status import report

_started = False


def watch_once() -> None:
    """Starts the thread that waits for the end of the parent, once, in a worker process."""
    global _started
    parent = multiprocessing.parent_process()
    if _started or parent is None:
        return
    _started = True
    threading.Thread(target=_wait, args=(parent,), name="r2serve-parent", daemon=True).start()


def _wait(parent: BaseProcess) -> None:
    parent.join()
    report(f"{parent.name} (process {parent.pid}) has ended before its worker")
