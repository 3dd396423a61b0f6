"""The end of `make cases`: reports from the field, before and now, and a line for each case."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

CASE = "case"
"""Property of a report whose test has a marker `case`."""
REPORTED = ("01", "02", "03", "06", "07", "12", "15", *(str(number) for number in range(20, 31)))
"""Numbers of the reports that came as small cases."""


@dataclass
class Case:
    """A case: ``before``: what r2serve did when it was reported. ``failed``: tests by name."""

    before: str
    passed: int = 0
    failed: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def now(self) -> str:
        if self.failed:
            return "wrong: " + ", ".join(self.failed)
        if not self.passed:
            return "not run: skipped"
        return f"right, {self.passed} tests" if self.passed > 1 else "right"

    def line(self, number: str) -> str:
        """Returns the line of a case that judges itself: ok, FAIL or SKIP."""
        if self.failed:
            return f"FAIL {number}: got {self.now}, wanted right"
        return f"{'ok' if self.passed else 'SKIP'} {number}: {self.now}"


def note(item: pytest.Item) -> None:
    """Adds the case of a test to its reports."""
    marker = item.get_closest_marker(CASE)
    if marker is not None:
        number, before = marker.args
        item.user_properties.append((CASE, (number, before)))


def numbered(items: list[pytest.Item]) -> list[pytest.Item]:
    """Returns the tests of cases with a number; the others are parts of `make test-long`."""
    return [
        item
        for item in items
        if (marker := item.get_closest_marker(CASE)) is not None and marker.args[0] in REPORTED
    ]


class Cases:
    """Collects the reports of the tests with a case, and prints the table and the lines."""

    def __init__(self) -> None:
        self._cases: dict[str, Case] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found: Any = dict(report.user_properties).get(CASE)
        if found is None:
            return
        number, before = found
        case = self._cases.setdefault(number, Case(before))
        case.seconds += report.duration
        name = report.nodeid.rpartition("::")[2]
        if report.failed and name not in case.failed:
            case.failed.append(name)
        elif report.when == "call" and report.passed:
            case.passed += 1

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        width = max((len(case.before) for case in self._cases.values()), default=0)
        terminalreporter.write_line(f"{'case':8} {'before':{width}}  {'s':>4}  now")
        for number, case in sorted(self._cases.items()):
            terminalreporter.write_line(
                f"{number:8} {case.before:{width}}  {case.seconds:4.0f}  {case.now}"
            )
        for number in sorted({*REPORTED, *self._cases}):
            case = self._cases.get(number, Case(""))
            terminalreporter.write_line(case.line(number))
