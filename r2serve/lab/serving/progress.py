"""Progress display of the demo: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console
from rich.status import Status

PLAIN_S = 15.0
"""Interval of the lines of a long step where no line can be replaced, s."""


class Progress:
    """A sequence of steps, each with a live line."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._begun = time.monotonic()
        self._status: Status | None = None
        self._step = ""
        self._told_s = self._begun

    @contextlib.contextmanager
    def step(self, text: str) -> Iterator[None]:
        """Shows `text` during the block; on a terminal, prints the duration afterwards."""
        self._step = text
        begun = self._told_s = time.monotonic()
        if not self._console.is_terminal:
            self.line(text)
            yield
            return
        with self._console.status(text) as status:
            self._status = status
            try:
                yield
            finally:
                self._status = None
        self.line(f"{text} ({time.monotonic() - begun:.1f} s)")

    def detail(self, text: str) -> None:
        """Replaces the live part of the step's line; plain output has a line every PLAIN_S."""
        if self._status is not None:
            self._status.update(f"{self._step}: {text}")
        elif not self._console.is_terminal and time.monotonic() - self._told_s >= PLAIN_S:
            self._told_s = time.monotonic()
            self.line(f"{self._step}: {text}")

    def line(self, text: str) -> None:
        """Prints a permanent line."""
        elapsed = time.monotonic() - self._begun
        self._console.print(f"[dim]{elapsed:6.1f} s[/]  {text}", highlight=False)
