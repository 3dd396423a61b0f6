"""The closing table of `make cases`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import cases
import pytest


class Lines:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def write_line(self, line: str) -> None:
        self.lines.append(line)


def report(
    name: str, number: str, *, failed: bool = False, skipped: bool = False, when: str = "call"
) -> Any:
    properties = [(cases.CASE, (number, f"before {number}"))] if number else []
    return SimpleNamespace(
        user_properties=properties,
        nodeid=f"tests/e2e/test_ports.py::{name}",
        failed=failed,
        passed=not failed and not skipped,
        when=when,
        duration=1.5,
    )


def test_a_case_is_wrong_if_one_of_its_tests_fails_at_any_time() -> None:
    table, terminal = cases.Cases(), Lines()
    for each in (
        report("other", ""),
        report("second", "02", failed=True, when="setup"),
        report("first", "01"),
        report("third", "02"),
        report("fourth", "03"),
        report("fifth", "03"),
        report("fifth", "03", failed=True, when="teardown"),
        report("first", "01", when="teardown"),
        report("sixth", "04", skipped=True, when="setup"),
    ):
        table.pytest_runtest_logreport(each)
    table.pytest_terminal_summary(terminal)  # type: ignore[arg-type]
    rows = [line.split(None, 1) for line in terminal.lines]
    assert [row[0] for row in rows] == ["case", "01", "02", "03", "04"]
    assert [row[1].partition("  ")[2].split(None, 1)[1] for row in rows[1:]] == [
        "right",
        "wrong: second",
        "wrong: fifth",
        "not run: skipped",
    ]
    assert rows[1][1].split("  ")[0] == "before 01"


def test_the_marker_reaches_the_report() -> None:
    marker = pytest.mark.case("07", "waited")
    item = SimpleNamespace(
        get_closest_marker=lambda name: marker.mark if name == "case" else None, user_properties=[]
    )
    cases.note(item)  # type: ignore[arg-type]
    assert item.user_properties == [(cases.CASE, ("07", "waited"))]
