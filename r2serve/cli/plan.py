"""The command ``r2serve plan``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from r2serve import plan
from r2serve.config import Config
from r2serve.errors import ConfigError
from r2serve.observe import journal
from r2serve.observe.journal import Journal

_RAIL = re.compile(r"rail(\d+)@node(\d+)")
_SIZE = re.compile(r"(\d{1,18})\s*(B|KiB|MiB|GiB)?", re.IGNORECASE)
_UNITS = {"b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


class _Size(click.ParamType):  # type: ignore[type-arg]
    """A number of bytes: ``4096``, ``64KiB``, ``64MiB`` or ``1GiB``."""

    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        if isinstance(value, int):
            return value
        found = _SIZE.fullmatch(str(value).strip())
        if not found:
            self.fail(f"{value!r}; must be bytes, KiB, MiB or GiB, for example 64MiB", param, ctx)
        return int(found[1]) * _UNITS[(found[2] or "B").lower()]


def lost_in_journals(journals: Iterable[tuple[str, Journal]]) -> tuple[int, list[str]]:
    """Returns the rails of a node, and the names of the lost ones; takes paths with their journals.

    As in an engine, a port is lost if no rail is UP or SUSPECT and a rail has been UP. Reserves,
    rails never up, and rails inside a node count for nothing. Losses of a node's ranks add up.

    Raises:
        ConfigError: a journal has no rail between nodes, its rails are not numbered from 0 without
            a gap, or two journals have different numbers of rails.
    """
    count = 0
    lost: set[tuple[int, int]] = set()
    for path, read in journals:
        up = _ports_up(read)
        rails = {rail for _, rail in up}
        if not up:
            raise ConfigError(f"--from-journal: {path} has no rail to another node that was up")
        if rails != set(range(len(rails))):
            raise ConfigError(
                f"--from-journal: {path} has the rails {', '.join(map(str, sorted(rails)))}; must "
                "be all rails from 0, without reserves and rails that were never up"
            )
        if count not in (0, len(rails)):
            raise ConfigError(
                f"--from-journal: {path} has {len(rails)} rails; must be {count} as in the others, "
                "because a plan has equal nodes"
            )
        count = len(rails)
        lost.update(port for port, is_up in up.items() if not is_up)
    return count, [f"rail{rail}@node{node}" for node, rail in sorted(lost)]


def _ports_up(read: Journal) -> dict[tuple[int, int], bool]:
    """Returns whether each port, by node and number, has a rail that carries data."""
    up: dict[tuple[int, int], bool] = {}
    for rail in read.rails:
        found = _RAIL.fullmatch(rail.name)
        if not found or rail.reserve or not rail.been_up:
            continue
        port = int(found[2]), int(found[1])
        up[port] = up.get(port, False) or rail.presence == "up"
    return up


def _rails_of(
    rails: int | None, lost: tuple[str, ...], journals: tuple[Path, ...]
) -> tuple[int, list[str]]:
    """Returns the rails of a node and the lost ones, by the options and the journals."""
    if not journals:
        return 2 if rails is None else rails, list(lost)
    if rails is not None:
        raise ConfigError(f"--rails: {rails}; must be left out, because --from-journal tells it")
    read = []
    for path in journals:
        try:
            read.append((str(path), journal.read(path, events=False)))
        except (OSError, journal.JournalError) as error:
            raise ConfigError(f"--from-journal: {path}: {error}") from error
    count, names = lost_in_journals(read)
    return count, names + [name for name in lost if name not in names]


@click.command(name="plan")
@click.option(
    "--bytes", "size", type=_Size(), default="64MiB", show_default=True, help="Size of the buffer."
)
@click.option(
    "--lost",
    multiple=True,
    metavar="RAIL",
    help="A lost rail, such as rail1@node3; may be given several times.",
)
@click.option(
    "--from-journal",
    "journals",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="A worker's journal, which tells rails and lost rails of its node; may be given several "
    "times. Nodes without a journal count as healthy.",
)
@click.option("--nodes", default=4, show_default=True, help="Number of nodes.")
@click.option("--rails", type=int, help="Rails of a node.  [default: 2, or as in the journals]")
@click.option("--ranks-per-node", default=1, show_default=True, help="Ranks of a node.")
@click.option("--gbit", default=100.0, show_default=True, help="Rate of a rail in Gbit/s.")
@click.option(
    "--latency-us", default=5.0, show_default=True, help="Latency of a message in microseconds."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    size: int,
    lost: tuple[str, ...],
    journals: tuple[Path, ...],
    nodes: int,
    rails: int | None,
    ranks_per_node: int,
    gbit: float,
    latency_us: float,
    as_json: bool,
) -> None:
    """Explain what an all-reduce does while rails are lost, and predict its time.

    Options of the environment, such as R2CCL_SLOT_BYTES, count as in an engine.
    """
    try:
        config = Config.from_env()
        count, names = _rails_of(rails, lost, journals)
        cluster = plan.Cluster(
            nodes=nodes,
            rails=count,
            ranks_per_node=ranks_per_node,
            gbit_s=gbit,
            latency_us=latency_us,
            slot_bytes=config.slot_bytes,
            algorithm=config.algorithm,
        )
        made = plan.make(size, cluster, names)
    except ConfigError as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps(made.to_json(), indent=1))
    else:
        _show(made)


def _show(made: plan.Plan) -> None:
    console = Console(highlight=False)
    cluster = made.cluster
    console.print(
        f"all-reduce of {plan.show_bytes(made.bytes)}: {cluster.nodes} nodes, ranks of a node "
        f"{cluster.ranks_per_node}, rails of a node {cluster.rails} with {cluster.gbit_s:g} Gbit/s"
    )
    blocks = f", {made.blocks} blocks, two under way" if made.blocks else ""
    console.print(f"choice: {made.algorithm}, {made.shares} shares{blocks}")
    for reason in made.reasons:
        console.print(f"  {reason}")
    nodes = Table()
    for column in ("node", "rails UP", "announces", "share", "sends, receives"):
        nodes.add_column(column)
    for node in made.nodes:
        nodes.add_row(
            f"node{node.node}",
            f"{node.rails_up} of {cluster.rails}",
            f"{node.announced}/16" if node.announced else "no loss",
            f"{100 * node.share:.1f} %",
            plan.show_bytes(node.moved_bytes),
        )
    console.print(nodes)
    times = Table()
    for column in ("predicted time", "closed form", "flow model"):
        times.add_column(column)
    for name, prediction in (
        ("no rail lost", made.healthy),
        ("rails lost, even shares", made.even),
        ("rails lost, as chosen", made.chosen),
    ):
        times.add_row(name, plan.show_time(prediction.form_s), plan.show_time(prediction.flow_s))
    console.print(times)
