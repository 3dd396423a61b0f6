"""Points measured by ``net_bench``, and their targets.

A point is an object of JSON: a line of ``net_bench`` (bench/netplugin/net_bench.cc).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

Point = dict[str, Any]

ONE_WAY_FACTOR, ONE_WAY_US = 1.25, 1.0
"""Limit of one way: this factor times the time of the raw socket, plus this time in us."""
LEAST_BANDWIDTH = 0.9
"""Part of the raw socket's bandwidth."""
IDLE_SHM_NS = 100.0
"""A test of a request with nothing new, over shared memory, ns."""
STALL_MS = {"carrier_loss": 10.0, "black_hole": 50.0}
"""p99 of the longest round trip around a fault, ms."""
CONNECTIONS, CONNECTION_KIB, CONNECTIONS_S, CONNECTIONS_FACTOR = 512, 64.0, 2.0, 1.1
"""Connections of a pair: memory of each in KiB, start in s, one way against a single connection."""

_DETAIL = {"one_way": "bytes", "idle_test": "rail", "stall": "fault", "connections": "count"}
EXPECTED = {
    *(("one_way", each) for each in (8, 1024, 4096, 16_384, 65_536)),
    ("bandwidth", None),
    *(("idle_test", each) for each in ("tcp", "shm")),
    ("connections", CONNECTIONS),
    *(("stall", each) for each in ("", *STALL_MS)),
}
"""Points of a whole run, by their key."""


class PointError(ValueError):
    """The output of net_bench is incomplete, or has a line that is no point."""


def key(point: Point) -> tuple[str, Any]:
    """Returns the kind of a point, and its size, rail, fault or number of connections."""
    what = point["what"]
    return what, point[_DETAIL[what]] if what in _DETAIL else None


def limits(point: Point) -> list[tuple[str, float, float]]:
    """Returns each name, measured value and largest allowed value; none: only a number."""
    match point["what"]:
        case "one_way":
            most = ONE_WAY_FACTOR * point["floor_us"] + ONE_WAY_US
            return [("plugin_us", point["plugin_us"], most)]
        case "bandwidth":
            ratio = point["floor_mib_s"] / point["plugin_mib_s"]
            return [("floor / plugin", ratio, 1 / LEAST_BANDWIDTH)]
        case "idle_test" if point["rail"] == "shm":
            return [("ns", point["ns"], IDLE_SHM_NS)]
        case "stall" if point["fault"] in STALL_MS:
            return [("p99_ms", point["p99_ms"], STALL_MS[point["fault"]])]
        case "connections":
            most = CONNECTIONS_FACTOR * point["alone_us"]
            return [
                ("kib_each", point["kib_each"], CONNECTION_KIB),
                ("start_s", point["start_s"], CONNECTIONS_S),
                ("one_way_us", point["one_way_us"], most),
            ]
    return []


def judged(line: str) -> Point:
    """Returns the point of a line with its misses, and whether its targets are met.

    ``met`` is None for a point without a target.

    Raises:
        PointError: the line is no point.
    """
    try:
        point: Point = json.loads(line)
        known = key(point) in EXPECTED
        found = limits(point)
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise PointError(f"net_bench: not a point: {line.strip()[:200]!r}") from error
    if not known:
        raise PointError(f"net_bench: a point without a meaning here: {line.strip()[:200]!r}")
    misses = [
        f"{name} is {value:.3g}: must be at most {most:.3g}"
        for name, value, most in found
        if not value <= most
    ]
    return point | {"misses": misses, "met": not misses if found else None}


def check_complete(points: Iterable[Point]) -> None:
    """Raises PointError unless every point of a whole run is there."""
    missing = EXPECTED - {key(point) for point in points}
    if missing:
        raise PointError(f"net_bench: no point of {sorted(missing, key=str)}")
