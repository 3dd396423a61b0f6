"""``r2serve bench collectives``: measures the matrix of collectives."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from r2serve.bench.collectives import (
    machine,
    markdown,
    report,
    resilience,
    resume,
    runner,
    stalls,
    verdict,
)
from r2serve.bench.collectives.control import NotSupported, WorkerError
from r2serve.bench.collectives.matrix import (
    ALGORITHMS,
    ALL,
    DEFAULT_SIZES,
    DTYPE_BYTES,
    IMPLS,
    OPS,
    STATES,
    MatrixOptions,
    OptionError,
    parse_counts,
    parse_ops,
    parse_sizes,
)
from r2serve.bench.collectives.strikes import StrikeError
from r2serve.lab.holder import LabUnavailableError
from r2serve.terminal import result_option

# Defaults of options: DEFAULTS without --full, FULL with --full.
DEFAULTS: dict[str, Any] = {
    "ops": ("all_reduce",),
    "ranks": ("2",),
    "rails": ("2",),
    "sizes": DEFAULT_SIZES,
    "algorithms": ("auto",),
    "states": ("healthy",),
    "seconds": 1.0,
    "rounds": 5,
}
FULL: dict[str, Any] = {
    "ops": (ALL,),
    "ranks": ("2..8",),
    "rails": ("3",),  # the state two-lost needs three rails
    "sizes": "1KiB,64KiB,1MiB",
    "algorithms": ALGORITHMS,
    "states": tuple(STATES),
    "seconds": 0.1,
    "rounds": 3,
}


def one_of(known: Iterable[str], default: str | None = None) -> str:
    """Returns the help text of an option with a fixed set of names."""
    names = list(known)
    return f"{', '.join(names)}.  [default: {default or names[0]}]"


def clean_up_when_terminated() -> None:
    """Makes SIGTERM end the workers and remove their files, like Ctrl-C."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def progress_lines() -> runner.Progress:
    """Returns a logger of progress lines.

    A spinner is not used: the redrawing thread would take CPU time from the ranks.
    """
    return Console(stderr=True, log_path=False).log


@click.command()
@click.option("--op", "ops", multiple=True, help=one_of((ALL, *OPS), "all_reduce"))
@click.option("--ranks", multiple=True, help="Processes: 2, 2,4 or 2..8.  [default: 2]")
@click.option("--rails", multiple=True, help="Loopback rails: 2, 2,3 or 1..3.  [default: 2]")
@click.option("--sizes", help=f"Bytes per rank.  [default: {DEFAULT_SIZES}]")
@click.option(
    "--dtype", "dtypes", multiple=True, default=("float32",), help=one_of(DTYPE_BYTES, "float32")
)
@click.option("--algorithm", "algorithms", multiple=True, help=one_of(ALGORITHMS))
@click.option("--state", "states", multiple=True, help=one_of(STATES))
@click.option("--impl", "impls", multiple=True, default=IMPLS, help=one_of(IMPLS, "all"))
@click.option(
    "--seconds", type=float, help="Seconds measured per point and implementation.  [default: 1]"
)
@click.option("--rounds", type=int, help="Turns per point and implementation.  [default: 5]")
@click.option("--iterations", type=int, help="Calls measured per point, instead of --seconds.")
@click.option(
    "--full",
    is_flag=True,
    help="Change the defaults: all ops, algorithms and states, 2 to 8 ranks, 3 rails, 3 sizes, "
    "0.1 s, 3 rounds.",
)
@click.option(
    "--minutes",
    type=click.FloatRange(min=0, min_open=True),
    help="Start no setting (ranks, rails, state) after this number of minutes.  "
    "[default: no limit]",
)
@click.option("--resume", "go_on", is_flag=True, help="Continue the matrix in the --json file.")
@click.option(
    "--resilience-compare", is_flag=True, help="Also compare r2ccl with resilience on and off."
)
@click.option(
    "--stalls",
    "faults_each",
    type=click.IntRange(min=0),
    default=0,
    help="Also measure stalls of real faults, this number per kind and size, in network "
    "namespaces.",
)
@result_option("--json", "json_path")
@click.option("--png", "png_path", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--docs",
    "docs_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Write the results into this Markdown file, in place of earlier results.",
)
def collectives(
    dtypes: tuple[str, ...],
    impls: tuple[str, ...],
    iterations: int | None,
    full: bool,
    minutes: float | None,
    go_on: bool,
    resilience_compare: bool,
    faults_each: int,
    json_path: Path | None,
    png_path: Path | None,
    docs_path: Path | None,
    **given: Any,
) -> None:
    """Measure latency, bandwidth and CPU time of collectives on loopback rails.

    r2ccl is measured beside gloo, Open MPI, MPICH and the raw floor. Options of the matrix (--op,
    --ranks, --rails, --dtype, --algorithm, --state, --impl) may be repeated. The report ends with
    a list of combinations not measured, with the reasons.
    """
    clean_up_when_terminated()
    progress = progress_lines()
    result = report.CollectivesReport(machine.describe(sys.argv[1:]))
    try:
        options = choose(FULL if full else DEFAULTS, given, dtypes, impls, iterations)
        if docs_path is not None:
            markdown.require_place(docs_path)  # fail before minutes of measuring, not after
        if go_on and json_path is None:
            raise OptionError("--resume needs --json: the file to continue")
        done = resume.resume(json_path, options, result, progress) if go_on and json_path else []
    except (OptionError, markdown.MarkerError) as error:
        raise click.UsageError(str(error)) from error
    try:
        resume.measure(options, result, done, progress, json_path, minutes)
        if resilience_compare:
            for setting in options.settings():
                if setting.state == "healthy":
                    result.resilience += resilience.compare(options, setting, progress)
        if faults_each:
            result.faults = stalls.run(faults_each, progress)
    except (WorkerError, NotSupported, StrikeError, LabUnavailableError) as error:
        raise click.ClickException(str(error)) from error
    result.checks = verdict.verdicts(
        result.rows, result.resilience, stalls.summarise(result.faults)
    )
    report.show(result, Console())
    if json_path is not None:
        result.write_json(json_path)
    if png_path is not None:
        report.write_png(result.rows, png_path)
    if docs_path is not None:
        markdown.put(result, docs_path)


def choose(
    defaults: dict[str, Any],
    given: dict[str, Any],
    dtypes: tuple[str, ...] = ("float32",),
    impls: tuple[str, ...] = IMPLS,
    iterations: int | None = None,
) -> MatrixOptions:
    """Returns the options of a run: ``given`` options, else ``defaults``. Raises OptionError."""
    chosen = {
        name: default if given.get(name) in (None, ()) else given[name]
        for name, default in defaults.items()
    }
    return MatrixOptions(
        ops=parse_ops(chosen["ops"]),
        sizes=parse_sizes(chosen["sizes"]),
        dtypes=dtypes,
        ranks=parse_counts("--ranks", chosen["ranks"]),
        rails=parse_counts("--rails", chosen["rails"]),
        impls=impls,
        algorithms=chosen["algorithms"],
        states=chosen["states"],
        seconds=chosen["seconds"],
        rounds=chosen["rounds"],
        iterations=iterations,
    )
