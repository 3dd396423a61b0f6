"""Compares the latency of healthy collectives between two builds: `make compare BASE=<commit>`.

compare.py BASE [--minutes 20] [--json FILE]

Each start runs three jobs of two ranks at the same time: the base, this tree, and the base again.
The jobs take turns of a few milliseconds, so all jobs meet the same drift of the machine. Rank i of
every job is pinned to the same CPU. A start gives two ratios for each size, each a median over
turns: this tree to the base, and the base to itself. The 95 % interval of the median ratio comes
from a bootstrap over starts. Starts are added until every interval is within ±2 % of its median.

Exit status: 0 every median ratio is at most 1.03; 1 a ratio is above; 2 not decided in time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import socket
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build/compare"
WORKER = Path(__file__).with_name("worker.py")
LIMIT = 1.03
HALF_WIDTH = 0.02
LEAST_STARTS = 5
RESAMPLES = 2000
ANSWER_LIMIT_S = 60.0
FLAGS = "-O2 -g1 -DNDEBUG"

CALLS = {1 << 10: 40, 4 << 10: 30, 16 << 10: 30, 256 << 10: 12, 4 << 20: 3}
"""Calls of a turn, by size in bytes. A cycle has 100 calls up to 16 KiB, so a start stays short."""

CYCLES = 40
"""Turns of each job and size in a start."""


@dataclass(frozen=True)
class Cycle:
    """Median times in us of three neighbouring turns, a turn of each job."""

    base: float
    new: float
    again: float

    @property
    def ratio(self) -> float:
        """This tree / base. The base is the mean of both jobs."""
        return self.new / ((self.base + self.again) / 2)

    @property
    def noise(self) -> float:
        return self.again / self.base


Start = Mapping[int, Sequence[Cycle]]
"""Cycles by size."""


@dataclass(frozen=True)
class Estimate:
    """A median ratio and its 95 % interval."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, ratios: Sequence[float], seed: int = 0) -> Estimate:
        source = random.Random(seed)
        medians = sorted(
            statistics.median(source.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES)
        )
        tail = RESAMPLES // 40
        return cls(statistics.median(ratios), medians[tail], medians[-1 - tail])

    @property
    def narrow(self) -> bool:
        return max(self.high - self.median, self.median - self.low) <= HALF_WIDTH * self.median

    def text(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def status_of(estimates: Sequence[Estimate]) -> int:
    """Returns the exit status for the estimates so far; 2: more rounds are needed."""
    if not all(each.narrow for each in estimates):
        return 2
    return 1 if any(each.median > LIMIT for each in estimates) else 0


def judge(starts: Sequence[Start]) -> tuple[int, dict[int, tuple[Estimate, Estimate]]]:
    """Returns the status, and by size the estimates of this tree and of the base to itself."""
    by_size = {}
    for size in starts[0]:
        cycles = [start[size] for start in starts]
        ratios = [statistics.median(each.ratio for each in of_start) for of_start in cycles]
        noises = [statistics.median(each.noise for each in of_start) for of_start in cycles]
        by_size[size] = Estimate.of(ratios), Estimate.of(noises)
    if len(starts) < LEAST_STARTS:
        return 2, by_size
    return status_of([new for new, _ in by_size.values()]), by_size


def install(source: Path, name: str) -> Path:
    """Installs the source tree into a folder of its own, and returns the folder."""
    site = FOLDER / name / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
    command += ["--no-build-isolation", "-C", f"build-dir={FOLDER / name / 'build'}"]
    command += ["-C", f"cmake.define.CMAKE_CXX_FLAGS_RELWITHDEBINFO={FLAGS}"]
    subprocess.run([*command, "--target", str(site), str(source)], check=True)
    return site


def base_tree(commit: str) -> Path:
    """Checks the commit out below `build/compare`, once."""
    full = _git("rev-parse", "--verify", f"{commit}^{{commit}}")
    tree = FOLDER / full[:12] / "tree"
    if not tree.exists():
        _git("worktree", "prune")
        _git("worktree", "add", "--detach", str(tree), full)
    return tree


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout.strip()


class Job:
    """Both ranks of a build, each a process."""

    def __init__(self, site: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environment = {name: value for name, value in os.environ.items() if "R2CCL_" not in name}
        environment |= {
            "PYTHONPATH": f"{site}:{sysconfig.get_path('purelib')}",
            "PYTHONSAFEPATH": "1",
            "OMP_NUM_THREADS": "1",
            "R2CCL_NODE": "per-rank",
            "R2CCL_RAILS": "127.0.0.1,127.0.0.2",
        }
        self._site = site
        self._ranks = [
            subprocess.Popen(
                # -S: no .pth file may put the installed r2serve before the one of the site.
                [sys.executable, "-S", str(WORKER), str(site), str(rank), str(port)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for rank in (0, 1)
        ]

    def turn(self, size: int, calls: int) -> float:
        """Returns the median time of rank 0, in us."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{size} {calls}\n".encode())
            rank.stdin.flush()
        median, _ = map(self._answer, self._ranks)
        return float(median)

    def _answer(self, rank: subprocess.Popen[bytes]) -> bytes:
        assert rank.stdout is not None
        ready, _, _ = select.select([rank.stdout], [], [], ANSWER_LIMIT_S)
        line = rank.stdout.readline() if ready else b""
        if not line:
            raise SystemExit(f"{self._site}: a rank has ended or does not answer")
        return line

    def close(self) -> None:
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.close()
        try:
            for rank in self._ranks:
                rank.wait(ANSWER_LIMIT_S)
        finally:
            for rank in self._ranks:
                rank.kill()


def start(base: Path, new: Path, source: random.Random) -> Start:
    """Starts three jobs and runs their turns, in random order in each cycle."""
    with ExitStack() as stack:
        jobs = []
        for site in (base, new, base):
            jobs.append(Job(site))
            stack.callback(jobs[-1].close)
        cycles: dict[int, list[Cycle]] = {size: [] for size in CALLS}
        for job in jobs:
            for size, calls in CALLS.items():
                job.turn(size, calls)
        for _ in range(CYCLES):
            for size, calls in CALLS.items():
                medians = [0.0, 0.0, 0.0]
                for index in source.sample(range(3), 3):
                    medians[index] = jobs[index].turn(size, calls)
                cycles[size].append(Cycle(*medians))
    return cycles


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("base", help="commit to compare with")
    parser.add_argument("--minutes", type=float, default=20.0, help="limit (default: 20)")
    parser.add_argument("--json", type=Path, help="append the result to this file")
    options = parser.parse_args(arguments)
    tree = base_tree(options.base)
    base, new = install(tree, tree.parent.name), install(ROOT, "new")
    began = time.monotonic()
    starts: list[Start] = []
    source = random.Random(0)
    status, estimates = 2, {}
    while status == 2 and time.monotonic() - began < 60 * options.minutes:
        starts.append(start(base, new, source))
        status, estimates = judge(starts)
        took_s = time.monotonic() - began
        widest = max(new.high - new.low for new, _ in estimates.values())
        say(f"{took_s:7.0f} s  start {len(starts)}: widest interval {widest:.3f}")
    for size, (ratio, noise) in estimates.items():
        say(f"{size:9} bytes: new / base {ratio.text()}, base / base {noise.text()}")
    say({0: f"no ratio above {LIMIT}", 1: f"a ratio above {LIMIT}", 2: "not decided"}[status])
    if options.json:
        points = {
            str(size): {"new": vars(ratio), "base": vars(noise)}
            for size, (ratio, noise) in estimates.items()
        }
        record = {"base": tree.parent.name, "starts": len(starts), "status": status, "us": points}
        with options.json.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
