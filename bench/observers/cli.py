"""``r2serve bench observers``: measures the cost of observation."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
from rich.console import Console

from r2serve.bench.collectives import machine
from r2serve.bench.collectives.cli import clean_up_when_terminated, progress_lines
from r2serve.bench.collectives.native.build import BuildError
from r2serve.bench.observers import costs
from r2serve.terminal import result_option


@click.command(name="observers")
@result_option("--json", "json_path")
def command(json_path: Path | None) -> None:
    """Measure the cost of observation: the journal, attribution and the sidecar."""
    clean_up_when_terminated()
    metadata = machine.describe(sys.argv[1:])
    try:
        measured = costs.run(progress_lines())
    except BuildError as error:
        raise click.ClickException(str(error)) from error
    costs.show(measured, Console())
    if json_path is not None:
        text = json.dumps({"metadata": metadata, **measured}, indent=1) + "\n"
        json_path.write_text(text, encoding="utf-8")
