"""Results of the stages of `make test`, and the list at the end of a run; see docs/testing.md.

A stage leaves its results in files below build/results. Pytest writes a JSON file
(tests/conftest.py), and a native test program writes a report of GoogleTest.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import skips
from hangs import Watchdog
from skips import Skip
from strain import Figures

TESTS_FAILED = 1
NOTHING_COLLECTED = 5
"""Exit statuses of pytest."""
LATE_TEXT = "late: "
"""Part of the message of a native expectation that judges a duration."""
NO_REPORT = "no report: it crashed, or exceeded its time"
HUNG = "hung, and was killed at its time limit"
SHOWN_LINES = 60
REPORT = re.compile(r"(ERROR|WARNING): \w+Sanitizer|: runtime error: ")
"""First line of a sanitizer's report."""

Kills = Callable[[float, float], int]
"""Out-of-memory kills of an interval; see `strain.Monitor.kills`."""


def no_kills(_since: float, _until: float) -> int:
    return 0


@dataclass(frozen=True)
class Late:
    """A test that failed with nothing but TimingMiss, or a native program with the label timing.

    started, stopped: s since 1970.
    """

    name: str
    message: str
    started: float
    stopped: float
    variant: str = ""


@dataclass
class Outcome:
    """The end of a stage: failures as lines of text, late tests, passed and skipped tests.

    undetermined: failures during an out-of-memory kill, which are no verdict. reports: lines shown
    below a failure. began: s since 1970.
    """

    stage: str
    kills: Kills = no_kills
    began: float = field(default_factory=time.time)
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)
    undetermined: list[str] = field(default_factory=list)
    reports: dict[str, list[str]] = field(default_factory=dict)
    late: list[Late] = field(default_factory=list)
    skipped: list[Skip] = field(default_factory=list)
    passed: int = 0
    collected: bool = False

    def fail_unless_killed(
        self, text: str, started: float | None = None, stopped: float | None = None
    ) -> None:
        """Adds a failure; it is undetermined if the system killed a process for want of memory.

        started, stopped: of the test, in s since 1970; None = of the stage.
        """
        since = self.began if started is None else started
        killed = self.kills(since, time.time() if stopped is None else stopped)
        (self.undetermined if killed else self.failures).append(text)


def add_pytest(file: Path, status: int, outcome: Outcome) -> None:
    """Adds the results of a run of pytest, written by tests/conftest.py."""
    if not file.exists():
        outcome.fail_unless_killed(f"{file.stem}: pytest ended with status {status} and no results")
        return
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    for each in found["failed"]:
        text = f"{each['nodeid']}: {each['message']}"
        outcome.fail_unless_killed(text, each["started"], each["stopped"])
    outcome.late += [Late(**each) for each in found["late"]]
    outcome.skipped += [Skip(file.stem, test, reason) for test, reason in found["skipped"]]
    outcome.passed += found["passed"]
    outcome.collected = outcome.collected or status != NOTHING_COLLECTED
    explained = status == TESTS_FAILED and (found["failed"] or found["late"])
    if status not in (0, NOTHING_COLLECTED) and not explained:
        outcome.fail_unless_killed(f"{file.stem}: pytest ended with status {status}")


def add_native(
    build: Path, results: Path, status: int, outcome: Outcome, hung: Sequence[str] = ()
) -> None:
    """Adds the results of native tests: the failed cases and programs, and all reports.

    A program with a sanitizer's report has failed, even if it passed: a sanitizer may go on after
    a report, and the report may be one of a child whose exit status no test reads.

    build: folder of the variant. results: folder with the reports of GoogleTest. hung: names of
    killed programs, each with its stage.
    """
    outcome.collected = True
    for report in sorted(results.glob("*.xml")):
        passed, skipped, _ = native_cases(report)
        outcome.passed += passed
        for case, reason in skipped:
            outcome.skipped.append(Skip(outcome.stage, f"{report.stem}: {case}", reason))
    log = build / "Testing" / "Temporary" / "LastTest.log"
    fresh = log.exists() and log.stat().st_mtime >= outcome.began
    reports = sanitizer_reports(log) if fresh else {}
    if status != 0:
        add_failed_programs(build, results, status, reports, outcome, hung)
    for program, shown in reports.items():
        name = f"{outcome.stage}: {program}: {shown[0]}"
        outcome.failures.append(name)
        outcome.reports[name] = shown


