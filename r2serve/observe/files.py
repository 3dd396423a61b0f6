"""Files of a journal folder: detection of live writers, and the bound on all files together.

Workers share the bound without talking to each other: before a worker takes room, it deletes files
of ended writers, oldest first, and takes the room only if the bound then allows it.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from r2serve.observe import journal, request_log
from r2serve.observe.safe_open import open_regular

SIDECAR_LOG = "sidecar.log"
KEPT = 64
"""Journals of ended writers that stay in a folder, and request logs."""
YOUNG_S = 5.0
"""A younger file without a lock may belong to a writer that is about to lock the file, s."""
SHARE = 4
"""Files take at most 1/SHARE of their file system, because engines need /dev/shm, too."""
_OURS = (journal.PATTERN, request_log.PATTERN + "*", SIDECAR_LOG + "*")


def is_written(path: str | Path, owners: Collection[int] | None = None) -> bool:
    """Returns True while the journal's writer is alive, i.e. holds a lock on the file.

    Raises:
        OSError: the file cannot be opened, or belongs to a user outside ``owners``.
    """
    file = open_regular(path, owners)
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


@dataclass(frozen=True)
class _Ended:
    """A journal or a request log of an ended writer, with its other parts."""

    time: float
    path: Path
    kind: str

    def delete(self) -> None:
        for each in (
            self.path,
            request_log.previous(self.path),
            request_log.unfinished(self.path),
            request_log.replacement(self.path),
        ):
            _unlink(each)


def prune(folder: str | Path, keep: int) -> None:
    """Deletes journals, request logs and drill sockets of ended writers from a folder.

    keep: number of newest journals, and of newest request logs, to keep.
    """
    ended = list(_ended(Path(folder)))
    for pattern in (journal.PATTERN, request_log.PATTERN):
        for one in [one for one in ended if one.kind == pattern][keep:]:
            one.delete()
    for socket in Path(folder).glob("*.drills"):
        if not _is_written(socket.with_suffix(".journal")):
            _unlink(socket)


def room_for(folder: str | Path, need_bytes: int, limit_bytes: int) -> str:
    """Makes room for a file of ``need_bytes``; returns the reason if there is none, else empty.

    Deletes files of ended writers, oldest first, until all files of r2serve in the folder and the
    new file take at most ``limit_bytes``, and at most a quarter of a file system with a limit.

    Raises:
        OSError: the folder cannot be read.
    """
    folder = Path(folder)
    system = os.statvfs(folder)
    system_bytes = system.f_blocks * system.f_frsize
    limit, bound = limit_bytes, f"journal_limit_bytes (R2CCL_JOURNAL_LIMIT_BYTES = {limit_bytes})"
    if system_bytes:  # 0: without a limit, as tmpfs can be
        limit = min(limit, system_bytes // SHARE)
        bound = f"the lower of {bound} and a quarter of the file system ({system_bytes} bytes)"
    used = used_bytes(folder)
    if used + need_bytes <= limit:
        return ""
    for one in reversed(list(_ended(folder))):
        if abs(time.time() - one.time) < YOUNG_S:
            continue
        one.delete()
        used = used_bytes(folder)
        if used + need_bytes <= limit:
            return ""
    return (
        f"files of r2serve in {folder} take {used} bytes; {need_bytes} more would exceed {limit}, "
        f"{bound}"
    )


def used_bytes(folder: str | Path) -> int:
    """Returns the bytes of all files of r2serve in the folder, of live and of ended writers."""
    total = 0
    for pattern in _OURS:
        for path in Path(folder).glob(pattern):
            try:
                status = path.lstat()
            except OSError:
                continue  # just deleted
            total += max(status.st_size, status.st_blocks * 512)
    return total


def _ended(folder: Path) -> Iterator[_Ended]:
    """Yields journals and request logs of ended writers, newest first."""
    found = []
    for pattern in (journal.PATTERN, request_log.PATTERN):
        for path in folder.glob(pattern):
            try:
                if not is_written(path):
                    found.append(_Ended(path.stat().st_mtime, path, pattern))
            except OSError:
                continue  # owned by another user, or just deleted
    for path in folder.glob(request_log.unfinished(Path(request_log.PATTERN)).name):
        whole = path.with_suffix("")
        try:
            if not whole.exists() and not is_written(path):  # killed while the log began
                found.append(_Ended(path.stat().st_mtime, whole, request_log.PATTERN))
        except OSError:
            continue
    yield from sorted(found, key=lambda one: (one.time, one.path), reverse=True)


def _unlink(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return  # the folder is read-only, or the file is of another user
