"""Files that must not be open to other users: tokens, keys and the file of faults."""

from __future__ import annotations

import os
import stat
from pathlib import Path

LONGEST_SECRET = 4096
"""Most bytes of a token or key."""


def read_private(path: str | Path, *, closed_to: int = 0o007) -> bytes:
    """Returns the contents of a file with a secret, at most LONGEST_SECRET bytes.

    closed_to: mode bits that the file must not have; by default those of users outside its group.

    Raises:
        OSError: the file cannot be read, is no regular file, or is open to other users.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would block
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path} is no regular file")
        if why := why_not_private(status, closed_to):
            raise PermissionError(f"{path} {why}")
        return os.read(file, LONGEST_SECRET)
    finally:
        os.close(file)


def why_not_private(status: os.stat_result, closed_to: int) -> str:
    """Returns why other users may have read or written a file; empty: they cannot.

    A file of root is as private as one of this user, because Kubernetes mounts secrets as root's.
    """
    if status.st_uid not in (0, os.geteuid()):
        return f"belongs to user {status.st_uid}: must belong to this user or root"
    if status.st_mode & closed_to:
        if not closed_to & 0o444:
            return "is writable by other users: run chmod go-w"
        return "is accessible to other users: must have mode 600, or 640 for its group"
    return ""
