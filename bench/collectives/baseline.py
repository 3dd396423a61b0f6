"""Committed ratios of r2ccl's times to other contenders' times, and the check against new ratios.

Absolute times describe a machine. A ratio of interleaved slices describes the code, even on a
machine with other load. Ratios are comparable only on the same kind of machine. The file of
baselines therefore has separate rows for each processor model.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from r2serve.bench.collectives.control import WorkerGroup
from r2serve.bench.collectives.matrix import (
    CollectiveCall,
    Contender,
    MatrixOptions,
    Setting,
    format_size,
)
from r2serve.bench.collectives.runner import Progress, calibrate, started
from r2serve.bench.collectives.statistics import median

COMMITTED = Path(__file__).parents[1] / "results" / "baseline.jsonl"
ALLOWED = 0.15  # relative deviation, up and down
KIB, MIB = 1 << 10, 1 << 20
SETTING = Setting(ranks=2, rails=2)
# Contenders by the name used in points: implementation to start, and extra environment.
PARTIES: dict[str, tuple[str, dict[str, str]]] = {
    "r2ccl": ("r2ccl", {}),
    "r2ccl-off": ("r2ccl", {"R2CCL_RESILIENCE": "off"}),
    "floor": ("floor", {}),
    "gloo": ("gloo", {}),
}


class BaselineError(RuntimeError):
    """The file is not a baseline, or a point could not be measured."""


@dataclass(frozen=True)
class Point:
    """Time of an all_reduce of ``bytes`` with ``over``, divided by the time with ``under``."""

    bytes: int
    over: str
    under: str

    def __str__(self) -> str:
        return f"{format_size(self.bytes)}: {self.over} / {self.under}"


@dataclass(frozen=True)
class PairedRatio:
    """Median and quartiles of a ratio over pairs of slices."""

    ratio: float
    low: float
    high: float
    pairs: int


# Points with stable ratios from start to start. Two kinds of points are left out:
# - gloo at small sizes: the time there is mostly scheduler time.
# - 1 MiB: the ratio to the floor varied from 1.08 to 1.37 between starts of the same build.
POINTS = (
    Point(4 * KIB, "r2ccl", "floor"),
    Point(16 * KIB, "r2ccl", "floor"),
    Point(64 * KIB, "r2ccl", "floor"),
    Point(64 * KIB, "r2ccl", "r2ccl-off"),
    Point(16 * MIB, "r2ccl", "floor"),
    Point(16 * MIB, "r2ccl", "gloo"),
)


@dataclass(frozen=True)
class Effort:
    """Points to measure, and how often.

    ``seconds`` is the time measured for each contender, size and start.
    """

    points: tuple[Point, ...] = POINTS
    starts: int = 3
    rounds: int = 20
    seconds: float = 0.5


def measure(effort: Effort, progress: Progress) -> dict[Point, PairedRatio]:
    """Measures every point of ``effort``.

    All processes are started several times: the order of rails and the memory layout are fixed
    at start, and both affect the times.

    Raises WorkerError, NotSupported or ContenderUnavailable when a point cannot be measured.
    """
    pairs: dict[Point, list[float]] = {point: [] for point in effort.points}
    for start in range(effort.starts):
        progress(f"start {start + 1} of {effort.starts}")
        _measure_start(effort, pairs)
    return {point: summarise(ratios) for point, ratios in pairs.items()}


def _measure_start(effort: Effort, pairs: dict[Point, list[float]]) -> None:
    sizes = sorted({point.bytes for point in effort.points})
    options = MatrixOptions(sizes=tuple(sizes), seconds=effort.seconds, rounds=effort.rounds)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="r2serve-bench-")))
        groups = {}
        for name in sorted({name for point in effort.points for name in (point.over, point.under)}):
            impl, environment = PARTIES[name]
            groups[name] = stack.enter_context(
                started(impl, SETTING, scratch, name=name, extra_environment=environment)
            )
        for size in sizes:
            points = [point for point in effort.points if point.bytes == size]
            for medians in _rounds(
                options, CollectiveCall("all_reduce", size, "float32"), points, groups
            ):
                for point in points:
                    pairs[point].append(medians[point.over] / medians[point.under])


def _rounds(
    options: MatrixOptions,
    workload: CollectiveCall,
    points: Sequence[Point],
    groups: dict[str, WorkerGroup],
) -> Iterable[dict[str, float]]:
    """Yields, for each round, the median time of each contender's slice, in ns.

    The first contender changes from round to round.
    """
    names = sorted({name for point in points for name in (point.over, point.under)})
    slices = {}
    for name in names:
        slices[name] = calibrate(options, workload, Contender(PARTIES[name][0]), groups[name])
    for index in range(options.rounds):
        turn = index % len(names)
        medians = {}
        for name in names[turn:] + names[:turn]:
            timed = groups[name].run(slices[name].warmup, slices[name].iterations)
            medians[name] = median(timed.times_ns[0])
        yield medians


def summarise(ratios: Sequence[float]) -> PairedRatio:
    if not ratios:
        raise BaselineError("a point was not measured")
    ordered = sorted(ratios)
    count = len(ordered)
    return PairedRatio(median(ordered), ordered[count // 4], ordered[(3 * count) // 4], count)


def write(path: Path, measured: Mapping[Point, PairedRatio], metadata: Mapping[str, Any]) -> None:
    """Writes a line for each point, with ``metadata``; lines of other processors stay.

    ``metadata["machine"]["cpu"]`` names the processor. Raises BaselineError when the existing file
    is not a file of baselines.
    """
    rows = _rows(path) if path.exists() else []
    rows = [row for row in rows if row["machine"]["cpu"] != metadata["machine"]["cpu"]]
    for point, ratio in measured.items():
        figures = {name: rounded(of) for name, of in asdict(ratio).items()}
        rows.append({**asdict(point), **figures, **metadata})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def rounded(value: float) -> float:
    return round(value, 3)


def read(path: Path, cpu: str) -> dict[Point, PairedRatio]:
    """Returns the baseline of the processor ``cpu``.

    Raises BaselineError when the file has no points of this processor, or is not a file of
    baselines.
    """
    found: dict[str, dict[Point, PairedRatio]] = {}
    for row in _rows(path):
        of_cpu = found.setdefault(row["machine"]["cpu"], {})
        point, ratio = _parse(row)
        if point in of_cpu:
            raise BaselineError(f"{path}: {point} appears twice")
        if not ratio.ratio > 0:
            raise BaselineError(f"{path}: {point} has the ratio {ratio.ratio}, not above 0")
        of_cpu[point] = ratio
    if cpu not in found:
        raise BaselineError(
            f"{path} has no points of this processor ({cpu}), only of {', '.join(found) or 'none'}:"
            " write a baseline at a commit known to be good (--write)"
        )
    return found[cpu]


def _rows(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of all processors. Raises BaselineError when a row is malformed."""
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for row in rows:
            _parse(row)
            str(row["machine"]["cpu"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BaselineError(f"{path}: {type(error).__name__}: {error}") from error
    return rows


def _parse(row: Mapping[str, Any]) -> tuple[Point, PairedRatio]:
    point = Point(int(row["bytes"]), str(row["over"]), str(row["under"]))
    ratio, low, high = (float(row[name]) for name in ("ratio", "low", "high"))
    return point, PairedRatio(ratio, low, high, int(row["pairs"]))


def complaints(
    measured: Mapping[Point, PairedRatio], committed: Mapping[Point, PairedRatio]
) -> list[str]:
    """Returns a line for each ratio outside the limits; empty when every ratio is within."""
    found = []
    for point, now in measured.items():
        before = committed.get(point)
        if before is None:
            found.append(f"{point}: measured {now.ratio:.3f}, but the baseline has no such point")
            continue
        least, most = limits(before)
        said = f"{point}: {now.ratio:.3f} where the baseline has {before.ratio:.3f}"
        if now.ratio > most:
            found.append(f"{said}, slower than the limit of {most:.3f}")
        elif now.ratio < least:
            found.append(
                f"{said}, faster than the limit of {least:.3f}: write a new baseline (--write)"
            )
    return found


def limits(committed: PairedRatio) -> tuple[float, float]:
    return committed.ratio * (1 - ALLOWED), committed.ratio * (1 + ALLOWED)


def show(
    measured: Mapping[Point, PairedRatio], committed: Mapping[Point, PairedRatio], console: Console
) -> None:
    table = Table("point", "ratio", "quartiles", "pairs", "baseline", "limits")
    for point, now in measured.items():
        before = committed.get(point)
        least, most = limits(before) if before is not None else (0.0, 0.0)
        table.add_row(
            str(point),
            f"{now.ratio:.3f}",
            f"{now.low:.3f} to {now.high:.3f}",
            str(now.pairs),
            "-" if before is None else f"{before.ratio:.3f}",
            "-" if before is None else f"{least:.3f} to {most:.3f}",
        )
    console.print(table)
