"""CPUs of background threads: the CPUs that the process had at its start.

A new thread inherits the CPUs of its creator. An engine may pin the thread that computes to a CPU,
and background threads on the same CPU would wait for the computation. ``import r2serve`` loads
this module, so the set is recorded early. An OpenMP runtime pins the first thread even earlier,
when torch loads the runtime; then the set comes from the parent process.
"""

from __future__ import annotations

import contextlib
import os
import threading

VARIABLE = "R2SERVE_FIRST_CPUS"
"""CPUs of the first process of an engine, for its children."""
PINNING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Variables with which an OpenMP runtime pins the thread that loads the runtime."""
MOST = 8192
"""Limit of the number of a CPU."""

_first = os.sched_getaffinity(0)


def _record() -> None:
    global _first
    _first = os.sched_getaffinity(0)


os.register_at_fork(after_in_child=_record)


def at_start() -> set[int]:
    """Returns the CPUs of this process at its start."""
    import multiprocessing  # not at the import of r2serve, which is fast

    if any(name in os.environ for name in PINNING) and multiprocessing.parent_process() is not None:
        return parsed(os.environ.get(VARIABLE, "")) or set(_first)
    return set(_first)


def hand_down() -> None:
    """Tells the CPUs to the children of this process; a child hands on what it was told."""
    os.environ[VARIABLE] = shown(at_start())


def permitted() -> set[int]:
    """Returns the CPUs to which a thread of this process may move, which a cpuset limits."""
    found: list[set[int]] = []

    def look() -> None:
        with contextlib.suppress(OSError):  # a filter of system calls
            os.sched_setaffinity(0, range(MOST))  # this thread; the kernel keeps permitted CPUs
            found.append(os.sched_getaffinity(0))

    looking = threading.Thread(target=look, name="r2serve-cpus")
    looking.start()
    looking.join()
    return found[0] if found else set(_first)


def parsed(text: str) -> set[int] | None:
    """Returns the CPUs of a list as in ``0-3,8``; None: the text is no such list."""
    cpus: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        ends = [first, last if dash else first]
        if not all(end.isascii() and end.isdecimal() and len(end) <= 4 for end in ends):
            return None
        low, high = map(int, ends)
        if not low <= high < MOST:
            return None
        cpus.update(range(low, high + 1))
    return cpus


def shown(cpus: set[int]) -> str:
    """Returns the list of the CPUs, as :func:`parsed` takes it."""
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and ranges[-1][1] == cpu - 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)
