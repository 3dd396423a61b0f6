"""Writes results into a section of a Markdown page; no number in the docs is typed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from r2serve.bench.collectives import stalls
from r2serve.bench.collectives.columns import on_page
from r2serve.bench.collectives.report import (
    RESILIENCE,
    STALLS,
    TARGETS,
    CollectivesReport,
    latency_columns,
    latency_groups,
)
from r2serve.bench.collectives.statistics import LatencyRow

MARKER = "<!-- results of r2serve bench collectives: everything below is written by --docs -->"


class MarkerError(ValueError):
    """The page has no marker line for results."""


def put(report: CollectivesReport, page: Path) -> None:
    """Replaces all text below the marker line of ``page`` by the results.

    Raises MarkerError when ``page`` has no marker line.
    """
    require_place(page)
    above = page.read_text(encoding="utf-8").partition(MARKER)[0]
    page.write_text(above + MARKER + "\n\n" + section(report), encoding="utf-8")


def require_place(page: Path) -> None:
    """Raises MarkerError when ``page`` has no marker line."""
    if MARKER not in page.read_text(encoding="utf-8"):
        raise MarkerError(f"{page} has no line {MARKER!r}")


def section(report: CollectivesReport) -> str:
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


def _where(report: CollectivesReport) -> str:
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


def _latencies(rows: Sequence[LatencyRow]) -> list[str]:
    return [
        f"**{title}**\n\n" + on_page(latency_columns(group), group)
        for title, group in latency_groups(rows).items()
    ]


def _resilience(report: CollectivesReport) -> str:
    return "**Resilience on against off, p50**\n\n" + on_page(RESILIENCE, report.resilience)


def _stalls(report: CollectivesReport) -> str:
    table = on_page(STALLS, stalls.summarise(report.faults))
    return f"**Stall of the collective affected by a fault**\n\n{table}"


def _targets(report: CollectivesReport) -> str:
    return "**Targets**\n\n" + on_page(TARGETS, report.checks)
