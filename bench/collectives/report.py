"""Results of a benchmark as tables, as JSON and as a picture."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from r2serve.bench.collectives import columns, stalls
from r2serve.bench.collectives.columns import Column
from r2serve.bench.collectives.matrix import Contender, format_size
from r2serve.bench.collectives.resilience import Pairs
from r2serve.bench.collectives.runner import Skipped
from r2serve.bench.collectives.stalls import MeasuredFault
from r2serve.bench.collectives.statistics import LatencyRow
from r2serve.bench.collectives.verdict import Check, tally

RATIOS = (("r2ccl", "floor"), ("gloo", "r2ccl"), ("openmpi", "r2ccl"), ("mpich", "r2ccl"))


@dataclass
class CollectivesReport:
    metadata: dict[str, Any]
    rows: list[LatencyRow] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    resilience: list[Pairs] = field(default_factory=list)
    faults: list[MeasuredFault] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    # Options and measured settings, for a later --resume: see resume.py.
    matrix: dict[str, Any] = field(default_factory=dict)
    # Settings not measured because --minutes had passed.
    pending: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {
            **self.metadata,
            "matrix": self.matrix,
            "rows": [row.as_json() for row in self.rows],
            "pending": self.pending,
            "skipped": [{"what": s.what, "reason": s.reason} for s in self.skipped],
            "resilience": [pairs.as_json() for pairs in self.resilience],
            "stalls": [summary.as_json() for summary in stalls.summarise(self.faults)],
            "faults": [fault.as_json() for fault in self.faults],
            "verdict": [check.as_json() for check in self.checks],
        }

    def write_json(self, path: Path) -> None:
        path.write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")


def show(report: CollectivesReport, console: Console) -> None:
    for table in latency_tables(report.rows):
        console.print(table)
    if report.resilience:
        console.print(resilience_table(report.resilience))
    if report.faults:
        console.print(stall_table(report.faults))
    for skipped in report.skipped:
        console.print(f"[yellow]not measured:[/] {skipped.what}: {skipped.reason}", highlight=False)
    for setting in report.pending:
        console.print(f"[yellow]no time for:[/] {setting}; continue with --resume", highlight=False)
    if report.checks:
        console.print(verdict_table(report.checks))
        console.print(tally(report.checks))


def latency_groups(rows: Sequence[LatencyRow]) -> dict[str, list[LatencyRow]]:
    """Groups rows by op, dtype, ranks, rails and state; the key is the title of the group."""
    groups: dict[str, list[LatencyRow]] = {}
    for row in rows:
        title = f"{row.op} {row.dtype}, {row.ranks} ranks, {row.rails} rails, {row.state}"
        groups.setdefault(title, []).append(row)
    return groups


def latency_columns(rows: Sequence[LatencyRow]) -> list[Column[LatencyRow]]:
    """Returns the columns of a latency table; rows of r2ccl are compared with ``rows``."""

    def ratio(name: str) -> Callable[[LatencyRow], str]:
        def cell(row: LatencyRow) -> str:
            measured = ratios(row, rows) if row.impl == "r2ccl" else {}
            return f"{measured[name]:.2f}" if name in measured else ""

        return cell

    return [
        Column("bytes", lambda row: format_size(row.bytes)),
        Column("contender", lambda row: Contender(row.impl, row.algorithm).label, left=True),
        Column("p50 us", lambda row: f"{row.p50_us:.1f}"),
        Column("p95 us", lambda row: f"{row.p95_us:.1f}", page_only=True),
        Column("p99 us", lambda row: f"{row.p99_us:.1f}"),
        Column("Gbit/s", lambda row: f"{row.busbw_gbps:.2f}"),
        Column("CPU ns/B", cpu_cell),
        *(Column(f"{above} / {below}", ratio(f"{above}/{below}")) for above, below in RATIOS),
    ]


def latency_tables(rows: Sequence[LatencyRow]) -> list[Table]:
    """Returns a table for each combination of op, dtype, ranks, rails and state."""
    return [
        columns.in_terminal(
            f"{title}: ratios of p50",
            latency_columns(group),
            group,
            group_by=lambda row: row.bytes,
        )
        for title, group in latency_groups(rows).items()
    ]


def ratios(row: LatencyRow, rows: Sequence[LatencyRow]) -> dict[str, float]:
    """Returns p50 ratios of r2ccl's ``row`` and the contenders measured at the same point."""
    at_point = {other.impl: other.p50_us for other in rows if _point(other) == _point(row)}
    at_point["r2ccl"] = row.p50_us
    return {
        f"{above}/{below}": at_point[above] / at_point[below]
        for above, below in RATIOS
        if above in at_point and below in at_point
    }


