"""RDMA rails on real queue pairs: runs the tests in tests/guest/inside in a virtual machine.

``make test-guest`` runs the same tests and prints the progress.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
GUEST = ROOT / "tests" / "guest"
NATIVE = ROOT / "build" / "native-plain" / "sweep_guest"
MEMORY_BYTES = 7 << 30
LIMIT_S = 3600  # time limit for hung tests; an idle machine takes 9 minutes for all tests


@pytest.fixture(scope="module")
def _can_boot() -> None:
    tools = subprocess.run(
        [ROOT / "deploy/setup/system.sh", "guest"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHON": sys.executable},
        check=False,
    )
    if tools.returncode != 0:
        pytest.skip(f"no guest: {tools.stderr.strip()}")
    if psutil.virtual_memory().available < MEMORY_BYTES:
        pytest.skip("no guest: needs 7 GiB of free memory")
    if not NATIVE.exists():
        pytest.skip(f"no guest: {NATIVE} is not built (make test-native)")
    if platform.machine() != "x86_64":
        pytest.skip("no guest: needs an x86-64 machine")
    kernel = subprocess.run(
        [sys.executable, GUEST / "guest.py", "--fetch"], capture_output=True, text=True, check=False
    )
    if kernel.returncode != 0:
        pytest.skip(f"no guest: {kernel.stderr.strip()}")


NEVER_RAN = 125
"""Exit status of guest.py if the guest did not finish the command."""
PART: dict[str, str] = {}
WHOLE = {"R2SERVE_SWEEP_PARTS": "1000000", "R2SERVE_GUEST_CALLS": "6000"}
MEASURES = GUEST / "inside" / "test_numbers.py"
"""Figures for docs/rdma.md, with no verdict on a speed: the part leaves them out."""


def run_in_guest(sizes: dict[str, str]) -> subprocess.CompletedProcess[str]:
    arguments = ["-q"]
    if sizes is PART:
        arguments.append(f"--ignore={MEASURES}")
    return subprocess.run(
        [sys.executable, GUEST / "check.py", "--timeout", str(LIMIT_S), "--", *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S + 120,
        env=os.environ | sizes,
        check=False,
    )


@pytest.mark.guest
@pytest.mark.timeout(2 * LIMIT_S + 360)
@pytest.mark.usefixtures("_can_boot")
@pytest.mark.parametrize(
    "sizes",
    [pytest.param(PART, id="part"), pytest.param(WHOLE, id="whole", marks=pytest.mark.long)],
)
def test_rails_over_rdma_in_the_guest(sizes: dict[str, str], show: Callable[[str], None]) -> None:
    began = time.monotonic()
    done = run_in_guest(sizes)
    if done.returncode == NEVER_RAN and "Kernel panic" in done.stderr:
        # Emulated processors that run in parallel sometimes crash while the kernel patches code.
        show("guest: the kernel crashed; second attempt")
        began = time.monotonic()
        done = run_in_guest(sizes)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    report = done.stdout.partition(" measured ")[2]
    for line in report.splitlines()[1:]:
        show(f"guest: {line}")
    show(f"guest: {time.monotonic() - began:.0f} s including the boot (target: 480 s)")
    assert re.search(r"^\d+ passed", done.stdout, re.MULTILINE)
    assert "skipped" not in done.stdout.splitlines()[-1]
