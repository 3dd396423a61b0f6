"""Measures the matrix: all contenders of a setting are up, and take turns at every point.

A point is measured in rounds. In each round every contender runs a slice of its iterations, in an
order that rotates, so that a drift of the machine hits all alike.
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
    Contender,
    MatrixOptions,
    Setting,
    Workload,
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
    """Something of the matrix that could not be measured, and why."""

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
    """Everything of one setting, added to ``results``."""
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
    """A contender that says that it cannot do a workload, and why."""

    contender: Contender
    workload: Workload
    reason: str


def list_refusals(refusals: Sequence[Refusal], setting: Setting) -> list[Skipped]:
    """One entry for what is refused for the same reason at several sizes."""
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
    """What a contender's slices of one point gave: ``times_ns`` by rank, then by iteration."""

    times_ns: list[list[int]]
    cpu_ns: int = 0

    def add(self, part: Timed) -> None:
        """``cpu_ns`` is the sum over the ranks."""
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
    """The workers of ``impl``, connected. ``name`` tells two groups of one impl apart."""
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
    workload: Workload,
    contenders: list[Contender],
    groups: dict[str, WorkerGroup],
    refusals: list[Refusal],
) -> dict[Contender, Samples]:
    """The samples of every contender that is through with all its slices."""
    slices: dict[Contender, Slice] = {}
    taken: dict[Contender, Samples] = {}

    def plan(contender: Contender, group: WorkerGroup) -> None:
        slices[contender] = calibrate(options, workload, contender, group)

    def take(contender: Contender, group: WorkerGroup) -> None:
        group.prepare(workload.request(contender.algorithm))
        part = group.run(slices[contender].warmup, slices[contender].iterations)
        taken.setdefault(contender, Samples([[] for _ in part.times_ns])).add(part)

    def guarded(act: Callable[[Contender, WorkerGroup], None], contender: Contender) -> None:
        """A peer whose workers end is closed and listed; what is measured here never may end."""
        impl = contender.impl
        try:
            if impl in groups:
                act(contender, groups[impl])
        except NotSupported as error:
            refusals.append(Refusal(contender, workload, str(error)))
        except WorkerError as error:
            if impl == "r2ccl":
                raise
            refusals.append(Refusal(contender, workload, f"and all after it: {error}"))
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
    """What a contender runs in one round; only ``iterations`` count."""

    warmup: int
    iterations: int


def calibrate(
    options: MatrixOptions, workload: Workload, contender: Contender, group: WorkerGroup
) -> Slice:
    """A slice that fills the contender's share of ``options.seconds``, from a short first run."""
    group.prepare(workload.request(contender.algorithm))
    first = group.run(2, CALIBRATION_ITERATIONS)
    return plan_slice(options, median(first.times_ns[0]))


def plan_slice(options: MatrixOptions, call_ns: float) -> Slice:
    warmup = max(2, min(MAX_WARMUP_ITERATIONS, int(WARMUP_NS / call_ns)))
    if options.iterations is not None:
        return Slice(warmup, max(1, options.iterations // options.rounds))
    wanted = int(options.seconds * 1e9 / options.rounds / call_ns)
    return Slice(warmup, max(MIN_SLICE_ITERATIONS, min(MAX_SLICE_ITERATIONS, wanted)))
