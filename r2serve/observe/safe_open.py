"""Opens files written by other processes: regular files only, never through a symbolic link."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def open_regular(path: str | Path) -> int:
    """Opens a regular file for reading and returns the descriptor.

    Other file types are refused; opening a pipe, for example, could block.

    Raises:
        OSError: the file does not exist, or is no regular file.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(f"{path} is no regular file")
    return file
