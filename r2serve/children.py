"""A command as a child of this process: its signals, its descendants, and its end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType

import psutil

from r2serve.errors import ConfigError

FAILED = 70
"""Exit status of a command that was ended by :meth:`Command.end`."""
GRACE_S = 1.0
"""Time for the command to end by itself after SIGTERM; then its processes are killed."""


class Command:
    """A running command; see :func:`running`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._ended = False
        self._at_the_end: list[psutil.Process] = []

    def processes(self) -> list[psutil.Process]:
        """Returns the command's own process and its descendants; none after the command's end."""
        if self._process.returncode is None:  # else the number may belong to a stranger
            with contextlib.suppress(psutil.NoSuchProcess):
                own = psutil.Process(self._process.pid)
                return [own, *own.children(recursive=True)]
        return []

    def end(self, grace_s: float = GRACE_S) -> None:
        """Ends the command with its descendants; another thread may be in :meth:`wait`.

        grace_s: seconds from SIGTERM to SIGKILL.
        """
        # The command may end before its descendants, which then have another parent.
        self._at_the_end.extend(self.processes()[1:])
        self._ended = True
        self._process.terminate()

        def kill() -> None:
            victims = self.processes()[1:]
            self._process.kill()
            _kill(victims)

        timer = threading.Timer(grace_s, kill)
        timer.daemon = True
        timer.start()

    def wait(self) -> int:
        """Waits for the end; returns the status as a shell has it, or FAILED after :meth:`end`."""
        status = self._process.wait()
        if self._ended:
            _, left = psutil.wait_procs(self._at_the_end, GRACE_S)
            _kill(left)
            return FAILED
        return status if status >= 0 else 128 - status


@contextlib.contextmanager
def running(argv: Sequence[str], env: Mapping[str, str]) -> Iterator[Command]:
    """Starts a command, and forwards SIGTERM, SIGHUP, SIGINT, SIGUSR1 and SIGUSR2 to it.

    Only for the main thread. A terminal sends SIGINT to both, so its SIGINT is not forwarded.
    Schedulers announce the end of a job by SIGUSR1 or SIGUSR2.

    Raises:
        ConfigError: the command cannot be started.
    """
    process: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        if process is None:
            early.append(number)
        else:
            process.send_signal(number)

    def forward_unless_by_terminal(number: int, frame: FrameType | None) -> None:
        if not _in_foreground():
            forward(number, frame)

    handlers = {
        signal.SIGTERM: forward,
        signal.SIGHUP: forward,
        signal.SIGINT: forward_unless_by_terminal,
        signal.SIGUSR1: forward,
        signal.SIGUSR2: forward,
    }
    # A signal that is ignored, as by nohup, stays ignored, here and in the command.
    before = {
        number: signal.signal(number, handler)
        for number, handler in handlers.items()
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        try:
            process = subprocess.Popen(argv, env=dict(env))
        except OSError as error:
            raise ConfigError(f"COMMAND: {argv[0]}: {error.strerror}; must be a program") from error
        for number in early:
            process.send_signal(number)
        yield Command(process)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _in_foreground() -> bool:
    """Whether a terminal sends SIGINT to this process and the command alike.

    Both are in one process group, and a terminal signals its foreground group.
    """
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False  # no terminal controls this session, or the terminal has hung up
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
