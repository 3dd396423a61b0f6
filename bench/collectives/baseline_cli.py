"""``r2serve bench baseline``: checks r2ccl's speed against committed ratios."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import click
from rich.console import Console

from r2serve.bench.collectives import baseline, machine
from r2serve.bench.collectives.cli import clean_up_when_terminated, progress_lines
from r2serve.bench.collectives.contenders import ContenderUnavailable
from r2serve.bench.collectives.control import NotSupported, WorkerError
from r2serve.bench.collectives.matrix import OptionError, parse_sizes


def _file(option: str, text: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option(
        option,
        type=click.Path(dir_okay=False, path_type=Path),
        is_flag=False,
        flag_value=str(baseline.COMMITTED),
        help=f"{text}  [default FILE: the committed baseline]",
        metavar="[FILE]",
    )


@click.command(name="baseline")
@_file("--check", "Compare with the baseline in FILE.")
@_file("--write", "Measure a baseline and write FILE.")
@click.option("--sizes", help="Only points of these sizes: 4KiB,64KiB.  [default: all]")
@click.option("--starts", default=3, show_default=True, type=click.IntRange(1, 100))
@click.option("--rounds", default=20, show_default=True, type=click.IntRange(1, 1000))
@click.option(
    "--seconds",
    default=0.5,
    show_default=True,
    help="Time measured for each contender, size and start, in seconds.",
)
def command(
    check: Path | None,
    write: Path | None,
    sizes: str | None,
    starts: int,
    rounds: int,
    seconds: float,
) -> None:
    """Check r2ccl's times, relative to other contenders, against committed ratios.

    The check fails if a ratio deviates by more than 15 % from the committed ratio. A faster ratio
    fails as well, because the baseline is then out of date. A file has a separate baseline for
    each processor model.
    """
    if (check is None) == (write is None):
        raise click.UsageError("give either --check or --write")
    try:
        committed = {} if check is None else baseline.read(check, machine.cpu_model())
        points = _chosen(sizes)
        effort = baseline.Effort(points, starts, rounds, seconds)
        clean_up_when_terminated()
        metadata = machine.describe(sys.argv[1:])
        measured = baseline.measure(effort, progress_lines())
        if write is not None:
            kept = ("commit", "machine", "date")
            baseline.write(write, measured, {name: metadata[name] for name in kept})
    except OptionError as error:
        raise click.UsageError(str(error)) from error
    except (baseline.BaselineError, ContenderUnavailable, WorkerError, NotSupported) as error:
        raise click.ClickException(str(error)) from error
    baseline.show(measured, committed, Console())
    if check is not None and (wrong := baseline.complaints(measured, committed)):
        raise click.ClickException("\n".join(["ratios outside the baseline's limits:", *wrong]))


def _chosen(sizes: str | None) -> tuple[baseline.Point, ...]:
    if sizes is None:
        return baseline.POINTS
    wanted = parse_sizes(sizes)
    points = tuple(point for point in baseline.POINTS if point.bytes in wanted)
    missing = set(wanted) - {point.bytes for point in points}
    if missing or not points:
        raise OptionError(f"--sizes: no point has {sorted(missing) or 'none'} bytes")
    return points
