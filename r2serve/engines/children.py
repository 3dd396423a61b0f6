"""The end of an engine's first process and its children, with a status that a supervisor reads."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from typing import NoReturn

import psutil

EXIT_STATUS = 70  # EX_SOFTWARE of sysexits(3)


def kill_children(spare: str = "") -> None:
    """Kills the processes that this process has started by multiprocessing, with descendants.

    Python's trackers stay: they remove the shared memory of killed processes.

    Args:
        spare: start of the name of processes that stay; empty: none does.
    """
    for child in multiprocessing.active_children():
        if child.pid is None or (spare and child.name.startswith(spare)):
            continue
        with contextlib.suppress(psutil.Error):
            for each in psutil.Process(child.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if not any("resource_tracker" in word for word in each.cmdline()):
                        each.kill()
        child.kill()


def leave() -> NoReturn:
    """Kills the children and ends this process with :data:`EXIT_STATUS`."""
    kill_children()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_STATUS)
