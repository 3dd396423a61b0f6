"""Whether every process of a command with NCCL has taken the network plugin.

NCCL_SET_THREAD_NAME lets NCCL name its threads. A process with a thread ``NCCL Service`` has a
communicator, and has chosen its network before. The plugin has a thread ``r2ccl-nccl`` from its
start on. A process that has lost the variables of ``r2serve nccl`` has no such names. Its loaded
libnccl and its environment are a hint, but no proof: torch loads libnccl in every process, also in
processes without the plugin on purpose. A hint is a warning, and only a proof ends the command.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Signs:
    """Signs of the choice of NCCL in a process."""

    plugin: bool = False
    """NCCL has taken the plugin."""
    reason: str = ""
    """Why NCCL of the process has no plugin; empty: has the plugin, or no sign of a choice."""
    proved: bool = False
    """The reason is a proof; False: a hint."""


def signs(process: psutil.Process) -> Signs:
    """Returns the signs of the choice of NCCL in a process.

    Raises:
        OSError, psutil.Error: the process has ended, or belongs to another user.
    """
    folder = Path("/proc", str(process.pid))
    names = {(each / "comm").read_text().rstrip("\n") for each in (folder / "task").iterdir()}
    if PLUGIN_THREAD in names:
        return Signs(plugin=True)
    if any(name.startswith(NCCL_THREAD) for name in names):
        return Signs(reason="its NCCL has a communicator over another network", proved=True)
    environment = process.environ()
    # A process title by setproctitle replaces the environment in /proc.
    if not environment or environment.get("NCCL_NET", "").lower() == NETWORK:
        return Signs()
    if not _LIBRARY.search((folder / "maps").read_text(errors="replace")):
        return Signs()
    return Signs(reason="it has loaded NCCL, but its environment has lost NCCL_NET")


@dataclass(frozen=True)
class Finding:
    """A process without the plugin."""

    proved: bool
    text: str


def _sentence(pid: int, words: str, reason: str) -> str:
    return (
        f"process {pid} ({words}) is not over the network plugin: {reason}. Pass on the variables "
        "of `r2serve nccl --show` to every rank, or use --no-check"
    )


class Ranks:
    """Looks at the processes of a command again and again."""

    def __init__(self, within_s: float = WITHIN_S) -> None:
        """within_s: time in which a process takes the plugin, s."""
        self._within_s = within_s
        self._judged: set[psutil.Process] = set()  # nothing more to find
        self._hinted: set[psutil.Process] = set()  # warned of; a proof may follow
        self._since: dict[psutil.Process, float] = {}

    def look(self, processes: Iterable[psutil.Process], now_s: float) -> list[Finding]:
        """Returns the processes without the plugin for too long, each once.

        now_s: time of a monotonic clock, s.
        """
        found = []
        for process in processes:
            if process in self._judged:
                continue
            try:
                shown = signs(process)
                if not shown.reason:
                    self._since.pop(process, None)
                    if shown.plugin:
                        self._judged.add(process)
                    continue
                if now_s - self._since.setdefault(process, now_s) < self._within_s:
                    continue
                words = " ".join(process.cmdline())[:200]
            except (OSError, psutil.Error):
                continue  # the process has ended, or is none of this user
            if shown.proved or process not in self._hinted:
                found.append(Finding(shown.proved, _sentence(process.pid, words, shown.reason)))
            (self._judged if shown.proved else self._hinted).add(process)
        return found


def watched(
    command: Command,
    tell: Callable[[str], None],
    within_s: float = WITHIN_S,
    every_s: float = EVERY_S,
) -> int:
    """Waits for a command, and ends it if a process provably does not take the plugin.

    tell: prints warnings, and why the command is ended. within_s, every_s: as WITHIN_S and EVERY_S.
    Returns the exit status; :data:`r2serve.children.FAILED` after such a process.
    """
    over = threading.Event()

    def watch() -> None:
        ranks = Ranks(within_s)
        while not over.wait(every_s):
            for found in ranks.look(command.processes(), time.monotonic()):
                if found.proved:
                    tell(f"r2serve nccl: the command is ended: {found.text}")
                    command.end(GRACE_S)
                    return
                tell(f"r2serve nccl: warning: {found.text}")

    thread = threading.Thread(target=watch, name="r2serve-nccl", daemon=True)
    thread.start()
    try:
        return command.wait()
    finally:
        over.set()
        thread.join()
