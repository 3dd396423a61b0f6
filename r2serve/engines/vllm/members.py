"""End of a worker whose peer is gone while nothing runs.

In a call, a worker learns of a lost peer by the call's error, and ends. Between two calls nothing
would tell the engine until its next request, which then fails. So a thread of the worker asks the
core, and ends the worker as a failed call does; a supervisor restarts the group before a request
comes.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from r2serve import process
from r2serve.engines.vllm.ending import end_worker_now
from r2serve.engines.vllm.exit_status import report_closed
from r2serve.errors import PeerLostError, R2cclError

LOOK_S = 0.5
"""Pause between two looks at the members."""

_started = False


class Watched(Protocol):
    """The part of ``_core.Engine`` used here."""

    def check_members(self) -> None: ...


class Members:
    """Decides when the members of the open communicators are gone for good."""

    def __init__(
        self,
        opened: Callable[[], Sequence[tuple[Watched, float]]],
        told_closed: Callable[[], None],
    ) -> None:
        """``opened`` returns the open engines, each with its ``link_timeout_s``.

        ``told_closed`` is called once for each engine with a peer that has closed.
        """
        self._opened = opened
        self._told_closed = told_closed
        self._since_s: dict[int, float] = {}

    def look(self, now_s: float) -> R2cclError | None:
        """Returns the error that ends the worker, or None. ``now_s``: a monotonic clock.

        The core reports a lost peer after ``link_timeout_s``. A closed peer, or a communicator that
        failed, gets the same time here: this engine may be about to stop in good order, too.
        """
        seen: dict[int, float] = {}
        for engine, link_timeout_s in self._opened():
            try:
                engine.check_members()
            except PeerLostError as error:
                return error
            except R2cclError as error:
                if id(engine) not in self._since_s:
                    self._told_closed()
                since_s = self._since_s.get(id(engine), now_s)
                if now_s - since_s >= link_timeout_s:
                    return error
                seen[id(engine)] = since_s
        self._since_s = seen
        return None


def watch_once(local_rank: int) -> None:
    """Starts the thread, once, if this process is a worker of vLLM.

    Worker 0 of a node tells the node's first process of a closed peer, see :mod:`.stopping`.
    A process without a multiprocessing parent (``vllm.LLM`` without worker processes, a Ray actor)
    goes on; its next call raises.
    """
    global _started
    if _started or multiprocessing.parent_process() is None:
        return
    _started = True
    told_closed = report_closed if local_rank == 0 else _nothing
    threading.Thread(
        target=_follow, args=(told_closed,), name="r2serve-members", daemon=True
    ).start()


def _nothing() -> None:
    """Tells no process."""


def _follow(told_closed: Callable[[], None]) -> None:
    members = Members(_opened, told_closed)
    while True:
        time.sleep(LOOK_S)
        error = members.look(time.monotonic())
        if error is not None:
            end_worker_now(error)
            return


def _opened() -> list[tuple[Watched, float]]:
    return [(each.engine, each.config.link_timeout_s) for each in process.opened()]
