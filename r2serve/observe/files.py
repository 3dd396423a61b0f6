"""Journal files: detection of live writers, and pruning of old files."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from r2serve.observe import journal, request_log
from r2serve.observe.safe_open import open_regular


def is_written(path: str | Path) -> bool:
    """Returns True while the journal's writer is alive, i.e. holds a lock on the file.

    Raises:
        OSError: the file cannot be opened.
    """
    file = open_regular(path)
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)  # releases the shared lock, too
    return False


def _is_written(path: Path) -> bool:
    try:
        return is_written(path)
    except OSError:
        return False


def prune(folder: str | Path, keep: int) -> None:
    """Deletes journals, request logs and drill sockets of ended writers from a folder.

    keep: number of newest journals, and of newest request logs, to keep.
    """
    for pattern in (journal.PATTERN, request_log.PATTERN):
        ended = []
        for path in Path(folder).glob(pattern):
            try:
                if not is_written(path):
                    ended.append((path.stat().st_mtime, path))
            except OSError:
                continue  # owned by another user, or just deleted
        for _, path in sorted(ended, reverse=True)[keep:]:
            for each in (path, request_log.previous(path), request_log.unfinished(path)):
                each.unlink(missing_ok=True)
    for socket in Path(folder).glob("*.drills"):
        if not _is_written(socket.with_suffix(".journal")):
            socket.unlink(missing_ok=True)
