"""What keeping everything for replay costs: r2ccl against itself with R2CCL_RESILIENCE=off."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from r2serve.bench.collectives.matrix import (
    Contender,
    MatrixOptions,
    Setting,
    Workload,
    format_size,
)
from r2serve.bench.collectives.runner import Progress, calibrate, started
from r2serve.bench.collectives.statistics import median

MIN_PAIRS = 10


@dataclass(frozen=True)
class Pairs:
    """Interleaved slices with resilience on and off. ``ratio`` is on / off, below 1 is faster.

    Each pair gives the ratio of its two medians, taken within milliseconds of each other;
    ``ratio`` is the median over pairs, which a drift of the machine does not move, and
    ``ratio_low`` and ``ratio_high`` are its quartiles.
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
        # More pairs of shorter slices than a latency point has: the median over pairs counts.
        rounds = max(MIN_PAIRS, 2 * options.rounds)
        for workload in options.workloads(setting.ranks):
            progress(f"resilience on/off: {workload.op} {format_size(workload.bytes)}")
            slices = {
                state: calibrate(options, workload, contender, group)
                for state, group in groups.items()
            }
            times: dict[str, list[list[int]]] = {"on": [], "off": []}
            for pair in range(rounds):
                # on-off, off-on, ...: whoever goes second has no advantage from it.
                for state in ("on", "off") if pair % 2 == 0 else ("off", "on"):
                    planned = slices[state]
                    part = groups[state].run(planned.warmup, planned.iterations)
                    times[state].append(part.times_ns[0])
            results.append(evaluate(setting, workload, times["on"], times["off"]))
    return results


def evaluate(
    setting: Setting, workload: Workload, on: list[list[int]], off: list[list[int]]
) -> Pairs:
    """``on`` and ``off`` hold one list of times (ns) a slice; slices of one index are a pair."""
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
