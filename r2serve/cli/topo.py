"""The commands ``r2serve topo`` and ``r2serve doctor``."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from r2serve import terminal
from r2serve.config import Config
from r2serve.errors import ConfigError
from r2serve.ports.management_address import find_management_address
from r2serve.ports.pairing import unpaired_ports
from r2serve.terminal import is_wide, result_option, table
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
        here = node.look(config, find_management_address())
        return here, config, peer.read(peer_file) if peer_file else None
    except ConfigError as error:
        raise click.ClickException(str(error)) from error


@click.command(name="topo")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@result_option("--picture", "picture_file", help="Draw the topology into this SVG file.")
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
    console = terminal.console()
    for shown in _nics(here, wide=is_wide(console)):
        console.print(shown)
    for text in (*here.shared, *here.warnings):
        console.print(text, highlight=False, markup=False)
    for chain in here.chains:
        order = ", ".join(f"{step.rail} {step.nic} ({step.distance})" for step in chain.steps)
        console.print(f"failover chain of {chain.rank}: {order or 'no rail'}", markup=False)
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


_NETWORK = ("rail", "NIC", "kind", "Gbit/s", "MTU", "address")
_HARDWARE = ("RDMA", "GID", "NUMA", "PCI")


def _nics(here: node.NodeReport, *, wide: bool) -> list[Table]:
    """Returns a table of the NICs; on narrow terminals, a second one has their hardware."""
    title = f"NICs of {here.host}"
    if wide:
        made = table(*_NETWORK, *_HARDWARE, "note", title=title)
        for nic in here.nics:
            made.add_row(*_network(nic), *_hardware(nic), Text(_note(nic)))
        return [made]
    made = table(*_NETWORK, "note", title=title)
    hardware = table("NIC", *_HARDWARE, title=f"hardware of the NICs of {here.host}")
    for nic in here.nics:
        made.add_row(*_network(nic), Text(_note(nic)))
        if any(each.plain for each in _hardware(nic)):
            hardware.add_row(Text(nic.name), *_hardware(nic))
    return [made, hardware] if hardware.row_count else [made]


def _network(nic: node.Nic) -> list[Text]:
    return [
        Text(nic.rail or "-"),
        Text(nic.name + ("" if nic.up and nic.carrier else " (down)")),
        Text(nic.kind),
        Text(f"{nic.gbit_s:g}" if nic.gbit_s else ""),
        Text(str(nic.mtu)),
        Text("\n".join(nic.addresses)),
    ]


def _hardware(nic: node.Nic) -> list[Text]:
    return [
        Text(f"{nic.rdma} {nic.rdma_state}".strip()),
        Text(nic.gid),
        Text(str(nic.numa_node) if nic.numa_node >= 0 else ""),
        Text(nic.pci),
    ]


def _note(nic: node.Nic) -> str:
    """Returns why a NIC is no rail, a reserve, or a rail over TCP although it has RDMA."""
    if not nic.rail:
        return nic.why_not
    reserve = f"reserve: {nic.reserve}" if nic.reserve else ""
    tcp = f"tcp: {nic.why_tcp}" if nic.why_tcp and nic.rdma else ""
    return "; ".join(filter(None, (reserve, tcp)))


def _kind_and_why(kind: str, why_tcp: str, rdma: str) -> str:
    """Returns the kind, with the reason for TCP if the port has an RDMA device."""
    return f"{kind}: {why_tcp}" if why_tcp and rdma else kind


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
    title = f"rails between {here.host} and {there.host}"
    made = table(escape(here.host), escape(there.host), "kind", "Gbit/s", "MTU", title=title)
    for pair in pairs:
        own, other = pair.own, pair.other
        made.add_row(
            Text(f"{own.rail} {own}"),
            Text(f"{other.rail} {other}"),
            Text(_kind_and_why(pair.kind, pair.why_tcp, own.verbs_device or other.verbs_device)),
            f"{pair.gbit_s:g}" if pair.gbit_s else "",
            str(own.mtu) if own.mtu == other.mtu else f"{own.mtu} and {other.mtu}",
        )
    console.print(made)


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
        console = terminal.console()
        for finding in findings:
            colour = _COLOURS[finding.level]
            console.print(f"[{colour}]{finding.level:8}[/] {finding.check}: {escape(finding.text)}")
            if finding.fix:
                console.print(f"         fix: {finding.fix}", markup=False)
    if any(finding.level == FAILURE for finding in findings):
        raise click.exceptions.Exit(1)
