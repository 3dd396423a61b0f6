"""Terminal handling shared by the demo commands: signals, report and exit status."""

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
    """The final report of a command."""

    @property
    def passed(self) -> bool: ...

    def to_json(self) -> dict[str, Any]: ...


R = TypeVar("R", bound=AnyReport)


def _interrupt(number: int, frame: FrameType | None) -> None:
    # Ignore further signals during the clean-up, e.g. a second Ctrl-C.
    for other in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(other, signal.SIG_IGN)
    raise KeyboardInterrupt


def report_and_exit(
    run: Callable[[Progress], R], render: Callable[[R, Console], None], json_path: Path | None
) -> None:
    """Runs a command, prints and writes the report, and exits.

    Exit status: 0 if the report passed, 1 if not, 130 on a signal.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    # Without a terminal, use a wide console: wrapped tables are hard to read.
    console = Console() if sys.stdout.isatty() else Console(width=_PLAIN_WIDTH)
    try:
        report = run(Progress(console))
    except KeyboardInterrupt:
        console.print("interrupted; all processes and temporary files are removed")
        sys.exit(INTERRUPTED)
    render(report, console)
    if json_path is not None:
        json_path.write_text(json.dumps(report.to_json(), indent=2) + "\n", encoding="utf-8")
    sys.exit(0 if report.passed else 1)
