"""Exit status of ``vllm serve`` after the failure of a worker.

vLLM ends a node after the end of a worker, in part with exit status 0, for example a node without
the HTTP server. A supervisor that restarts failed units would then leave the node down. So the
first process of the command line makes a datagram socket, a failing worker sends its reason, and
the first process exits with ``EXIT_STATUS``. A killed worker sends nothing; vLLM logs its death,
and the process that logs it sends the line. The socket's name is abstract: no file remains.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import multiprocessing.util
import os
import secrets
import signal
import socket
import sys
import weakref

from r2serve.engines import flag
from r2serve.engines.children import EXIT_STATUS
from r2serve.forks import close_in_children

_LOG = logging.getLogger(__name__)

VARIABLE = "R2SERVE_FAILURES"
"""Name of the socket, inherited by the processes of the engine."""
STOPPED = (0, -signal.SIGTERM, -signal.SIGINT)
"""Exit codes of a worker that was told to stop."""
_MAX_BYTES = 2048
_CLOSED = b"\0closed"
"""Message about a peer that has closed; a reason has no NUL."""
DEATHS = logging.getLogger("vllm").getChild("v1.executor.multiproc_executor")
"""Logger of vLLM's message about a worker that ended."""
DEATH = "Worker proc %s died unexpectedly"
"""Start of this message, before its arguments are filled in."""


class Failures:
    """The first process's end: knows whether a worker failed."""

    def __init__(self) -> None:
        """Raises OSError if the socket cannot be made."""
        self.name = f"r2serve-failures-{os.getpid()}-{secrets.token_hex(8)}"
        self.reason = ""
        """Reason of the first failed worker; empty: none failed."""
        self.peer_closed = False
        """Whether a peer of a worker has closed."""
        self._process = os.getpid()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind("\0" + self.name)
        close_in_children(self)

    def left_behind(self) -> None:
        """Closes the socket in a forked child."""
        self._socket.close()

    def is_own(self) -> bool:
        """Whether this process made the socket; False in a forked child."""
        return os.getpid() == self._process

    def read(self) -> None:
        """Reads the messages of the workers so far."""
        if not self.is_own():
            return
        with contextlib.suppress(BlockingIOError):
            while True:
                message = self._socket.recv(_MAX_BYTES)
                if message == _CLOSED:
                    self.peer_closed = True
                elif not self.reason:
                    self.reason = message.decode(errors="replace")


_failures: Failures | None = None


def listen_once() -> None:
    """Makes the socket in the first process of the command line; elsewhere does nothing."""
    global _failures
    if _failures is not None or not flag.of_command_line:
        return
    if multiprocessing.parent_process() is not None:
        return
    try:
        _failures = Failures()
    except OSError as error:
        _LOG.warning("a failed worker may leave exit status 0: %s", error)
        return
    os.environ[VARIABLE] = _failures.name
    atexit.register(_at_exit)


def listens() -> bool:
    """Whether this is the first process of a command line, with the socket."""
    return _failures is not None and _failures.is_own()


def hear_deaths() -> None:
    """Reports deaths of workers that vLLM logs in this process; without effect on the log."""
    if not any(isinstance(one, _Deaths) for one in DEATHS.filters):
        DEATHS.addFilter(_Deaths())


class _Deaths(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        if str(record.msg).startswith(DEATH) and not _was_told_to_stop(record.args):
            report(record.getMessage())
        return True


def _was_told_to_stop(arguments: object) -> bool:
    """Whether the message's exit code is that of a worker that a supervisor has stopped, too."""
    return isinstance(arguments, tuple) and len(arguments) > 1 and arguments[1] in STOPPED


def report(reason: str) -> None:
    """Tells the first process that this worker fails; without such a process does nothing."""
    _tell(reason.encode()[:_MAX_BYTES])


def report_closed() -> None:
    """Tells the first process that a peer has closed its communicator."""
    _tell(_CLOSED)


def peer_closed() -> bool:
    """Whether a worker of this first process has reported a closed peer."""
    if _failures is None:
        return False
    _failures.read()
    return _failures.peer_closed


def _tell(message: bytes) -> None:
    name = os.environ.get(VARIABLE)
    if not name:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as telling:
        telling.setblocking(False)
        try:
            telling.sendto(message, "\0" + name)
        except OSError as error:
            _LOG.debug("the first process does not hear of this worker: %s", error)


def _at_exit() -> None:
    if _failures is None:
        return
    _failures.read()
    if not _failures.reason:
        return
    _LOG.error("exit status %d: a worker failed: %s", EXIT_STATUS, _failures.reason)
    # Exit functions that were registered before this one do not run. These two end children, and
    # remove folders.
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]
    weakref.finalize._exitfunc()  # type: ignore[attr-defined]
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_STATUS)
