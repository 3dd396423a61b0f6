"""Closing report of a test run: what was skipped and why, native tests included."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--native-results",
        metavar="FOLDER",
        help="GoogleTest's XML reports, one folder a build variant, to count in the closing report",
    )


def native_results(folder: Path) -> tuple[int, Counter[str]]:
    """Passed tests, and skipped ones by reason, in GoogleTest reports below ``folder``."""
    passed, skipped = 0, Counter[str]()
    for report in sorted(folder.glob("*.xml")):
        for case in ElementTree.parse(report).iter("testcase"):
            if case.get("result") == "skipped":
                note = case.find("skipped")
                text = (note.get("message") if note is not None else None) or "no reason given"
                skipped[text.strip().splitlines()[-1]] += 1
            elif case.get("status") == "run" and case.find("failure") is None:
                passed += 1
    return passed, skipped


def skip_reason(report: pytest.TestReport) -> str:
    """The text given to ``pytest.skip``, without file and line."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    return str(report.longrepr)


def skip_line(reasons: Counter[str]) -> str:
    line = f"skipped: {reasons.total()}"
    if reasons:
        line += " (" + ", ".join(f"{text}: {n}" for text, n in reasons.most_common()) + ")"
    return line


# Last of all summaries, so that only pytest's own closing line comes after it.
@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    reasons = Counter(skip_reason(report) for report in terminalreporter.stats.get("skipped", []))
    folder = config.getoption("--native-results")
    if folder is not None:
        for variant in sorted(path for path in Path(folder).iterdir() if path.is_dir()):
            passed, skipped = native_results(variant)
            terminalreporter.write_line(f"native, {variant.name}: {passed} passed")
            reasons += skipped
    terminalreporter.write_line(skip_line(reasons))
