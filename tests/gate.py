"""Runs the stages of `make test`, and lists all failures at the end; docs/testing.md has the rules.

gate.py [--keep-going] [--deadline SECONDS] [--record FILE] [--long | --quick] [STAGE...]
        [-- arguments of pytest]

--keep-going: runs the other stages after a failed stage. --deadline: limit for all stages, times
the factor for waits; stages not begun by then count as failed. --record: appends the closing list
to a file, as a line of JSON; the environment variable GATE_RECORD does the same (1 =
bench/results/gate.jsonl). --long, --quick: the stages of `make test-long`, `make quick`. Without
STAGE, all stages run; without --long and --quick, all but lint. Exit status: 0 = passed, 1 =
failed, 3 = undetermined, because the system killed a process for want of memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import beside
import gate_stages
import outcomes
import psutil
import strain
import timings
from gate_stages import ONE_WORKER, ROOT, Stage
from hangs import FOLDER_VARIABLE, Watchdog, family, kill_all
from outcomes import Late, Outcome, say
from timely import PATIENCE_VARIABLE

# A tenth of the weight of other processes: few delays in the guest, and some progress on a machine
# that is never idle.
NICE = 10
MOST_LATE = 3
"""More late tests than these are a defect or an unusable machine, and none is run again."""
LONGEST_RERUN_S = 900.0
RECORD_VARIABLE = "GATE_RECORD"
RECORDS = ROOT / "bench" / "results" / "gate.jsonl"
PARTS = "parts.jsonl"
"""The closing lists of all runs of `make test-long`: its parts run apart."""


class Gate:
    """A run of stages in the folder `root`.

    deadline_s: limit for all stages in s from now on, multiplied by the factor for waits.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        deadline_s: float,
        watchdog: Watchdog,
        monitor: strain.Monitor,
        root: Path,
    ) -> None:
        self.patience = float(os.environ[PATIENCE_VARIABLE])
        self._arguments = tuple(arguments)
        self._deadline = time.monotonic() + deadline_s * self.patience
        self._watchdog = watchdog
        self._monitor = monitor
        self._root = root
        self._results = results_of(root)

    def left_s(self) -> float:
        """Returns the time left for all stages, in s."""
        return self._deadline - time.monotonic()

    def run(self, stage: Stage) -> Outcome:
        say(f"== {stage.name}")
        began = time.monotonic()
        outcome = Outcome(stage.name, self._monitor.kills)
        left_s = self.left_s()
        if left_s <= 0:
            outcome.failures.append(f"{stage.name}: not begun, the deadline of all stages is over")
            return outcome
        limit_s = min(stage.budget_s * self.patience, left_s)
        if stage.target:
            with self._watchdog.native(stage.name, stage.hang_s * self.patience):
                status = self._wait(["make", stage.target], limit_s, outcome)
            if stage.variant:
                build, results = self._build(stage.variant), self._results / stage.variant
                outcomes.add_native(build, results, status, outcome, hung=self._watchdog.killed)
            else:
                outcomes.add_target(status, outcome)
        else:
            self._pytest(stage, limit_s, outcome)
        outcomes.add_unexpected_skips(outcome)
        kill_all(of_this_run(self._root))  # orphans of killed processes
        outcome.seconds = time.monotonic() - began
        timings.keep(stage.name, outcome.seconds)
        return outcome

    def run_again(self, late: Late) -> Outcome:
        """Runs a late test alone."""
        say(f"== once more, alone: {late.name}")
        began = time.monotonic()
        outcome = Outcome(late.name, self._monitor.kills)
        limit_s = min(LONGEST_RERUN_S * self.patience, self.left_s())
        if late.variant:
            command = ["ctest", "--test-dir", str(self._build(late.variant))]
            command += ["--output-on-failure", "-j1", "--no-tests=error", "-R", f"^{late.name}$"]
            with self._watchdog.native(late.variant, gate_stages.HANG_S * self.patience):
                status = self._wait(command, limit_s, outcome)
            if status != 0:
                outcome.failures.append(f"{late.variant}: {late.name}")
            else:
                outcome.passed += 1
        else:
            stage = Stage("once-more", limit_s, pytest=(*ONE_WORKER, late.name))
            self._file(stage).unlink(missing_ok=True)
            command = [*self._command(stage, ()), "-m", ""]
            outcomes.add_pytest(self._file(stage), self._wait(command, limit_s, outcome), outcome)
            outcome.failures += [f"{each.name}: {each.message}" for each in outcome.late]
        if not outcome.passed and not outcome.failures and not outcome.undetermined:
            outcome.failures.append(f"{late.name}: did not run again")
        outcome.seconds = time.monotonic() - began
        return outcome

    def run_late_again(self, late: Sequence[Late]) -> tuple[Outcome, list[dict[str, str]]]:
        """Runs late tests once more, one at a time; returns the rows of UNSTABLE, too."""
        whole = Outcome("once more")
        rows = []
        for each in late:
            figures = self._monitor.figures(each.started, each.stopped)
            message = " ".join(each.message.split())[:300]
            rows.append({"test": each.name, "message": message, "machine": str(figures)})
        if len(late) > MOST_LATE:
            whole.failures += [f"late: {row['test']}: {row['message']}" for row in rows]
            text = f"{len(late)} late tests, more than {MOST_LATE}: none was run again"
            whole.failures.append(text)
            return whole, rows
        for row, each in zip(rows, late, strict=True):
            again = self.run_again(each)
            row["again"] = "failed" if again.failures else "passed"
            if again.undetermined:
                row["again"] = "undetermined"
            whole.failures += [f"late, and failed again alone: {text}" for text in again.failures]
            whole.undetermined += again.undetermined
            whole.passed += again.passed
            whole.seconds += again.seconds
        return whole, rows

    def _pytest(self, stage: Stage, limit_s: float, outcome: Outcome) -> None:
        meanwhile = (
            self._at_low_priority(stage.beside, outcome)
            if stage.beside
            else contextlib.nullcontext()
        )
        with meanwhile:
            command = self._command(stage, self._arguments)
            if command:
                status = self._wait(command, limit_s, outcome)
                outcomes.add_pytest(self._file(stage), status, outcome)

    def _build(self, variant: str) -> Path:
        return self._root / "build" / f"native-{variant}"

    def _file(self, stage: Stage) -> Path:
        return self._results / f"{stage.name}.json"

    def _command(self, stage: Stage, arguments: Sequence[str]) -> list[str]:
        """Returns the command of a stage; [] = the arguments name files of other stages only."""
        own = [f"--outcome={self._file(stage)}", *stage.pytest]
        named = [each for each in arguments if (self._root / each.partition("::")[0]).exists()]
        if named and stage.folders:
            options = [each for each in arguments if each not in named]
            chosen = [each for each in named if each.startswith(stage.folders)]
            above = tuple(f"{each.rstrip('/')}/" for each in named)
            chosen += [each for each in stage.folders if each.startswith(above)]
            own += [*options, *chosen]
            return [sys.executable, "-m", "pytest", *own] if chosen else []
        return [sys.executable, "-m", "pytest", *own, *arguments, *stage.folders]

    @contextlib.contextmanager
    def _at_low_priority(self, stage: Stage, outcome: Outcome) -> Iterator[None]:
        """Runs other tests meanwhile, on CPUs that are idle otherwise; prints their output last."""
        output = self._results / f"{stage.name}.log"
        with output.open("wb") as file:
            command = self._command(stage, self._arguments)
            process = beside.start(command, NICE, cwd=self._root, stdout=file)
            try:
                yield
                limit_s = min(stage.budget_s * self.patience, self.left_s())
                status = self._end(process, limit_s, stage.name, outcome)
            finally:
                kill_all(family(process.pid))
        say(f"== {stage.name}")
        sys.stdout.write(output.read_text(errors="replace"))
        sys.stdout.flush()
        outcomes.add_pytest(self._file(stage), status, outcome)

    def _wait(self, command: Sequence[str], limit_s: float, outcome: Outcome) -> int:
        process = subprocess.Popen(command, cwd=self._root)
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
        for test in self._watchdog.running():
            self._watchdog.store(test)
            outcome.failures.append(f"{name}: was running {test.nodeid}")
        kill_all([*family(process.pid), *of_this_run(self._root)])
        return process.wait()


