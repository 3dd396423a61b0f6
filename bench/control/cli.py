"""``r2serve bench control``: measures relays in a lab, without an engine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from r2serve.bench.collectives import machine
from r2serve.bench.collectives.cli import clean_up_when_terminated, progress_lines
from r2serve.bench.control import costs, grid, outages
from r2serve.bench.control.jobs import REAL_TIME, ControlError, check_requirements
from r2serve.lab import lab as labs
from r2serve.lab.holder import LabCommandError, LabUnavailableError
from r2serve.lab.kinds import KINDS
from r2serve.lab.serving import workdir
from r2serve.terminal import result_option

Measure = Callable[[Path, Callable[[str], None]], dict[str, Any]]

PARTS = ("grid", "away", "lost", "stopped-relay", "killed-relay", "killed-worker", "idle", "groups")
OF_EACH_NICS = ("grid", "idle")


@click.command(name="control")
@click.option(
    "--part",
    "parts",
    multiple=True,
    type=click.Choice(PARTS),
    default=PARTS,
    help="Measurement; may be repeated.  [default: all]",
)
@click.option(
    "--nics",
    multiple=True,
    type=click.IntRange(3, 16),
    default=(3, 5),
    show_default=True,
    help="NICs of a node, the management NIC included, for grid and idle; may be repeated.",
)
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    type=click.Choice(list(KINDS)),
    default=grid.KINDS,
    help=f"Fault of the grid; may be repeated.  [default: {', '.join(grid.KINDS)}]",
)
@click.option(
    "--idle-s",
    type=click.FloatRange(min=1),
    default=60.0,
    show_default=True,
    help="Seconds of the measurement of idle relays.",
)
@click.option(
    "--real-time/--no-real-time",
    default=None,
    help="Run the jobs of the grid with real-time priority, so that other load does not count. "
    "[default: if this user may]",
)
@result_option("--json", "json_path", help="Append a line per measurement.")
def command(
    parts: tuple[str, ...],
    nics: tuple[int, ...],
    kinds: tuple[str, ...],
    idle_s: float,
    real_time: bool | None,
    json_path: Path | None,
) -> None:
    """Measure what relays do for connections of a job: ZMQ, gloo and a TCP store.

    Two nodes are network namespaces with several NICs each. grid: round trips through each fault
    and each second fault, beside direct connections. away, lost: all NICs of a node are away for
    8 s, or for good. stopped-relay, killed-relay, killed-worker: a process is stopped for 5 s, or
    killed. idle: CPU time and memory of idle relays. groups: 200 new gloo groups in a row without
    the management NIC.
    """
    clean_up_when_terminated()
    about = machine.describe(sys.argv[1:])
    watch = progress_lines()
    privileged = may_have_real_time() if real_time is None else real_time
    measures: dict[str, Measure] = {
        "away": outages.away,
        "lost": outages.lost,
        "stopped-relay": outages.stopped_relay,
        "killed-relay": outages.killed_relay,
        "killed-worker": outages.killed_worker,
        "groups": costs.groups,
    }
    plan: list[tuple[str, Measure]] = []
    for part in parts:
        for count in nics if part in OF_EACH_NICS else ():
            measure: Measure = partial(costs.idle, count, idle_s)
            if part == "grid":
                measure = partial(grid.measure, count, kinds, real_time=privileged)
            plan.append((part, measure))
        plan += [(part, measures[part])] if part in measures else []
    try:
        check_requirements()
        labs.sweep()
        workdir.sweep()
        for part, measure in plan:
            _take(part, measure, about, watch, json_path)
    except (ControlError, LabUnavailableError, LabCommandError) as error:
        raise click.ClickException(str(error)) from error


def may_have_real_time() -> bool:
    """Whether this user may start programs with real-time priority."""
    try:
        done = subprocess.run([*REAL_TIME, "true"], capture_output=True, check=False)
    except FileNotFoundError:
        return False
    return done.returncode == 0


def _take(
    part: str,
    measure: Measure,
    about: dict[str, Any],
    watch: Callable[[str], None],
    json_path: Path | None,
) -> None:
    watch(f"== {part}")
    with workdir.work_directory() as work:
        found = measure(work / part, watch)
    row = {"part": part, **found, **about}
    # A key with `met` tells whether a limit is kept; the row has the measured value beside it.
    for name, value in found.items():
        if name.endswith("met"):
            click.echo(f"{part}: {name}: {json.dumps(value)}")
    if json_path is not None:
        with json_path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
