"""Cost of keeping data for replay: interleaved slices of r2ccl with R2CCL_RESILIENCE on and off."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from r2serve.bench.collectives.matrix import (
    CollectiveCall,
    Contender,
    MatrixOptions,
    Setting,
    format_size,
)
from r2serve.bench.collectives.runner import Progress, calibrate, started
from r2serve.bench.collectives.statistics import median

MIN_PAIRS = 10


@dataclass(frozen=True)
class Pairs:
    """Result of interleaved slices with resilience on and off; ``ratio`` is on / off.

    A pair consists of two slices, measured within milliseconds of each other, and gives the ratio
    of the two medians. ``ratio`` is the median over the pairs: a drift of the machine cancels out
    within a pair. ``ratio_low`` and ``ratio_high`` are the quartiles. A ratio below 1 means that
    r2ccl is faster with resilience on.
    """

    op: str
    bytes: int
    dtype: str
    ranks: int
    rails: int
    on_p50_us: float
    off_p50_us: float
    ratio: float
    ratio_low: float
    ratio_high: float
    pairs: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def compare(options: MatrixOptions, setting: Setting, progress: Progress) -> list[Pairs]:
    results = []
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="r2serve-bench-")))
        groups = {
            state: stack.enter_context(
                started(
                    "r2ccl",
                    setting,
                    scratch,
                    name=f"r2ccl-{state}",
                    extra_environment={"R2CCL_RESILIENCE": state},
                )
            )
            for state in ("on", "off")
        }
        contender = Contender("r2ccl")
        # Twice the rounds of a latency point, because the result is a median over pairs.
        rounds = max(MIN_PAIRS, 2 * options.rounds)
        for workload in options.workloads(setting.ranks):
            progress(f"resilience on/off: {workload.op} {format_size(workload.bytes)}")
            slices = {
                state: calibrate(options, workload, contender, group)
                for state, group in groups.items()
            }
            times: dict[str, list[list[int]]] = {"on": [], "off": []}
            for pair in range(rounds):
                # The order alternates (on-off, off-on, ...): neither state is always second.
                for state in ("on", "off") if pair % 2 == 0 else ("off", "on"):
                    planned = slices[state]
                    part = groups[state].run(planned.warmup, planned.iterations)
                    times[state].append(part.times_ns[0])
            results.append(evaluate(setting, workload, times["on"], times["off"]))
    return results


def evaluate(
    setting: Setting, workload: CollectiveCall, on: list[list[int]], off: list[list[int]]
) -> Pairs:
    """Evaluates slices of times in ns; ``on[i]`` and ``off[i]`` are a pair."""
    ratios = sorted(median(a) / median(b) for a, b in zip(on, off, strict=True))
    return Pairs(
        op=workload.op,
        bytes=workload.bytes,
        dtype=workload.dtype,
        ranks=setting.ranks,
        rails=setting.rails,
        on_p50_us=median([time for times in on for time in times]) / 1e3,
        off_p50_us=median([time for times in off for time in times]) / 1e3,
        ratio=median(ratios),
        ratio_low=ratios[len(ratios) // 4],
        ratio_high=ratios[(3 * len(ratios)) // 4],
        pairs=len(ratios),
    )
