"""The commands ``r2serve topo`` and ``r2serve doctor``."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from r2serve.config import Config
from r2serve.errors import ConfigError
from r2serve.ports.host_address import control_address
from r2serve.ports.pairing import unpaired_ports
from r2serve.topo import doctor, node, peer, picture
from r2serve.topo.checks import FAILURE, NOTE, OK, WARNING

_COLOURS = {OK: "green", NOTE: "cyan", WARNING: "yellow", FAILURE: "red"}
_CHAIN_IS_ADVICE = (
    "A failover chain is an estimate: near and fast rails first. At run time the core chooses "
    "rails by measured round trips and rates."
)

_peer_option = click.option(
    "--peer",
    "peer_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Output of `r2serve topo --json` on another node.",
)


def _look(peer_file: Path | None) -> tuple[node.NodeReport, Config, peer.Peer | None]:
    try:
        config = Config.from_env()
        here = node.look(config, control_address())
        return here, config, peer.read(peer_file) if peer_file else None
    except ConfigError as error:
        raise click.ClickException(str(error)) from error


@click.command(name="topo")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--picture",
    "picture_file",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Draw the topology into this SVG file.",
)
@_peer_option
def topo(as_json: bool, picture_file: Path | None, peer_file: Path | None) -> None:
    """Show the NICs and rails of this node, and each rank's failover chain.

    With --peer, also show the rails between the ports of both nodes.
    """
    here, _, there = _look(peer_file)
    if picture_file is not None:
        picture_file.write_text(picture.draw(here), encoding="utf-8")
    if as_json:
        told = here.to_json()
        if there is not None:
            pairs = [pair.to_json() for pair in peer.pairs(here.ports, there.ports)]
            told["peer"] = {"host": there.host, "pairs": pairs}
        click.echo(json.dumps(told, indent=1))
        return
    console = Console()
    nics = Table(title=f"NICs of {here.host}")
    for column in ("rail", "NIC", "kind", "address", "RDMA", "GID", "Gbit/s", "MTU", "NUMA", "PCI"):
        nics.add_column(column)
    for nic in here.nics:
        state = "" if nic.up and nic.carrier else " (down)"
        nics.add_row(
            _role(nic),
            nic.name + state,
            _kind_and_why(nic.kind, nic.why_tcp, nic.rdma),
            "\n".join(nic.addresses),
            f"{nic.rdma} {nic.rdma_state}".strip(),
            nic.gid,
            f"{nic.gbit_s:g}" if nic.gbit_s else "",
            str(nic.mtu),
            str(nic.numa_node) if nic.numa_node >= 0 else "",
            nic.pci,
        )
    console.print(nics)
    for text in (*here.shared, *here.warnings):
        console.print(text, highlight=False, markup=False)
    for chain in here.chains:
        order = ", ".join(f"{step.rail} {step.nic} ({step.distance})" for step in chain.steps)
        console.print(f"failover chain of {chain.rank}: {order or 'no rail'}")
    if here.chains:
        console.print(_CHAIN_IS_ADVICE)
    if there is not None:
        _show_pairs(here, there, console)
    for gpu in here.gpus:
        where = f"buffers in {gpu.buffers}" if gpu.buffers else "no buffers"
        console.print(
            f"gpu{gpu.index}: {gpu.name}, compute capability {gpu.compute_capability}, {where}"
            + (f": {gpu.why_not}" if gpu.why_not else ""),
            highlight=False,
        )
    console.print(f"libibverbs: {here.libibverbs}", highlight=False)
    console.print(f"CUDA: {here.cuda}", highlight=False)


def _role(nic: node.Nic) -> str:
    if not nic.rail:
        return f"- {nic.why_not}"
    return f"{nic.rail} (reserve: {nic.reserve})" if nic.reserve else nic.rail


def _kind_and_why(kind: str, why_tcp: str, rdma: str) -> str:
    """Returns the kind, with the reason for TCP if the port has an RDMA device."""
    return escape(f"{kind}: {why_tcp}" if why_tcp and rdma else kind)


def _unpaired(here: node.NodeReport, there: peer.Peer) -> list[str]:
    own = [end.info() for end in here.ports]
    theirs = [end.info() for end in there.ports]
    return list(unpaired_ports(own, theirs, there.host).values())


def _show_pairs(here: node.NodeReport, there: peer.Peer, console: Console) -> None:
    pairs = peer.pairs(here.ports, there.ports)
    if not pairs:
        without = " and ".join(each.host for each in (here, there) if not each.ports)
        why = f"no port on {without}" if without else ""
        why = why or "; ".join(_unpaired(here, there))
        console.print(f"no rails between {here.host} and {there.host}: {why}", highlight=False)
        return
    table = Table(title=f"rails between {here.host} and {there.host}")
    for column in (here.host, there.host, "kind", "Gbit/s", "MTU"):
        table.add_column(column)
    for pair in pairs:
        own, other = pair.own, pair.other
        table.add_row(
            f"{own.rail} {own}",
            f"{other.rail} {other}",
            _kind_and_why(pair.kind, pair.why_tcp, own.verbs_device or other.verbs_device),
            f"{pair.gbit_s:g}" if pair.gbit_s else "",
            str(own.mtu) if own.mtu == other.mtu else f"{own.mtu} and {other.mtu}",
        )
    console.print(table)


@click.command(name="doctor")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_peer_option
def check(as_json: bool, peer_file: Path | None) -> None:
    """Check this node for problems that prevent rails from working, and propose fixes.

    Exit status 1 if a rail cannot work.
    """
    here, config, there = _look(peer_file)
    findings = doctor.examine(here, config, there)
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        console = Console(highlight=False)
        for finding in findings:
            colour = _COLOURS[finding.level]
            console.print(f"[{colour}]{finding.level:8}[/] {finding.check}: {escape(finding.text)}")
            if finding.fix:
                console.print(f"         fix: {finding.fix}", markup=False)
    if any(finding.level == FAILURE for finding in findings):
        raise click.exceptions.Exit(1)
