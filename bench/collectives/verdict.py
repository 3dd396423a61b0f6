"""Compares measured rows with the targets of r2ccl.

The report lists a missed target with the measured value. A missed target never fails a run,
because a busy machine can miss targets as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from r2serve.bench.collectives.matrix import format_size
from r2serve.bench.collectives.resilience import Pairs
from r2serve.bench.collectives.stalls import Summary
from r2serve.bench.collectives.statistics import LatencyRow

KIB = 1 << 10
MIB = 1 << 20

SMALL = (4 * KIB, 64 * KIB)
FLOOR_LIMIT = 1.25
GLOO_FACTOR = 10.0
# Limits GLOO_FACTOR where gloo is close to the floor: r2ccl cannot be faster than the floor.
GLOO_SHARE = 0.8
FLOOR_LIMIT_1MIB = 1.2
FLOOR_SHARE_64MIB = 0.85  # of the bandwidth
# A slow rail costs at most a tenth of the speed of the same job without this rail.
SLOW_SHARE_1MIB = 0.9
# More ranks than cores on the reference machine. The floor does not support this number of ranks.
CROWDED = 4
CROWDED_SIZES = (KIB, 64 * MIB)
RESILIENCE_LIMIT = 1.03
CARRIER_STALL_MS = 20.0
# Limit for black holes, in addition to the longest call of the same run without a fault.
BLACK_HOLE_STALL_MS = 100.0
NEXT_LIMIT = 1.1


@dataclass(frozen=True)
class Check:
    """A target. ``measured`` is a ratio, or in milliseconds; ``wanted`` is the target in words."""

    target: str
    measured: float
    wanted: str
    met: bool

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def verdicts(
    rows: Iterable[LatencyRow], pairs: Iterable[Pairs] = (), stalls: Iterable[Summary] = ()
) -> list[Check]:
    """Checks every target with measured rows: all_reduce, float32, 2 rails.

    The rails are healthy, except in the target of a slow rail.
    """
    by_point: dict[tuple[int, int], dict[str, float]] = {}
    by_state: dict[str, float] = {}  # of r2ccl with 2 ranks at 1 MiB
    for row in rows:
        if (row.op, row.dtype, row.rails, row.algorithm) != ("all_reduce", "float32", 2, "auto"):
            continue
        if row.state == "healthy":
            by_point.setdefault((row.ranks, row.bytes), {})[row.impl] = row.p50_us
        if (row.impl, row.ranks, row.bytes) == ("r2ccl", 2, MIB):
            by_state[row.state] = row.p50_us
    checks: list[Check] = []
    for ranks, size in sorted(by_point):
        p50 = by_point[ranks, size]
        if "r2ccl" in p50 and ranks == 2:
            checks += _latency_checks(size, p50["r2ccl"], p50)
        elif "r2ccl" in p50 and ranks == CROWDED:
            checks += _crowded_checks(size, p50["r2ccl"], p50)
    if "slow" in by_state and "one-lost" in by_state:
        share = by_state["one-lost"] / by_state["slow"]
        checks.append(at_least("1 MiB: r2ccl, one-lost / slow", share, SLOW_SHARE_1MIB))
    checks += [_resilience_check(pair) for pair in pairs]
    for stall in stalls:
        checks += _stall_checks(stall)
    return checks


def _latency_checks(size: int, own: float, p50: dict[str, float]) -> list[Check]:
    name = format_size(size)
    floor, gloo = p50.get("floor"), p50.get("gloo")
    checks: list[Check] = []
    if SMALL[0] <= size <= SMALL[1]:
        if floor is not None:
            checks.append(at_most(f"{name}: r2ccl / floor", own / floor, FLOOR_LIMIT))
        if gloo is not None:
            checks.append(at_least(f"{name}: gloo / r2ccl", gloo / own, gloo_factor(gloo, floor)))
    elif floor is not None and size == MIB:
        checks.append(at_most(f"{name}: r2ccl / floor", own / floor, FLOOR_LIMIT_1MIB))
    elif floor is not None and size == 64 * MIB:
        checks.append(at_least(f"{name}: floor / r2ccl", floor / own, FLOOR_SHARE_64MIB))
    return checks


def _crowded_checks(size: int, own: float, p50: dict[str, float]) -> list[Check]:
    if not CROWDED_SIZES[0] <= size <= CROWDED_SIZES[1]:
        return []
    name = f"{CROWDED} ranks, {format_size(size)}"
    others = {"gloo": "gloo", "openmpi": "Open MPI"}
    return [
        at_most(f"{name}: r2ccl / {label}", own / p50[impl], 1.0)
        for impl, label in others.items()
        if impl in p50
    ]


def gloo_factor(gloo: float, floor: float | None) -> float:
    """Returns the target for gloo's time divided by r2ccl's time, for small all-reduces."""
    return GLOO_FACTOR if floor is None else min(GLOO_FACTOR, GLOO_SHARE * gloo / floor)


def _resilience_check(pair: Pairs) -> Check:
    name = f"{pair.op} {format_size(pair.bytes)}, {pair.ranks} ranks, {pair.rails} rails"
    return at_most(f"{name}: resilience on / off", pair.ratio, RESILIENCE_LIMIT)


def _stall_checks(stall: Summary) -> list[Check]:
    name = f"{stall.kind} during {format_size(stall.bytes)}"
    if stall.kind == "carrier_loss":
        limit = CARRIER_STALL_MS
    else:
        limit = BLACK_HOLE_STALL_MS + stall.undisturbed_ms_worst
    return [
        at_most(f"{name}: worst stall of {stall.faults}, ms", stall.stall_ms_worst, limit),
        at_most(f"{name}: next calls / one rail healthy", stall.next_ratio_median, NEXT_LIMIT),
    ]


def at_most(target: str, measured: float, limit: float) -> Check:
    """Returns the check ``measured <= limit``."""
    return Check(target, measured, f"at most {limit:.4g}", measured <= limit)


def at_least(target: str, measured: float, limit: float) -> Check:
    """Returns the check ``measured >= limit``."""
    return Check(target, measured, f"at least {limit:.4g}", measured >= limit)


def tally(checks: Sequence[Check]) -> str:
    met = sum(check.met for check in checks)
    return f"{met} of {len(checks)} targets met"