def results_of(root: Path) -> Path:
    return root / "build" / "results"


def of_this_run(root: Path) -> list[psutil.Process]:
    """Returns the processes with the environment of this run, orphans included."""
    folder = str(results_of(root) / "running")
    found = []
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if each.pid != os.getpid() and each.environ().get(FOLDER_VARIABLE) == folder:
                found.append(each)
    return found


def options_of(given: Sequence[str], known: Sequence[Stage] | None) -> argparse.Namespace:
    """Parses the arguments before `--`; `chosen`: the stages."""
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--keep-going", action="store_true")
    parser.add_argument("--deadline", type=float, default=7200.0)
    parser.add_argument("--record", type=Path)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--long", action="store_true")
    kind.add_argument("--quick", action="store_true")
    parser.add_argument("stages", nargs="*", metavar="STAGE")
    options = parser.parse_args(given)
    all_of_them: Sequence[Stage] = gate_stages.LONG_STAGES if options.long else gate_stages.STAGES
    all_of_them = known or (gate_stages.QUICK_STAGES if options.quick else all_of_them)
    names = [each.name for each in all_of_them]
    unknown = set(options.stages) - set(names)
    if unknown:
        text = f"unknown stage {', '.join(sorted(unknown))}; there are {', '.join(names)}"
        parser.error(text)
    default = [name for name in names if options.long or options.quick or name != "lint"]
    wanted = options.stages or default
    options.chosen = [each for each in all_of_them if each.name in wanted]
    recorded = os.environ.get(RECORD_VARIABLE, "")
    if options.record is None and recorded not in ("", "0"):
        options.record = RECORDS if recorded == "1" else Path(recorded)
    if options.record is not None:
        try:  # before an hour of stages, not after it
            options.record.parent.mkdir(parents=True, exist_ok=True)
            options.record.open("a").close()
        except OSError as error:
            text = f"{error.strerror}; must be a file that can be written"
            parser.error(f"--record ({RECORD_VARIABLE}) is {options.record}: {text}")
    return options