def add_failed_programs(
    build: Path,
    results: Path,
    status: int,
    reports: dict[str, list[str]],
    outcome: Outcome,
    hung: Sequence[str],
) -> None:
    """Adds failed cases, late programs, and programs without a failed case or a report."""
    failed_file = build / "Testing" / "Temporary" / "LastTestsFailed.log"
    if not failed_file.exists() or failed_file.stat().st_mtime < outcome.began:
        outcome.fail_unless_killed(f"{outcome.stage}: make ended with status {status}")
        return
    programs = [line.partition(":")[2] for line in failed_file.read_text().splitlines()]
    timing = timing_programs(build)
    for program in programs:
        name = f"{outcome.stage}: {program}"
        if name in hung:
            outcome.failures.append(f"{name}: {HUNG}")
            continue
        cases = native_cases(results / f"{program}.xml")[2]
        late = program in timing and cases and all(LATE_TEXT in each for each in cases)
        if late and program not in reports:
            variant = build.name.removeprefix("native-")
            outcome.late.append(Late(program, cases[0], outcome.began, time.time(), variant))
            continue
        for each in cases:
            outcome.failures.append(f"{name}: {each}")
        if not cases and program not in reports:
            outcome.fail_unless_killed(f"{name}: {NO_REPORT}")


def add_target(status: int, outcome: Outcome) -> None:
    """Adds the result of a make target without tests."""
    outcome.collected = True
    if status != 0:
        outcome.fail_unless_killed(f"{outcome.stage}: make ended with status {status}")


def timing_programs(build: Path) -> set[str]:
    done = subprocess.run(
        ["ctest", "--test-dir", str(build), "-N", "-L", "^timing$"],
        capture_output=True,
        text=True,
        check=False,
    )
    # Short numbers have more spaces: "Test  #7: name", "Test #10: name".
    return set(re.findall(r"^ +Test +#\d+: (\S+)$", done.stdout, re.MULTILINE))


def native_cases(report: Path) -> tuple[int, list[tuple[str, str]], list[str]]:
    """Returns passed tests, skipped tests with reasons, and failed tests of a GoogleTest report.

    A program that crashed leaves no report, or a part of one: no test counts then.
    """
    passed, skipped, failed = 0, list[tuple[str, str]](), list[str]()
    try:
        cases = list(ElementTree.parse(report).iter("testcase"))
    except (FileNotFoundError, ElementTree.ParseError):
        cases = []
    for case in cases:
        name = f"{case.get('classname')}.{case.get('name')}"
        messages = [each.get("message") or "" for each in case.iter("failure")]
        if case.get("result") == "skipped":
            note = case.find("skipped")
            text = (note.get("message") if note is not None else None) or "no reason given"
            skipped.append((name, text.strip().splitlines()[-1]))
        elif messages:
            # Every failed expectation of a case, since one of them may be no late one.
            failed += [f"{name}: {' '.join(each.split())[:300]}" for each in messages]
        elif case.get("status") == "run":
            passed += 1
    return passed, skipped, failed


def sanitizer_reports(log: Path) -> dict[str, list[str]]:
    """Returns the first sanitizer's report of each program, passed or not, in CTest's log."""
    found = dict[str, list[str]]()
    program, inside = "", False
    for line in log.read_text(errors="replace").splitlines():
        if heading := re.match(r"\d+/\d+ Test(?:ing)?: (.*)", line):
            program, inside = heading[1].strip(), False
        elif program and program not in found and REPORT.search(line):
            found[program], inside = [], True
        if inside:
            shown = found[program]
            shown.append(line)
            inside = len(shown) < SHOWN_LINES and not line.startswith("SUMMARY: ")
    return found


