"""Opens what others write: regular files alone, and never through a link."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def open_regular(path: str | Path) -> int:
    """A descriptor to read a regular file with.

    Raises:
        OSError: it is not there, or is something else: a pipe would keep whoever opens it waiting.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(f"{path} is no regular file")
    return file
