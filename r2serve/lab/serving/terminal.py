"""What the commands that serve a model have in common on the terminal."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, TypeVar

from rich.console import Console

from r2serve.lab.serving.progress import Progress

INTERRUPTED = 130
_PLAIN_WIDTH = 160


class AnyReport(Protocol):
    """What such a command ends with."""

    @property
    def passed(self) -> bool: ...

    def to_json(self) -> dict[str, Any]: ...


R = TypeVar("R", bound=AnyReport)


def _interrupt(number: int, frame: FrameType | None) -> None:
    # Taking everything down takes moments; a second Ctrl-C must not cut that short.
    for other in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(other, signal.SIG_IGN)
    raise KeyboardInterrupt


def report_and_exit(
    run: Callable[[Progress], R], render: Callable[[R, Console], None], json_path: Path | None
) -> None:
    """Runs, shows and writes the report, and exits: 0 if it passed, 1 if not, 130 on a signal."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    # Without a terminal there is no width to fit into, and a wrapped table is hard to read.
    console = Console() if sys.stdout.isatty() else Console(width=_PLAIN_WIDTH)
    try:
        report = run(Progress(console))
    except KeyboardInterrupt:
        console.print("interrupted; everything that it made is gone")
        sys.exit(INTERRUPTED)
    render(report, console)
    if json_path is not None:
        json_path.write_text(json.dumps(report.to_json(), indent=2) + "\n", encoding="utf-8")
    sys.exit(0 if report.passed else 1)
