"""The core alone over real queue pairs, and memory accessed by devices directly."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ranks import Job

NATIVE = Path(__file__).resolve().parents[3] / "build/native-plain"


def native(program: str, **environment: str) -> list[str]:
    """Runs a GoogleTest program, and returns its lines of output."""
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


def test_a_late_write_lands_only_without_a_fence(
    show: Callable[[str], None],
) -> None:
    """Runs ../native/late_write_guest.cc over two queue pairs."""
    for line in native("late_write_guest"):
        if " OK " in line:
            show(f"late write: {line.split()[3]}")


def test_all_reduce_survives_a_queue_pair_error_at_each_step(show: Callable[[str], None]) -> None:
    """Runs ../native/sweep_guest.cc: an all-reduce with an error at each step, or at a part of the
    steps.
    """
    parts = os.environ.get("R2SERVE_SWEEP_PARTS", "12")
    seed = os.environ.get("R2SERVE_GUEST_SEED", str(int(time.time())))
    printed = native("sweep_guest", R2SERVE_SWEEP_PARTS=parts, R2SERVE_SWEEP_SEED=seed)
    for line in printed:
        if line.startswith("SWEEP"):
            show(line.replace("SWEEP", f"sweep, seed {seed}:"))


def test_a_registered_tensor_is_sent_and_received_without_a_copy(job: Job) -> None:
    before = job.sent()
    job.ask("registered", elements=2_000_000, count=3)
    for is_now, was in zip(job.sent(), before, strict=True):
        assert (is_now - was)["verbs"] >= 3 * 2_000_000 * 4 / 2
