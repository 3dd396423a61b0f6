"""Compares the latency of healthy collectives between two builds: `make compare BASE=<commit>`.

compare.py BASE [--minutes 20] [--json FILE]

Both builds are installed into separate folders, and started in turns: the base, this tree, and the
base again. Each round gives two ratios for each size: this tree to the base, and the base to
itself. The 95 % interval of the median ratio comes from a bootstrap over rounds. Rounds are added
until every interval is within ±2 % of its median.

Exit status: 0 every median ratio is at most 1.03; 1 a ratio is above; 2 not decided in time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build/compare"
WORKER = Path(__file__).with_name("worker.py")
LIMIT = 1.03
HALF_WIDTH = 0.02
LEAST_ROUNDS = 5
RESAMPLES = 2000
START_LIMIT_S = 120.0
FLAGS = "-O2 -g1 -DNDEBUG"

Medians = Mapping[int, float]


@dataclass(frozen=True)
class Round:
    """Medians in us by size, of three starts in a row."""

    base: Medians
    new: Medians
    again: Medians

    def ratio(self, size: int) -> float:
        """Returns this tree / base. The base is the mean of the starts before and after."""
        return self.new[size] / ((self.base[size] + self.again[size]) / 2)

    def noise(self, size: int) -> float:
        return self.again[size] / self.base[size]


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


def judge(rounds: Sequence[Round]) -> tuple[int, dict[int, tuple[Estimate, Estimate]]]:
    """Returns the status, and by size the estimates of this tree and of the base to itself."""
    by_size = {
        size: (
            Estimate.of([each.ratio(size) for each in rounds]),
            Estimate.of([each.noise(size) for each in rounds]),
        )
        for size in rounds[0].base
    }
    if len(rounds) < LEAST_ROUNDS:
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


def start(site: Path) -> dict[int, float]:
    """Runs both ranks of a build and returns the medians of rank 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if "R2CCL_" not in name}
    environment |= {
        "PYTHONPATH": str(site),
        "PYTHONSAFEPATH": "1",
        "OMP_NUM_THREADS": "1",
        "R2CCL_NODE": "per-rank",
        "R2CCL_RAILS": "127.0.0.1,127.0.0.2",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(port)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (1, 0)
    ]
    try:
        output = ranks[1].communicate(timeout=START_LIMIT_S)[0]
        statuses = [rank.wait(START_LIMIT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(statuses):
        raise SystemExit(f"{site}: a rank ended with status {max(statuses)}")
    return {int(size): median for size, median in json.loads(output).items()}


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
    rounds: list[Round] = []
    status, estimates = 2, {}
    while status == 2 and time.monotonic() - began < 60 * options.minutes:
        rounds.append(Round(start(base), start(new), start(base)))
        status, estimates = judge(rounds)
        took_s = time.monotonic() - began
        widest = max(new.high - new.low for new, _ in estimates.values())
        say(f"{took_s:7.0f} s  round {len(rounds)}: widest interval {widest:.3f}")
    for size, (ratio, noise) in estimates.items():
        say(f"{size:9} bytes: new / base {ratio.text()}, base / base {noise.text()}")
    say({0: f"no ratio above {LIMIT}", 1: f"a ratio above {LIMIT}", 2: "not decided"}[status])
    if options.json:
        points = {
            str(size): {"new": vars(ratio), "base": vars(noise)}
            for size, (ratio, noise) in estimates.items()
        }
        record = {"base": tree.parent.name, "rounds": len(rounds), "status": status, "us": points}
        with options.json.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
