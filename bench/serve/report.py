"""Reports of rows: a table on the terminal, an HTML page, a section of the documentation."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table

from r2serve.bench.collectives.markdown import MarkerError
from r2serve.bench.serve.compare import TargetResult

Row = Mapping[str, Any]

HEADER = (
    *("scenario", "contender", "sent", "lost", "wrong", "sent again", "TTFT p50 / p99"),
    *("TPOT p50 / p99", "E2E p50 / p99", "longest gap", "good/s", "sidecar agrees"),
)
BAD_COLUMNS = (3, 4)
WIDTH = 150
BEGIN = "<!-- results of r2serve bench serve: what follows is written by --docs -->"
END = "<!-- end of the results of r2serve bench serve -->"


def cells(row: Row) -> list[str]:
    """Returns the cells of a run, in the order of HEADER.

    A contender that did not run has only the cells for scenario and contender.
    """
    names = [str(row["scenario"]), str(row["contender"])]
    if "not_run" in row:
        return names
    requests, gap = row["requests"], row["longest_gap_ms"]
    return [
        *names,
        str(requests["sent"]),
        str(requests["failed"]),
        "?" if requests["wrong"] is None else str(requests["wrong"]),
        str(requests["sent_again"]),
        *(_percentiles(row, name) for name in ("ttft_ms", "tpot_ms", "e2e_ms")),
        "-" if gap is None else f"{gap:.0f}",
        f"{row['goodput_per_s']:.2f}",
        _agreement(row.get("impact", {})),
    ]


def _agreement(impact: Mapping[str, Any]) -> str:
    """Returns the number of requests with agreeing figures, and the clients' jitter."""
    waited, jitter = impact.get("requests"), impact.get("jitter_ms")
    if not waited:
        return "" if waited is None else "none waited"
    said = f"{impact['agree']} of {len(waited)}"
    return said if jitter is None else f"{said} (±{jitter:.0f} ms)"


def show(rows: Sequence[Row], verdicts: Sequence[TargetResult], notes: Sequence[str] = ()) -> None:
    """Prints a line per run, the reasons for missing runs, and the verdicts.

    The table has at least WIDTH columns, even on a narrower terminal or in a log.
    """
    console = Console()
    if console.width < WIDTH:
        console = Console(width=WIDTH)
    title = "requests, measured by clients; times in ms: p50 / p99"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in HEADER:
        side: Literal["left", "right"] = "left" if name in HEADER[:2] else "right"
        table.add_column(name.removesuffix(" p50 / p99"), justify=side, no_wrap=True)
    for row in rows:
        line = cells(row)
        table.add_row(*(line if len(line) == len(HEADER) else [*line, "not run"]))
    console.print(table)
    for row in rows:
        if "not_run" in row:
            said = f"{row['scenario']}, {row['contender']}: not run: {row['not_run']}"
            console.print(said, highlight=False, markup=False)
    for verdict in verdicts:
        console.print(_sentence(verdict), highlight=False)
    for note in notes:
        console.print(note, highlight=False, markup=False)


def write_page(
    rows: Sequence[Row],
    verdicts: Sequence[TargetResult],
    pictures: Mapping[str, Path],
    path: Path,
) -> None:
    """Writes a single HTML file with all pictures embedded."""
    import jinja2

    lines: list[dict[str, Any]] = []
    for row in rows:
        first = not lines or lines[-1]["cells"][0] != row["scenario"]
        lines.append({"cells": cells(row), "why": row.get("not_run"), "first": first})
    template = Path(__file__).with_name("page.html.j2").read_text(encoding="utf-8")
    text = (
        jinja2.Environment(autoescape=True)
        .from_string(template)
        .render(
            about=_about(rows[-1]),
            header=HEADER,
            bad=BAD_COLUMNS,
            lines=lines,
            verdicts=verdicts,
            pictures=[
                {"title": title, "data": base64.b64encode(picture.read_bytes()).decode("ascii")}
                for title, picture in pictures.items()
            ],
            serves=dict.fromkeys(
                (row["contender"], row["serves"]) for row in rows if "serves" in row
            ),
        )
    )
    path.write_text(text, encoding="utf-8")


def put(
    rows: Sequence[Row],
    others: Sequence[Row],
    verdicts: Sequence[TargetResult],
    pictures: Mapping[str, Path],
    page: Path,
    notes: Sequence[str] = (),
) -> None:
    """Replaces the text between the markers of ``page``. Raises MarkerError without markers.

    others: rows of other invocations; rows of another commit are marked as stale. notes: further
    results, a sentence each.
    """
    above, below = split(page)
    parts = [_where(rows[-1]), _table(rows)]
    missing = [row for row in rows if "not_run" in row]
    if missing:
        parts.append(
            "\n".join(
                f"- {row['scenario']}, {row['contender']}: not run: {row['not_run']}"
                for row in missing
            )
        )
    said = [*map(_sentence, verdicts), *notes]
    if said:
        parts.append("\n".join(f"- {each}" for each in said))
    for title, picture in pictures.items():
        parts.append(f"![{title}]({picture.name})")
    commit = rows[-1]["commit"]
    for command in dict.fromkeys((row["commit"], row["command"]) for row in others):
        theirs = [row for row in others if (row["commit"], row["command"]) == command]
        at = f"measured at commit `{command[0]}`, {theirs[-1]['date']}, by `{command[1]}`"
        which = f"Also {at}" if command[0] == commit else f"**Stale**: {at}"
        parts.append(f"{which}\n\n{_table(theirs)}")
    page.write_text("\n\n".join([above + BEGIN, *parts, END + below]), encoding="utf-8")


def split(page: Path) -> tuple[str, str]:
    """Returns the text before and after the markers. Raises MarkerError without markers."""
    text = page.read_text(encoding="utf-8")
    above, begin, rest = text.partition(BEGIN)
    _, end, below = rest.partition(END)
    if not begin or not end:
        raise MarkerError(f"{page} has no lines {BEGIN!r} and {END!r}")
    return above, below


def _table(rows: Sequence[Row]) -> str:
    lines = [HEADER, ["---"] * len(HEADER)]
    for row in rows:
        line = cells(row)
        not_run = [*line, "not run", *[""] * (len(HEADER) - len(line) - 1)]
        lines.append(line if len(line) == len(HEADER) else not_run)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _where(row: Row) -> str:
    return "\n".join(f"- {name}: {value}" for name, value in _about(row).items())


def _about(row: Row) -> dict[str, str]:
    machine = row["machine"]
    return {
        "command": f"`{row['command']}`",
        "commit": f"{row['commit']}, {row['date']}",
        "machine": f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"Linux {machine['kernel']}, load before the run {machine['load_before']}",
    }


def _sentence(verdict: TargetResult) -> str:
    return (
        f"{verdict.target}, {verdict.contender}: {verdict.ratio:.3f}, 95 % interval "
        f"{verdict.low:.3f} to {verdict.high:.3f}, wanted at most {verdict.limit:.2f}: "
        f"{verdict.said} ({verdict.pairs} pairs of {verdict.requests} requests)"
    )


def _percentiles(row: Row, name: str) -> str:
    found = row.get(name)
    return "-" if found is None else f"{found['p50']:.0f} / {found['p99']:.0f}"
