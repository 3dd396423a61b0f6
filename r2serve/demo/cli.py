"""`r2serve demo`: the command line of the demo."""

from __future__ import annotations

from pathlib import Path

import click

from r2serve.cli.main import LazyCommand, LazyGroup
from r2serve.demo.flow import DemoOptions, run_demo
from r2serve.demo.report import render
from r2serve.lab.serving.serve import ENGINES
from r2serve.lab.serving.terminal import report_and_exit
from r2serve.terminal import result_option

_LAZY = {
    "hour": LazyCommand("r2serve.demo.hour.cli", "Serve a model through an hour of faults.", "vllm")
}


@click.group(name="demo", cls=LazyGroup, lazy=_LAZY, invoke_without_command=True)
@click.pass_context
@result_option("--json", "json_path", help="Write the report here.")
@click.option("--baseline", is_flag=True, help="Also run the engine's stock communicator.")
@click.option(
    "--requests", type=click.IntRange(1, 64), default=8, show_default=True, help="Parallel streams."
)
@click.option(
    "--tokens",
    type=click.IntRange(0, 16000),
    default=0,
    help="Tokens per request; 0 = enough for the duration of the faults.",
)
@click.option(
    "--keep-logs", type=click.Path(file_okay=False, path_type=Path), help="Copy the logs here."
)
@click.option(
    "--namespaces/--no-namespaces",
    default=True,
    help="Run nodes in network namespaces, or both on this machine with faults in the engine.",
)
@click.option(
    "--gpu",
    is_flag=True,
    help="Run both nodes on the first GPU, a server per node; implies --no-namespaces.",
)
@click.option(
    "--servers",
    type=click.IntRange(1, 2),
    default=1,
    show_default=True,
    help="Number of servers for the two nodes; 2 needs --no-namespaces.",
)
@click.option(
    "--engine",
    type=click.Choice(list(ENGINES)),
    default="vllm",
    show_default=True,
    help="The engine to serve with.",
)
def command(
    context: click.Context,
    json_path: Path | None,
    baseline: bool,
    requests: int,
    tokens: int,
    keep_logs: Path | None,
    namespaces: bool,
    gpu: bool,
    servers: int,
    engine: str,
) -> None:
    """Serve a tiny model over two nodes and fail NICs during decoding.

    Streams greedy requests without faults, then again while a rail loses the carrier, the other
    rail becomes a black hole, and the management NIC loses the carrier. Exit status 0 only if no
    request is lost, all tokens are equal, and tokens come without the management NIC.
    """
    if context.invoked_subcommand is not None:
        return
    if gpu and engine != "vllm":
        raise click.UsageError(f"--gpu: --engine is {engine}: must be vllm")
    options = DemoOptions(
        requests=requests,
        tokens=tokens,
        baseline=baseline,
        namespaces=namespaces and not gpu,
        servers=2 if gpu else servers,
        gpu=gpu,
        keep_logs=keep_logs,
        engine=engine,
    )
    report_and_exit(lambda progress: run_demo(options, progress), render, json_path)
