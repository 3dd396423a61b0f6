"""``r2serve bench``: the command group that the command line attaches lazily."""

from __future__ import annotations

import click

from r2serve.bench.collectives.baseline_cli import command as baseline
from r2serve.bench.collectives.cli import collectives
from r2serve.bench.collectives.stalls_cli import command as stalls
from r2serve.bench.flood.cli import command as flood
from r2serve.bench.netplugin.cli import command as netplugin
from r2serve.bench.observers.cli import command as observers
from r2serve.cli.main import LazyCommand, LazyGroup

LAZY = {
    "serve": LazyCommand(
        "r2serve.bench.serve.cli", "Measure the cost of rail faults to requests.", "vllm"
    ),
    "control": LazyCommand(
        "r2serve.bench.control.cli", "Measure relays without an engine.", "vllm"
    ),
    "kernels": LazyCommand(
        "r2serve.bench.kernels.cli", "Measure the Triton kernels on a GPU.", "kernels", "kernels"
    ),
}


@click.group(name="bench", cls=LazyGroup, lazy=LAZY)
def command() -> None:
    """Measure r2serve beside other communication libraries."""


command.add_command(collectives)
command.add_command(baseline)
command.add_command(stalls)
command.add_command(observers)
command.add_command(flood)
command.add_command(netplugin)
