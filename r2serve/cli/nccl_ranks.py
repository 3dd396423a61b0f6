"""Whether every process of a command with NCCL has taken the network plugin.

NCCL_SET_THREAD_NAME lets NCCL name its threads. A process with a thread ``NCCL Service`` has a
communicator, and has chosen its network before. The plugin has a thread ``r2ccl-nccl`` from its
start on. A process that has lost the variables of ``r2serve nccl`` has no such names: its loaded
libnccl and its environment tell.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

from r2serve.children import Command

NETWORK = "r2ccl"
"""Name of the plugin's network, and value of NCCL_NET."""
NCCL_THREAD, PLUGIN_THREAD = "NCCL Service", "r2ccl-nccl"
WITHIN_S = 30.0
"""Time in which a process takes the plugin, s."""
EVERY_S = 2.0
"""Time between two looks at the processes, s."""
GRACE_S = 5.0
"""Time for the command to end by itself after SIGTERM, s."""
_LIBRARY = re.compile(r"/libnccl\.so")


def complaint(process: psutil.Process) -> str | None:
    """Returns why NCCL of a process has no plugin; empty: has it; None: no sign of NCCL's choice.

    Raises:
        OSError, psutil.Error: the process has ended, or belongs to another user.
    """
    folder = Path("/proc", str(process.pid))
    names = {(each / "comm").read_text().rstrip("\n") for each in (folder / "task").iterdir()}
    if PLUGIN_THREAD in names:
        return ""
    if any(name.startswith(NCCL_THREAD) for name in names):
        return "its NCCL has a communicator over another network"
    environment = process.environ()
    # A process title by setproctitle replaces the environment in /proc.
    if not environment or environment.get("NCCL_NET", "").lower() == NETWORK:
        return None
    if not _LIBRARY.search((folder / "maps").read_text(errors="replace")):
        return None
    return "it has loaded NCCL, but its environment has lost NCCL_NET"


class Ranks:
    """Looks at the processes of a command again and again."""

    def __init__(self, within_s: float = WITHIN_S) -> None:
        """within_s: time in which a process takes the plugin, s."""
        self._within_s = within_s
        self._taken: set[psutil.Process] = set()
        self._since: dict[psutil.Process, float] = {}

    def look(self, processes: Iterable[psutil.Process], now_s: float) -> str | None:
        """Returns a sentence about a process without the plugin for too long; None: there is none.

        now_s: time of a monotonic clock, s.
        """
        for process in processes:
            if process in self._taken:
                continue
            try:
                why = complaint(process)
                if not why:
                    self._since.pop(process, None)
                if why == "":
                    self._taken.add(process)
                if not why or now_s - self._since.setdefault(process, now_s) < self._within_s:
                    continue
                words = " ".join(process.cmdline())[:200]
            except (OSError, psutil.Error):
                continue  # the process has ended, or is none of this user
            return (
                f"process {process.pid} ({words}) is not over the network plugin: {why}. Pass on "
                "the variables of `r2serve nccl --show` to every rank, or use --no-check"
            )
        return None


def watched(
    command: Command,
    tell: Callable[[str], None],
    within_s: float = WITHIN_S,
    every_s: float = EVERY_S,
) -> int:
    """Waits for a command, and ends it if a process does not take the plugin.

    tell: prints why the command is ended. within_s, every_s: as WITHIN_S and EVERY_S.
    Returns the exit status; :data:`r2serve.children.FAILED` after such a process.
    """
    over = threading.Event()

    def watch() -> None:
        ranks = Ranks(within_s)
        while not over.wait(every_s):
            if found := ranks.look(command.processes(), time.monotonic()):
                tell(f"r2serve nccl: the command is ended: {found}")
                command.end(GRACE_S)
                return

    thread = threading.Thread(target=watch, name="r2serve-nccl", daemon=True)
    thread.start()
    try:
        return command.wait()
    finally:
        over.set()
        thread.join()
