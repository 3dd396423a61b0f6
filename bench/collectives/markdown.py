"""Results as the section of a Markdown page, so that no number in the docs is typed by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from r2serve.bench.collectives import stalls
from r2serve.bench.collectives.matrix import Contender, format_size
from r2serve.bench.collectives.report import RATIOS, Report, cpu_cell, ratios
from r2serve.bench.collectives.statistics import Row

MARKER = "<!-- results of r2serve bench collectives: everything below is written by --docs -->"


class MarkerError(ValueError):
    """The page has no place for results."""


def put(report: Report, page: Path) -> None:
    """Replaces everything of ``page`` below its marker line by the results.

    Raises MarkerError when there is no such line.
    """
    require_place(page)
    above = page.read_text(encoding="utf-8").partition(MARKER)[0]
    page.write_text(above + MARKER + "\n\n" + section(report), encoding="utf-8")


def require_place(page: Path) -> None:
    """Raises MarkerError when ``page`` has no marker line."""
    if MARKER not in page.read_text(encoding="utf-8"):
        raise MarkerError(f"{page} has no line {MARKER!r}")


def section(report: Report) -> str:
    parts = [_where(report), *_latencies(report.rows)]
    if report.resilience:
        parts.append(_resilience(report))
    if report.faults:
        parts.append(_stalls(report))
    if report.skipped:
        lines = [f"- not measured: {skipped.what}: {skipped.reason}" for skipped in report.skipped]
        parts.append("\n".join(lines))
    if report.pending:
        parts.append("\n".join(f"- no time for: {setting}" for setting in report.pending))
    if report.checks:
        parts.append(_targets(report))
    return "\n\n".join(parts) + "\n"


def _where(report: Report) -> str:
    about = report.metadata
    machine = about["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    return "\n".join(
        (
            f"- command: `{about['command']}`",
            f"- commit: `{about['commit']}`, {about['date']}",
            f"- machine: {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
            f"Linux {machine['kernel']}, load before the run {machine['load_before']}",
            f"- versions: {versions}",
        )
    )


def _latencies(rows: Sequence[Row]) -> list[str]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        title = f"{row.op} {row.dtype}, {row.ranks} ranks, {row.rails} rails, {row.state}"
        groups.setdefault(title, []).append(row)
    names = [f"{above} / {below}" for above, below in RATIOS]
    header = ("bytes", "peer", "p50 us", "p95 us", "p99 us", "Gbit/s", "CPU ns/B", *names)
    return [
        f"**{title}**\n\n" + _table(header, [_latency(row, group) for row in group])
        for title, group in groups.items()
    ]


def _latency(row: Row, rows: Sequence[Row]) -> list[str]:
    measured = ratios(row, rows) if row.impl == "r2ccl" else {}
    of_peers = [f"{above}/{below}" for above, below in RATIOS]
    return [
        format_size(row.bytes),
        Contender(row.impl, row.algorithm).label,
        *(f"{value:.1f}" for value in (row.p50_us, row.p95_us, row.p99_us)),
        f"{row.busbw_gbps:.2f}",
        cpu_cell(row),
        *(f"{measured[name]:.2f}" if name in measured else "" for name in of_peers),
    ]


def _resilience(report: Report) -> str:
    header = ("op", "ranks", "rails", "bytes", "on us", "off us", "on / off", "quartiles")
    cells = [
        [
            pair.op,
            str(pair.ranks),
            str(pair.rails),
            format_size(pair.bytes),
            f"{pair.on_p50_us:.2f}",
            f"{pair.off_p50_us:.2f}",
            f"{pair.ratio:.3f}",
            f"{pair.ratio_low:.3f} to {pair.ratio_high:.3f}",
        ]
        for pair in report.resilience
    ]
    return "**Resilience on against off, p50**\n\n" + _table(header, cells)


def _stalls(report: Report) -> str:
    header = ("fault", "bytes", "faults", "median ms", "worst ms", "no fault ms", "next", "worst")
    cells = [
        [
            summary.kind,
            format_size(summary.bytes),
            str(summary.faults),
            f"{summary.stall_ms_median:.2f}",
            f"{summary.stall_ms_worst:.2f}",
            f"{summary.undisturbed_ms_worst:.2f}",
            f"{summary.next_ratio_median:.2f}",
            f"{summary.next_ratio_worst:.2f}",
        ]
        for summary in stalls.summarise(report.faults)
    ]
    return "**Stall of the collective that a fault hit**\n\n" + _table(header, cells)


def _targets(report: Report) -> str:
    cells = [
        [
            check.target,
            f"{check.measured:.3g}",
            check.wanted,
            "met" if check.met else "**not reached**",
        ]
        for check in report.checks
    ]
    return "**Targets**\n\n" + _table(("target", "measured", "wanted", "verdict"), cells)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
