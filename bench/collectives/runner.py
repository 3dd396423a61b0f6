"""Measures the matrix: all contenders of a setting run at the same time and take turns.

A point is measured in rounds. In each round, every contender runs a slice of the iterations. The
order rotates from round to round, so a drift of the machine affects all contenders alike.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from r2serve.bench.collectives import states
from r2serve.bench.collectives.contenders import ContenderUnavailable, launch
from r2serve.bench.collectives.control import NotSupported, Timed, WorkerError, WorkerGroup
from r2serve.bench.collectives.matrix import (
    CollectiveCall,
    Contender,
    MatrixOptions,
    Setting,
    format_size,
)
from r2serve.bench.collectives.statistics import LatencyRow, median, summarise

Progress = Callable[[str], None]

CALIBRATION_ITERATIONS = 5
MIN_SLICE_ITERATIONS = 5
MAX_SLICE_ITERATIONS = 5000
WARMUP_NS = 20_000_000
MAX_WARMUP_ITERATIONS = 100


@dataclass(frozen=True)
class Skipped:
    """A part of the matrix not measured, and the reason."""

    what: str
    reason: str


@dataclass
class Results:
    rows: list[LatencyRow] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)


def run(options: MatrixOptions, progress: Progress) -> Results:
    results = Results()
    for setting in options.settings():
        measure(options, setting, results, progress)
    return results


def measure(options: MatrixOptions, setting: Setting, results: Results, progress: Progress) -> None:
    """Measures all points of a setting, and adds the rows to ``results``."""
    refusals: list[Refusal] = []
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="r2serve-bench-")))
        groups: dict[str, WorkerGroup] = {}
        for impl in options.impls:
            progress(f"{setting.where}: starting {impl}")
            try:
                groups[impl] = stack.enter_context(started(impl, setting, scratch))
            except (ContenderUnavailable, WorkerError) as error:
                if impl == "r2ccl" and isinstance(error, WorkerError):
                    raise
                results.skipped.append(Skipped(f"{impl} ({setting.where})", str(error)))
        for workload in options.workloads(setting.ranks):
            size = format_size(workload.bytes)
            progress(f"{setting.where}: {workload.op} {workload.dtype} {size}")
            contenders = [c for c in options.contenders(workload.op) if c.impl in groups]
            taken = _measure_point(options, workload, contenders, groups, refusals)
            for contender, samples in taken.items():
                row = summarise(setting, workload, contender, samples.times_ns, samples.cpu_ns)
                results.rows.append(row)
    results.skipped += list_refusals(refusals, setting)


@dataclass(frozen=True)
class Refusal:
    """A workload refused by a contender, and the reason."""

    contender: Contender
    workload: CollectiveCall
    reason: str


def list_refusals(refusals: Sequence[Refusal], setting: Setting) -> list[Skipped]:
    """Returns a single entry for all sizes refused by a contender for the same reason."""
    sizes: dict[tuple[str, str], list[str]] = {}
    for refusal in refusals:
        workload = refusal.workload
        what = f"{refusal.contender.label} {workload.op} {workload.dtype}"
        sizes.setdefault((what, refusal.reason), []).append(format_size(workload.bytes))
    return [
        Skipped(f"{what} {', '.join(of_what)} ({setting.where})", reason)
        for (what, reason), of_what in sizes.items()
    ]


@dataclass
class Samples:
    """Measurements of a contender at a point, over all slices.

    ``times_ns``: by rank, then by iteration. ``cpu_ns``: the sum over the ranks.
    """

    times_ns: list[list[int]]
    cpu_ns: int = 0

    def add(self, part: Timed) -> None:
        """Appends the times of a slice, and adds the CPU time of all ranks."""
        self.times_ns = [a + b for a, b in zip(self.times_ns, part.times_ns, strict=True)]
        self.cpu_ns += sum(part.cpu_ns)


@contextmanager
def started(
    impl: str,
    setting: Setting,
    scratch: Path,
    *,
    name: str | None = None,
    extra_environment: dict[str, str] | None = None,
) -> Iterator[WorkerGroup]:
    """Starts the workers of ``impl`` and yields the connected group.

    ``name`` distinguishes two groups of the same implementation.
    """
    name = name or impl
    home = scratch / name
    home.mkdir()
    control = home / "control"
    plan = launch(impl, setting, control, home).with_environment(extra_environment or {})
    with WorkerGroup(name, plan, setting.ranks, control, home / "log") as group:
        if impl == "r2ccl":
            states.make(group, setting)
        yield group


def _measure_point(
    options: MatrixOptions,
    workload: CollectiveCall,
    contenders: list[Contender],
    groups: dict[str, WorkerGroup],
    refusals: list[Refusal],
) -> dict[Contender, Samples]:
    """Returns the samples of every contender with all slices completed."""
    slices: dict[Contender, Slice] = {}
    taken: dict[Contender, Samples] = {}

    def plan(contender: Contender, group: WorkerGroup) -> None:
        slices[contender] = calibrate(options, workload, contender, group)

    def take(contender: Contender, group: WorkerGroup) -> None:
        group.prepare(workload.request(contender.algorithm))
        part = group.run(slices[contender].warmup, slices[contender].iterations)
        taken.setdefault(contender, Samples([[] for _ in part.times_ns])).add(part)

    def guarded(act: Callable[[Contender, WorkerGroup], None], contender: Contender) -> None:
        """Runs ``act``; closes and lists a contender if a worker fails.

        A failure of an r2ccl worker is raised, and ends the benchmark.
        """
        impl = contender.impl
        try:
            if impl in groups:
                act(contender, groups[impl])
        except NotSupported as error:
            refusals.append(Refusal(contender, workload, str(error)))
        except WorkerError as error:
            if impl == "r2ccl":
                raise
            refusals.append(Refusal(contender, workload, f"and all later points: {error}"))
            groups.pop(impl).close()

    for contender in contenders:
        guarded(plan, contender)
    able = list(slices)
    for round_index in range(options.rounds):
        turn = round_index % len(able) if able else 0
        for contender in able[turn:] + able[:turn]:
            guarded(take, contender)
    return {contender: taken[contender] for contender in able if contender.impl in groups}


@dataclass(frozen=True)
class Slice:
    """Calls of a contender in a round: ``warmup`` calls without timing, then ``iterations``."""

    warmup: int
    iterations: int


def calibrate(
    options: MatrixOptions, workload: CollectiveCall, contender: Contender, group: WorkerGroup
) -> Slice:
    """Returns a slice with a duration of about ``options.seconds / options.rounds``.

    A short first run gives the duration of a call.
    """
    group.prepare(workload.request(contender.algorithm))
    first = group.run(2, CALIBRATION_ITERATIONS)
    return plan_slice(options, median(first.times_ns[0]))


def plan_slice(options: MatrixOptions, call_ns: float) -> Slice:
    warmup = max(2, min(MAX_WARMUP_ITERATIONS, int(WARMUP_NS / call_ns)))
    if options.iterations is not None:
        return Slice(warmup, max(1, options.iterations // options.rounds))
    wanted = int(options.seconds * 1e9 / options.rounds / call_ns)
    return Slice(warmup, max(MIN_SLICE_ITERATIONS, min(MAX_SLICE_ITERATIONS, wanted)))
