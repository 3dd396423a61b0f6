"""Opens files written by other processes: regular files only, never through a symbolic link."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from pathlib import Path


def open_regular(path: str | Path, owners: Collection[int] | None = None) -> int:
    """Opens a regular file for reading and returns the descriptor.

    Other file types are refused; opening a pipe, for example, could block. owners: users to whom
    the file may belong; None: any user.

    Raises:
        OSError: the file does not exist, is no regular file, or belongs to another user.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        os.close(file)
        raise OSError(f"{path} is no regular file")
    if owners is not None and status.st_uid not in owners:
        os.close(file)
        raise PermissionError(f"{path} belongs to user {status.st_uid}: not believed")
    return file
