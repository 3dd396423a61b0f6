"""How starved the machine is: the factor for waits of tests, and figures beside a late test.

A process killed for want of memory says nothing about the product, so the monitor notes the times
of these kills, too.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
import time
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

REFERENCE_S = 0.12
"""CPU time of `work` on the slowest machine with factor 1."""
MOST = 8.0
ROUNDS = 450_000
TICK_S = 0.01
SHORTEST_PAUSE_S = 0.05
EVERY_S = 10.0
KILLS_EVERY_S = 1.0
CGROUPS = Path("/sys/fs/cgroup")


def work() -> float:
    """Returns the seconds of a fixed calculation."""
    began = time.monotonic()
    total = 0
    for each in range(ROUNDS):
        total += each * each % 7
    assert total > 0
    return time.monotonic() - began


def _repeat(count: int) -> float:
    return statistics.median(work() for _ in range(count))


def factor() -> float:
    """Measures the factor for waits: a fixed calculation on all CPUs at once, against REFERENCE_S.

    At least 1, at most MOST; a busy or slow machine gets a higher factor.
    """
    cores = os.cpu_count() or 1
    with get_context("spawn").Pool(cores) as pool:
        median_s = statistics.median(pool.map(_repeat, [9] * cores))
    return min(MOST, max(1.0, median_s / REFERENCE_S))


@dataclass(frozen=True)
class Figures:
    """The state of the machine during an interval."""

    load: float
    """Highest number of runnable processes, an average of a minute."""
    steal_percent: float
    """Share of CPU time taken by other machines."""
    pressure_percent: float | None
    """Highest share of time in which a process waited for a CPU (PSI, 60 s); None = not offered."""
    longest_pause_s: float
    """Longest delay of a thread that wakes up every 10 ms."""

    def __str__(self) -> str:
        pressure = "?" if self.pressure_percent is None else f"{self.pressure_percent:.0f} %"
        return (
            f"load {self.load:.1f}, steal {self.steal_percent:.1f} %, CPU pressure {pressure}, "
            f"longest pause {self.longest_pause_s * 1000:.0f} ms"
        )


class Sample(NamedTuple):
    """State of the machine; stolen, ticks: of all CPUs since boot (`/proc/stat`)."""

    at: float
    load: float
    pressure: float | None
    stolen: int
    ticks: int


class Monitor:
    """A thread that records its own delays, as a sign of a starved machine."""

    def __init__(self) -> None:
        self._pauses: list[tuple[float, float]] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._samples: list[Sample] = []
        self._kills = memory_kills()
        self._kills_at = time.time()
        self._killed: list[tuple[float, float, int]] = []
        self._counting = threading.Lock()

    def __enter__(self) -> Monitor:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def figures(self, since: float, until: float) -> Figures:
        """Returns figures of an interval; `since`, `until`: s since 1970."""
        own = [s for at, s in self._pauses.copy() if since <= at <= until + s]
        samples = [each for each in self._samples.copy() if since - EVERY_S <= each.at <= until]
        samples = samples or [_sample()]
        steal = samples[-1].stolen - samples[0].stolen
        total = samples[-1].ticks - samples[0].ticks
        pressures = [each.pressure for each in samples if each.pressure is not None]
        return Figures(
            load=max(each.load for each in samples),
            steal_percent=100 * steal / max(1, total),
            pressure_percent=max(pressures, default=None),
            longest_pause_s=max(own, default=0.0),
        )

    def kills(self, since: float, until: float) -> int:
        """Returns the out-of-memory kills of an interval; `since`, `until`: s since 1970."""
        self._count_kills()
        return sum(n for begin, end, n in self._killed.copy() if begin <= until and since <= end)

    def _count_kills(self) -> None:
        with self._counting:
            now, kills = time.time(), memory_kills()
            if kills > self._kills:
                self._killed.append((self._kills_at, now, kills - self._kills))
            self._kills, self._kills_at = kills, now

    def _watch(self) -> None:
        last = time.monotonic()
        sampled = counted = 0.0
        while not self._end.wait(TICK_S):
            now = time.monotonic()
            if now - last - TICK_S > SHORTEST_PAUSE_S:
                self._pauses.append((time.time(), now - last - TICK_S))
            last = now
            if now - sampled >= EVERY_S:
                sampled = now
                self._samples.append(_sample())
            if now - counted >= KILLS_EVERY_S:
                counted = now
                self._count_kills()


def memory_kills(root: Path = CGROUPS, of_machine: Path = Path("/proc/vmstat")) -> int:
    """Returns the number of processes killed for want of memory so far.

    Counted are the kills in the own control group and below; without such a group, the kills of the
    whole machine.
    """
    for file in _memory_files(root, Path("/proc/self/cgroup")):
        with contextlib.suppress(OSError, ValueError):
            return _value(file, "oom_kill")
    with contextlib.suppress(OSError, ValueError):
        return _value(of_machine, "oom_kill")
    return 0


def _memory_files(root: Path, groups: Path) -> list[Path]:
    """Returns the files that may have the counter, of the own group and of a container's group."""
    found = []
    with contextlib.suppress(OSError):
        for line in groups.read_text().splitlines():
            number, controllers, group = line.split(":", 2)
            if number == "0" and not controllers:
                found.append(root / group.lstrip("/") / "memory.events")
    return [*found, root / "memory.events"]


def _value(file: Path, name: str) -> int:
    """Returns a value of a file with a name and a number in each line."""
    for line in file.read_text().splitlines():
        words = line.split()
        if len(words) == 2 and words[0] == name:
            return int(words[1])
    raise ValueError(f"{file} has no value {name}")


def _sample() -> Sample:
    values = [int(each) for each in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return Sample(time.time(), os.getloadavg()[0], _pressure(), values[7], sum(values))


def _pressure() -> float | None:
    try:
        line = Path("/proc/pressure/cpu").read_text().splitlines()[0]
    except OSError:
        return None
    return float(line.split("avg60=")[1].split()[0])
