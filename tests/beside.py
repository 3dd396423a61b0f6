"""Work beside the stages of `make test`, on CPUs that are idle otherwise.

The sanitized native tests are compiled ahead of their stages. The compilation beside a stage ends
with the stage, and the stage of a variant compiles what is left at normal priority.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
from hangs import FOLDER_VARIABLE, family, kill_all

LOWEST = 19
"""Niceness with 1.5 % of the weight of other processes."""
GRACE_S = 20.0
"""Time for ninja to remove incomplete files."""


def start(command: Sequence[str], nice: int, **options: Any) -> subprocess.Popen[bytes]:
    """Starts a process at a niceness, in a session of its own. options: of `subprocess.Popen`.

    The session gets the niceness, too: a kernel with autogroups gives all sessions equal shares of
    the CPUs, and the niceness of a process counts inside its session only.
    """
    weighed = ["nice", "-n", str(nice), *command]
    process = subprocess.Popen(weighed, start_new_session=True, **options)
    with contextlib.suppress(OSError):  # no autogroups
        Path(f"/proc/{process.pid}/autogroup").write_text(str(nice), encoding="utf-8")
    return process


@contextlib.contextmanager
def compiled_ahead(root: Path, variants: Sequence[str]) -> Iterator[None]:
    """Compiles native tests while the body runs, one variant after another.

    The stage of a variant repeats a failed compilation, with its errors.
    """
    if not variants:
        yield
        return
    command = ["make", *(f"ahead-{variant}" for variant in variants)]
    # The gate kills processes with this variable at the end of each stage.
    environment = {name: value for name, value in os.environ.items() if name != FOLDER_VARIABLE}
    with (root / "build" / "ahead.log").open("ab") as log:
        compiling = start(
            command, LOWEST, cwd=root, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            yield
        finally:
            end(compiling)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process of `start` with its descendants; after GRACE_S by SIGKILL."""
    descendants = family(process.pid)
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while left := [each for each in descendants if is_alive(each)]:
        if time.monotonic() > deadline:
            kill_all(left)
            break
        time.sleep(0.05)
    process.wait()


def is_alive(process: psutil.Process) -> bool:
    """Whether a process runs; an orphan may stay a zombie, which runs no more."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
