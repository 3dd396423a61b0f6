"""Runs steps in order, each with a limit and a separate process group.

The log grows line by line, and each step writes a record at once. A killed run leaves all records
up to its end. The script uses only the standard library.
"""

from __future__ import annotations

import json
import os
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

OUT_OF_TIME = 124  # the exit status of timeout(1)
NOT_STARTED = 127  # the exit status of a shell for a missing command
TRACEBACK_S = 2.0  # time for the tracebacks of a hung process
LEAVE_S = 5.0  # time for the end of a killed process; a driver may delay the end


@dataclass(frozen=True)
class Step:
    """A command with a limit in seconds; `environment` is added to the variables of all steps.

    show: print the output to standard output after the command has ended.
    """

    name: str
    command: tuple[str, ...]
    limit_s: float
    environment: Mapping[str, str] = field(default_factory=dict)
    show: bool = False


@dataclass(frozen=True)
class Outcome:
    """Result of a step.

    rc: exit status; 124 = out of time, 127 = not started, 128 + n = ended by signal n, None =
    skipped. began_s: seconds since the start of the run.
    """

    step: str
    rc: int | None
    began_s: float
    seconds: float
    last_line: str

    @property
    def failed(self) -> bool:
        return self.rc not in (0, None)

    def line(self) -> str:
        rc = "-" if self.rc is None else str(self.rc)
        return f"{self.step:<12} rc={rc:<4} {self.seconds:6.1f} s  {self.last_line[:160]}"


class Stepper:
    """Writes `gpu.log` and `steps.jsonl` into a folder; starts with empty files."""

    def __init__(self, out: Path, folder: Path, environment: Mapping[str, str]) -> None:
        """Creates the log files in `out`; commands run in `folder`."""
        out.mkdir(parents=True, exist_ok=True)
        self.log = out / "gpu.log"
        self.outcomes: list[Outcome] = []
        self._records = out / "steps.jsonl"
        self._folder = folder
        self._environment = dict(environment)
        self._began = time.monotonic()
        # The kernel release identifies a sandbox like gVisor, which lacks some system calls.
        self.log.write_text(f"{os.uname().release}\n")
        self._records.write_text("")
        # The core dump of an aborted CUDA process may take gigabytes.
        _, hard = resource.getrlimit(resource.RLIMIT_CORE)
        resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, _stop)

    def say(self, text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def record(self, **what: Any) -> None:
        with self._records.open("a") as records:
            records.write(json.dumps(what) + "\n")

    def run(self, step: Step) -> Outcome:
        """Runs the command to its end or limit; a failing command raises no exception."""
        began = time.monotonic()
        with self.log.open("ab") as log:
            log.write(f"=== {step.name}: {shlex.join(step.command)}\n".encode())
            log.flush()
            start, rc = log.tell(), NOT_STARTED
            try:
                rc = self._ran(step, log)
            except SystemExit as stop:
                rc = int(stop.code or 0)
                raise
            finally:
                seconds = time.monotonic() - began
                lines = _lines(self.log, start)
                if step.show:
                    self.say("\n".join(lines))
                self._end(step.name, rc, began, seconds, lines[-1].strip() if lines else "")
        return self.outcomes[-1]

    def skip(self, name: str, why: str) -> None:
        self._without_command(name, None, f"skipped: {why}")

    def fail(self, name: str, why: str) -> None:
        self._without_command(name, 1, why)

    def _without_command(self, name: str, rc: int | None, why: str) -> None:
        with self.log.open("a") as log:
            log.write(f"=== {name}: {why}\n")
        self._end(name, rc, time.monotonic(), 0.0, why)

    def _end(self, name: str, rc: int | None, began: float, seconds: float, last: str) -> None:
        outcome = Outcome(name, rc, round(began - self._began, 3), round(seconds, 3), last)
        self.outcomes.append(outcome)
        self.record(**asdict(outcome))
        self.say(outcome.line())

    def _ran(self, step: Step, log: BinaryIO) -> int:
        # The child writes into the log file directly, not through a pipe. A late descendant keeps a
        # file open without harm, but would keep the reader of a pipe waiting.
        try:
            child = subprocess.Popen(
                step.command,
                cwd=self._folder,
                env=self._environment | dict(step.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            log.write(f"not started: {error}\n".encode())
            log.flush()
            return NOT_STARTED
        try:
            status = child.wait(step.limit_s)
        except subprocess.TimeoutExpired:
            status = None
            log.write(f"out of time after {step.limit_s:g} s\n".encode())
            log.flush()
            _abort(child)
        finally:
            _end_group(child)
        if status is None:
            return OUT_OF_TIME
        return status if status >= 0 else 128 - status


def _stop(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _abort(child: subprocess.Popen[bytes]) -> None:
    """Sends SIGABRT; Python's faulthandler then prints the tracebacks of all threads."""
    child.send_signal(signal.SIGABRT)
    try:
        child.wait(TRACEBACK_S)
    except subprocess.TimeoutExpired:
        return  # the group is killed next


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """Kills the process group, because late children would hold the GPU of the next step."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # the group is empty
    deadline = time.monotonic() + LEAVE_S
    while child.poll() is None or _members(child.pid):
        if time.monotonic() > deadline:
            sys.stderr.write(f"process group {child.pid} outlives SIGKILL: a driver holds it\n")
            return
        time.sleep(0.02)


def _members(group: int) -> list[int]:
    """Returns the live processes of a group, without zombies."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name_and_rest = stat.read_text(errors="replace")
        except OSError:
            continue  # the process has ended
        state, _, its_group = name_and_rest.rpartition(")")[2].split()[:3]
        if int(its_group) == group and state not in "ZX":
            found.append(int(stat.parent.name))
    return found


def _lines(log: Path, start: int) -> list[str]:
    """Returns the non-empty lines after `start`, from the log's last 64 KiB."""
    with log.open("rb") as file:
        file.seek(max(start, file.seek(0, os.SEEK_END) - 65536))
        text = file.read().decode(errors="replace")
    return [line for line in text.splitlines() if line.strip()]
