"""Runs the stages of `make test`, and lists all failures at the end; docs/testing.md has the rules.

gate.py [--keep-going] [--deadline SECONDS] [--long] [STAGE...] [-- arguments of pytest]

--keep-going: runs the other stages after a failed stage. --deadline: limit for all stages; stages
not begun by then count as failed. --long: the stages of `make test-long`. Without STAGE, all stages
run; without --long, all but lint.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import strain
import timings
from hangs import FOLDER_VARIABLE, Watchdog, family, kill_all, running
from timely import PATIENCE_VARIABLE

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "build" / "results"
RUNNING = RESULTS / "running"
TESTS_FAILED = 1
NOTHING_COLLECTED = 5
"""Exit statuses of pytest."""
CORES = os.cpu_count() or 1
# Many tests wait for faults to end and for processes to start, without using a CPU. A worker with
# two engines of two ranks each takes 4 GiB.
WORKERS = max(2, min(CORES + 1, psutil.virtual_memory().total >> 32, 8))
# A tenth of the weight of other processes: few delays in the guest, and some progress on a machine
# that is never idle.
NICE = 10
MOST_LATE = 3
"""More late tests than these are a defect or an unusable machine, and none is run again."""
LONGEST_RERUN_S = 900.0
LATE_TEXT = "late: "
"""Part of the message of a native expectation that judges a duration."""


@dataclass(frozen=True)
class Stage:
    """A stage: a make target, or tests chosen by pytest's arguments.

    folders: of the tests; none = all of pyproject.toml. budget_s: wall-clock limit in s, about
    twice the usual time; multiplied by the factor for waits. beside: a second choice of tests, run
    at low priority meanwhile.
    """

    name: str
    budget_s: float
    target: str = ""
    variant: str = ""
    pytest: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    beside: Stage | None = None


def _workers(count: int) -> tuple[str, ...]:
    return ("-n", str(count), "--dist", "worksteal")


ONE_WORKER = ("-n", "1")
"""A separate process for the tests: after its death the next process runs the other tests."""
QUICK = "not long and not alone and not guest and not computes"
COMPUTING = Stage("computing", 1500, pytest=(*_workers(CORES), "-m", "computes and not long"))
STAGES = (
    Stage("lint", 900, target="lint"),
    Stage("plain", 900, target="native-plain", variant="plain"),
    Stage(
        "unit",
        900,
        pytest=(*_workers(WORKERS), "-m", QUICK),
        folders=("tests/unit", "tests/kernels"),
    ),
    Stage("asan", 1200, target="native-asan", variant="asan"),
    Stage("tsan", 1200, target="native-tsan", variant="tsan"),
    Stage(
        "engines",
        2400,
        pytest=(*_workers(WORKERS), "-m", QUICK),
        folders=("tests/engines", "tests/e2e"),
    ),
    Stage("guest", 1200, pytest=(*ONE_WORKER, "-m", "guest and not long"), beside=COMPUTING),
    Stage("alone", 1200, pytest=(*ONE_WORKER, "-m", "alone and not long")),
)


def _long(name: str, *files: str, without: Sequence[str] = ()) -> Stage:
    """Long tests run one at a time, since many of them measure."""
    left_out = tuple(f"--ignore={each}" for each in without)
    return Stage(name, 3600, pytest=(*ONE_WORKER, "-m", "long", *left_out), folders=files)


SEARCHES = ("tests/unit/test_model.py", "tests/e2e/test_sim_campaign.py", "tests/e2e/test_fuzz.py")
SERVERS = tuple(f"tests/e2e/test_{each}.py" for each in ("bench_serve", "dashboard", "demo"))
HOUR = ("tests/e2e/test_hour.py",)
STALLS = tuple(f"tests/e2e/test_{each}.py" for each in ("baseline", "stall_distributions"))
LOADS = tuple(
    f"tests/e2e/test_{each}.py"
    for each in ("crowd", "fork", "growth", "huge", "random_collectives", "soak")
)
GUEST = ("tests/e2e/test_guest.py",)
SGLANG = ("tests/engines/sglang",)
LONG_STAGES = (
    Stage("lint", 3600, target="lint-all"),
    Stage("plain", 3600, target="native-plain-long", variant="plain"),
    Stage("asan", 3600, target="native-asan-long", variant="asan"),
    Stage("tsan", 3600, target="native-tsan-long", variant="tsan"),
    _long("unit", "tests/unit", "tests/kernels", without=SEARCHES),
    _long("searches", *SEARCHES),
    _long("engines", "tests/engines", without=SGLANG),
    _long("sglang", *SGLANG),
    _long("servers", *SERVERS),
    _long("hour", *HOUR),
    _long("stalls", *STALLS),
    _long("loads", *LOADS),
    _long("guest", *GUEST),
    _long(
        "faults",
        "tests/e2e",
        without=(*SEARCHES, *SERVERS, *HOUR, *STALLS, *LOADS, *GUEST),
    ),
)
"""Stages of `make test-long`, which run on their own, too: `make test-long PART=hour`."""


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
    """The end of a stage: failures as lines of text, late tests, passed and skipped tests."""

    stage: str
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)
    late: list[Late] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    passed: int = 0
    collected: bool = False


class Gate:
    """A run of the stages."""

    def __init__(self, arguments: Sequence[str], deadline: float, watchdog: Watchdog) -> None:
        self._arguments = tuple(arguments)
        self._deadline = deadline
        self._watchdog = watchdog
        self.patience = float(os.environ[PATIENCE_VARIABLE])

    def run(self, stage: Stage) -> Outcome:
        say(f"== {stage.name}")
        began = time.monotonic()
        outcome = Outcome(stage.name)
        left_s = self._deadline - began
        if left_s <= 0:
            outcome.failures.append(f"{stage.name}: not begun, the deadline of all stages is over")
            return outcome
        limit_s = min(stage.budget_s * self.patience, left_s)
        if stage.target:
            status = self._wait(["make", stage.target], limit_s, outcome)
            _add_native(stage, status, began, outcome)
        else:
            self._pytest(stage, limit_s, outcome)
        kill_all(_of_this_run())  # orphans of killed processes
        outcome.seconds = time.monotonic() - began
        timings.keep(stage.name, outcome.seconds)
        return outcome

    def run_again(self, late: Late) -> Outcome:
        """Runs a late test alone."""
        say(f"== once more, alone: {late.name}")
        began = time.monotonic()
        outcome = Outcome(late.name)
        limit_s = min(LONGEST_RERUN_S * self.patience, self._deadline - time.monotonic())
        if late.variant:
            folder = ROOT / "build" / f"native-{late.variant}"
            command = ["ctest", "--test-dir", str(folder), "--output-on-failure", "-j1"]
            command += ["--no-tests=error", "-R", f"^{late.name}$"]
            if self._wait(command, limit_s, outcome) != 0:
                outcome.failures.append(f"{late.variant}: {late.name}")
            else:
                outcome.passed += 1
        else:
            stage = Stage("once-more", limit_s, pytest=(*ONE_WORKER, late.name))
            _outcome_file(stage).unlink(missing_ok=True)
            command = [*self._command(stage, ()), "-m", ""]
            _add_pytest(stage, self._wait(command, limit_s, outcome), outcome)
            outcome.failures += [f"{each.name}: {each.message}" for each in outcome.late]
        if not outcome.passed and not outcome.failures:
            outcome.failures.append(f"{late.name}: did not run again")
        outcome.seconds = time.monotonic() - began
        return outcome

    def _pytest(self, stage: Stage, limit_s: float, outcome: Outcome) -> None:
        meanwhile = (
            self._at_low_priority(stage.beside, outcome)
            if stage.beside
            else contextlib.nullcontext()
        )
        with meanwhile:
            command = self._command(stage, self._arguments)
            if command:
                _add_pytest(stage, self._wait(command, limit_s, outcome), outcome)

    def _command(self, stage: Stage, arguments: Sequence[str]) -> list[str]:
        """Returns the command of a stage; [] = the arguments name files of other stages only."""
        own = [f"--outcome={_outcome_file(stage)}", *stage.pytest]
        named = [each for each in arguments if (ROOT / each.partition("::")[0]).exists()]
        if named and stage.folders:
            options = [each for each in arguments if each not in named]
            chosen = [each for each in named if each.startswith(stage.folders)]
            own += [*options, *chosen]
            return [sys.executable, "-m", "pytest", *own] if chosen else []
        return [sys.executable, "-m", "pytest", *own, *arguments, *stage.folders]

    @contextlib.contextmanager
    def _at_low_priority(self, stage: Stage, outcome: Outcome) -> Iterator[None]:
        """Runs other tests meanwhile, on CPUs that are idle otherwise; prints their output last."""
        output = RESULTS / f"{stage.name}.log"
        with output.open("wb") as file:
            process = subprocess.Popen(self._command(stage, self._arguments), cwd=ROOT, stdout=file)
            os.setpriority(os.PRIO_PROCESS, process.pid, NICE)
            try:
                yield
                limit_s = min(stage.budget_s * self.patience, self._deadline - time.monotonic())
                status = self._end(process, limit_s, stage.name, outcome)
            finally:
                kill_all(family(process.pid))
        say(f"== {stage.name}")
        sys.stdout.write(output.read_text(errors="replace"))
        sys.stdout.flush()
        _add_pytest(stage, status, outcome)

    def _wait(self, command: Sequence[str], limit_s: float, outcome: Outcome) -> int:
        process = subprocess.Popen(command, cwd=ROOT)
        try:
            return self._end(process, limit_s, outcome.stage, outcome)
        finally:
            kill_all(family(process.pid))

    def _end(
        self, process: subprocess.Popen[bytes], limit_s: float, name: str, outcome: Outcome
    ) -> int:
        """Returns the exit status; after `limit_s` keeps the stacks and kills all processes."""
        try:
            return process.wait(max(1.0, limit_s))
        except subprocess.TimeoutExpired:
            outcome.failures.append(f"{name}: still running after its {limit_s:.0f} s, killed")
        for test in running(self._watchdog.folder):
            self._watchdog.store(test)
            outcome.failures.append(f"{name}: was running {test.nodeid}")
        kill_all([*family(process.pid), *_of_this_run()])
        return process.wait()


def _of_this_run() -> list[psutil.Process]:
    """Returns the processes with the environment of this run, orphans included."""
    found = []
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if each.pid != os.getpid() and each.environ().get(FOLDER_VARIABLE) == str(RUNNING):
                found.append(each)
    return found


def _outcome_file(stage: Stage) -> Path:
    return RESULTS / f"{stage.name}.json"


def _add_pytest(stage: Stage, status: int, outcome: Outcome) -> None:
    """Adds the results of a run of pytest, written by tests/conftest.py."""
    file = _outcome_file(stage)
    if not file.exists():
        outcome.failures.append(f"{stage.name}: pytest ended with status {status} and no results")
        return
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    failures = [f"{each['nodeid']}: {each['message']}" for each in found["failed"]]
    late = [Late(**each) for each in found["late"]]
    outcome.failures += failures
    outcome.late += late
    outcome.skipped += Counter(found["skipped"])
    outcome.passed += found["passed"]
    outcome.collected = outcome.collected or status != NOTHING_COLLECTED
    explained = status == TESTS_FAILED and (failures or late)
    if status not in (0, NOTHING_COLLECTED) and not explained:
        outcome.failures.append(f"{stage.name}: pytest ended with status {status}")


def _add_native(stage: Stage, status: int, began: float, outcome: Outcome) -> None:
    """Adds the results of a make target; of native tests, the failed programs and cases."""
    outcome.collected = True
    failed_file = ROOT / f"build/native-{stage.variant}/Testing/Temporary/LastTestsFailed.log"
    if stage.variant:
        for report in sorted((RESULTS / stage.variant).glob("*.xml")):
            passed, skipped, _ = native_cases(report)
            outcome.passed += passed
            outcome.skipped += skipped
    if status == 0:
        return
    now = time.time()
    since = now - (time.monotonic() - began)
    if not stage.variant or not failed_file.exists() or failed_file.stat().st_mtime < since:
        outcome.failures.append(f"{stage.name}: make ended with status {status}")
        return
    timing = _timing_programs(stage.variant)
    for line in failed_file.read_text().splitlines():
        program = line.partition(":")[2]
        cases = native_cases(RESULTS / stage.variant / f"{program}.xml")[2]
        if program in timing and cases and all(LATE_TEXT in each for each in cases):
            outcome.late.append(Late(program, cases[0], since, now, stage.variant))
            continue
        names = cases or ["no report: it crashed, or exceeded its time"]
        outcome.failures += [f"{stage.name}: {program}: {each}" for each in names]


def _timing_programs(variant: str) -> set[str]:
    folder = ROOT / "build" / f"native-{variant}"
    done = subprocess.run(
        ["ctest", "--test-dir", str(folder), "-N", "-L", "^timing$"],
        capture_output=True,
        text=True,
        check=False,
    )
    return {line.split()[-1] for line in done.stdout.splitlines() if "Test #" in line}


def native_cases(report: Path) -> tuple[int, Counter[str], list[str]]:
    """Returns passed tests, skipped tests by reason, and failed tests of a GoogleTest report.

    A program that crashed leaves no report, or a part of one: no test counts then.
    """
    passed, skipped, failed = 0, Counter[str](), []
    try:
        cases = list(ElementTree.parse(report).iter("testcase"))
    except (FileNotFoundError, ElementTree.ParseError):
        cases = []
    for case in cases:
        messages = [each.get("message") or "" for each in case.iter("failure")]
        if case.get("result") == "skipped":
            note = case.find("skipped")
            text = (note.get("message") if note is not None else None) or "no reason given"
            skipped[text.strip().splitlines()[-1]] += 1
        elif messages:
            # Every failed expectation of a case, since one of them may be no late one.
            name = f"{case.get('classname')}.{case.get('name')}"
            failed += [f"{name}: {' '.join(each.split())[:300]}" for each in messages]
        elif case.get("status") == "run":
            passed += 1
    return passed, skipped, failed


def run_late_again(gate: Gate, late: Sequence[Late], monitor: strain.Monitor) -> Outcome:
    """Runs late tests once more, one at a time; prints them as UNSTABLE, and keeps them."""
    whole = Outcome("once more")
    rows = []
    for each in late:
        figures = monitor.figures(each.started, each.stopped)
        message = " ".join(each.message.split())[:300]
        rows.append({"test": each.name, "message": message, "machine": str(figures)})
    if len(late) > MOST_LATE:
        whole.failures += [f"late: {row['test']}: {row['message']}" for row in rows]
        whole.failures.append(f"{len(late)} late tests, more than {MOST_LATE}: none was run again")
    else:
        for row, each in zip(rows, late, strict=True):
            again = gate.run_again(each)
            row["again"] = "failed" if again.failures else "passed"
            whole.failures += [f"late, and failed again alone: {text}" for text in again.failures]
            whole.passed += again.passed
            whole.seconds += again.seconds
    say(f"UNSTABLE: {len(rows)}")
    for row in rows:
        say(f"  {row['test']} ({row.get('again', 'not run again')}): {row['message']}")
        say(f"    {row['machine']}")
    (RESULTS / "unstable.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return whole


GUEST_FILES = (
    *("csrc/connect", "csrc/device", "csrc/drivers", "csrc/link", "csrc/rails"),
    "tests/guest",
)
GUEST_PASSED = ROOT / "tests" / "guest" / "passed.txt"


def guest_digest() -> str:
    """Returns a digest of the files that the tests in the guest judge."""
    digest = hashlib.sha256()
    names = _git("ls-files", "--", *GUEST_FILES).splitlines()
    for name in sorted(names):
        if ROOT / name != GUEST_PASSED and (ROOT / name).exists():
            digest.update(name.encode() + b"\0" + (ROOT / name).read_bytes() + b"\0")
    return digest.hexdigest()


def without_passed_guest(stages: Sequence[Stage]) -> list[Stage]:
    """Leaves out the guest, but no test that computes, if the guest passed with these files."""
    if not any(each.name == "guest" for each in stages):
        return list(stages)
    passed = GUEST_PASSED.read_text().split() if GUEST_PASSED.exists() else []
    digest = guest_digest()
    if digest not in passed:
        say(f"guest: files {digest[:12]} are new to {GUEST_PASSED.name}")
        return list(stages)
    say(f"guest: passed with files {digest[:12]}, so it does not run")
    return [COMPUTING if each.name == "guest" else each for each in stages]


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def summary(outcomes: Sequence[Outcome], watchdog: Watchdog) -> None:
    """Prints seconds, counts and skips of the stages, and the list of failures."""
    say("stage          seconds  passed  skipped  failed")
    for each in outcomes:
        counts = f"{each.passed:7} {each.skipped.total():8} {len(each.failures):7}"
        say(f"{each.stage:14} {each.seconds:7.0f} {counts}")
    skipped = sum((each.skipped for each in outcomes), Counter[str]())
    for reason, count in skipped.most_common():
        say(f"skipped: {count}: {reason}")
    failures = [each for outcome in outcomes for each in outcome.failures]
    for failure in failures:
        say(f"FAILURE {' '.join(failure.split())[:600]}")
        file = watchdog.stacks_of(failure.partition(": ")[0])
        if file is not None:
            say(f"  stacks: {file.relative_to(ROOT)}")
            say("    " + "\n    ".join(file.read_text(errors="replace").splitlines()[:60]))
    for nodeid in watchdog.killed:
        say(f"killed after its time limit: {nodeid}")
    keep(outcomes, failures)
    passed = sum(each.passed for each in outcomes)
    say(f"{passed} passed, {len(failures)} failed, {skipped.total()} skipped")


def keep(outcomes: Sequence[Outcome], failures: Sequence[str]) -> None:
    """Keeps the closing list in `build/results/gate.json`, a row of bench/results/gate.jsonl."""
    row = {
        "ended": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _git("rev-parse", "HEAD"),
        "cores": CORES,
        "load": os.getloadavg()[2],
        "factor": float(os.environ[PATIENCE_VARIABLE]),
        "seconds": {each.stage: round(each.seconds) for each in outcomes},
        "passed": {each.stage: each.passed for each in outcomes},
        "failures": list(failures),
        "unstable": json.loads((RESULTS / "unstable.json").read_text(encoding="utf-8")),
    }
    (RESULTS / "gate.json").write_text(json.dumps(row) + "\n", encoding="utf-8")


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def main(given: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--keep-going", action="store_true")
    parser.add_argument("--deadline", type=float, default=7200.0)
    parser.add_argument("--long", action="store_true")
    parser.add_argument("stages", nargs="*", metavar="STAGE")
    end = given.index("--") if "--" in given else len(given)
    options = parser.parse_args(given[:end])
    known = LONG_STAGES if options.long else STAGES
    names = [each.name for each in known]
    unknown = set(options.stages) - set(names)
    if unknown:
        text = f"unknown stage {', '.join(sorted(unknown))}; there are {', '.join(names)}"
        parser.error(text)
    default = [name for name in names if options.long or name != "lint"]
    chosen = [each for each in known if each.name in (options.stages or default)]
    if not options.long and "guest" not in options.stages[:1]:
        chosen = without_passed_guest(chosen)
    deadline = time.monotonic() + options.deadline
    began = time.time()
    shutil.rmtree(RESULTS, ignore_errors=True)
    RESULTS.mkdir(parents=True)
    os.environ.setdefault(PATIENCE_VARIABLE, f"{strain.factor():.2f}")
    os.environ[FOLDER_VARIABLE] = str(RUNNING)
    say(f"factor for waits of tests: {os.environ[PATIENCE_VARIABLE]}")
    outcomes: list[Outcome] = []
    try:
        with strain.Monitor() as monitor, Watchdog(RUNNING, RESULTS / "stacks") as watchdog:
            arguments = given[end + 1 :]
            gate = Gate(arguments, deadline, watchdog)
            for stage in chosen:
                outcomes.append(gate.run(stage))
                if outcomes[-1].failures and not options.keep_going:
                    break
            late = [each for outcome in outcomes for each in outcome.late]
            outcomes.append(run_late_again(gate, late, monitor))
            # Arguments may choose tests of a single stage.
            empty = [each.stage for each in outcomes[:-1] if not each.collected]
            if len(empty) == len(chosen) or (empty and not arguments):
                outcomes[-1].failures.append(f"no test was chosen: {', '.join(empty)}")
            say("\n".join(timings.table(began)))
            summary(outcomes, watchdog)
    finally:
        # An interrupted run leaves nothing behind, such as the emulator of a guest.
        kill_all(_of_this_run())
    return 1 if any(each.failures for each in outcomes) else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main(sys.argv[1:]))
