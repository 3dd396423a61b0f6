"""Run delay: time in which a thread was ready to run, but its host had no CPU for the thread."""

from __future__ import annotations

import os
import threading
from typing import BinaryIO

_ACCOUNT = "/proc/thread-self/schedstat"


class _Opened(threading.local):
    """The kernel's account of a thread, opened once; a forked child has an account of its own."""

    process = 0
    file: BinaryIO | None = None


_opened = _Opened()


def run_delay_ns() -> int:
    """Returns this thread's total so far, ns; 0 on a kernel without scheduler statistics."""
    if _opened.process != os.getpid():
        _opened.process = os.getpid()
        try:
            _opened.file = open(_ACCOUNT, "rb", buffering=0)  # noqa: SIM115  kept open
        except OSError:
            _opened.file = None
    if _opened.file is None:
        return 0
    return int(os.pread(_opened.file.fileno(), 96, 0).split()[1])
