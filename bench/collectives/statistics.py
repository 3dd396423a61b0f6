"""Percentiles, bus bandwidth and the row that a benchmark point becomes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from r2serve.bench.collectives.matrix import Contender, Setting, Workload


@dataclass(frozen=True)
class LatencyRow:
    """One point of the matrix. Latencies in microseconds, as rank 0 saw them.

    ``p50_slowest_us`` is the median over iterations of the slowest rank's time: it lies near
    ``p50_us`` when the ranks agree. ``busbw_gbps`` is in gigabits a second, at ``p50_us``.
    ``cpu_ns_per_byte`` is the time that the ranks' processes spent in user and system mode for
    each byte that they brought; None for a barrier, which brings none.
    """

    op: str
    bytes: int
    dtype: str
    ranks: int
    rails: int
    impl: str
    algorithm: str
    state: str
    p50_us: float
    p95_us: float
    p99_us: float
    p50_slowest_us: float
    busbw_gbps: float
    samples: int
    cpu_ns_per_byte: float | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least ``percent`` % of the values do not exceed (nearest rank).

    A value that was measured, never an average of two: a bimodal latency has no made-up middle.
    """
    if not values:
        raise ValueError("percentile of no values")
    if not 0 < percent <= 100:
        raise ValueError(f"percent is {percent}; it must be above 0 and at most 100")
    ordered = sorted(values)
    return ordered[math.ceil(len(ordered) * percent / 100) - 1]


def median(values: Sequence[float]) -> float:
    return percentile(values, 50)


def wire_bytes(op: str, size: int, ranks: int) -> float:
    """Bytes that every rank must at least send (or receive) for an input of ``size`` per rank.

    These are the bus-bandwidth factors of NCCL's tests, which count all_gather by its output. Of
    uneven ops it is the mean, of gather what the root receives, and of send_recv, whose message
    goes from rank to rank, what all of them send one after the other.
    """
    match op:
        case "all_reduce":
            return size * 2 * (ranks - 1) / ranks
        case "all_gather" | "all_gatherv" | "gather":
            return size * (ranks - 1)
        case "reduce_scatter" | "reduce_scatterv" | "all_to_all" | "all_to_allv":
            return size * (ranks - 1) / ranks
        case "broadcast":
            return size
        case "send_recv":
            return size * ranks
        case "barrier":
            return 0
    raise ValueError(f"no bus bandwidth is defined for {op!r}")


def bus_bandwidth_gbps(op: str, size: int, ranks: int, time_us: float) -> float:
    return wire_bytes(op, size, ranks) * 8 / (time_us * 1e3)


def summarise(
    setting: Setting,
    workload: Workload,
    contender: Contender,
    times_ns: Sequence[Sequence[int]],
    cpu_ns: int | None = None,
) -> LatencyRow:
    """The row of a point from the times of each rank (outer: rank, inner: iteration).

    ``cpu_ns`` is the CPU time of all ranks together in all iterations, None where unknown.
    """
    brought = workload.bytes * setting.ranks * len(times_ns[0])
    own = times_ns[0]
    slowest = [max(times) for times in zip(*times_ns, strict=True)]
    p50_us = percentile(own, 50) / 1e3
    return LatencyRow(
        op=workload.op,
        bytes=workload.bytes,
        dtype=workload.dtype,
        ranks=setting.ranks,
        rails=setting.rails,
        impl=contender.impl,
        algorithm=contender.algorithm,
        state=setting.state,
        p50_us=p50_us,
        p95_us=percentile(own, 95) / 1e3,
        p99_us=percentile(own, 99) / 1e3,
        p50_slowest_us=percentile(slowest, 50) / 1e3,
        busbw_gbps=bus_bandwidth_gbps(workload.op, workload.bytes, setting.ranks, p50_us),
        samples=len(own),
        cpu_ns_per_byte=cpu_ns / brought if brought and cpu_ns is not None else None,
    )
