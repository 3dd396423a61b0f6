"""``r2serve sim``: the production state machine in simulated time, with every fault there is."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from r2serve.sim import campaign, mutants

MUTANT_SEEDS = 10_000
"""How many seeds a planted bug may take to be noticed."""

SOUND_SEEDS = 300
"""How many seeds the same build must pass with no bug planted."""

_SHOWN_FAILURES = 10


@click.command()
@click.option("--seed", default=0, show_default=True, help="The first seed.")
@click.option("--seeds", type=click.IntRange(1), help="How many.  [default: 1]")
@click.option("--trace", is_flag=True, help="Print what happens, step by step.")
@click.option("--jobs", type=click.IntRange(1), help="Processes.  [default: one a processor]")
@click.option(
    "--mutants", "with_mutants", is_flag=True, help="Plant bugs and see that each is caught."
)
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path))
def command(
    seed: int,
    seeds: int | None,
    trace: bool,
    jobs: int | None,
    with_mutants: bool,
    json_file: Path | None,
) -> None:
    """Run whole jobs on virtual time with random faults, and check the invariants at every step.

    A seed is a job of 2 to 16 ranks over 1 to 8 rails with several communicators, and what goes
    wrong in it. The status is 0 only if no invariant broke and, from 100 seeds on, every kind of
    fault, replays, hedges and fences took part. The last line counts them.
    """
    if with_mutants:
        ok = _mutants(seed, seeds or MUTANT_SEEDS, json_file)
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
        click.echo(f"in {count} seeds there was not one: {name}")
    if json_file is not None:
        json_file.write_text(json.dumps(totals.as_json(), indent=1) + "\n")
    click.echo(totals.summary())
    return not totals.failures and not totals.idle()


def _show(failure: campaign.Failure) -> None:
    click.echo(f"seed {failure.seed}: {failure.job}")
    for violation in failure.violations:
        click.echo(f"  {violation}")
    click.echo(f"  replay: {failure.replay}")


def _mutants(first: int, count: int, json_file: Path | None) -> bool:
    click.echo("building the core with its planted bugs", err=True)
    library = mutants.build()
    sound = mutants.judge(library, mutants.SOUND, first, SOUND_SEEDS)
    if sound.text != "nothing was noticed":
        click.echo(f"without a planted bug, seed {sound.seed}: {sound.text}")
        return False
    verdicts = []
    for verdict in mutants.judge_all(library, first, count):
        verdicts.append(verdict)
        where = f"seed {verdict.seed}" if verdict.caught else f"NOT CAUGHT, seed {verdict.seed}"
        click.echo(f"{verdict.name:28} {where}: {verdict.text}")
    caught = sum(verdict.caught for verdict in verdicts)
    if json_file is not None:
        json_file.write_text(json.dumps([vars(verdict) for verdict in verdicts], indent=1) + "\n")
    click.echo(f"caught {caught}/{len(verdicts)}")
    return caught == len(verdicts)