def add_unexpected_skips(outcome: Outcome) -> None:
    """Adds a failure for each skip that tests/skips.toml does not list for this machine."""
    for skip in skips.unexpected(outcome.skipped, skips.expected()):
        outcome.failures.append(f"{skip.test}: unexpected skip: {skip.reason}")


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def say_unstable(rows: Sequence[dict[str, str]], file: Path) -> None:
    """Prints the late tests, and keeps them."""
    say(f"UNSTABLE: {len(rows)}")
    for row in rows:
        say(f"  {row['test']} ({row.get('again', 'not run again')}): {row['message']}")
        say(f"    {row['machine']}")
    file.write_text(json.dumps(list(rows), indent=1) + "\n", encoding="utf-8")


def summary(outcomes: Sequence[Outcome], watchdog: Watchdog) -> None:
    """Prints seconds, counts and skips of the stages, and the list of failures."""
    say("stage          seconds  passed  skipped  failed")
    for each in outcomes:
        counts = f"{each.passed:7} {len(each.skipped):8} {len(each.failures):7}"
        say(f"{each.stage:14} {each.seconds:7.0f} {counts}")
    skipped = Counter(skip.reason for each in outcomes for skip in each.skipped)
    for reason, count in skipped.most_common():
        say(f"skipped: {count}: {reason}")
    failed = 0
    for outcome in outcomes:
        for failure in outcome.failures:
            failed += 1
            say(f"FAILURE {' '.join(failure.split())[:600]}")
            say_stacks(failure, outcome, watchdog)
    for nodeid in watchdog.killed:
        say(f"killed after its time limit: {nodeid}")
    for outcome in outcomes:
        for text in outcome.undetermined:
            say(f"UNDETERMINED (out of memory) {' '.join(text.split())[:600]}")
    undetermined = sum(len(each.undetermined) for each in outcomes)
    passed = sum(each.passed for each in outcomes)
    ends = f", {undetermined} undetermined" if undetermined else ""
    say(f"{passed} passed, {failed} failed, {skipped.total()} skipped{ends}")


def say_stacks(failure: str, outcome: Outcome, watchdog: Watchdog) -> None:
    """Prints the sanitizer's report, or the stacks at the time limit of a test."""
    lines = outcome.reports.get(failure, [])
    nodeid = failure.removesuffix(f": {HUNG}")
    file = watchdog.stacks_of(nodeid if nodeid != failure else failure.partition(": ")[0])
    if file is not None:
        say(f"  stacks: {os.path.relpath(file)}")
        lines = file.read_text(errors="replace").splitlines()
    for line in lines[:SHOWN_LINES]:
        say(f"    {line}")


def status_of(outcomes: Sequence[Outcome]) -> int:
    """Returns the exit status: 1 = failed, 3 = undetermined, since memory was short; 0 = passed."""
    if any(each.failures for each in outcomes):
        return 1
    return 3 if any(each.undetermined for each in outcomes) else 0


def row_of(
    outcomes: Sequence[Outcome],
    unstable: Sequence[dict[str, str]],
    *,
    commit: str,
    factor: float,
    figures: Figures,
) -> dict[str, object]:
    """Returns the closing list as a row of bench/results/gate.jsonl."""
    return {
        "ended": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit,
        "cores": os.cpu_count(),
        "machine": str(figures),
        "load": round(os.getloadavg()[2], 1),
        "factor": factor,
        "seconds": {each.stage: round(each.seconds) for each in outcomes},
        "passed": {each.stage: each.passed for each in outcomes},
        "skipped": {each.stage: len(each.skipped) for each in outcomes},
        "failures": [text for each in outcomes for text in each.failures],
        "undetermined": [text for each in outcomes for text in each.undetermined],
        "unstable": list(unstable),
    }
