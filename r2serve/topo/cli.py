"""``r2serve topo`` and ``r2serve doctor``."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from r2serve.config import Config
from r2serve.errors import ConfigError
from r2serve.topo import doctor, node, picture

_COLOURS = {
    doctor.OK: "green",
    doctor.NOTE: "cyan",
    doctor.WARNING: "yellow",
    doctor.FAILURE: "red",
}


def _look() -> tuple[node.Node, Config]:
    try:
        config = Config.from_env()
        return node.look(config), config
    except ConfigError as error:
        raise click.ClickException(str(error)) from error


@click.command(name="topo")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--picture",
    "picture_file",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Draw it into this SVG file.",
)
def topo(as_json: bool, picture_file: Path | None) -> None:
    """Show the NICs of this node, which of them are rails, and each rank's failover chain."""
    here, _ = _look()
    if picture_file is not None:
        picture_file.write_text(picture.draw(here), encoding="utf-8")
    if as_json:
        click.echo(json.dumps(here.to_json(), indent=1))
        return
    console = Console()
    nics = Table(title=f"NICs of {here.host}")
    for column in ("rail", "NIC", "kind", "address", "RDMA", "GID", "Gbit/s", "MTU", "NUMA", "PCI"):
        nics.add_column(column)
    for nic in here.nics:
        state = "" if nic.up and nic.carrier else " (down)"
        nics.add_row(
            nic.rail or f"- {nic.why_not}",
            nic.name + state,
            nic.kind,
            "\n".join(nic.addresses),
            f"{nic.rdma} {nic.rdma_state}".strip(),
            nic.gid,
            f"{nic.gbit_s:g}" if nic.gbit_s else "",
            str(nic.mtu),
            str(nic.numa_node) if nic.numa_node >= 0 else "",
            nic.pci,
        )
    console.print(nics)
    for chain in here.chains:
        order = ", ".join(f"{step.rail} {step.nic} ({step.distance})" for step in chain.steps)
        console.print(f"failover chain of {chain.rank}: {order or 'no rail'}")
    for gpu in here.gpus:
        where = f"buffers in {gpu.buffers}" if gpu.buffers else "no buffers"
        console.print(
            f"gpu{gpu.index}: {gpu.name}, compute capability {gpu.compute_capability}, {where}: "
            f"{gpu.why_not}",
            highlight=False,
        )
    console.print(f"libibverbs: {here.libibverbs}", highlight=False)
    console.print(f"CUDA: {here.cuda}", highlight=False)


@click.command(name="doctor")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check(as_json: bool) -> None:
    """Say what would keep rails from working on this node, and how to mend it.

    Exit status 1 if a rail cannot work.
    """
    here, config = _look()
    findings = doctor.examine(here, config)
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        console = Console(highlight=False)
        for finding in findings:
            colour = _COLOURS[finding.level]
            console.print(f"[{colour}]{finding.level:8}[/] {finding.check}: {finding.text}")
            if finding.fix:
                console.print(f"         fix: {finding.fix}", markup=False)
    if any(finding.level == doctor.FAILURE for finding in findings):
        raise click.exceptions.Exit(1)
