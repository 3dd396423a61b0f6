"""``r2serve bench netplugin``: measures the network plugin for NCCL against its targets."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from r2serve.bench.collectives import machine
from r2serve.bench.netplugin import targets
from r2serve.bench.netplugin.targets import Point, PointError
from r2serve.terminal import result_option

PROGRAM = Path(__file__).resolve().parents[2] / "build" / "native-plain" / "net_bench"
"""Built by `make bench-netplugin` in a checkout."""


@click.command(name="netplugin")
@click.option(
    "--rounds",
    type=click.IntRange(min=10),
    default=5000,
    show_default=True,
    help="Round trips of each size; a tenth of them for the bandwidth.",
)
@click.option(
    "--faults",
    type=click.IntRange(min=1),
    default=100,
    show_default=True,
    help="Faults of each kind.",
)
@click.option(
    "--program",
    type=click.Path(dir_okay=False, path_type=Path),
    default=PROGRAM,
    help="The measuring program. Default: build/native-plain/net_bench of the checkout.",
)
@result_option("--json", "json_path", help="Append the machine, and a line per point.")
def command(rounds: int, faults: int, program: Path, json_path: Path | None) -> None:
    """Measure the network plugin beside a raw socket, on loopback rails of this machine.

    Prints a line of JSON per point. Points: one way and bandwidth beside the raw socket, a test
    with nothing new, 512 connections, stalls at faults. Needs a quiet machine. The status is 1 if a
    target is missed: one way of 8 B to 64 KiB within 1.25 times the socket and 1 us, 0.9 of its
    bandwidth at 1 MiB, stalls of at most 10 ms (carrier loss) and 50 ms (black hole) in p99.
    """
    metadata = machine.describe(sys.argv[1:])
    points: list[Point] = []
    try:
        for point in measured(program, rounds, faults):
            click.echo(json.dumps(point))
            points.append(point)
        targets.check_complete(points)
    except PointError as error:
        raise click.ClickException(str(error)) from error
    if json_path is not None:
        with json_path.open("a", encoding="utf-8") as file:
            for row in ({"metadata": metadata}, *points):
                file.write(json.dumps(row) + "\n")
    missed = [f"{targets.key(point)}: {each}" for point in points for each in point["misses"]]
    if missed:
        raise click.ClickException("\n".join(["missed targets:", *missed]))


def measured(program: Path, rounds: int, faults: int) -> Iterator[Point]:
    """Runs the program, and yields each point once it is measured.

    Raises:
        PointError: the program cannot be started, has failed, or printed a line that is no point.
    """
    try:
        process = subprocess.Popen(
            [str(program), str(rounds), str(faults)], stdout=subprocess.PIPE, text=True
        )
    except OSError as error:
        raise PointError(
            f"--program {program}: {error.strerror}; build it by `make bench-netplugin` in a "
            "checkout of r2serve"
        ) from error
    with process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                yield targets.judged(line)
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        raise PointError(f"{program.name} ended with status {process.returncode}")
