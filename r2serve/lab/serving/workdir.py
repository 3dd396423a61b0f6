"""The demo's temporary directory, which goes away with the demo or, at the latest, at the next."""

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
    """The process that a directory's name says it belongs to, None if it is not one of ours."""
    pid = name.removeprefix(_PREFIX).partition("-")[0]
    return int(pid) if name.startswith(_PREFIX) and pid.isdigit() else None


def sweep(parent: Path | None = None) -> list[Path]:
    """Removes the directories of demos that were killed, and returns them."""
    parent = parent or Path(tempfile.gettempdir())
    removed = []
    for path in parent.glob(f"{_PREFIX}*"):
        pid = owner_pid(path.name)
        if pid is None or Path(f"/proc/{pid}").exists():
            continue
        # The directory above is everybody's: what another user or a link put there is not ours.
        if path.is_symlink() or not path.is_dir() or path.stat().st_uid != os.getuid():
            continue
        logger.info("removing %s, left by process %d", path, pid)
        shutil.rmtree(path)
        removed.append(path)
    return removed


@contextlib.contextmanager
def work_directory(keep_logs: Path | None = None) -> Iterator[Path]:
    """A directory for one demo; on leaving its logs and results go to keep_logs, if given."""
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
