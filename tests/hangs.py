"""Ends tests that exceed their time limit, and keeps the stacks of all their processes.

Each pytest process notes the running test in a file (see `note`). A thread of tests/gate.py reads
the files: at the limit of a test it stores the stacks of the processes of the test, and later it
kills a test that does not react to pytest's own time-out. A native program is a child of CTest. At
the limit, the thread stores the stacks of all its threads, and kills the program. CTest's own limit
is longer, because CTest stores no stacks. Other tests of the part run on.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

FOLDER_VARIABLE = "R2SERVE_TEST_RUNNING"
"""Environment variable with the folder for notes of running tests."""
REACTION_S = 15.0
"""Pytest's own time-out follows this many seconds after the limit, when the stacks are stored."""
DEATH_S = 60.0
"""A process that ignores pytest's time-out is killed this many seconds after the limit."""
LONGEST_DUMP_S = 20.0
LONGEST_S = 60.0
"""Limits for the stacks of a process, and of all processes of a test, in seconds."""
MOST_PROCESSES = 24
SET_PTRACER = 0x59616D61
ANY_PROCESS = ctypes.c_ulong(-1)
"""PR_SET_PTRACER and PR_SET_PTRACER_ANY of <linux/prctl.h>."""


@contextlib.contextmanager
def note(nodeid: str, limit_s: float) -> Iterator[None]:
    """Notes a running test for the watchdog; does nothing without FOLDER_VARIABLE."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        yield
        return
    # Where only ancestors may read a process (Yama), py-spy may read this one. Other kernels refuse
    # the call, and it is not needed there.
    ctypes.CDLL(None).prctl(SET_PTRACER, ANY_PROCESS, 0, 0, 0)
    file = Path(folder, f"{os.getpid()}.json")
    row = {"nodeid": nodeid, "pid": os.getpid(), "started": time.time(), "limit_s": limit_s}
    fresh = file.with_suffix(".new")
    fresh.write_text(json.dumps(row), encoding="utf-8")
    fresh.replace(file)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


@dataclass(frozen=True)
class Running:
    """A running test: process, start in s since 1970, and limit in s.

    grace_s: time in s from the limit to the kill.
    """

    nodeid: str
    pid: int
    started: float
    limit_s: float
    grace_s: float = DEATH_S


def running(folder: Path) -> list[Running]:
    """Returns the tests noted in a folder; notes of ended processes are removed."""
    found = []
    for file in sorted(folder.glob("*.json")):
        try:
            each = Running(**json.loads(file.read_text(encoding="utf-8")))
        except FileNotFoundError:  # the test has just ended
            continue
        if psutil.pid_exists(each.pid):
            found.append(each)
        else:
            file.unlink(missing_ok=True)
    return found


def native_programs(
    stage: str, limit_s: float, seen: dict[tuple[int, float], float]
) -> list[Running]:
    """Returns the programs that CTest runs below this process, as tests of a native stage.

    A program that hangs reacts to nothing, so the kill follows the stacks at once. seen: the times
    of the first calls that found a program, by process and start.
    """
    found = []
    for each in family(os.getpid()):
        with contextlib.suppress(psutil.Error):
            parent = each.parent()
            # CTest's child has the name of CTest until the program begins.
            if parent is None or parent.name() != "ctest" or each.name() == "ctest":
                continue
            name = f"{stage}: {native_name(each.cmdline())}"
            started = seen.setdefault((each.pid, each.create_time()), time.time())
            found.append(Running(name, each.pid, started, limit_s, grace_s=0.0))
    return found


def native_name(command: Sequence[str]) -> str:
    """Returns CTest's name of a program: the name of its report, else of its file."""
    for word in command:
        if word.startswith("--gtest_output=xml:"):
            return Path(word).stem
    return Path(command[0]).name if command else "a program without a name"


def family(pid: int) -> list[psutil.Process]:
    """Returns a process and all its descendants, parents first."""
    with contextlib.suppress(psutil.NoSuchProcess):
        first = psutil.Process(pid)
        return [first, *first.children(recursive=True)]
    return []