def main(given: Sequence[str], root: Path = ROOT, known: Sequence[Stage] | None = None) -> int:
    """Runs the gate. known: the stages to choose from; None = those of this project."""
    end = given.index("--") if "--" in given else len(given)
    arguments = given[end + 1 :]
    options = options_of(given[:end], known)
    chosen = options.chosen
    if not options.long and "guest" not in options.stages[:1]:
        chosen = gate_stages.without_passed_guest(chosen, say)
    began = time.time()
    results = results_of(root)
    renew(results)
    os.environ.setdefault(PATIENCE_VARIABLE, f"{strain.factor():.2f}")
    os.environ[FOLDER_VARIABLE] = str(results / "running")
    say(f"factor for waits of tests: {os.environ[PATIENCE_VARIABLE]}")
    ended: list[Outcome] = []
    try:
        with (
            strain.Monitor() as monitor,
            Watchdog(results / "running", results / "stacks") as watchdog,
        ):
            gate = Gate(arguments, options.deadline, watchdog, monitor, root)
            for number, stage in enumerate(chosen):
                later = gate_stages.compiled_beside(stage, chosen[number + 1 :])
                with beside.compiled_ahead(root, later):
                    ended.append(gate.run(stage))
                if outcomes.status_of(ended[-1:]) and not options.keep_going:
                    break
            once_more, unstable = gate.run_late_again([each for one in ended for each in one.late])
            # Arguments may choose tests of a single stage.
            empty = [each.stage for each in ended if not each.collected]
            if len(empty) == len(chosen) or (empty and not arguments):
                once_more.failures.append(f"no test was chosen: {', '.join(empty)}")
            ended.append(once_more)
            outcomes.say_unstable(unstable, results / "unstable.json")
            say("\n".join(timings.table(began)))
            outcomes.summary(ended, watchdog)
            row = outcomes.row_of(
                ended,
                unstable,
                commit=gate_stages.git("rev-parse", "HEAD"),
                factor=gate.patience,
                figures=monitor.figures(began, time.time()),
            )
            records = (options.record, results / PARTS if options.long else None)
            keep(row, results / "gate.json", *filter(None, records))
    finally:
        # An interrupted run leaves nothing behind, such as the emulator of a guest.
        kill_all(of_this_run(root))
    return outcomes.status_of(ended)


def renew(results: Path) -> None:
    """Makes the folder, and removes the results in it, except for the closing lists of parts."""
    parts = results / PARTS
    lines = parts.read_bytes() if parts.exists() else b""
    shutil.rmtree(results, ignore_errors=True)
    results.mkdir(parents=True)
    if lines:
        parts.write_bytes(lines)


def keep(row: dict[str, object], file: Path, *records: Path) -> None:
    """Writes the closing list to `file`, and appends it to each of the records."""
    line = json.dumps(row) + "\n"
    file.write_text(line, encoding="utf-8")
    for record in records:
        record.parent.mkdir(parents=True, exist_ok=True)  # main() may have removed it
        with record.open("a", encoding="utf-8") as lines:
            lines.write(line)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main(sys.argv[1:]))