def cpu_cell(row: LatencyRow) -> str:
    """Returns the CPU time per byte in ns, with three digits; empty for a barrier."""
    return "" if row.cpu_ns_per_byte is None else f"{row.cpu_ns_per_byte:.3g}"


RESILIENCE: list[Column[Pairs]] = [
    Column("op", lambda pair: pair.op),
    Column("ranks", lambda pair: str(pair.ranks)),
    Column("rails", lambda pair: str(pair.rails)),
    Column("bytes", lambda pair: format_size(pair.bytes)),
    Column("on us", lambda pair: f"{pair.on_p50_us:.2f}"),
    Column("off us", lambda pair: f"{pair.off_p50_us:.2f}"),
    Column("on / off", lambda pair: f"{pair.ratio:.3f}"),
    Column("quartiles", lambda pair: f"{pair.ratio_low:.3f} to {pair.ratio_high:.3f}"),
]
STALLS: list[Column[stalls.Summary]] = [
    Column("fault", lambda summary: summary.kind, left=True),
    Column("bytes", lambda summary: format_size(summary.bytes)),
    Column("faults", lambda summary: str(summary.faults)),
    Column("median ms", lambda summary: f"{summary.stall_ms_median:.2f}"),
    Column("worst ms", lambda summary: f"{summary.stall_ms_worst:.2f}"),
    Column("no fault ms", lambda summary: f"{summary.undisturbed_ms_worst:.2f}"),
    Column("next", lambda summary: f"{summary.next_ratio_median:.2f}"),
    Column("worst next", lambda summary: f"{summary.next_ratio_worst:.2f}"),
]
TARGETS: list[Column[Check]] = [
    Column("target", lambda check: check.target, left=True),
    Column("measured", lambda check: f"{check.measured:.3g}", left=True),
    Column("wanted", lambda check: check.wanted, left=True),
    Column(
        "verdict",
        lambda check: "met" if check.met else "not reached",
        left=True,
        good=lambda check: check.met,
    ),
]


def resilience_table(pairs: Sequence[Pairs]) -> Table:
    title = "r2ccl with resilience on against off, interleaved, p50"
    return columns.in_terminal(title, RESILIENCE, pairs)


def stall_table(faults: Sequence[MeasuredFault]) -> Table:
    title = "stall of the collective affected by a fault; next calls / calls on one healthy rail"
    return columns.in_terminal(title, STALLS, stalls.summarise(faults))


def verdict_table(checks: Sequence[Check]) -> Table:
    return columns.in_terminal("targets", TARGETS, checks)


def write_png(rows: Sequence[LatencyRow], path: Path) -> None:
    """Plots latency and bandwidth over size, a line per contender. Needs the extra ``[bench]``."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 5), layout="constrained")
    lines: dict[str, list[LatencyRow]] = {}
    for row in rows:
        if row.bytes == 0:
            continue  # a barrier has no size
        label = Contender(row.impl, row.algorithm).label
        setting = f"{row.op} {row.dtype}, {row.ranks} ranks, {row.rails} rails, {row.state}"
        lines.setdefault(f"{label}: {setting}", []).append(row)
    for label, points in lines.items():
        sizes = [point.bytes for point in points]
        (line,) = left.plot(sizes, [p.p50_us for p in points], marker="o", label=label)
        low, high = [p.p50_us for p in points], [p.p99_us for p in points]
        left.fill_between(sizes, low, high, color=line.get_color(), alpha=0.1)
        right.plot(sizes, [p.busbw_gbps for p in points], marker="o", label=label)
    left.set(title="latency: p50, shaded up to p99", ylabel="us", yscale="log")
    right.set(title="bus bandwidth at p50", ylabel="Gbit/s")
    ticks = sorted({row.bytes for row in rows if row.bytes})
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [format_size(tick) for tick in ticks], rotation=45)
        axes.set_xlabel("bytes per rank")
        axes.grid(alpha=0.3)
    left.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _point(row: LatencyRow) -> tuple[str, str, int, int, str, int]:
    return (row.op, row.dtype, row.ranks, row.rails, row.state, row.bytes)
