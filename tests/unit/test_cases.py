"""The closing table of `make cases`."""

from __future__ import annotations

import re
from pathlib import Path
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
    rows = [line.split(None, 1) for line in terminal.lines[:5]]
    assert [row[0] for row in rows] == ["case", "01", "02", "03", "04"]
    assert [row[1].partition("  ")[2].split(None, 1)[1] for row in rows[1:]] == [
        "right",
        "wrong: second",
        "wrong: fifth",
        "not run: skipped",
    ]
    assert rows[1][1].split("  ")[0] == "before 01"
    said = terminal.lines[5:]
    assert [line.partition(":")[0].split()[1] for line in said] == sorted({*cases.REPORTED, "04"})
    assert said[0] == "ok 01: right"
    assert said[1] == "FAIL 02: got wrong: second, wanted right"
    assert said[3] == "SKIP 04: not run: skipped"
    assert said[-1] == "SKIP 30: not run: skipped"


def test_every_report_has_a_test() -> None:
    marked = {
        number
        for path in Path(__file__).resolve().parents[1].rglob("test_*.py")
        for number in re.findall(r'mark\.case\(\s*"(\w+)"', path.read_text())
    }
    assert sorted(set(cases.REPORTED) - marked) == []


def test_tests_of_other_cases_are_left_to_the_long_tests() -> None:
    def item(*arguments: str) -> Any:
        marker = pytest.mark.case(*arguments).mark if arguments else None
        return SimpleNamespace(get_closest_marker=lambda name: marker if name == "case" else None)

    items = [item("20", "before"), item("features", "before"), item()]
    assert cases.numbered(items) == items[:1]


def test_the_marker_reaches_the_report() -> None:
    marker = pytest.mark.case("07", "waited")
    item = SimpleNamespace(
        get_closest_marker=lambda name: marker.mark if name == "case" else None, user_properties=[]
    )
    cases.note(item)  # type: ignore[arg-type]
    assert item.user_properties == [(cases.CASE, ("07", "waited"))]
