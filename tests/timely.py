"""Waits of the tests, and the only failure that `make test` runs again: a condition met too late.

A starved machine delays processes without an error in the product. A test therefore waits for a
condition with a generous end, and reports a late condition with TimingMiss. Every other failure is
final at once.
"""

from __future__ import annotations

import os
import subprocess
import time
import warnings
from collections.abc import Callable
from typing import Protocol, TypeVar

PATIENCE_VARIABLE = "R2SERVE_TEST_PATIENCE"
"""Environment variable with the factor for the waits of tests, at least 1 (see tests/strain.py)."""
EVERY_S = 0.02

T = TypeVar("T")


class TimingMiss(AssertionError):
    """A condition that depends on time was not met, or a duration exceeded its limit."""


class Ending(Protocol):
    """The part of `subprocess.Popen` used here."""

    pid: int

    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


def patience() -> float:
    """Returns the factor for waits: 1 on a quiet machine."""
    return max(1.0, float(os.environ.get(PATIENCE_VARIABLE, "1")))


def timely(
    condition: Callable[[], T], what: str, within_s: float = 30.0, every_s: float = EVERY_S
) -> T:
    """Waits until `condition()` is true, and returns its value.

    within_s: limit in seconds, multiplied by `patience`; 0 = a single check, for a timing verdict.
    every_s: pause in seconds between two checks. The condition is checked once more after the
    limit, so a pause of this process alone is no miss.

    Raises:
        TimingMiss: the condition is still false; the text contains `what`.
    """
    limit_s = within_s * patience()
    deadline = time.monotonic() + limit_s
    while True:
        last = time.monotonic() >= deadline
        value = condition()
        if value:
            return value
        if last:
            raise TimingMiss(f"not within {limit_s:g} s: {what}" if limit_s else what)
        time.sleep(min(every_s, max(0.0, deadline - time.monotonic())))


def ended(process: Ending, what: str, within_s: float = 60.0) -> int:
    """Waits for the end of a process, and returns its exit status.

    Raises:
        TimingMiss: the process still runs after `within_s` seconds times `patience`.
    """
    limit_s = within_s * patience()
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        raise TimingMiss(f"still running after {limit_s:g} s: {what}") from None


def stop(process: Ending, what: str, grace_s: float = 10.0) -> None:
    """Waits for the end of a process, and kills it after `grace_s` seconds times `patience`.

    A teardown uses this function: a late end is a warning with the name of the process, no error.
    """
    for limit_s in (grace_s * patience(), 60.0):
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            warnings.warn(
                f"{what} (process {process.pid}) did not end within {limit_s:g} s", stacklevel=2
            )
            process.kill()
        else:
            return
