"""``r2serve bench stalls``: measures stalls of collectives under real faults."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
from rich.console import Console

from r2serve.bench.collectives import machine, stall_distributions
from r2serve.bench.collectives.cli import clean_up_when_terminated, progress_lines
from r2serve.bench.collectives.control import NotSupported, WorkerError
from r2serve.bench.collectives.names import Named
from r2serve.bench.collectives.strikes import StrikeError
from r2serve.faults import canonical
from r2serve.lab.holder import LabUnavailableError


def named(kind: str) -> str:
    """Returns the kind for a deprecated name; returns any other name unchanged."""
    name = canonical(kind)
    return stall_distributions.PEER_CARRIER if name == "peer_port_loss" else name


@click.command(name="stalls")
@click.option(
    "--faults",
    "count",
    type=click.IntRange(min=0),
    default=200,
    show_default=True,
    help="Real faults of each kind under r2ccl, half at each size.",
)
@click.option(
    "--mptcp",
    "of_mptcp",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    help="Real faults of each kind under MPTCP, half at each size; a fault takes seconds.",
)
@click.option(
    "--ucx",
    "of_ucx",
    type=click.IntRange(min=0),
    default=2,
    show_default=True,
    help="Real faults of each kind under UCX's failover mode, half at each size; a fault that "
    "UCX does not survive takes 40 s.",
)
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    type=Named((*stall_distributions.KINDS, *stall_distributions.ON_DEMAND), named),
    help="Measure only faults of this kind; may be repeated.  [default: carrier_loss, "
    "peer_carrier_loss and black_hole]",
)
@click.option(
    "--compute-us",
    type=click.IntRange(min=0, max=100_000),
    default=0,
    show_default=True,
    help="Computation of each rank's pinned thread before each call, as of an engine's worker; "
    "only for r2ccl, and a part of the call's time.",
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write results to this file, after every size of every kind.",
)
@click.option(
    "--resume", "resumed", is_flag=True, help="Continue the --json file, if of the same commit."
)
def command(
    count: int,
    of_mptcp: int,
    of_ucx: int,
    kinds: tuple[str, ...],
    compute_us: int,
    json_path: Path | None,
    resumed: bool,
) -> None:
    """Measure stalls of all_reduces of 16 KiB and 1 MiB under real faults, beside MPTCP and UCX.

    The lab has two nodes with two rails in network namespaces. By default there are three kinds:
    a port loses the carrier, the peer's port loses the carrier, or a switch drops all packets
    with every carrier up. Two further kinds must be named: egress_refused, where the node's own
    kernel drops its packets, and middlebox_ack, where a hop acknowledges packets for the peer.
    """
    if not count and not of_mptcp and not of_ucx:
        raise click.UsageError("--faults, --mptcp and --ucx are 0: there is nothing to measure")
    if compute_us and (of_mptcp or of_ucx):
        raise click.UsageError("--compute-us is for r2ccl alone: needs --mptcp 0 and --ucx 0")
    clean_up_when_terminated()
    metadata = machine.describe(sys.argv[1:])
    measured = stall_distributions.Measured()
    if resumed:
        if json_path is None:
            raise click.UsageError("--resume needs --json: the file to continue")
        try:
            measured = stall_distributions.resume(json_path, metadata["commit"])
        except ValueError as error:
            raise click.UsageError(f"--resume: {error}") from error

    def save(so_far: stall_distributions.Measured) -> None:
        if json_path is not None:
            text = json.dumps(stall_distributions.as_json(so_far, metadata), indent=1) + "\n"
            json_path.write_text(text, encoding="utf-8")

    every = kinds or stall_distributions.KINDS
    try:
        measured = stall_distributions.run(
            count, of_mptcp, progress_lines(), every, of_ucx, measured, save, compute_us
        )
    except (WorkerError, NotSupported, StrikeError, LabUnavailableError) as error:
        raise click.ClickException(str(error)) from error
    stall_distributions.show(measured, Console())
