"""Runs the Python tests in three parts; docs/testing.md describes the parts.

run.py [--native-results=FOLDER] [arguments of pytest]

The last part counts the reports of the native tests.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import psutil

NOTHING_COLLECTED = 5
CORES = os.cpu_count() or 1
# Many tests wait for faults to end and for processes to start, without using a CPU. A worker with
# two engines of two ranks each takes 4 GiB.
WORKERS = max(2, min(CORES + 2, psutil.virtual_memory().total >> 32, 8))
# A tenth of the weight of other processes: few delays in the guest, and some progress on a machine
# that is never idle.
NICE = 10


class Part(NamedTuple):
    """A run of pytest, and the run beside it."""

    name: str
    options: tuple[str, ...]
    beside: Part | None = None


def workers(count: int) -> tuple[str, ...]:
    return ("-n", str(count), "--dist", "worksteal")


COMPUTING = Part("Python tests that compute", (*workers(CORES), "-m", "computes and not long"))
PARTS = (
    Part(
        "Python tests, beside each other",
        (*workers(WORKERS), "-m", "not long and not alone and not guest and not computes"),
    ),
    Part("Python tests in the guest", ("-m", "guest and not long"), beside=COMPUTING),
    Part("Python tests, alone", ("-m", "alone and not long")),
)


def command(part: Part, arguments: Sequence[str]) -> list[str]:
    timings = f"--timings={part.name}"
    return [sys.executable, "-m", "pytest", timings, *part.options, *arguments]


@contextlib.contextmanager
def at_low_priority(part: Part, arguments: Sequence[str], statuses: list[int]) -> Iterator[None]:
    """Runs a part meanwhile, on CPUs that are idle otherwise; prints its output at the end."""
    with tempfile.TemporaryFile() as output:
        with subprocess.Popen(command(part, arguments), stdout=output) as process:
            try:
                os.setpriority(os.PRIO_PROCESS, process.pid, NICE)
                yield
            except BaseException:
                process.terminate()
                raise
        statuses.append(process.returncode)
        output.seek(0)
        say(part.name)
        sys.stdout.write(output.read().decode(errors="replace"))


def say(name: str) -> None:
    sys.stdout.write(f"== {name}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str]) -> int:
    native = [each for each in arguments if each.startswith("--native-results")]
    others = [each for each in arguments if each not in native]
    statuses: list[int] = []
    for part in PARTS:
        meanwhile = (
            at_low_priority(part.beside, others, statuses)
            if part.beside
            else contextlib.nullcontext()
        )
        own = [*others, *native] if part is PARTS[-1] else others
        with meanwhile:
            say(part.name)
            statuses.append(subprocess.run(command(part, own), check=False).returncode)
    failed = [status for status in statuses if status not in (0, NOTHING_COLLECTED)]
    if failed:
        return failed[0]
    return 0 if 0 in statuses else NOTHING_COLLECTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
