"""Memory that devices read and write by themselves."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

from ranks import Job

LATE_WRITE = Path(__file__).resolve().parents[3] / "build/native-plain/late_write_guest"


def test_a_late_write_lands_without_a_fence_and_does_not_with_one(
    show: Callable[[str], None],
) -> None:
    """The core alone, over two queue pairs (../native/late_write_guest.cc)."""
    done = subprocess.run([LATE_WRITE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
    for line in done.stdout.splitlines():
        if " OK " in line:
            show(f"late write: {line.split()[3]}")


def test_a_registered_tensor_is_sent_from_where_it_lies(job: Job) -> None:
    before = job.carried()
    job.ask("registered", elements=300_000, count=5)
    assert sum(job.carried().values()) - sum(before.values()) >= 5 * 300_000 * 4 / 2
