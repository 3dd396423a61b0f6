"""Messages between a worker and the test: lines of JSON."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from typing import Any

ARGUMENTS: dict[str, Any] = json.loads(sys.argv[1])

_lock = threading.Lock()


def say(what: Any) -> None:
    with _lock:
        sys.stdout.write(json.dumps(what) + "\n")
        sys.stdout.flush()


def hear() -> Any:
    """Returns the next message of the test; ends the process if the test has ended."""
    line = sys.stdin.readline()
    if not line:
        os._exit(3)
    return json.loads(line)


class LogLines(logging.Handler):
    """Keeps the log lines of r2serve, and prints the lines to standard error."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.warnings: list[str] = []
        logging.getLogger("r2serve").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        if record.levelno == logging.WARNING:
            self.warnings.append(record.getMessage())
        sys.stderr.write(f"{record.created:.3f} {record.levelname} {record.getMessage()}\n")


def resources() -> dict[str, int]:
    """Returns the numbers of descriptors, threads and resident bytes of this process."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        pages = int(statm.read().split()[1])
    return {
        "descriptors": len(os.listdir("/proc/self/fd")) - 1,  # without the listing's descriptor
        "threads": len(os.listdir("/proc/self/task")),
        "bytes": pages * os.sysconf("SC_PAGE_SIZE"),
    }
