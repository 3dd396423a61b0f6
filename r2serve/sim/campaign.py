"""Runs many seeds in parallel, and sums up the results.

A seed determines everything: the job, its faults and their times. A failed seed is therefore enough
to reproduce the failure.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import click

from r2serve import _core

CAMPAIGN_SEEDS = 100
"""A campaign of at least this number of seeds must exercise every fault kind and mechanism."""

MECHANISMS = (
    "steps",
    "replays",
    "hedges",
    "fences",
    "gpu_calls",
    "exchange_calls",
    "streams",
    "posted",
    "compared",
    "parted",
)
SUMMED = (*MECHANISMS, "calls", "errors", "downs")
_CHUNK = 16


@dataclass
class Failure:
    """A seed that broke an invariant."""

    seed: int
    job: str
    violations: list[str]

    @property
    def replay(self) -> str:
        return f"r2serve sim --seed {self.seed} --trace"


@dataclass
class Totals:
    """Sums over all seeds of a campaign."""

    seeds: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    def add(self, result: dict[str, Any]) -> None:
        self.seeds += 1
        self.counts.update({name: result[name] for name in SUMMED})
        self.faults.update(result["faults"])
        if result["violations"]:
            self.failures.append(Failure(result["seed"], result["job"], result["violations"]))

    def idle(self) -> list[str]:
        """Returns mechanisms and fault kinds that never occurred; empty below CAMPAIGN_SEEDS."""
        if self.seeds < CAMPAIGN_SEEDS:
            return []
        idle = [name for name in MECHANISMS if not self.counts[name]]
        return idle + [kind for kind in _core.fault_kinds() if not self.faults[kind]]

    def summary(self) -> str:
        parts = [f"seeds {self.seeds}", f"steps {self.counts['steps']}"]
        parts.append(f"faults {sum(self.faults.values())}")
        parts += [f"{name} {self.counts[name]}" for name in ("replays", "hedges", "fences")]
        return ", ".join(parts)

    def as_json(self) -> dict[str, Any]:
        return {
            "seeds": self.seeds,
            **{name: self.counts[name] for name in SUMMED},
            "faults": {kind: self.faults[kind] for kind in _core.fault_kinds()},
            "idle": self.idle(),
            "failures": [
                {"seed": f.seed, "job": f.job, "violations": f.violations, "replay": f.replay}
                for f in self.failures
            ],
        }


def _simulate(seed: int) -> dict[str, Any]:
    return _core.simulate(seed)  # a wrapper, because the core's function cannot be pickled


def trace(first: int, count: int) -> Iterator[dict[str, Any]]:
    """Yields the results of ``count`` seeds in order, and prints every step."""
    for seed in range(first, first + count):
        yield _core.simulate(seed, trace=click.echo)


def run(first: int, count: int, jobs: int | None = None) -> Iterator[dict[str, Any]]:
    """Yields the results of ``count`` seeds from ``first`` on, in any order.

    ``jobs``: number of processes; default: the number of processors.
    """
    jobs = min(jobs or os.cpu_count() or 1, count)
    seeds = range(first, first + count)
    if jobs == 1:
        yield from map(_simulate, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(_simulate, seeds, chunksize=_CHUNK)
