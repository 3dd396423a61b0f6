"""Runs the Python tests: most tests in parallel, then the measuring tests one at a time.

run.py [--native-results=FOLDER] [arguments of pytest]

The second run counts the reports of the native tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

NOTHING_COLLECTED = 5
# Many tests wait for faults to end and for processes to start, without using a CPU. A worker with
# two engines of two ranks each takes 4 GiB.
WORKERS = min((os.cpu_count() or 1) + 1, 8)


def main(arguments: Sequence[str]) -> int:
    pytest = [sys.executable, "-m", "pytest"]
    beside = ["-n", str(WORKERS), "--dist", "worksteal", "-m", "not long and not alone"]
    alone = ["-m", "alone and not long"]
    native = [each for each in arguments if each.startswith("--native-results")]
    others = [each for each in arguments if each not in native]
    parts = {"Python tests, beside each other": beside, "Python tests, alone": [*alone, *native]}
    statuses = []
    for part, choice in parts.items():
        sys.stdout.write(f"== {part}\n")
        sys.stdout.flush()
        command = [*pytest, f"--timings={part}", *choice, *others]
        statuses.append(subprocess.run(command, check=False).returncode)
    failed = [status for status in statuses if status not in (0, NOTHING_COLLECTED)]
    if failed:
        return failed[0]
    return NOTHING_COLLECTED if NOTHING_COLLECTED in statuses and 0 not in statuses else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
