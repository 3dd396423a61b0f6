"""``r2serve sim``: runs the production state machine in simulated time, with random faults."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import click

from r2serve.sim import campaign, mutants
from r2serve.terminal import result_option

MUTANT_SEEDS = 10_000
"""Default number of seeds within which a planted bug must be caught."""

SOUND_SEEDS = 300
"""Number of seeds that the same build must pass without a planted bug."""

_SHOWN_FAILURES = 10
LAST_SEED = 2**62
"""The core takes seeds of 64 bits; no campaign counts from here to their end."""


@click.command()
@click.option(
    "--seed",
    type=click.IntRange(0, LAST_SEED),
    default=0,
    show_default=True,
    help="First seed.",
)
@click.option(
    "--seeds",
    type=click.IntRange(1),
    help="Number of seeds. [default: 1; with --mutants at most 10000 per bug]",
)
@click.option("--trace", is_flag=True, help="Print every step; runs seeds one after another.")
@click.option(
    "--jobs", type=click.IntRange(1), help="Number of processes. [default: number of processors]"
)
@click.option(
    "--mutants",
    "with_mutants",
    is_flag=True,
    help="Compile planted bugs into the core, and check that an invariant catches each bug.",
)
@click.option(
    "--likely",
    "likely_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="With --mutants: seeds to try first, a file written by an earlier --json.",
)
@result_option("--json", "json_file")
def command(
    seed: int,
    seeds: int | None,
    trace: bool,
    jobs: int | None,
    with_mutants: bool,
    likely_file: Path | None,
    json_file: Path | None,
) -> None:
    """Run whole jobs in simulated time with random faults, and check invariants at every step.

    A seed determines a job of 2 to 16 ranks over 1 to 8 rails with several communicators, and the
    faults of the job. Exit status 0 only if no invariant broke and, from 100 seeds on, every kind
    of fault and every mechanism (replays, hedges, fences, …) occurred. The last line has counts.
    """
    if likely_file is not None and not with_mutants:
        raise click.UsageError("--likely: has a meaning only with --mutants")
    if with_mutants:
        ok = _mutants(seed, seeds or MUTANT_SEEDS, _seeds_of(likely_file), json_file)
    else:
        ok = _seeds(seed, seeds or 1, trace, jobs, json_file)
    sys.exit(0 if ok else 1)


def _seeds(first: int, count: int, trace: bool, jobs: int | None, json_file: Path | None) -> bool:
    totals = campaign.Totals()
    results = campaign.trace(first, count) if trace else campaign.run(first, count, jobs)
    progress = sys.stderr.isatty()
    for result in results:
        totals.add(result)
        if result["violations"] and len(totals.failures) <= _SHOWN_FAILURES:
            _show(totals.failures[-1])
        if progress and totals.seeds % 100 == 0:
            click.echo(f"\r{totals.seeds} of {count} seeds", err=True, nl=False)
    if progress:
        click.echo("\r\033[K", err=True, nl=False)
    if len(totals.failures) > _SHOWN_FAILURES:
        click.echo(f"… and {len(totals.failures) - _SHOWN_FAILURES} more seeds failed")
    for name in totals.idle():
        click.echo(f"never occurred in {count} seeds: {name}")
    if json_file is not None:
        json_file.write_text(json.dumps(totals.as_json(), indent=1) + "\n")
    click.echo(totals.summary())
    return not totals.failures and not totals.idle()


def _show(failure: campaign.Failure) -> None:
    click.echo(f"seed {failure.seed}: {failure.job}")
    for violation in failure.violations:
        click.echo(f"  {violation}")
    click.echo(f"  replay: {failure.replay}")


def _seeds_of(file: Path | None) -> dict[str, int]:
    """Returns the seed of each planted bug in a file of ``--json``."""
    if file is None:
        return {}
    try:
        entries = json.loads(file.read_bytes())
        if not isinstance(entries, list):
            raise TypeError("not a list")
        return {entry["name"]: int(entry["seed"]) for entry in entries}
    except (ValueError, KeyError, TypeError) as error:
        raise click.BadParameter(
            f"{file}: {error!r}; must be a file written by --mutants --json",
            param_hint="--likely",
        ) from None


def _mutants(first: int, count: int, likely: Mapping[str, int], json_file: Path | None) -> bool:
    click.echo("building the core with its planted bugs", err=True)
    library = mutants.build()
    sound = mutants.judge(library, mutants.SOUND, first, SOUND_SEEDS)
    if sound.text != "nothing was noticed":
        click.echo(f"fails without a planted bug: seed {sound.seed}: {sound.text}")
        return False
    verdicts = []
    for verdict in mutants.judge_all(library, first, count, likely):
        verdicts.append(verdict)
        where = f"seed {verdict.seed}" if verdict.caught else f"NOT CAUGHT, seed {verdict.seed}"
        click.echo(f"{verdict.name:28} {where}: {verdict.text}")
    caught = sum(verdict.caught for verdict in verdicts)
    if json_file is not None:
        json_file.write_text(json.dumps([vars(verdict) for verdict in verdicts], indent=1) + "\n")
    click.echo(f"caught {caught}/{len(verdicts)}")
    return caught == len(verdicts)
