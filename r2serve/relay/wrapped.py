"""``r2serve relay … -- COMMAND``: runs a command whose connections between nodes are carried.

The command finds the virtual address of node 0 in ``MASTER_ADDR``. Words of the command may
contain ``{master}``, the virtual address of node 0, and ``{address}``, the own virtual address.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

import psutil

from r2serve.errors import ConfigError
from r2serve.relay.client import Carried
from r2serve.relay.parent import Failure, RelayProcess
from r2serve.variables import MANAGEMENT, RELAY

FAILED = 70
"""Exit status after the loss of the relay or of another node."""
GRACE_S = 1.0
"""Time for the command to end by itself after the loss; then its processes are killed."""
IN_COMMAND = Path(__file__).with_name("in_command")

_LOG = logging.getLogger("r2serve.relay")


def run(relay: RelayProcess, argv: Sequence[str], port: int, management: str | None) -> int:
    """Runs the command behind a relay that is ready; returns the exit status.

    Raises:
        ConfigError: the command cannot be started.
    """
    carried = Carried(relay.prefix, relay.node)
    env = environment(carried, port, os.environ, management)
    words = filled(argv, carried)
    command: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        if command is None:
            early.append(number)
        else:
            command.send_signal(number)

    def forward_unless_by_terminal(number: int, frame: FrameType | None) -> None:
        if not _in_foreground():
            forward(number, frame)

    handlers = {
        signal.SIGTERM: forward,
        signal.SIGHUP: forward,
        signal.SIGINT: forward_unless_by_terminal,
    }
    # A signal that is ignored, as by nohup, stays ignored, here and in the command.
    before = {
        number: signal.signal(number, handler)
        for number, handler in handlers.items()
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        try:
            command = subprocess.Popen(words, env=env)
        except OSError as error:
            raise ConfigError(
                f"COMMAND: {words[0]}: {error.strerror}; must be a program"
            ) from error
        for number in early:
            command.send_signal(number)
        return _status(command, relay)
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


def _status(command: subprocess.Popen[bytes], relay: RelayProcess) -> int:
    """Waits for the command, or ends it after the loss; returns the exit status."""
    failures: list[Failure] = []
    descendants: list[psutil.Process] = []

    def lost(error: Failure) -> None:
        _LOG.error("the command is ended: %s: %s", type(error).__name__, error)
        # The command may end before its descendants, which then have another parent.
        descendants.extend(_descendants(command))
        failures.append(error)
        _end(command)

    relay.on_end(lost)
    status = command.wait()
    if failures:
        _, left = psutil.wait_procs(descendants, GRACE_S)
        _kill(left)
        return FAILED
    return status if status >= 0 else 128 - status


def environment(
    carried: Carried, port: int, base: Mapping[str, str], management: str | None
) -> dict[str, str]:
    """Returns the environment of the command."""
    paths = [str(IN_COMMAND), *filter(None, [base.get("PYTHONPATH")])]
    env = dict(base)
    env |= {
        RELAY: str(carried),
        "MASTER_ADDR": carried.address_of(0),
        "MASTER_PORT": str(port),
        "PYTHONPATH": os.pathsep.join(paths),
    }
    if management:
        env[MANAGEMENT] = management
    return env


def filled(argv: Sequence[str], carried: Carried) -> list[str]:
    """Returns the command with its addresses."""
    values = {"{master}": carried.address_of(0), "{address}": carried.address}
    words = []
    for word in argv:
        for name, value in values.items():
            word = word.replace(name, value)
        words.append(word)
    return words


def _descendants(command: subprocess.Popen[bytes]) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(command.pid).children(recursive=True)
    return []


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _end(command: subprocess.Popen[bytes]) -> None:
    """Ends the command with its descendants, in another thread than the waiting one."""
    command.terminate()

    def kill() -> None:
        victims = _descendants(command)
        command.kill()
        _kill(victims)

    timer = threading.Timer(GRACE_S, kill)
    timer.daemon = True
    timer.start()
