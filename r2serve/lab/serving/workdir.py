"""Temporary directory of the demo, removed at the end; the next demo cleans up after a kill."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

_PREFIX = "r2serve-demo-"


def owner_pid(name: str) -> int | None:
    """Returns the pid in a directory's name; None for other directories."""
    pid = name.removeprefix(_PREFIX).partition("-")[0]
    return int(pid) if name.startswith(_PREFIX) and pid.isdigit() else None


def sweep(parent: Path | None = None) -> list[Path]:
    """Removes the directories of killed demos, and returns the paths removed."""
    parent = parent or Path(tempfile.gettempdir())
    removed = []
    for path in parent.glob(f"{_PREFIX}*"):
        pid = owner_pid(path.name)
        if pid is None or Path(f"/proc/{pid}").exists():
            continue
        # Other users can write to the parent: skip links and files of other owners.
        if path.is_symlink() or not path.is_dir() or path.stat().st_uid != os.getuid():
            continue
        logger.info("removing %s, left by process %d", path, pid)
        shutil.rmtree(path)
        removed.append(path)
    return removed


@contextlib.contextmanager
def work_directory(keep_logs: Path | None = None) -> Iterator[Path]:
    """Creates a temporary directory; on leaving, copies logs and results to keep_logs if given."""
    path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
    try:
        yield path
    finally:
        try:
            if keep_logs is not None:
                _keep(path, keep_logs)
        finally:
            shutil.rmtree(path)


def _keep(path: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for pattern in ("*.log", "*.json", "*/journal/*"):
        for file in path.glob(pattern):
            shutil.copyfile(file, target / "-".join(file.relative_to(path).parts))
