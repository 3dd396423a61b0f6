"""The files that journals are: whose writer lives, and which ones to keep."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from r2serve.observe.journal import PATTERN


def is_written(path: str | Path) -> bool:
    """Whether the process that writes a journal lives: it holds a lock on the file.

    Raises:
        OSError: the file cannot be opened.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)  # and with it the lock
    return False


def prune(folder: str | Path, keep: int) -> None:
    """Delete the journals of a folder whose writers have ended, but for the newest `keep`."""
    ended = []
    for path in Path(folder).glob(PATTERN):
        try:
            if not is_written(path):
                ended.append((path.stat().st_mtime, path))
        except OSError:
            continue  # somebody else's, or deleted just now
    for _, path in sorted(ended, reverse=True)[keep:]:
        path.unlink(missing_ok=True)
