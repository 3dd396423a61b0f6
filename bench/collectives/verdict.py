"""Holds measured rows against the targets that r2ccl is developed to.

A target that is not reached is said, with its ratio; it never fails a run, because a busy machine
is no defect of the code.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from r2serve.bench.collectives.matrix import format_size
from r2serve.bench.collectives.resilience import Pairs
from r2serve.bench.collectives.stalls import Summary
from r2serve.bench.collectives.statistics import Row

KIB = 1 << 10
MIB = 1 << 20

SMALL = (KIB, 64 * KIB)
FLOOR_LIMIT = 1.5
GLOO_FACTOR_SMALL = 8.0
# Where gloo itself comes near the floor, a fixed factor below gloo would lie below the floor too.
GLOO_NEAR_FLOOR = 12.0
GLOO_SHARE = 0.7
GLOO_FACTOR_1MIB = 3.0
FLOOR_LIMIT_1MIB = 1.2
GLOO_FACTOR_64MIB = 1.5
RESILIENCE_LIMIT = 1.03
CARRIER_STALL_MS = 20.0
# Plus what the machine itself adds: the longest call of the same run that no fault had hit.
BLACK_HOLE_STALL_MS = 100.0
NEXT_LIMIT = 1.1


@dataclass(frozen=True)
class Check:
    """One target. ``measured`` is a ratio, or milliseconds; ``wanted`` the target in words."""

    target: str
    measured: float
    wanted: str
    met: bool

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def verdicts(
    rows: Iterable[Row], pairs: Iterable[Pairs] = (), stalls: Iterable[Summary] = ()
) -> list[Check]:
    """Checks for every target whose rows were measured; targets are for 2 ranks on 2 rails."""
    by_size: dict[int, dict[str, float]] = {}
    for row in rows:
        standard = (row.op, row.dtype, row.ranks, row.rails) == ("all_reduce", "float32", 2, 2)
        if standard and row.algorithm == "auto" and row.state == "healthy":
            by_size.setdefault(row.bytes, {})[row.impl] = row.p50_us
    checks: list[Check] = []
    for size in sorted(by_size):
        p50 = by_size[size]
        if "r2ccl" in p50:
            checks += _latency_checks(size, p50["r2ccl"], p50)
    checks += [_resilience_check(pair) for pair in pairs]
    for stall in stalls:
        checks += _stall_checks(stall)
    return checks


def _latency_checks(size: int, own: float, p50: dict[str, float]) -> list[Check]:
    name = format_size(size)
    floor, gloo, openmpi = p50.get("floor"), p50.get("gloo"), p50.get("openmpi")
    checks: list[Check] = []
    if SMALL[0] <= size <= SMALL[1]:
        if floor is not None:
            checks.append(at_most(f"{name}: r2ccl / floor", own / floor, FLOOR_LIMIT))
        if gloo is not None:
            checks.append(
                at_least(f"{name}: gloo / r2ccl", gloo / own, small_gloo_factor(gloo, floor))
            )
        if openmpi is not None:
            checks.append(at_most(f"{name}: r2ccl / Open MPI", own / openmpi, 1.0))
    if size == MIB and gloo is not None:
        checks.append(_one_mib(name, own, gloo, floor))
    if size == 64 * MIB and gloo is not None:
        checks.append(at_least(f"{name}: gloo / r2ccl", gloo / own, GLOO_FACTOR_64MIB))
    return checks


def small_gloo_factor(gloo: float, floor: float | None) -> float:
    """How many times below gloo a small all-reduce has to be."""
    if floor is not None and gloo / floor < GLOO_NEAR_FLOOR:
        return GLOO_SHARE * gloo / floor
    return GLOO_FACTOR_SMALL


def _one_mib(name: str, own: float, gloo: float, floor: float | None) -> Check:
    check = at_least(f"{name}: gloo / r2ccl", gloo / own, GLOO_FACTOR_1MIB)
    if check.met or floor is None:
        return check
    return at_most(f"{name}: r2ccl / floor", own / floor, FLOOR_LIMIT_1MIB)


def _resilience_check(pair: Pairs) -> Check:
    name = f"{pair.op} {format_size(pair.bytes)}, {pair.ranks} ranks, {pair.rails} rails"
    return at_most(f"{name}: resilience on / off", pair.ratio, RESILIENCE_LIMIT)


def _stall_checks(stall: Summary) -> list[Check]:
    name = f"{stall.kind} during {format_size(stall.bytes)}"
    if stall.kind == "carrier":
        limit = CARRIER_STALL_MS
    else:
        limit = BLACK_HOLE_STALL_MS + stall.undisturbed_ms_worst
    return [
        at_most(f"{name}: worst stall of {stall.faults}, ms", stall.stall_ms_worst, limit),
        at_most(f"{name}: next calls / one rail healthy", stall.next_ratio_median, NEXT_LIMIT),
    ]


def at_most(target: str, measured: float, limit: float) -> Check:
    """That ``measured`` is no more than ``limit``."""
    return Check(target, measured, f"at most {limit:.4g}", measured <= limit)


def at_least(target: str, measured: float, limit: float) -> Check:
    """That ``measured`` is no less than ``limit``."""
    return Check(target, measured, f"at least {limit:.4g}", measured >= limit)


def tally(checks: Sequence[Check]) -> str:
    met = sum(check.met for check in checks)
    return f"{met} of {len(checks)} targets met"
