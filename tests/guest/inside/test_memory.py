"""The core alone over real queue pairs, and memory that devices use by themselves."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ranks import Job

NATIVE = Path(__file__).resolve().parents[3] / "build/native-plain"


def native(program: str, **environment: str) -> list[str]:
    """Runs GoogleTest tests; what they printed."""
    done = subprocess.run(
        [NATIVE / program],
        capture_output=True,
        text=True,
        timeout=400,
        env=os.environ | environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout.splitlines()


def test_a_late_write_lands_without_a_fence_and_does_not_with_one(
    show: Callable[[str], None],
) -> None:
    """Over two queue pairs (../native/late_write_guest.cc)."""
    for line in native("late_write_guest"):
        if " OK " in line:
            show(f"late write: {line.split()[3]}")


def test_a_queue_pair_is_in_error_at_each_step(show: Callable[[str], None]) -> None:
    """Of an all-reduce, or at so many of them (../native/sweep_guest.cc)."""
    parts = os.environ.get("R2SERVE_SWEEP_PARTS", "12")
    for line in native("sweep_guest", R2SERVE_SWEEP_PARTS=parts):
        if line.startswith("SWEEP"):
            show(line.replace("SWEEP", "sweep:"))


def test_a_registered_tensor_is_sent_and_received_where_it_lies(job: Job) -> None:
    before = job.carried()
    job.ask("registered", elements=2_000_000, count=3)
    assert sum(job.carried().values()) - sum(before.values()) >= 3 * 2_000_000 * 4 / 2
