"""Effect of a lost rail on latencies: ratios over pairs of runs, with bootstrap intervals."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from r2serve.bench.collectives.statistics import percentile

RESAMPLES = 2000
INTERVAL_PERCENT = 95
WANTED_PAIRS = 5
WANTED_REQUESTS = 300

Statistic = Callable[[Sequence[float]], float]


@dataclass(frozen=True)
class LatencyTarget:
    """Upper limit of the ratio ``permanent`` / ``healthy``, for a statistic of a latency."""

    name: str
    samples: str
    statistic: Statistic
    limit: float


def _p99(values: Sequence[float]) -> float:
    return percentile(values, 99)


def _median(values: Sequence[float]) -> float:
    return percentile(values, 50)


TARGETS = (
    LatencyTarget("E2E p99, one rail lost / healthy", "e2e_ms", _p99, 1.03),
    LatencyTarget("TPOT median, one rail lost / healthy", "tpot_ms", _median, 1.01),
)


@dataclass(frozen=True)
class TargetResult:
    """Result of a target.

    ratio: median over the pairs. low, high: bounds of the interval. requests: number of requests
    of the smallest run. said: the verdict in words.
    """

    target: str
    contender: str
    pairs: int
    requests: int
    ratio: float
    low: float
    high: float
    limit: float
    said: str


def verdicts(rows: Sequence[Mapping[str, Any]], seed: int = 0) -> list[TargetResult]:
    """Returns results for every contender and label with pairs of ``healthy`` and ``permanent``."""
    found = []
    for label, contender in dict.fromkeys((row["label"], row["contender"]) for row in rows):
        about = (label, contender)
        pairs = _pairs([row for row in rows if (row["label"], row["contender"]) == about])
        for target in TARGETS:
            samples = [
                (healthy["samples"][target.samples], lost["samples"][target.samples])
                for healthy, lost in pairs
            ]
            if samples and all(min(len(one), len(other)) for one, other in samples):
                found.append(_judge(target, contender, samples, seed))
    return found


def _pairs(
    rows: Sequence[Mapping[str, Any]],
) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    of = {(row["scenario"], row["pair"]): row for row in rows if "samples" in row}
    return [
        (of["healthy", pair], of["permanent", pair])
        for pair in sorted({pair for _, pair in of})
        if ("healthy", pair) in of and ("permanent", pair) in of
    ]


def _judge(
    target: LatencyTarget,
    contender: str,
    pairs: Sequence[tuple[Sequence[float], Sequence[float]]],
    seed: int,
) -> TargetResult:
    low, high = interval(pairs, target.statistic, seed)
    ratio = _ratio(pairs, target.statistic)
    requests = min(min(len(one), len(other)) for one, other in pairs)
    if high <= target.limit:
        said = "met"
    elif low > target.limit:
        said = "not reached"
    else:
        said = "not resolved"
    if len(pairs) < WANTED_PAIRS or requests < WANTED_REQUESTS:
        said = f"too few to say ({WANTED_PAIRS} pairs of {WANTED_REQUESTS} requests are wanted)"
    return TargetResult(
        target.name, contender, len(pairs), requests, ratio, low, high, target.limit, said
    )


def _ratio(pairs: Sequence[tuple[Sequence[float], Sequence[float]]], of: Statistic) -> float:
    return statistics.median(of(lost) / of(healthy) for healthy, lost in pairs)


def interval(
    pairs: Sequence[tuple[Sequence[float], Sequence[float]]], of: Statistic, seed: int = 0
) -> tuple[float, float]:
    """Returns the bootstrap interval of the median ratio over pairs.

    Each resample draws pairs, and inside each pair requests, with replacement.
    """
    source = random.Random(seed)
    ratios = []
    for _ in range(RESAMPLES):
        drawn = source.choices(pairs, k=len(pairs))
        again = [
            (
                source.choices(healthy, k=len(healthy)),
                source.choices(lost, k=len(lost)),
            )
            for healthy, lost in drawn
        ]
        ratios.append(_ratio(again, of))
    tail = (100 - INTERVAL_PERCENT) / 2
    return percentile(ratios, tail), percentile(ratios, 100 - tail)
