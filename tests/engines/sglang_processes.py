"""Processes of SGLang's servers, found for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import psutil


def schedulers(folder: Path, rank: int) -> Sequence[psutil.Process]:
    """Returns the processes of a scheduler with this working folder, in a server without stages.

    The title of the process replaces its command line and its environment in /proc.
    """
    found = []
    for process in psutil.process_iter():
        try:
            named = " ".join(process.cmdline()).strip() == f"sglang::scheduler_TP{rank}"
            if named and process.cwd() == str(folder):
                found.append(process)
        except psutil.Error:
            continue  # the process has just ended
    return found