def kill_all(processes: list[psutil.Process]) -> None:
    """Sends SIGKILL, children first."""
    for each in reversed(processes):
        with contextlib.suppress(psutil.Error):
            each.kill()


def stacks(processes: list[psutil.Process]) -> str:
    """Returns the stacks of processes: py-spy for Python, gdb for others."""
    texts = []
    deadline = time.monotonic() + LONGEST_S
    for each in processes[:MOST_PROCESSES]:
        try:
            words = each.cmdline()
            title = f"process {each.pid}: {' '.join(words)[:300]} ({each.status()})"
        except psutil.Error:
            continue
        if time.monotonic() > deadline:
            texts.append(f"--- {title}")
            continue
        texts.append(f"--- {title}\n{_stack(each.pid)}")
    if len(processes) > MOST_PROCESSES:
        texts.append(f"--- {len(processes) - MOST_PROCESSES} more processes")
    return "\n".join(texts)


def _stack(pid: int) -> str:
    spy = Path(sys.executable).with_name("py-spy")
    commands = []
    with contextlib.suppress(OSError):
        if "python" in Path(os.readlink(f"/proc/{pid}/exe")).name and spy.exists():
            commands.append([str(spy), "dump", "--nonblocking", "--pid", str(pid)])
    if (gdb := shutil.which("gdb")) is not None:
        commands.append([gdb, "-p", str(pid), "-batch", "-nx", "-ex", "thread apply all bt 16"])
    for command in commands:
        with contextlib.suppress(subprocess.TimeoutExpired, OSError):
            done = subprocess.run(command, capture_output=True, check=False, timeout=LONGEST_DUMP_S)
            if done.returncode == 0:
                return done.stdout.decode(errors="replace")
    with contextlib.suppress(OSError):
        return f"waits in the kernel's {Path(f'/proc/{pid}/wchan').read_text()}"
    return "no stack"


def file_name(nodeid: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", nodeid)[-120:] + ".txt"


class Watchdog:
    """A thread that watches the tests noted in `folder`, and stores stacks in `kept`."""

    def __init__(self, folder: Path, kept: Path) -> None:
        self.folder = folder
        self.kept = kept
        self.killed: list[str] = []
        """The tests killed so far."""
        self._native: tuple[str, float] | None = None
        self._seen: dict[tuple[int, float], float] = {}
        self._stored: set[tuple[str, float]] = set()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Watchdog:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.kept.mkdir(parents=True, exist_ok=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(2 * LONGEST_S)

    @contextlib.contextmanager
    def native(self, stage: str, limit_s: float) -> Iterator[None]:
        """Watches the programs that CTest runs meanwhile, too; `limit_s`: of each, in s."""
        self._native = (stage, limit_s)
        try:
            yield
        finally:
            self._native = None

    def running(self) -> list[Running]:
        """Returns the tests noted in the folder, and the native programs."""
        native = self._native
        programs = native_programs(*native, self._seen) if native else []
        return [*running(self.folder), *programs]

    def stacks_of(self, nodeid: str) -> Path | None:
        file = self.kept / file_name(nodeid)
        return file if file.exists() else None

    def store(self, test: Running) -> None:
        """Stores the stacks of all processes of a test."""
        text = stacks(family(test.pid))
        title = f"{test.nodeid}: {time.time() - test.started:.0f} s, limit {test.limit_s:.0f} s"
        (self.kept / file_name(test.nodeid)).write_text(f"{title}\n{text}\n", encoding="utf-8")

    def _watch(self) -> None:
        while not self._end.wait(1.0):
            for test in self.running():
                key = (test.nodeid, test.started)
                if self._late_s(test) >= test.grace_s and key in self._stored:
                    if test in self.running():  # it may have ended since
                        self.killed.append(test.nodeid)
                        kill_all(family(test.pid))
                        (self.folder / f"{test.pid}.json").unlink(missing_ok=True)
                elif self._late_s(test) >= 0 and key not in self._stored:
                    self._stored.add(key)
                    self.store(test)

    @staticmethod
    def _late_s(test: Running) -> float:
        return time.time() - test.started - test.limit_s
