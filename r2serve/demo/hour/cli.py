"""`r2serve demo hour`: the command line of the hour."""

from __future__ import annotations

from pathlib import Path

import click

from r2serve.demo.hour.report import render
from r2serve.demo.hour.run import HourOptions, run_hour
from r2serve.lab.schedule import HOUR_S, ScheduleError
from r2serve.lab.serving.terminal import report_and_exit
from r2serve.terminal import result_option


@click.command(name="hour")
@click.option(
    "--tensor-parallel-size",
    "tensor_parallel",
    type=click.Choice(["2", "4"]),
    default="2",
    show_default=True,
    help="Number of ranks, half on each node.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(1, HOUR_S),
    default=HOUR_S,
    show_default=True,
    help="Length of the played part, in seconds; the hour is compressed 12:1 into 300 s.",
)
@click.option(
    "--streams", type=click.IntRange(1, 64), default=8, show_default=True, help="Parallel requests."
)
@click.option("--seed", default=0, show_default=True, help="Seed of the schedule.")
@click.option(
    "--rails", type=click.IntRange(2, 8), default=2, show_default=True, help="Rails per node."
)
@click.option(
    "--fallback/--no-fallback",
    default=True,
    show_default=True,
    help="Use the management NIC while no rail is left.",
)
@result_option("--json", "json_path", help="Write the report here.")
@click.option(
    "--keep-logs", type=click.Path(file_okay=False, path_type=Path), help="Copy the logs here."
)
def command(
    tensor_parallel: str,
    seconds: float,
    streams: int,
    seed: int,
    rails: int,
    fallback: bool,
    json_path: Path | None,
    keep_logs: Path | None,
) -> None:
    """Serve a model through an hour of faults, compressed into 5 minutes.

    Two nodes in network namespaces serve a tiny model. Streams of greedy requests run throughout;
    each request is compared token by token with a run without faults. Exit status 0 only if no
    request is lost, no token is wrong, all rails rejoin, and workers notice each lost rail.
    """
    options = HourOptions(
        tensor_parallel=int(tensor_parallel),
        seconds=seconds,
        streams=streams,
        seed=seed,
        rails=rails,
        fallback=fallback,
        keep_logs=keep_logs,
    )
    try:
        report_and_exit(lambda progress: run_hour(options, progress), render, json_path)
    except ScheduleError as error:
        raise click.ClickException(str(error)) from error
