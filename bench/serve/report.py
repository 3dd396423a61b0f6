"""The closing table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table


def _percentiles(row: Mapping[str, Any], name: str) -> str:
    found = row.get(name)
    return "-" if found is None else f"{found['p50']:.0f} / {found['p99']:.0f}"


def show(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """A line a run, and why what did not run did not."""
    table = Table(
        title="requests, as clients saw them; times in ms: p50 / p99", title_justify="left"
    )
    for name in ("scenario", "contender"):
        table.add_column(name, no_wrap=True)
    for name in ("sent", "lost", "wrong", "TTFT", "TPOT", "E2E", "longest gap", "good/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        if "not_run" in row:
            table.add_row(row["scenario"], row["contender"], "not run", *[""] * 7)
            continue
        requests = row["requests"]
        gap = row["longest_gap_ms"]
        table.add_row(
            row["scenario"],
            row["contender"],
            str(requests["sent"]),
            str(requests["failed"]),
            "?" if requests["wrong"] is None else str(requests["wrong"]),
            _percentiles(row, "ttft_ms"),
            _percentiles(row, "tpot_ms"),
            _percentiles(row, "e2e_ms"),
            "-" if gap is None else f"{gap:.0f}",
            f"{row['goodput_per_s']:.2f}",
        )
    console.print(table)
    for row in rows:
        if "not_run" in row:
            console.print(
                f"{row['scenario']}, {row['contender']}: not run: {row['not_run']}", highlight=False
            )
