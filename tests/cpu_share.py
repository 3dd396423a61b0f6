"""Shortages of CPU for tests: a quota for a process, and processes that use up the CPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def cpu_quota(quota_ms: int, period_ms: int) -> Iterator[Callable[[int], None]]:
    """Yields a function that limits the CPU time of a process, in a group of its own."""
    one, two = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
    made: list[Path] = []

    def limit(process: int) -> None:
        first = one.is_dir()
        group = (one if first else two) / f"r2serve-test-{process}"
        try:
            group.mkdir()
            made.append(group)
            if first:
                (group / "cpu.cfs_period_us").write_text(str(period_ms * 1000))
                (group / "cpu.cfs_quota_us").write_text(str(quota_ms * 1000))
            else:
                (group / "cpu.max").write_text(f"{quota_ms * 1000} {period_ms * 1000}")
            (group / "cgroup.procs").write_text(str(process))
        except OSError as error:
            pytest.skip(f"no CPU quota on this machine: {error}")

    try:
        yield limit
    finally:
        for group in made:
            for process in (group / "cgroup.procs").read_text().split():
                (group.parent / "cgroup.procs").write_text(process)
            group.rmdir()


@contextmanager
def cpu_hogs(count: int) -> Iterator[None]:
    """Runs processes that compute all the time."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for hog in busy:
            hog.kill()
            hog.wait()
