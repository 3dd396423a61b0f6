"""``r2serve bench``: the command group that the command line attaches lazily."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

import click
from rich.console import Console

from r2serve.bench.collectives import (
    distributions,
    machine,
    markdown,
    report,
    resilience,
    runner,
    stalls,
    verdict,
)
from r2serve.bench.collectives.control import NotSupported, WorkerError
from r2serve.bench.collectives.matrix import (
    ALGORITHMS,
    DEFAULT_SIZES,
    DTYPE_BYTES,
    IMPLS,
    OPS,
    OptionError,
    Options,
    parse_sizes,
)
from r2serve.bench.collectives.native.build import BuildError
from r2serve.bench.collectives.strikes import FaultError
from r2serve.bench.observers import costs
from r2serve.cli.main import LazyCommand, LazyGroup
from r2serve.drills.lab import LabUnavailableError


def _one_of(known: Iterable[str], default: str | None = None) -> str:
    names = list(known)
    return f"{', '.join(names)}.  [default: {default or names[0]}]"


LAZY = {
    "serve": LazyCommand(
        "r2serve.bench.serve.cli", "Measure what a rail's loss costs requests.", "demo"
    ),
    "kernels": LazyCommand(
        "r2serve.bench.kernels.cli", "Measure the Triton kernels, on a GPU.", "kernels", "kernels"
    ),
}


@click.group(name="bench", cls=LazyGroup, lazy=LAZY)
def command() -> None:
    """Measure r2serve against its peers."""


@command.command()
@click.option("--op", "ops", multiple=True, default=("all_reduce",), help=_one_of(OPS))
@click.option("--ranks", multiple=True, type=int, default=(2,), help="Processes.  [default: 2]")
@click.option(
    "--rails", multiple=True, type=int, default=(2,), help="Loopback rails.  [default: 2]"
)
@click.option("--sizes", default=DEFAULT_SIZES, show_default=True, help="Bytes per rank.")
@click.option(
    "--dtype", "dtypes", multiple=True, default=("float32",), help=_one_of(DTYPE_BYTES, "float32")
)
@click.option(
    "--algorithm", "algorithms", multiple=True, default=("auto",), help=_one_of(ALGORITHMS)
)
@click.option("--impl", "impls", multiple=True, default=IMPLS, help=_one_of(IMPLS, "all"))
@click.option(
    "--seconds", default=1.0, show_default=True, help="Time measured a point and implementation."
)
@click.option("--rounds", default=5, show_default=True, help="Turns that they take at a point.")
@click.option("--iterations", type=int, help="Calls measured a point, instead of --seconds.")
@click.option("--resilience-compare", is_flag=True, help="Also r2ccl with resilience on and off.")
@click.option(
    "--stalls",
    "faults_each",
    type=click.IntRange(min=0),
    default=0,
    help="Also this many real faults of each kind and size, in network namespaces.",
)
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--png", "png_path", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--docs",
    "docs_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Put the results into this Markdown file, in place of the last ones.",
)
def collectives(
    ops: tuple[str, ...],
    ranks: tuple[int, ...],
    rails: tuple[int, ...],
    sizes: str,
    dtypes: tuple[str, ...],
    algorithms: tuple[str, ...],
    impls: tuple[str, ...],
    seconds: float,
    rounds: int,
    iterations: int | None,
    resilience_compare: bool,
    faults_each: int,
    json_path: Path | None,
    png_path: Path | None,
    docs_path: Path | None,
) -> None:
    """Latency and bandwidth of collectives over loopback rails, r2ccl beside its peers.

    Options of the matrix (--op, --ranks, --rails, --dtype, --algorithm, --impl) may be repeated.
    """
    try:
        options = Options(
            ops=ops,
            sizes=parse_sizes(sizes),
            dtypes=dtypes,
            ranks=ranks,
            rails=rails,
            impls=impls,
            algorithms=algorithms,
            seconds=seconds,
            rounds=rounds,
            iterations=iterations,
        )
        if docs_path is not None:
            markdown.require_place(docs_path)  # before minutes of measuring, not after
    except (OptionError, markdown.MarkerError) as error:
        raise click.UsageError(str(error)) from error
    _clean_up_when_terminated()
    result = report.Report(machine.describe(sys.argv[1:]))
    progress = _progress()
    try:
        measured = runner.run(options, progress)
        result.rows, result.skipped = measured.rows, measured.skipped
        if resilience_compare:
            for setting in options.settings():
                result.resilience += resilience.compare(options, setting, progress)
        if faults_each:
            result.faults = stalls.run(faults_each, progress)
    except (WorkerError, NotSupported, FaultError, LabUnavailableError) as error:
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


@command.command(name="stalls")
@click.option(
    "--faults",
    type=click.IntRange(min=0),
    default=200,
    show_default=True,
    help="Real faults of each kind under r2ccl, half of them at each size.",
)
@click.option(
    "--mptcp",
    "of_mptcp",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    help="The same under MPTCP; each of them takes seconds.",
)
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    type=click.Choice(distributions.KINDS),
    help="Only faults of this kind; may be repeated.  [default: all]",
)
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path))
def stall_distributions(
    faults: int, of_mptcp: int, kinds: tuple[str, ...], json_path: Path | None
) -> None:
    """How long all_reduces of 16 KiB and 1 MiB stall at real faults, beside none and MPTCP.

    Two nodes with two rails in network namespaces. The faults are a port that loses its carrier,
    the peer's port that does, and a switch that drops everything with all carriers up.
    """
    if not faults and not of_mptcp:
        raise click.UsageError("--faults and --mptcp are both 0: there is nothing to measure")
    _clean_up_when_terminated()
    metadata = machine.describe(sys.argv[1:])
    try:
        measured = distributions.run(faults, of_mptcp, _progress(), kinds or distributions.KINDS)
    except (WorkerError, NotSupported, FaultError, LabUnavailableError) as error:
        raise click.ClickException(str(error)) from error
    distributions.show(measured, Console())
    if json_path is not None:
        text = json.dumps(distributions.as_json(measured, metadata), indent=1) + "\n"
        json_path.write_text(text, encoding="utf-8")


@command.command(name="observers")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path))
def observer_costs(json_path: Path | None) -> None:
    """What it costs to be observed: the journal, attribution and the sidecar."""
    _clean_up_when_terminated()
    metadata = machine.describe(sys.argv[1:])
    try:
        measured = costs.run(_progress())
    except BuildError as error:
        raise click.ClickException(str(error)) from error
    costs.show(measured, Console())
    if json_path is not None:
        text = json.dumps({"metadata": metadata, **measured}, indent=1) + "\n"
        json_path.write_text(text, encoding="utf-8")


def _clean_up_when_terminated() -> None:
    """As Ctrl-C: workers are ended and their files removed on the way out."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def _progress() -> runner.Progress:
    """Lines, not a spinner: a thread that redraws would take the ranks' cores."""
    return Console(stderr=True, log_path=False).log
