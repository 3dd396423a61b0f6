"""Measures the matrix: all peers of a setting are up, and take turns at every point.

A point is measured in rounds. In each round every contender runs a slice of its iterations, in an
order that rotates, so that a drift of the machine hits all alike.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from r2serve.bench.collectives.control import NotSupported, WorkerGroup
from r2serve.bench.collectives.matrix import (
    Contender,
    Options,
    Setting,
    Workload,
    format_size,
)
from r2serve.bench.collectives.peers import PeerUnavailable, launch
from r2serve.bench.collectives.statistics import Row, median, summarise

Progress = Callable[[str], None]

CALIBRATION_ITERATIONS = 5
MIN_SLICE_ITERATIONS = 5
MAX_SLICE_ITERATIONS = 5000
WARMUP_NS = 20_000_000
MAX_WARMUP_ITERATIONS = 100


@dataclass(frozen=True)
class Skipped:
    """Something of the matrix that could not be measured, and why."""

    what: str
    reason: str


@dataclass
class Results:
    rows: list[Row] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)


def run(options: Options, progress: Progress) -> Results:
    results = Results()
    for setting in options.settings():
        with tempfile.TemporaryDirectory(prefix="r2serve-bench-") as scratch:
            _run_setting(options, setting, Path(scratch), results, progress)
    return results


def _run_setting(
    options: Options, setting: Setting, scratch: Path, results: Results, progress: Progress
) -> None:
    where = f"{setting.ranks} ranks, {setting.rails} rails"
    with ExitStack() as stack:
        groups: dict[str, WorkerGroup] = {}
        for impl in options.impls:
            progress(f"{where}: starting {impl}")
            try:
                groups[impl] = stack.enter_context(started(impl, setting, scratch))
            except PeerUnavailable as error:
                results.skipped.append(Skipped(f"{impl} ({where})", str(error)))
        contenders = [c for c in options.contenders() if c.impl in groups]
        for workload in options.workloads():
            progress(f"{where}: {workload.op} {workload.dtype} {format_size(workload.bytes)}")
            times = _measure_point(options, workload, contenders, groups, results.skipped)
            for contender, by_rank in times.items():
                results.rows.append(summarise(setting, workload, contender, by_rank))


@contextmanager
def started(
    impl: str,
    setting: Setting,
    scratch: Path,
    *,
    name: str | None = None,
    extra_environment: dict[str, str] | None = None,
) -> Iterator[WorkerGroup]:
    """The workers of ``impl``, connected. ``name`` tells two groups of one impl apart."""
    name = name or impl
    home = scratch / name
    home.mkdir()
    control = home / "control"
    plan = launch(impl, setting, control, home).with_environment(extra_environment or {})
    with WorkerGroup(name, plan, setting.ranks, control, home / "log") as group:
        yield group


def _measure_point(
    options: Options,
    workload: Workload,
    contenders: list[Contender],
    groups: dict[str, WorkerGroup],
    skipped: list[Skipped],
) -> dict[Contender, list[list[int]]]:
    """Times per contender, outer by rank, inner by iteration."""
    slices: dict[Contender, Slice] = {}
    for contender in contenders:
        try:
            slices[contender] = calibrate(options, workload, contender, groups[contender.impl])
        except NotSupported as error:
            what = f"{contender.label} {workload.op} {workload.dtype} {format_size(workload.bytes)}"
            skipped.append(Skipped(what, str(error)))
    able = list(slices)
    times: dict[Contender, list[list[int]]] = {contender: [] for contender in able}
    for round_index in range(options.rounds):
        turn = round_index % len(able) if able else 0
        for contender in able[turn:] + able[:turn]:
            group = groups[contender.impl]
            group.prepare(workload.request(contender.algorithm))
            part = group.run(slices[contender].warmup, slices[contender].iterations)
            so_far = times[contender] or [[] for _ in part]
            times[contender] = [old + new for old, new in zip(so_far, part, strict=True)]
    return times


@dataclass(frozen=True)
class Slice:
    """What a contender runs in one round; only ``iterations`` count."""

    warmup: int
    iterations: int


def calibrate(
    options: Options, workload: Workload, contender: Contender, group: WorkerGroup
) -> Slice:
    """A slice that fills the contender's share of ``options.seconds``, from a short first run."""
    group.prepare(workload.request(contender.algorithm))
    first = group.run(2, CALIBRATION_ITERATIONS)
    return plan_slice(options, median(first[0]))


def plan_slice(options: Options, call_ns: float) -> Slice:
    warmup = max(2, min(MAX_WARMUP_ITERATIONS, int(WARMUP_NS / call_ns)))
    if options.iterations is not None:
        return Slice(warmup, max(1, options.iterations // options.rounds))
    wanted = int(options.seconds * 1e9 / options.rounds / call_ns)
    return Slice(warmup, max(MIN_SLICE_ITERATIONS, min(MAX_SLICE_ITERATIONS, wanted)))
