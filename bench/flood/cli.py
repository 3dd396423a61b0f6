"""``r2serve bench flood``: measures what a flood of connections costs collectives."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console

from r2serve.bench.collectives import machine
from r2serve.bench.collectives.cli import clean_up_when_terminated, progress_lines
from r2serve.bench.flood import measure
from r2serve.terminal import result_option


@click.command(name="flood")
@click.option(
    "--slices",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    help="Pairs of slices of each kind of flood.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.1),
    default=10.0,
    show_default=True,
    help="Length of a slice.",
)
@result_option("--json", "json_path")
def command(slices: int, seconds: float, json_path: Path | None) -> None:
    """Measure all-reduces under a flood at ports of rails, beside a flood at another port.

    Both floods run in turns on loopback. Silent connections are one kind, connections with eight
    bytes of garbage the other. The status is 1 if p50 is beyond 1.10 times, p99 beyond 2 times, or
    the log has more than one line in 10 s.
    """
    clean_up_when_terminated()
    metadata = machine.describe(sys.argv[1:])
    try:
        pairs = measure.run(progress_lines(), slices, seconds)
    except measure.FloodError as error:
        raise click.ClickException(str(error)) from error
    rows = measure.summary(pairs, seconds)
    measure.show(rows, Console())
    if json_path is not None:
        result = {"metadata": metadata, "summary": rows, "pairs": [asdict(pair) for pair in pairs]}
        json_path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if not all(row["met"] for row in rows):
        raise SystemExit(1)
