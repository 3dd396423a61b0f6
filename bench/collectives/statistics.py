"""Percentiles, bus bandwidth, and the result row of a benchmark point."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from r2serve.bench.collectives.matrix import CollectiveCall, Contender, Setting


@dataclass(frozen=True)
class LatencyRow:
    """A point of the matrix. Latencies are in microseconds, measured by rank 0.

    ``p50_slowest_us`` is the median over iterations of the slowest rank's time, close to
    ``p50_us`` when the ranks agree. ``busbw_gbps`` is the bus bandwidth at ``p50_us``, in Gbit/s.
    ``cpu_ns_per_byte`` is the user and system time of all ranks' processes per input byte of all
    ranks; None for a barrier, because a barrier has no bytes.
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
    """Returns the nearest-rank percentile.

    The result is the smallest value v with at least ``percent`` % of all values at or below v. The
    result is always a measured value, never an average of two values. For a bimodal latency, an
    average would be a time between the modes, never measured.
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
    """Returns the minimum number of bytes sent (or received) per rank, for ``size`` input bytes.

    The factors are the bus-bandwidth factors of nccl-tests (nccl-tests counts all_gather by the
    output). Uneven ops use the mean over the ranks. gather uses the bytes received by the root.
    send_recv passes a message from rank to rank, and uses the sum over all hops.
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
    workload: CollectiveCall,
    contender: Contender,
    times_ns: Sequence[Sequence[int]],
    cpu_ns: int | None = None,
) -> LatencyRow:
    """Returns the row of a point; ``times_ns`` is indexed by rank, then by iteration.

    ``cpu_ns`` is the total CPU time of all ranks over all iterations, None if unknown.
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
